"""Output of the demo: a live table on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actors.cli.demo.plan import CAMERAS
from actors.cli.output import Progress, state, tokens, windows
from cluster.lab.report.records import verdict
from cluster.types import CameraStatus, LastAnswer

if TYPE_CHECKING:
    from actors.cli.demo.live import LiveRun
    from actors.cli.demo.record import LoopedTruth

_SIGNS = {"right": ("✓", "green"), "wrong": ("✗", "red"), "open": ("~", "dim")}
LEGEND = "✓ correct   ✗ wrong   ~ too little of the event in the window to tell"

PLAIN_EVERY_S = 5.0


class Screen(Progress):
    """Progress of the current phase, below the live camera table."""

    def __init__(self, console: Console) -> None:
        super().__init__(screen=console)
        self._live = Live(self._bars, console=console, refresh_per_second=8, transient=True)
        self._table: Table | None = None
        self._cameras_at = 0.0

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self.end_live()

    def cameras(self, run: LiveRun, truths: Mapping[str, LoopedTruth]) -> None:
        """Show the cameras' current state, and whether their answers are correct."""
        self._table = cameras_table(run, truths)
        self._live.update(Group(self._table, self._bars))
        now = time.monotonic()
        if not self._screen.is_terminal and now - self._cameras_at >= PLAIN_EVERY_S:
            self._cameras_at = now
            for status in run.statuses.values():
                self.say(f"{run.seconds:4.0f} s  {status.name:8} {_one_line(status, truths.get(status.name))}")

    def end_live(self) -> None:
        """Leave the last table on the screen."""
        self._live.update(self._bars)
        if self._table is not None:
            self._screen.print(self._table)
        self._table = None


def _one_line(status: CameraStatus, truth: LoopedTruth | None) -> str:
    if not status.windows_done:
        return f"{status.state}  {status.reason}"
    answers = " · ".join(f"{a.question} {a.score:.2f} {_said(a)} {_sign(a, truth)[0]}" for a in status.last_answers)
    return (
        f"{status.state}  windows {windows(status)}  tokens {tokens(status)}  {1000 * status.latency_s:.0f} ms  "
        f"{answers}"
    )


def cameras_table(run: LiveRun, truths: Mapping[str, LoopedTruth]) -> Table:
    """The demo's cameras, with one line per question to fit 80 columns."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=LEGEND, caption_justify="left",
        caption_style="dim",
    )  # fmt: skip
    table.add_column("camera\n[dim]state[/]", no_wrap=True)
    table.add_column("fed by\n[dim]cue[/]", no_wrap=True)
    table.add_column("windows", justify="right", no_wrap=True, min_width=7)
    table.add_column("tokens [dim]full\n→ kept\n→ computed[/]", justify="right", no_wrap=True, min_width=10)
    table.add_column("latency", justify="right", no_wrap=True)
    table.add_column("last answers", no_wrap=True, min_width=26)
    for camera in CAMERAS:
        status = run.statuses.get(camera.name) or CameraStatus(camera.name, state="waiting")
        parts = (("gated", status.windows_gated), ("dropped", status.windows_dropped), ("lost", status.windows_lost))
        aside = "".join(f"\n[dim]{count} {name}[/]" for name, count in parts if count)
        table.add_row(
            Text.assemble((camera.name, "bold"), "\n", state(status)),
            f"{camera.fed_by}\n[dim]{status.cue}[/]",
            f"{status.windows_done + status.windows_gated}{aside}",
            tokens(status).replace(" → ", "\n→ "),
            f"{1000 * status.latency_s:.0f} ms" if status.windows_done else "",
            _answers(status, truths.get(camera.name)) if status.last_answers else Text(status.reason, style="dim"),
        )
    return table


def _answers(status: CameraStatus, truth: LoopedTruth | None) -> Text:
    text = Text()
    for answer in status.last_answers:
        if text:
            text.append("\n")
        sign, style = _sign(answer, truth)
        text.append(f"{answer.question} ", style="dim")
        text.append(f"{answer.score:.2f} {_said(answer)}", style="bold" if answer.positive else "")
        text.append(f" {sign}", style=style)
    return text


def _said(answer: LastAnswer) -> str:
    return "yes" if answer.positive else "no"


def _sign(answer: LastAnswer, truth: LoopedTruth | None) -> tuple[str, str]:
    """Sign for a correct or wrong answer, and its style; empty without ground truth."""
    if truth is None:
        return "", ""
    return _SIGNS[verdict(1.0 if answer.positive else 0.0, 0.5, truth.of_answer(answer))]
