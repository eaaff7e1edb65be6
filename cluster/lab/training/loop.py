"""Runs one stage: steps, schedule, moving average, checkpoints, validation, and the log."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from cluster.lab.training.checkpoint import Progress, load, save
from cluster.lab.training.config import Settings
from cluster.lab.training.examples import Example
from cluster.lab.training.feeder import Feeder
from cluster.lab.training.heads import DenseHeads
from cluster.lab.training.optimizer import StageOptimizer
from cluster.lab.training.replay import Replay
from cluster.lab.training.stages import Stage
from cluster.lab.training.trainee import Trainee

# Steps whose losses are averaged into one line of the log.
LOG_STEPS = 20
_LOWEST_RATE = 0.02


class Listener(Protocol):
    """Who is told how it goes: the command line's progress bar."""

    def step(self, share: float, step: int, rate: float, losses: dict[str, float]) -> None:
        """``share`` of the stage is done; ``rate``: examples per second since the last call; ``losses``: means."""

    def validated(self, metrics: dict[str, float]) -> None:
        """The validation set was asked."""


class StageRun:
    """One stage on its way. ``model`` and ``heads`` are changed in place; after :meth:`run` ``model`` has the moving
    average's weights if they answer better on validation."""

    def __init__(self, settings: Settings, stage: Stage, model: Trainee, heads: DenseHeads, folder: Path) -> None:
        self.settings, self.stage, self.model, self.heads = settings, stage, model, heads
        self.folder = folder
        self.parameters = {**_named("model", model.model), **_named("heads", heads)}
        self.average = {name: value.detach().clone() for name, value in model.model.state_dict().items()}
        self.optimizer = StageOptimizer(
            self.parameters,
            kind=stage.settings.optimizer,
            rate=stage.settings.rate,
            decay=stage.settings.decay,
        )
        self.step = 0
        self.elapsed_s = 0.0
        self.done = False
        self._identity = {"shape": settings.shape, "seed": settings.seed, "batch": stage.settings.batch}

    @property
    def path(self) -> Path:
        return self.folder / f"{self.stage.settings.name}.pt"

    @property
    def share(self) -> float:
        """How much of the stage is done, 0..1."""
        bounds = self.stage.settings
        shares = [0.0]
        if bounds.steps is not None:
            shares.append(self.step / max(1, bounds.steps))
        if bounds.minutes is not None:
            shares.append(self.elapsed_s / (60 * bounds.minutes) if bounds.minutes > 0 else 1.0)
        return min(1.0, max(shares))

    def resume(self) -> bool:
        """Take up the checkpoint if there is one; whether there was.

        Raises:
            ConfigError: it is of another run.
        """
        progress = load(self.path, self._identity)
        if progress is None:
            return False
        self.model.model.load_state_dict(progress.model)
        self.heads.load_state_dict(progress.heads)
        self.average = {name: value.to(self.model.device) for name, value in progress.average.items()}
        self.optimizer.load_state_dict(progress.optimizer)
        self.step, self.elapsed_s, self.done = progress.step, progress.elapsed_s, progress.done
        return True

    def save(self) -> None:
        """Write the checkpoint."""
        save(
            Progress(
                stage=self.stage.settings.name,
                step=self.step,
                elapsed_s=self.elapsed_s,
                done=self.done,
                model=self.model.model.state_dict(),
                average=self.average,
                heads=self.heads.state_dict(),
                optimizer=self.optimizer.state_dict(),
                settings={**self._identity, **asdict(self.stage.settings)},
            ),
            self.path,
        )

    # -- steps --------------------------------------------------------------------------------------
    def train_step(self, examples: list[Example]) -> dict[str, float]:
        """One step on these examples; returns the parts of its loss."""
        self.optimizer.zero_grad()
        loss = self.stage.loss(self.model, self.heads, examples)
        loss.total.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        if not math.isfinite(float(norm)):
            # One broken batch must not end a night's run, nor spoil the weights.
            self.step += 1
            return {"skipped": 1.0}
        self.optimizer.step(schedule(self.share, self.stage.settings.warm_up))
        self.step += 1
        self._move_average()
        return {**loss.parts, "norm": float(norm)}

    @torch.no_grad()
    def _move_average(self) -> None:
        # Early on the average follows closely, or it would remember the random beginning.
        decay = min(self.settings.average, (1 + self.step) / (10 + self.step))
        for name, value in self.model.model.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)

    def run(self, listener: Listener, *, validation: Callable[[], list[Example]]) -> None:
        """To the end of the stage. Interrupted, it leaves a checkpoint and raises."""
        saved = validated = time.monotonic()
        sums: dict[str, list[float]] = defaultdict(list)
        batch = self.stage.settings.batch
        replays = self.stage.settings.replays
        first = self.step * batch // (replays + 1)
        with Feeder(self.stage.make, workers=self.settings.workers, first=first) as feeder:
            examples = Replay(feeder, again=replays, seed=first)
            last = time.monotonic()
            try:
                while self.share < 1.0:
                    losses = self.train_step([examples.next() for _ in range(batch)])
                    for name, value in losses.items():
                        sums[name].append(value)
                    now = time.monotonic()
                    self.elapsed_s += now - last
                    last = now
                    if self.step % LOG_STEPS == 0:
                        means = {name: sum(values) / len(values) for name, values in sums.items()}
                        sums.clear()
                        self._log("losses", means)
                        listener.step(self.share, self.step, self.step * batch / self.elapsed_s, means)
                    if now - saved > 60 * self.settings.save_minutes:
                        self.save()
                        saved = now
                    if now - validated > 60 * self.settings.validate_minutes:
                        self.validate(validation(), listener)
                        # Validation is no training: it takes none of the stage's minutes.
                        last = validated = time.monotonic()
            except BaseException:
                self.save()
                raise
        self._finish(listener, validation())

    def _finish(self, listener: Listener, examples: list[Example]) -> None:
        """Keep the better of the weights and their moving average."""
        raw = {name: value.detach().clone() for name, value in self.model.model.state_dict().items()}
        if examples:
            plain = self.validate(examples, listener, average=False)
            averaged = self.validate(examples, listener)
            better = averaged[self.stage.score] >= plain[self.stage.score]
        else:
            better = True
        self.model.model.load_state_dict(self.average if better else raw)
        self.done = True
        self.save()

    def validate(self, examples: list[Example], listener: Listener, *, average: bool = True) -> dict[str, float]:
        """Metrics of the moving average (or of the weights as they are)."""
        with self._averaged() if average else nullcontext():
            metrics = self.stage.judge(self.model, self.heads, examples)
        self._log("validation" if average else "validation_raw", metrics)
        listener.validated(metrics)
        return metrics

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """With the moving average in place of the weights."""
        raw = {name: value.detach().clone() for name, value in self.model.model.state_dict().items()}
        self.model.model.load_state_dict(self.average)
        try:
            yield
        finally:
            self.model.model.load_state_dict(raw)

    def _log(self, what: str, values: dict[str, float]) -> None:
        line = {
            "stage": self.stage.settings.name,
            "step": self.step,
            "elapsed_s": round(self.elapsed_s, 1),
            "what": what,
        }
        numbers = {name: None if math.isnan(value) else round(value, 5) for name, value in values.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **numbers}) + "\n")


def schedule(share: float, warm_up: float) -> float:
    """Learning rate as a share of the highest: linear up to ``warm_up``, then a half cosine down to a fiftieth."""
    if share < warm_up:
        return max(share, 1e-3) / warm_up
    rest = (share - warm_up) / max(1e-9, 1 - warm_up)
    return _LOWEST_RATE + (1 - _LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))


def _named(prefix: str, module: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}
