"""Output of commands: tables and progress for people, JSON for machines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from actors.cli.options import spoken
from cluster.errors import SightlineError, UnavailableError, at_most
from cluster.files import check_file_writable, check_writable, json_text, replacing, write_text, writing
from cluster.lab.report.number_format import compact
from cluster.redaction import redact

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cluster.client import GatewayClient
    from cluster.types import CameraStatus

T = TypeVar("T")

WIDE = 140
"""Terminal width from which the table shows all columns."""

STATE_STYLE = {
    "running": "green",
    "waiting": "cyan",
    "connecting": "cyan",
    "backoff": "yellow",
    "error": "bold red",
    "ended": "dim",
    "paused": "dim",
}


def tokens(camera: CameraStatus) -> str:
    """``full → kept → computed``."""
    if not camera.tokens_full:
        return ""
    return f"{compact(camera.tokens_full)} → {compact(camera.tokens_kept)} → {compact(camera.tokens_computed)}"


def windows(camera: CameraStatus) -> str:
    """``12 (3 gated, 1 dropped)``: answered windows, then those gated, dropped and lost."""
    parts = [("gated", camera.windows_gated), ("dropped", camera.windows_dropped), ("lost", camera.windows_lost)]
    more = ", ".join(f"{count} {name}" for name, count in parts if count)
    return f"{camera.windows_done + camera.windows_gated}" + (f" ({more})" if more else "")


def memory(camera: CameraStatus) -> str:
    """``12 MB, 2 h 05 min``: size and time range; marked where part of it is unreachable."""
    held = f"{size(camera.memory_bytes)}, {spoken(camera.memory_oldest_s)}" if camera.memory_frames else ""
    return " ".join(filter(None, (held, "(degraded)" if camera.memory_state else "")))


def size(nbytes: float) -> str:
    """12400000 -> 12 MB: decimal units, two digits or more."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            value = nbytes / unit
            return f"{value:.1f} {letter}" if value < 9.95 else f"{value:.0f} {letter}"
    return f"{nbytes:.0f} B"


def last_answers(camera: CameraStatus) -> str:
    """``person 0.62 yes · vehicle 0.10 no``."""
    return " · ".join(f"{a.question} {a.score:.2f} {'yes' if a.positive else 'no'}" for a in camera.last_answers)


def state(camera: CameraStatus) -> Text:
    """The state, coloured on terminals."""
    from rich.text import Text

    return Text(camera.state, STATE_STYLE.get(camera.state, "white"))


_COLUMNS: tuple[tuple[str, bool, Callable[[CameraStatus], str | Text]], ...] = (
    ("camera", False, lambda each: each.name),
    ("!state", False, state),
    ("!from", True, lambda each: each.manager),
    ("!class, quality", True, lambda each: f"{each.priority}, {each.rung}"),
    ("!picture", True, lambda each: f"{each.codec} {each.width}×{each.height}" if each.codec else ""),
    ("!cue", True, lambda each: each.cue),
    ("!decode", True, lambda each: each.decode),
    (">!frame age", True, lambda each: f"{max(0.0, each.last_frame_age_s):.1f} s" if each.frames_decoded else ""),
    ("decoder → replica", True, lambda each: " → ".join(filter(None, (each.decoder, each.replica)))),
    (">windows", False, windows),
    (">tokens full → kept → computed", False, tokens),
    (">!latency", False, lambda each: f"{each.latency_s:.2f} s" if each.windows_done else ""),
    (">!memory", True, memory),
    ("last answers", False, last_answers),
)
"""Header, whether only wide terminals show it, and a camera's cell."""


def cameras_table(cameras: Sequence[CameraStatus], width: int) -> Table:
    """One row per camera; fewer columns on narrow terminals."""
    shown = [(name, cell) for name, wide, cell in _COLUMNS if width >= WIDE or not wide]
    return make_table("|".join(name for name, _ in shown), ([cell(each) for _, cell in shown] for each in cameras))


