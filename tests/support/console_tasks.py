"""What people do in the console, in a real browser on a real cluster (``sightline serve``) that begins with no camera.

Every task is done at desktop width with the pointer, at phone width by touch, and at desktop width with the keyboard
alone; after each one axe looks at the page. Cameras show bundled clips, and the bundled model answers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from console_bench import DESK, PHONE, browser
from playwright.sync_api import Browser, Page, expect

from cluster.errors import SightlineError
from cluster.lab.bench.harness import BenchResult, print_progress

CONFIGURATION = {
    "model": {"name": "demo"},
    # As the bundled model was trained.
    "sampling": {"anchor_interval_s": 4},
    "window": {"length_s": 20, "stride_s": 4},
    "gateway": {"port": 0, "http_port": 0},
}
TEXT = "Is someone inside the marked zone?"
START_S = 240.0
PATIENCE_MS = 60_000
# The bundled clip shows what it is asked for within a round of it.
INCIDENT_MS = 180_000
KINDS: dict[str, dict[str, Any]] = {
    "pointer": {"viewport": DESK},
    "touch": {"viewport": PHONE, "is_mobile": True, "has_touch": True},
    "keyboard": {"viewport": DESK},
}
MOST_TABS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The browser."""
    parser.add_argument("--browser", help="Chromium's command (default: the first that is found)")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``console_tasks``: those of ``console_tasks_tried`` that are done by pointer, by touch and by keyboard;
    ``first_answer_s`` from an empty console to the first answer of a camera that is added in it, with the pointer.

    Raises:
        ConfigError: no browser.
        SightlineError: the cluster does not start.
    """
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as url, browser(args.browser) as chromium:
        rows = do_tasks(chromium, url)
    first = next(row["seconds"] for row in rows if row["task"] == "first answer")
    tasks = {row["task"] for row in rows} - {"first answer"}
    figures = {
        "console_tasks": float(sum(all(row["done"] for row in rows if row["task"] == task) for task in tasks)),
        "console_tasks_tried": float(len(tasks)),
        "first_answer_s": first if first is not None else float("nan"),
    }
    return BenchResult(figures, rows, [f"{row['task']}, {row['kind']}: {row['why']}" for row in rows if row["why"]])


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """``http://host:port`` of the console of ``sightline serve`` without a camera.

    Raises:
        SightlineError: it does not start.
    """
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    addresses, output = folder / "addresses.json", folder / "serve.log"
    command = [str(Path(sys.executable).with_name("sightline")), "serve", "-c", "config.json", "--state", "none"]
    with output.open("w") as out:
        process = subprocess.Popen(
            [*command, "--json", str(addresses)], stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=os.environ
        )
    try:
        deadline_s = time.monotonic() + START_S
        url = ""
        while not url and time.monotonic() < deadline_s and process.poll() is None:
            with suppress(OSError, ValueError):
                url = json.loads(addresses.read_text())["metrics"].removesuffix("/metrics")
            time.sleep(0.1)
        if not url:
            said = output.read_text().strip().splitlines()
            raise SightlineError(f"sightline serve did not start: {said[-1] if said else 'it said nothing'}")
        yield url if url.startswith("http") else f"http://{url}"
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait()


def do_tasks(chromium: Browser, url: str) -> list[dict[str, Any]]:
    """A row for each task of each kind: whether it was done, in how many seconds, and why not. Those that need an
    incident come last, since one takes up to a round of the clip to come."""
    expect.set_options(timeout=PATIENCE_MS)
    with ExitStack() as contexts:
        people = []
        for kind, options in KINDS.items():
            context = chromium.new_context(**options)
            contexts.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            people.append((kind, context.new_page()))
        begun = [row for kind, page in people for row in _do(page, kind, _tasks_without_incident(page, kind, url))]
        return begun + [row for kind, page in people for row in _do(page, kind, _tasks_with_incident(page, kind, url))]


def _tasks_without_incident(page: Page, kind: str, url: str) -> dict[str, Callable[[], None]]:
    hand, name = _hand(page, kind), f"gate-{kind}"
    return {
        "add a camera": lambda: add_camera(page, hand, url, name),
        "first answer": lambda: expect(page.locator(".answers li").first).to_be_visible(),
        "draw a zone": lambda: draw_zone(page, hand, url, name),
        "see a question's replay": lambda: replay_question(page, hand, url, name),
        "write a question": lambda: write_question(page, hand),
    }


def _tasks_with_incident(page: Page, kind: str, url: str) -> dict[str, Callable[[], None]]:
    hand, name = _hand(page, kind), f"gate-{kind}"
    return {
        "confirm an incident": lambda: confirm_incident(page, hand, url, name),
        "ask all cameras": lambda: ask_all(page, hand, url, name),
    }


def _hand(page: Page, kind: str) -> Pointer:
    return Keyboard(page) if kind == "keyboard" else Pointer(page)


def _do(page: Page, kind: str, tasks: dict[str, Callable[[], None]]) -> list[dict[str, Any]]:
    rows = []
    began_s = time.monotonic()
    for task, do in tasks.items():
        task_s, why = time.monotonic(), ""
        print_progress(f"console_tasks: {task}, {kind}")
        try:
            do()
            done_s = time.monotonic()
            why = complaints(page)
        except Exception as error:
            done_s, why = time.monotonic(), " ".join(str(error).split())[:300]
        # The first answer counts from the empty console on.
        seconds = round(done_s - (began_s if task == "first answer" else task_s), 1)
        rows.append({"task": task, "kind": kind, "done": not why, "seconds": seconds, "why": why})
    return rows


def complaints(page: Page) -> str:
    """What axe says of the page, and whether it is wider than its window; empty when all is well."""
    found = Axe().run(page).response["violations"]
    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return "; ".join([*(each["id"] for each in found), *(["it scrolls sideways"] if wide else [])])


class Pointer:
    """Clicks and fills."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def press(self, role: Any, name: str) -> None:
        """Use a button or a link."""
        self.page.get_by_role(role, name=name, exact=True).click()

    def open(self, link: Any) -> None:
        """Follow a link."""
        link.click()

    def fill(self, name: str, text: str) -> None:
        """Put text into a field."""
        self.page.get_by_role("textbox", name=name, exact=True).fill(text)

    def switch(self, name: str) -> None:
        """Turn a switch on."""
        self.page.get_by_role("switch", name=name).check()

    def draw(self, corners: list[tuple[float, float]]) -> None:
        """A closed shape on the picture."""
        canvas = self.page.get_by_role("application", name="Draw a zone")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        for x, y in [*corners, corners[0]]:
            canvas.click(position={"x": x * box["width"], "y": y * box["height"]})


