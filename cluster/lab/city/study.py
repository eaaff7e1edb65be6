"""Studies with the simulator: evaluate a plan, or search for the fewest replicas or the most cameras."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cluster.control import costs
from cluster.control.ladder import Ladder, default
from cluster.errors import ConfigError, SightlineError
from cluster.lab.city.city import carried, carries, simulate
from cluster.lab.city.plan import FULL, CityPlan, PoolPlan, with_replicas
from cluster.lab.city.result import CityResult, Objective

SEARCH_S, SEARCH_BIN_S = 600.0, 60.0
"""Simulated seconds per trial, after the warm-up; maximum width of its time bins."""

STEP = 1.06
"""Initial factor between counts while the search brackets the answer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result for one count of cameras and replicas."""

    cameras: int
    replicas: int
    met: bool
    on_time: float
    answered: float
    quality: float
    utilisation: float
    lag_p99_s: float


SHOWN = ("on_time", "answered", "quality", "utilisation", "lag_p99_s")


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Progress callbacks: ``share`` of a simulation done, title of what ``begins``, each trial ``tried``."""

    share: Callable[[float], None] = lambda _: None
    begins: Callable[[str], None] = lambda _: None
    tried: Callable[[Trial], None] = lambda _: None


@dataclass(slots=True)
class Search:
    """Searches over the cameras or replicas of one city. ``seconds``: simulated time per trial."""

    plan: CityPlan
    objective: Objective
    progress: StudyProgress = StudyProgress()
    seconds: float = SEARCH_S
    trials: list[Trial] = field(default_factory=list)

    def least_replicas(self) -> int:
        """The fewest replicas that serve the plan's cameras.

        A city with several controllers consists of equal districts: one is searched and the result scaled. Raises
        ``ConfigError`` if the pool mixes kinds, ``SightlineError`` if even four times the size that the cost model
        suggests is not enough.
        """
        if len(self.plan.pools) != 1:
            raise ConfigError("the least number of accelerators can be found for one kind only; name one with --gpus")
        cameras = -(-self.plan.cameras // -(-self.plan.cameras // self.plan.per_controller))
        guess = cameras / min(carries(self.plan.mix, self.plan.pools[0].costs, self.plan.hour))
        found = self._bisect(lambda count: self._try(cameras, count), max(1, math.ceil(guess)), fewer=True)
        return math.ceil(found.plan.replicas * self.plan.cameras / cameras)

    def most_cameras(self, guess: int | None = None) -> CityResult:
        """The run with the most cameras that the plan's replicas serve. ``guess``: where to start. Raises
        ``SightlineError`` if not even a quarter of the number that the cost model suggests can be served."""
        return self._bisect(
            lambda count: self._try(count, None), max(1, guess or math.floor(sum(carried(self.plan)))), fewer=False
        )

    def _try(self, cameras: int, replicas: int | None) -> CityResult:
        # The wide bins of a long simulation would not separate the warm-up.
        bin_s = min(self.plan.timing.bin_s, SEARCH_BIN_S)
        timing = replace(self.plan.timing, seconds=self.plan.warmup_s + self.seconds, bin_s=bin_s)
        plan = replace(self.plan, timing=timing, events=(), cameras=cameras)
        found = simulate(plan if replicas is None else with_replicas(plan, replicas), self.progress.share)
        figures = found.figures
        reached = {name: getattr(figures, name) for name in SHOWN}
        trial = Trial(cameras, found.plan.replicas, self.objective.met(figures), **reached)
        self.trials.append(trial)
        self.progress.tried(trial)
        return found

    def _bisect(self, run: Callable[[int], CityResult], guess: int, *, fewer: bool) -> CityResult:
        """Bisect for the least count that meets the objective if ``fewer``, else the most, assuming monotonicity."""
        good: tuple[int, CityResult] | None = None
        bad: int | None = None
        limit = max(16, 4 * guess) if fewer else max(1, guess // 4)
        count, factor = guess, STEP
        while good is None or bad is None or abs(good[0] - bad) > max(1, round(0.003 * good[0])):
            found = run(count)
            if self.objective.met(found.figures):
                good = (count, found)
                if count == 1 and fewer:
                    break
            else:
                bad = count
                if count == limit and good is None:
                    raise SightlineError(
                        f"{found.plan.replicas} replicas do not meet the objective for {found.plan.cameras} cameras"
                        f"{_why(found, self.objective)}; relax --objective, or change the mix"
                    )
            if good is not None and bad is not None:
                count = (good[0] + bad) // 2
                continue
            away = (good is None) == fewer
            count = math.ceil(count * factor) if away else math.floor(count / factor)
            count = max(1, min(count, limit) if fewer else max(count, limit))
            factor *= STEP
        return good[1]


def _why(found: CityResult, objective: Objective) -> str:
    figures = found.figures
    return (
        f" ({figures.on_time:.2%} on time of {objective.on_time:.2%}, {figures.answered:.2%} answered of "
        f"{objective.answered:.2%}, quality {figures.quality:.3f} of {objective.quality:.3f}, "
        f"{figures.refused} refused)"
    )


def _scaling_efficiency(many: CityResult, search: Search) -> tuple[float, list[Trial]]:
    """Cameras of a pool, over its size times those of one replica (mean over several searches); the latter's trials.
    ``many``: result of ``search``'s :meth:`Search.most_cameras`."""
    plan = search.plan
    single: list[int] = []
    tried: list[Trial] = []
    for seed in range(SINGLE_SEEDS):
        alone = Search(
            replace(with_replicas(plan, 1), seed=plan.seed + seed),
            search.objective,
            StudyProgress(tried=search.progress.tried),
            search.seconds,
        )
        single.append(alone.most_cameras(many.plan.cameras // many.plan.replicas).plan.cameras)
        tried += alone.trials
    return many.plan.cameras / (many.plan.replicas * (sum(single) / len(single))), tried


MODEL = "qwen2.5-vl-7b"


def parse_pools(texts: Sequence[str], model: str = MODEL) -> tuple[tuple[PoolPlan, ...], bool]:
    """Parse ``KIND=N`` entries, or one ``KIND`` alone; also returns whether the numbers were given.

    A kind is an accelerator with a shipped cost model for ``model`` (h100), the name of any shipped cost model, or a
    file. Raises ``ConfigError`` for an unknown cost model, a bad number, or several kinds without numbers.
    """
    found: list[PoolPlan] = []
    listed = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    counted = ["=" in text for text in listed]
    if not listed or (not all(counted) and len(listed) > 1):
        raise ConfigError("--gpus takes KIND=N for each kind, as in h100=64, or one KIND alone to find the fewest")
    for text in listed:
        kind, _, number = text.partition("=")
        if number and (not number.isdecimal() or int(number) < 1):
            raise ConfigError(f"--gpus {text!r}: the number of replicas must be at least 1, as in {kind}=64")
        if "=" in text and not number:
            raise ConfigError(f"--gpus {text!r} has no number after the equals sign, as in {kind}=64")
        if any(pool.kind == kind for pool in found):
            raise ConfigError(f"--gpus names {kind!r} twice; add up the numbers")
        found.append(PoolPlan(kind, int(number or 1), _costs(kind, model)))
    return tuple(found), all(counted)


def _costs(kind: str, model: str) -> costs.CostModel:
    shipped = f"{model}-{kind}"
    if shipped in costs.names():
        return costs.load(shipped)
    if kind in costs.names() or Path(kind).suffix == ".json":
        return costs.load(kind)
    kinds = [name.removeprefix(f"{model}-") for name in costs.names() if name.startswith(f"{model}-")]
    raise ConfigError(
        f"there is no cost model of {model} on {kind!r}; there are: {', '.join(kinds) or 'none'}; name one of "
        f"{', '.join(costs.names())}, or a file written by sightline bench cost --out"
    )


def parse_ladder(text: str) -> Ladder:
    """Parse ``default``, ``none``, or the path of a file or model folder. Raises ``ConfigError`` if the path has no
    ladder."""
    if text == "none":
        return FULL
    return default() if text == "default" else Ladder.load(Path(text))


def parse_objective(text: str) -> Objective:
    """Parse ``on_time=0.99,answered=0.99,quality=0.98``, each part optional. Raises ``ConfigError`` for an unknown name
    or a value that is not a share."""
    known = [each.name for each in fields(Objective)]
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in known or not 0 <= share <= 1:
            raise ConfigError(
                f"--objective {part!r} is not NAME=SHARE with a share from 0 to 1; names are: {', '.join(known)}"
            )
        values[name] = share
    return Objective(**values)


SINGLE_SEEDS = 4
"""Single-replica searches that a pool is compared with; one search varies much because it has few cameras."""

TOP_UP, TOP_UPS = 0.03, 5
"""Fraction by which a pool grows while the full run misses the objective; maximum number of times."""


@dataclass(slots=True)
class Study:
    """Result of a study. ``trials``: of its search, for fewest replicas if ``fewer``; ``single``: of one replica."""

    result: CityResult
    objective: Objective
    figures: dict[str, float]
    trials: list[Trial] = field(default_factory=list)
    fewer: bool = False
    single: list[Trial] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, with ``figures`` in the format of the benchmarks."""
        return {
            "bench": "city",
            "figures": self.figures,
            "objective": asdict(self.objective),
            "met": self.objective.met(self.result.figures),
            "trials": [asdict(trial) for trial in self.trials],
            "single_trials": [asdict(trial) for trial in self.single],
            **self.result.as_json(),
        }


def study(
    plan: CityPlan, objective: Objective, *, cameras: bool, replicas: bool, progress: StudyProgress = StudyProgress()
) -> Study:
    """Simulate the plan, or search for the number that is not given. ``cameras``, ``replicas``: whether the plan's
    number is given. Raises ``ConfigError`` if neither is given or the plan cannot be simulated, ``SightlineError`` if a
    search cannot meet the objective."""
    if not cameras and not replicas:
        raise ConfigError("give the number of cameras, of accelerators (as in --gpus h100=64), or both")
    if plan.events and not cameras:
        raise ConfigError("events need a number of cameras: a search for the most cameras runs without events")
    if cameras and replicas:
        progress.begins(f"{plan.cameras:,} cameras")
        result = simulate(plan, progress.share)
        return Study(result, objective, _seconds(result))
    search = Search(plan, objective, progress)
    progress.begins("the fewest replicas" if cameras else "the most cameras")
    if cameras:
        result = _simulate_full_run(plan, objective, search.least_replicas(), progress)
        met = objective.met(result.figures)
        figures = ({"replicas_at_objective": float(result.plan.replicas)} if met else {}) | _seconds(result)
        return Study(result, objective, figures, search.trials, fewer=True)
    result = search.most_cameras()
    figures = {
        "utilisation_at_objective": result.figures.utilisation,
        "streams_at_objective": float(result.plan.cameras),
        "streams_per_replica": result.plan.cameras / result.plan.replicas,
    } | _seconds(result)
    found = Study(result, objective, figures, search.trials)
    if len(plan.pools) == 1 and plan.replicas > 1:
        progress.begins("one replica alone")
        figures["scaling_efficiency"], found.single = _scaling_efficiency(result, search)
    return found


def _seconds(result: CityResult) -> dict[str, float]:
    """Wall and CPU seconds of the simulation; on a busy machine they differ widely."""
    return {"simulate_s": result.simulate_s, "simulate_cpu_s": result.simulate_cpu_s}


def _simulate_full_run(plan: CityPlan, objective: Objective, enough: int, progress: StudyProgress) -> CityResult:
    """Simulate the full duration, of which a search tries only ten minutes without events; adds a few replicas while
    the objective is missed."""
    replicas = 0
    for more in range(TOP_UPS + 1):
        # Three percent of a small pool rounds to nothing.
        replicas = max(replicas + 1, math.ceil(enough * (1 + TOP_UP * more)))
        progress.begins(f"{plan.cameras:,} cameras on {replicas:,} replicas")
        result = simulate(with_replicas(plan, replicas), progress.share)
        if objective.met(result.figures):
            break
    return result