def expectation(camera: CameraStatus) -> str:
    """What to expect of an added camera: replica, window rate, lag and quality."""
    if not camera.replica:
        return "accepted; waiting for a replica"
    rate = f"a window every {1 / camera.windows_per_s:.3g} s" if camera.windows_per_s else "no windows"
    lag = f", answered about {camera.expected_lag_s:.2g} s after its end" if camera.expected_lag_s else ""
    quality = f", at reduced quality ({camera.rung}): {camera.rung_reason}" if camera.rung_reason else ""
    return f"accepted by {camera.replica}: {rate}{lag}{quality}"


def reasons(cameras: Sequence[CameraStatus]) -> list[str]:
    """Reasons for states, reduced quality and unreachable memories; cameras with the same one share a line."""
    names: dict[str, list[str]] = {}
    for camera in cameras:
        retry = f"; retrying in {camera.retry_in_s:.0f} s" if camera.state == "backoff" and camera.retry_in_s else ""
        for text in (
            camera.reason and f"{redact(camera.reason)}{retry}",
            camera.rung_reason and f"quality {camera.rung}: {camera.rung_reason}",
            camera.memory_state and f"memory: {redact(camera.memory_state)}",
        ):
            if text:
                names.setdefault(text, []).append(camera.name)
    return [f"{', '.join(at_most(3, same))}: {text}" for text, same in names.items()]


AGAIN_S = 180.0
"""Seconds to keep trying to reach a lost gateway: it restarts in a few, one that hangs after two minutes by default."""


def reconnecting(client: GatewayClient, open_stream: Callable[[], Iterable[T]], pause_s: float = 1.0) -> Iterator[T]:
    """Items of a gateway stream, reopened when the gateway restarts. Raises ``SightlineError``: there is no gateway, or
    it stays unreachable."""
    gone_s: float | None = None
    begun = False
    while True:
        try:
            client.cameras_list()
            begun, gone_s = True, None
            yield from open_stream()
            return
        except UnavailableError as error:
            if not begun or (gone_s is not None and time.monotonic() - gone_s > AGAIN_S):
                raise
            if gone_s is None:
                gone_s = time.monotonic()
                console(stderr=True).print(f"{error}; retrying for {AGAIN_S:.0f} s", style="yellow", markup=False)
        time.sleep(pause_s)


def warn_of_missed(missed: int, what: str) -> None:
    """Warn that ``missed`` answers or events did not reach this client."""
    if missed:
        console(stderr=True).print(
            f"[yellow]{missed} {what} were missed: this client reads too slowly, or a connection broke[/]"
        )


def trouble_lines(cameras: Sequence[CameraStatus]) -> list[str]:
    """A line for each camera that has a source but sends no video."""
    silent = ("connecting", "backoff", "error")
    return [f"{each.name}: {redact(each.reason) or 'no video yet'}" for each in cameras if each.state in silent]


PIPE_COLUMNS = 200
LINE_EVERY_S = 10.0


def console(*, stderr: bool = False) -> Console:
    """A console; in a pipe or a log lines are not wrapped, and tables as wide as COLUMNS says, or ``PIPE_COLUMNS``."""
    from rich.console import Console

    seen = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if seen or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(stderr=stderr, highlight=False, soft_wrap=not seen, width=width)


def print_json(target: str | None, body: Any) -> bool:
    """Write ``body``, which may hold dataclasses, to the ``target`` of ``--json``, if any; returns whether to print it
    for people as well. Raises ``SightlineError``: the file cannot be written."""
    if target == "-":
        print(json_text(body))
    elif target is not None:
        check_writable(Path(target).parent)
        write_text(Path(target), json_text(body) + "\n")
    return target != "-"