class Keyboard(Pointer):
    """Nothing but keys: Tab until what is wanted has the focus."""

    def _reach(self, target: Any) -> None:
        target.wait_for()
        for _ in range(MOST_TABS):
            if target.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise SightlineError(f"the keyboard does not reach {target}")

    def press(self, role: Any, name: str) -> None:
        """See :class:`Pointer`."""
        target = self.page.get_by_role(role, name=name, exact=True)
        expect(target).to_be_enabled()
        self._reach(target)
        self.page.keyboard.press("Enter")

    def open(self, link: Any) -> None:
        """See :class:`Pointer`."""
        self._reach(link)
        self.page.keyboard.press("Enter")

    def fill(self, name: str, text: str) -> None:
        """See :class:`Pointer`."""
        self._reach(self.page.get_by_role("textbox", name=name, exact=True))
        self.page.keyboard.type(text)

    def switch(self, name: str) -> None:
        """See :class:`Pointer`."""
        self._reach(self.page.get_by_role("switch", name=name))
        self.page.keyboard.press("Space")

    def draw(self, corners: list[tuple[float, float]]) -> None:
        """See :class:`Pointer`; the cross begins in the middle."""
        self._reach(self.page.get_by_role("application", name="Draw a zone"))
        at = (0.5, 0.5)
        for x, y in corners:
            for way, steps in (("Right", x - at[0]), ("Down", y - at[1])):
                key = {"Right": "Left", "Down": "Up"}[way] if steps < 0 else way
                for _ in range(round(abs(steps) / 0.05)):
                    self.page.keyboard.press(f"Shift+Arrow{key}")
            self.page.keyboard.press("Enter")
            at = x, y
        self.page.keyboard.press("c")


