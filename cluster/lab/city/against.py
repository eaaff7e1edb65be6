"""Validates the simulator against load tests: relative errors of lags and throughput for the same configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from cluster.config.problems import Section, from_validation
from cluster.control.costs import CostModel
from cluster.control.ladder import Ladder
from cluster.errors import ConfigError
from cluster.files import read_json
from cluster.lab.city.city import simulate
from cluster.lab.city.mix import Mix
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, Timing
from cluster.lab.city.replica import EngineSettings
from cluster.lab.city.result import Figures

REPEATS = 5
"""Simulations with different seeds whose counts are merged."""


class MeasuredRun(Section):
    """Figures measured by a load test. Lags of computed windows in seconds, from last frame to answer."""

    lag_p50_s: float = Field(gt=0)
    lag_p99_s: float = Field(gt=0)
    answered_per_s: float = Field(gt=0)
    gated_per_s: float = 0.0
    dropped_per_s: float = 0.0


class Run(Section):
    """One configuration that ran on a real cluster. ``mix``: its cameras, each class's ``share`` being their number;
    ``phases``: how window ends were distributed over the stride, or one phase per camera."""

    mix: Mix
    replicas: int = Field(ge=1)
    seconds: float = Field(gt=0)
    warmup_s: float = Field(default=0.0, ge=0)
    phases: str | tuple[float, ...] = "random"
    max_batch: int = Field(default=8, ge=1)
    per_stream: int = Field(default=2, ge=1)
    budget_s: float = Field(default=EngineSettings().budget_s, gt=0)
    ladder: bool = False
    cost: dict[str, Any]
    measured: MeasuredRun

    @property
    def cameras(self) -> int:
        return round(sum(each.share for each in self.mix.classes))


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured run and its simulation."""

    run: Run
    simulated: Figures

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors of median lag, p99 lag and computed windows per second."""
        measured, found = self.run.measured, self.simulated
        pairs = {
            "lag_p50_s": (found.lag_p50_s, measured.lag_p50_s),
            "lag_p99_s": (found.lag_p99_s, measured.lag_p99_s),
            "answered_per_s": (found.computed_per_s, measured.answered_per_s),
        }
        return {name: abs(ours / theirs - 1) for name, (ours, theirs) in pairs.items()}

    @property
    def error(self) -> float:
        """The largest of ``errors``."""
        return max(self.errors.values())

    def as_json(self) -> dict[str, Any]:
        found = self.simulated
        return {
            "cameras": self.run.cameras,
            "replicas": self.run.replicas,
            "measured": self.run.measured.model_dump(),
            "simulated": {
                "lag_p50_s": found.lag_p50_s,
                "lag_p99_s": found.lag_p99_s,
                "answered_per_s": found.computed_per_s,
                "busy": found.busy,
            },
            "errors": self.errors,
        }


def sim_error(compared: Sequence[Compared]) -> float:
    """Median over runs of each run's largest relative error."""
    return median(each.error for each in compared)


def read_runs(path: Path) -> list[Run]:
    """Read the runs from a load test's JSON: one object under ``city``, or several under ``runs``. Raises
    ``ConfigError`` if the file cannot be read or contains none."""
    body = read_json(path)
    listed = body.get("runs", [body] if "city" in body else None) if isinstance(body, Mapping) else None
    if not isinstance(listed, list):
        raise ConfigError(f"{path} has neither `city` nor `runs`; write it with: sightline loadtest run --json {path}")
    found = []
    for index, each in enumerate(listed):
        run = each.get("city", each) if isinstance(each, Mapping) else each
        measured = run.get("measured") if isinstance(run, Mapping) else None
        if isinstance(measured, Mapping) and measured.get("lag_p50_s") is None:
            raise ConfigError(f"{path}: run {index} has no computed windows to compare with; run it longer")
        try:
            found.append(Run.model_validate(run))
        except ValidationError as error:
            problem = from_validation(error, Run)[0]
            raise ConfigError(problem.sentence(f"{path}: run {index}")) from None
    if not found:
        raise ConfigError(f"{path} has no runs; write it with: sightline loadtest run --json {path}")
    return found


def compare(run: Run, ladder: Ladder, *, seed: int = 0, repeats: int = REPEATS) -> Compared:
    """Simulate a run ``repeats`` times and merge the counts. Raises ``ConfigError`` if the run's cost model, times or
    phases are invalid."""
    plan = _plan(run, ladder)
    found = [
        simulate(replace(plan, seed=seed + repeat, phases=_phases(run, np.random.default_rng([seed, repeat]))))
        for repeat in range(repeats)
    ]
    total, first = found[0].tally, found[0].first
    for again in found[1:]:
        total.add(again.tally)
    figures = Figures.of(total, first=first, end=first + round(run.seconds / total.bin_s))
    return Compared(run, replace(figures, computed_per_s=figures.computed_per_s / repeats))


def _plan(run: Run, ladder: Ladder) -> CityPlan:
    # Time to answer or drop the windows that ended last in the measurement.
    tail_s = max(each.window_s for each in run.mix.classes)
    wanted = {each.name for each in fields(CostModel)}
    if set(run.cost) != wanted:
        raise ConfigError(f"a run's cost must be a cost model with the keys {', '.join(sorted(wanted))}")
    return CityPlan(
        cameras=run.cameras,
        pools=(PoolPlan("measured", run.replicas, replace(CostModel(**run.cost), window_tokens=None)),),
        mix=run.mix,
        mix_name="measured",
        ladder=ladder if run.ladder else FULL,
        ladder_name="the model's" if run.ladder else "none",
        timing=Timing(run.warmup_s + run.seconds + tail_s, tick_s=1.0, bin_s=1.0),
        warmup_s=run.warmup_s,
        engine=EngineSettings(run.max_batch, run.per_stream, run.budget_s),
        force=True,
        # The measured cost is a mean over all windows, including those after gated and dropped ones.
        alike=True,
    )


def _phases(run: Run, rng: np.random.Generator) -> tuple[float, ...]:
    count = run.cameras
    if not isinstance(run.phases, str):
        if len(run.phases) != count or not all(0 <= phase < 1 for phase in run.phases):
            raise ConfigError(f"a run's phases must be {count} numbers from 0 to below 1, one per camera")
        return run.phases
    match run.phases:
        case "random":
            return tuple(rng.random(count).tolist())
        case "even":
            return tuple(rng.permutation(np.arange(count) / count).tolist())
        case "aligned":
            return (0.0,) * count
    raise ConfigError(f"unknown phases {run.phases!r}; use random, even, aligned, or one number per camera")
