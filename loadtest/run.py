"""A whole load test: warm up, measure, let things go wrong; or one measurement after another to find the limit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import SightlineConfig
from cluster.types import Question
from loadtest.faults import inflict
from loadtest.fleet import CameraSetup
from loadtest.footage import Footage
from loadtest.profile import Profile
from loadtest.result import FaultResult, Measurement, Tick
from loadtest.search import Search, Try
from loadtest.simulated import city
from loadtest.stage import Stage, on_stage
from loadtest.target import Target

QUESTION = Question("person", "Is there a person in the scene?")
"""Asked where the configuration has none of its own."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One test at a fixed number of streams. ``during``: over the faults, which ``measurement`` is before; ``city``:
    see :mod:`loadtest.simulated`."""

    measurement: Measurement
    faults: tuple[FaultResult, ...] = ()
    during: Measurement | None = None
    ticks: tuple[Tick, ...] = ()
    city: Mapping[str, Any] | None = None

    @property
    def silent(self) -> int:
        """Windows that nobody accounts for, over all of the test."""
        return (self.during or self.measurement).silent

    @property
    def extra(self) -> int:
        """Windows that were counted and never due, over all of the test."""
        return (self.during or self.measurement).extra


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The most streams that a cluster of ``replicas`` kept up with. ``best``: the measurement at that count."""

    replicas: int
    streams: int
    limit: str | None
    tries: tuple[Try, ...]
    best: Measurement | None = None
    silent: int = 0
    ticks: tuple[Tick, ...] = field(default=())


def camera_setup(config: SightlineConfig) -> CameraSetup:
    """What a configuration's sections mean for a camera that is added while the cluster runs, which may be one with
    other sections of its own."""
    sections = ("sampling", "pruning", "window", "memory")
    settings = {name: getattr(config, name).model_dump(mode="json") for name in sections}
    questions = tuple(question.question() for question in config.questions) or (QUESTION,)
    return CameraSetup(questions, settings, config.window.stride_s)


async def run_test(
    target: Target,
    profile: Profile,
    footage: Mapping[str, Footage],
    *,
    faults: Sequence[str] = (),
    on_tick: Callable[[Tick], None] = lambda _: None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> RunResult:
    """Bring up ``profile.streams`` cameras, measure for ``profile.measure_s``, then do each fault in turn.

    Raises:
        SightlineError: the cluster cannot be reached, does not take the cameras, or a fault cannot be done.
    """
    setup = camera_setup(target.config)
    async with on_stage(target, profile, footage, setup, on_tick=on_tick) as stage:
        on_phase("warming up")
        await stage.warm_up(profile.streams)
        on_phase("measuring")
        measurement = await stage.measure(profile.measure_s)
        results: list[FaultResult] = []
        during = None
        if faults:
            mark = await stage.mark()
            for name in faults:
                on_phase(name)
                results.append(await inflict(stage, name))
            during = await stage.conclude(mark)
        simulated = _city(target.config, profile, stage, measurement)
        return RunResult(measurement, tuple(results), during, tuple(stage.ticks), simulated)


def _city(config: SightlineConfig, profile: Profile, stage: Stage, found: Measurement) -> dict[str, Any] | None:
    if config.engine != "simulated":
        return None
    from cluster.models.loading import load_shape

    shape = load_shape(config.model.name)
    questions = stage.setup.questions
    return city(
        config,
        profile,
        stage.fleet.everyone(),
        found,
        began_s=stage.began_s,
        temporal=shape.geometry.temporal,
        query_tokens=round(sum(len(shape.question_ids(q.text)) for q in questions) / len(questions)),
    )


async def run_search(
    target: Target,
    profile: Profile,
    footage: Mapping[str, Footage],
    search: Search,
    *,
    save: Callable[[], None] = lambda: None,
    on_tick: Callable[[Tick], None] = lambda _: None,
    on_try: Callable[[int, str], None] = lambda _streams, _phase: None,
    on_result: Callable[[Try, Measurement], None] = lambda _try, _measurement: None,
) -> SearchResult:
    """Measure what ``search`` asks for until it is over; ``save`` is called after every try.

    Raises:
        SightlineError: the cluster cannot be reached or does not take the cameras.
    """
    found: list[tuple[Try, Measurement]] = []
    ticks: list[Tick] = []

    async def one(stage: Stage, fresh: bool) -> None:
        wanted = search.next()
        assert wanted is not None
        on_try(wanted.streams, wanted.phase)
        if len(stage.fleet.cameras) != wanted.streams:
            await stage.warm_up(wanted.streams)
        measurement = await stage.measure(profile.measure_s)
        verdict = measurement.verdict
        note = verdict.reasons[0] if verdict.reasons else ""
        result = Try(wanted.streams, verdict.stable, wanted.phase, fresh, verdict.limit, note)
        search.record(result)
        save()
        found.append((result, measurement))
        on_result(result, measurement)

    replicas = await asyncio.to_thread(target.replicas)
    starts = 0
    while (wanted := search.next()) is not None:
        starts += 1
        even = profile if wanted.phase == "coarse" else profile.model_copy(update={"phases": "even"})
        prefix = f"load-{starts}"
        async with on_stage(
            target, even, footage, camera_setup(target.config), on_tick=on_tick, prefix=prefix
        ) as stage:
            await one(stage, wanted.fresh)
            while (again := search.next()) is not None and not again.fresh:
                await one(stage, fresh=False)
            ticks += stage.ticks
            if search.next() is not None:
                # The next start is on the same cluster: these cameras have to leave it first.
                await stage.fleet.shrink(0)
    good = [measurement for result, measurement in found if result.stable and result.streams == search.stable]
    return SearchResult(
        replicas=replicas,
        streams=search.stable,
        limit=search.limit,
        tries=tuple(search.tries),
        best=good[-1] if good else None,
        silent=max((measurement.silent for _, measurement in found), default=0),
        ticks=tuple(ticks),
    )
