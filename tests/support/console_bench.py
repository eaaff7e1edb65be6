"""The console in a real browser: how soon the wall of cameras is there, and whether a page that is left open grows.

A made-up city (:mod:`console_gateway`, a process of its own) behind the gateway's real HTTP. The wall is opened a few
times with nothing cached, and timed up to the frame that shows its tiles. Then one page stays open while every camera
changes again and again: its heap and its document are measured after collecting garbage, and at the end what it shows
is compared with what the gateway says.
"""

import argparse
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import console_gateway
from console_city import City
from console_gateway import ConsoleGateway
from PIL import Image

from cluster.errors import ConfigError, SightlineError
from cluster.lab.bench.harness import BenchResult

DESK = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 720}
SETTLE_MS = 7_000


def take_screenshots(folder: Path) -> None:
    """PNGs of every page into ``folder``, which must exist."""
    with (
        tempfile.TemporaryDirectory() as kept,
        ConsoleGateway(City(500), Path(kept)) as gateway,
        browser() as chromium,
    ):
        gateway.remember(100)
        gateway.step(8)
        camera = sorted(gateway.city.hot)[1]
        camera_page = f"camera/{camera}"
        _save(folder / "wall.png", _shoot(chromium, f"{gateway.url}/", "dark", ".picture.there"))
        _save(folder / "camera.png", _shoot(chromium, f"{gateway.url}/#/{camera_page}", "light", ".plot svg"))
        incidents = f"{gateway.url}/#/incidents"
        _save(folder / "incidents.png", _shoot(chromium, incidents, "light", ".incident-row img", ".incident-row a"))
        _save(folder / "fleet.png", _shoot(chromium, f"{gateway.url}/#/fleet", "light", "tbody tr"))
        _save(folder / "ask.png", _shoot(chromium, f"{gateway.url}/#/ask/{camera}", "dark", "textarea", ask=True))
        phones = [
            _shoot(chromium, f"{gateway.url}/#/{page}", "dark", there, phone=True)
            for page, there in (("", ".picture.there"), ("incidents", ".incident-row img"), (camera_page, ".plot svg"))
        ]
        _save(folder / "phone.png", _beside(phones))


def _shoot(
    chromium: Any, url: str, scheme: str, there: str, click: str = "", *, ask: bool = False, phone: bool = False
) -> Image.Image:
    kind = {"device_scale_factor": 2, "is_mobile": True, "has_touch": True} if phone else {}
    context = chromium.new_context(viewport=PHONE if phone else DESK, color_scheme=scheme, **kind)
    try:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(there, timeout=PAINT_S * 1000)
        if click:
            page.click(click)
        if ask:
            page.fill("textarea", "Did anybody come by in the last half hour?")
            page.keyboard.press("Enter")
            page.wait_for_selector(".grounds", timeout=PAINT_S * 1000)
        page.wait_for_timeout(SETTLE_MS)
        return Image.open(io.BytesIO(page.screenshot()))
    finally:
        context.close()