def make_table(columns: str, rows: Iterable[Sequence[Any]]) -> Table:
    """A table in the command line's style.

    Args:
        columns: names between ``|``; ``>`` before a name aligns its column right, ``!`` keeps it on one line.
        rows: cells; strings are shown as they are, without markup.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns.split("|"):
        name, whole = column.strip(), "!" in column
        justify: Literal["left", "right"] = "right" if ">" in name else "left"
        # Wrap long words on narrow terminals: truncated text cannot be copied.
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if whole else "fold"
        table.add_column(name.strip(">!"), justify=justify, no_wrap=whole, overflow=overflow)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def works_or(trouble: str) -> Text:
    """A cell: *works*, or the trouble."""
    from rich.text import Text

    return Text(trouble, "bold red") if trouble else Text("works", "green")


def save(path: Path, data: Iterable[bytes], size: int, what: str) -> int:
    """Write a streamed file atomically with a progress bar; returns its size in bytes. Raises ``SightlineError``: the
    file cannot be written (its folder must exist), or ``data`` is incomplete."""
    written = 0
    with writing(path), replacing(path) as part, Progress(what, size) as progress, part.open("wb") as file:
        for each in data:
            written += file.write(each)
            progress.show(f"{written} bytes", written)
    return written


class Progress:
    """Progress on standard error: a bar on a terminal, otherwise lines of text every few seconds.

    Args:
        what: prefix of every text on a terminal.
        total: of the bar; ``None``: indeterminate.
        screen: instead of standard error.
    """

    def __init__(self, what: str = "", total: float | None = None, screen: Console | None = None) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._screen = screen or console(stderr=True)
        self._what = what
        self.phase = ""
        self._key, self._said_at, self._done = "", time.monotonic(), 0
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        bars = (*columns, TimeRemainingColumn()) if total else columns
        self._bars = Bars(*bars, console=self._screen, transient=True, disable=not self._screen.is_terminal)
        self._task = self._bars.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._screen.print(text, markup=False)

    def begin(self, phase: str, total: float | None = None) -> None:
        """Start a phase."""
        self.phase = phase
        self._bars.reset(self._task, total=total)
        self.show(phase)

    def show(self, text: str, done: float | None = None, total: float | None = None, *, key: str | None = None) -> None:
        """Update the bar; without a terminal, print a line every :data:`LINE_EVERY_S` and whenever ``key`` (default:
        the phase) changes."""
        key = self.phase if key is None else key
        self._bars.update(self._task, description=f"{self._what}  {text}".strip(), completed=done, total=total)
        moment = time.monotonic()
        if not self._screen.is_terminal and (key != self._key or moment - self._said_at >= LINE_EVERY_S):
            self._key, self._said_at = key, moment
            self.say(text)

    def count(self, done: int, total: int, now: str) -> None:
        """Show ``done`` of ``total``, and the item done last."""
        self._done = done
        self.show(f"{done} of {total}  {now}", done, total)

    def add_file(self, made: Path) -> None:
        """Count one more finished file."""
        self.count(self._done + 1, round(self._bars.tasks[0].total or 0), made.name)


class JsonLines:
    """One JSON object per line, to a file, to standard output (``-``) or nowhere (``None``); flushed line by line.

    A context manager. Raises ``SightlineError`` when the file cannot be written.
    """

    def __init__(self, target: str | None) -> None:
        self._path = None if target in (None, "-") else Path(str(target))
        self._file: Any = None if target is None else sys.stdout

    def __enter__(self) -> Self:
        if self._path is not None:
            check_writable(self._path.parent)
            with writing(self._path):
                self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()

    def write(self, body: Any) -> None:
        if self._file is not None:
            with writing(self._path or "standard output"):
                self._file.write(json_text(body, indent=None) + "\n")
                self._file.flush()


def check_json_target(target: str | Path | None) -> None:
    """Check that ``--json`` can be written, before anything expensive starts. Raises ``SightlineError``: it cannot."""
    if target not in (None, "-"):
        check_file_writable(Path(str(target)))


def for_each(items: Iterable[T], work: Callable[[T], None]) -> None:
    """Do ``work`` with each item. Raises ``UnavailableError`` at once, other ``SightlineError`` after the last item."""
    errors: list[SightlineError] = []
    for item in items:
        try:
            work(item)
        except UnavailableError:
            raise
        except SightlineError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else SightlineError("; ".join(at_most(10, [*map(str, errors)])))


def plural(count: int, noun: str) -> str:
    """``1 camera``, ``2 cameras``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
