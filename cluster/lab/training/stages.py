"""The stages of a training run: what each is shown, what it minimises, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from cluster.lab.training.config import Settings, StageSettings
from cluster.lab.training.examples import Example, TowerExamples, ValidationExamples, WindowExamples
from cluster.lab.training.feeder import FrozenExamples
from cluster.lab.training.loss import DenseHeads, Loss, tower_loss, window_loss
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.trainee import Trainee
from cluster.lab.training.validate import validate_tower, validate_windows

TRAINED = ("tower", "language", "windows", "codec")
"""In the order they run in; ``export`` follows."""


FROZEN = "frozen-tower.pt"
"""File with the tower of the stage ``language``, inside of the run's folder."""


CACHE = "recorded"
"""Folder of what pruners left of encoded scenes, inside of the run's."""


Minimised = Callable[[Trainee, DenseHeads, Sequence[Example]], Loss]


Judged = Callable[[Trainee, DenseHeads, Sequence[Example]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Stage:
    """``make``: number -> training example, ``check``: number -> validation example; ``score`` names the metric that
    tells the better of two models."""

    settings: StageSettings
    make: Callable[[int], Example]
    check: Callable[[int], Example]
    loss: Minimised
    judge: Judged
    score: str


def make_stage(settings: Settings, stage: StageSettings, recorded: Path | None, folder: Path = Path()) -> Stage:
    """A stage by its name. ``recorded``: the folder of encoded scenes that ``codec`` is trained on; what pruners leave
    of them is kept in ``folder``.

    Raises:
        ConfigError: no such stage, or ``codec`` without scenes.
    """
    grid = picture_grid(settings.model)
    shape, seed = settings.shape, settings.seed
    check = ValidationExamples(shape)

    def windows(model: Trainee, heads: DenseHeads, examples: Sequence[Example]) -> Loss:
        return window_loss(model, heads, examples, grid, train_tower=stage.train_tower)

    def judge_windows(model: Trainee, heads: DenseHeads, examples: Sequence[Example]) -> dict[str, float]:
        del heads
        return validate_windows(model, examples, grid)

    if stage.name == "tower":
        return Stage(
            stage,
            TowerExamples(shape, seed),
            check,
            lambda model, heads, examples: tower_loss(model, heads, examples, grid),
            lambda model, heads, examples: validate_tower(model, heads, examples, grid),
            "auc",
        )
    if stage.name == "language":
        seen = FrozenExamples(WindowExamples(shape, seed), str(folder / FROZEN), shape)
        return Stage(stage, seen, check, windows, judge_windows, "f1")
    if stage.name == "windows":
        return Stage(stage, WindowExamples(shape, seed), check, windows, judge_windows, "f1")
    if stage.name == "codec":
        if recorded is None:
            raise ConfigError("the codec stage is trained on encoded scenes; name their folder with --codec-scenes DIR")
        from cluster.lab.training.recorded import RecordedExamples, training_clips

        training_clips(recorded)

        return Stage(
            stage,
            RecordedExamples(str(recorded), str(folder / CACHE), shape, seed),
            check,
            windows,
            judge_windows,
            "f1",
        )
    raise ConfigError(f"unknown stage {stage.name!r}; there are: {', '.join(TRAINED)}, export")