def _beside(pictures: list[Image.Image], gap: int = 24) -> Image.Image:
    width = sum(each.width for each in pictures) + gap * (len(pictures) - 1)
    whole = Image.new("RGB", (width, pictures[0].height))
    left = 0
    for each in pictures:
        whole.paste(each, (left, 0))
        left += each.width + gap
    return whole.resize((width * 2 // 3, pictures[0].height * 2 // 3))


def _save(path: Path, picture: Image.Image) -> None:
    # A palette: a third of the size.
    picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VIEW = {"width": 1440, "height": 900}
PAINT_S, SETTLE_S, WARM_S = 60.0, 3.0, 10.0
SHOWN = "async () => { const { store } = await import('/console/store.js'); return [...store.cameras.values()]; }"
PAINTS = (
    "() => Object.fromEntries([...performance.getEntriesByType('paint'), ...performance.getEntriesByType('mark')]"
    ".map((entry) => [entry.name, entry.startTime]))"
)
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Cameras, how often the page is opened, how long it stays open, and the browser."""
    parser.add_argument("--cameras", type=int, default=500, help="cameras on the wall")
    parser.add_argument("--loads", type=int, default=5, help="times the page is opened")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it stays open")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two changes")
    parser.add_argument("--browser", help="Chromium's command (default: the first that is found)")


def run(args: argparse.Namespace) -> BenchResult:
    """Figures: ``console_first_paint_s`` (median), ``console_cameras``, ``console_heap_growth`` (end over beginning),
    ``console_nodes`` of the document, ``console_behind`` (cameras that are shown as they were).

    Raises:
        ConfigError: nothing to measure, or no browser.
    """
    if args.cameras < 1 or args.loads < 1 or args.seconds <= 0 or args.every <= 0:
        raise ConfigError("--cameras and --loads must be at least 1, --seconds and --every above 0")
    with browser(args.browser) as chromium, gateway(args.cameras, args.every) as url:
        loads = [first_paint(chromium, url) for _ in range(args.loads)]
        held = stay_open(chromium, url, args.seconds)
    painted = sorted(load["wall_s"] for load in loads)
    figures = {
        "console_first_paint_s": statistics.median(painted),
        "console_first_paint_worst_s": painted[-1],
        "console_cameras": float(held["cameras"]),
        "console_heap_growth": held["heap_end_mib"] / held["heap_begin_mib"],
        "console_nodes": float(held["nodes_end"]),
        "console_behind": float(held["behind"]),
    }
    notes = [
        "first paint: from navigation to the frame with the wall's tiles, nothing cached; first contentful paint: "
        + ", ".join(f"{load['contentful_s']:.2f}" for load in loads),
        f"page open for {args.seconds:g} s: heap {held['heap_begin_mib']:.1f} to {held['heap_end_mib']:.1f} MiB, "
        f"nodes {held['nodes_begin']} to {held['nodes_end']}, {held['changes']} changes of cameras shown",
    ]
    return BenchResult(figures, [{"load": number, **load} for number, load in enumerate(loads, 1)], notes)


@contextmanager
def browser(command: str | None = None) -> Iterator[Any]:
    """A headless Chromium, driven by Playwright; the machine's own, nothing is downloaded.

    Raises:
        ConfigError: there is no browser, or no Playwright.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise ConfigError("this needs Playwright, which drives the browser: pip install playwright") from None
    path = shutil.which(command) if command else next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise ConfigError("this needs Chromium: apt-get install chromium, or name it with --browser")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not have; only pages of our own are opened.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def gateway(cameras: int, every_s: float) -> Iterator[str]:
    """``http://host:port`` of a city's gateway in a process of its own.

    Raises:
        SightlineError: it does not come up.
    """
    command = [sys.executable, console_gateway.__file__, "--port", "0"]
    command += ["--cameras", str(cameras), "--every", str(every_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise SightlineError(f"the gateway ended with {process.wait()} before it served")
        yield url
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_paint(chromium: Any, url: str) -> dict[str, float]:
    """Seconds from navigation to the first contentful paint, and to the frame that shows the wall's tiles."""
    context = chromium.new_context(viewport=VIEW)
    try:
        page = context.new_page()
        page.goto(f"{url}/")
        page.wait_for_selector(".tile", timeout=PAINT_S * 1000)
        # Its frame may not be out yet, and the page's content policy lets nothing wait for it in there.
        deadline_s = time.monotonic() + PAINT_S
        while "wall-painted" not in (found := page.evaluate(PAINTS)):
            if time.monotonic() > deadline_s:
                raise SightlineError(f"the wall was not painted within {PAINT_S:g} s")
            time.sleep(0.02)
        return {"contentful_s": found["first-contentful-paint"] / 1000, "wall_s": found["wall-painted"] / 1000}
    finally:
        context.close()


def stay_open(chromium: Any, url: str, seconds: float) -> dict[str, Any]:
    """One page while the cameras change: heap, nodes, and how many cameras it does not show as they are."""
    context = chromium.new_context(viewport=VIEW)
    try:
        page = context.new_page()
        page.goto(f"{url}/")
        page.wait_for_selector(".tile", timeout=PAINT_S * 1000)
        page.evaluate(
            "async () => { const { store } = await import('/console/store.js'); window.changes = 0;"
            " const camera = store.camera.bind(store);"
            " store.camera = (status) => { window.changes += 1; camera(status); }; }"
        )
        session = context.new_cdp_session(page)
        # The first pictures and histories come in: what a page needs, and no growth.
        page.wait_for_timeout(1000 * min(seconds, WARM_S))
        begin = _weigh(session)
        page.wait_for_timeout(1000 * seconds)
        end = _weigh(session)
        # What the page shows now must be at least as new as what the gateway said a moment before.
        said = _ends(json.load(urllib.request.urlopen(f"{url}/v1/cameras", timeout=30))["cameras"])
        time.sleep(SETTLE_S)
        shown = _ends(page.evaluate(SHOWN))
        return {
            "cameras": len(shown),
            "behind": sum(shown.get(name, -1) < end_us for name, end_us in said.items()),
            "changes": page.evaluate("window.changes"),
            "heap_begin_mib": begin[0],
            "heap_end_mib": end[0],
            "nodes_begin": begin[1],
            "nodes_end": end[1],
        }
    finally:
        context.close()


def _ends(cameras: list[dict[str, Any]]) -> dict[str, int]:
    return {each["name"]: max((answer["end"] for answer in each["last_answers"]), default=0) for each in cameras}


def _weigh(session: Any) -> tuple[float, int]:
    """Heap in MiB and nodes of the document, with no garbage in them."""
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return metrics["JSHeapUsedSize"] / MIB, int(metrics["Nodes"])


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