def add_camera(page: Page, hand: Pointer, url: str, name: str) -> None:
    """From the console's front page to the page of the new camera."""
    page.goto(f"{url}/")
    hand.press("link", "Cameras")
    hand.press("link", "Add a camera")
    hand.fill("Name", name)
    hand.fill("Source", "demo://gate")
    hand.switch("Loop it in real time, like a camera")
    hand.fill("First question", TEXT)
    hand.press("button", "Add camera")
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()


def draw_zone(page: Page, hand: Pointer, url: str, name: str) -> None:
    """A zone that the cluster has afterwards."""
    page.goto(f"{url}/#/settings/{name}")
    canvas = page.get_by_role("application", name="Draw a zone")
    canvas.scroll_into_view_if_needed()
    # Its picture comes once it is in view, and gives the canvas its size.
    expect(page.locator(".mask-frame").filter(has=canvas).locator(".picture.there")).to_be_visible()
    hand.draw([(0.1, 0.1), (0.3, 0.1), (0.3, 0.3)])
    hand.press("button", "Save zones")
    expect(page.get_by_text("1 zone saved.")).to_be_visible()
    settings = page.evaluate("name => fetch(`/v1/cameras/${name}/settings`).then((reply) => reply.json())", name)
    [corners] = settings["settings"]["zones"]
    if any(
        max(abs(x - u), abs(y - v)) > 0.02
        for (x, y), (u, v) in zip(corners, [(0.1, 0.1), (0.3, 0.1), (0.3, 0.3)], strict=True)
    ):
        raise SightlineError(f"the zone was saved as {corners}")


def replay_question(page: Page, hand: Pointer, url: str, name: str) -> None:
    """A second question, not yet saved, with the scores and the incidents it would have had."""
    page.goto(f"{url}/#/settings/{name}")
    hand.press("button", "Write a question")
    hand.fill("Question", "Did a vehicle stop?")
    hand.press("button", "Replay")
    expect(page.locator(".replay")).to_contain_text("replayed from its memory")
    expect(page.locator(".rehearsal")).to_contain_text("at this threshold")


def write_question(page: Page, hand: Pointer) -> None:
    """It is asked from now on."""
    hand.press("button", "Save question")
    expect(page.get_by_role("button", name="Edit a vehicle stop")).to_be_visible()


def confirm_incident(page: Page, hand: Pointer, url: str, name: str) -> None:
    """One of the camera's own, by the question it was added with; the record says so afterwards."""
    page.goto(f"{url}/#/incidents")
    row = page.locator(".incident-list a").filter(has_text=name).first
    row.wait_for(timeout=INCIDENT_MS)
    hand.open(row)
    hand.press("button", "Confirm")
    expect(page.get_by_role("button", name="Confirm", exact=True)).to_have_attribute("aria-pressed", "true")
    path = "/v1/incidents?limit=50"
    listed = page.evaluate("path => fetch(path).then((reply) => reply.json())", path)["incidents"]
    if not any(each["camera"] == name and each["verdict"] == "confirmed" for each in listed):
        raise SightlineError(f"no incident of {name} is confirmed: {listed}")


def ask_all(page: Page, hand: Pointer, url: str, name: str) -> None:
    """A question to every camera; this one is among those that answer."""
    page.goto(f"{url}/#/ask")
    hand.switch("All cameras")
    hand.fill("Question to all cameras", TEXT)
    hand.press("button", "Ask all")
    expect(page.locator(".found a").filter(has_text=name).first).to_be_visible()
    expect(page.locator(".ask-progress")).to_contain_text("answered.")
