"""What a training run shows: a bar with losses, pace and time left, and a line for every validation."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from actors.cli.output import console

# A pipe or a log gets a line of text this often, in log intervals, in place of the bar.
_LINES = 5
_SHOWN = ("loss", "answers", "found", "memory", "recalled")
_JUDGED = ("auc", "f1", "video_f1")


class TrainingScreen:
    """Implements ``cluster.lab.training.run.Audience``; everything goes to standard error."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[losses]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task: TaskID | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begins(self, stage: str, step: int) -> None:
        self._task = self._progress.add_task(stage, total=1.0, losses="")
        self._console.print(f"[bold]{stage}[/bold]: " + (f"goes on at step {step}" if step else "begins"))

    def step(self, share: float, step: int, rate: float, losses: dict[str, float]) -> None:
        text = f"{rate:.2f} examples/s  " + "  ".join(f"{k} {losses[k]:.3f}" for k in _SHOWN if k in losses)
        if self._task is not None:
            self._progress.update(self._task, completed=share, losses=text)
        self._calls += 1
        if not self._live and self._calls % _LINES == 0:
            self._console.print(f"{100 * share:3.0f} %  step {step}  {text}")

    def validated(self, metrics: dict[str, float]) -> None:
        means = "  ".join(f"{name} {metrics[name]:.3f}" for name in _JUDGED if name in metrics)
        kinds = "  ".join(f"{k.split(':')[1]} {v:.2f}" for k, v in metrics.items() if k.startswith("f1:"))
        self._console.print(f"validation: {means}" + (f"  (f1: {kinds})" if kinds else ""))

    def exported(self, folder: Path, kind: str) -> None:
        self._console.print(f"[bold]model[/bold]: {folder} ({kind} weights)")
