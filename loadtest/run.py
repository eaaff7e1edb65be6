"""Runs a load test (warm up, measure, inject faults), or a series of measurements to find the capacity limit."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from cluster.config import CameraEntry, SightlineConfig
from cluster.config.root import resolve
from cluster.control import costs
from cluster.control.demand import Demand
from cluster.lab.bench.window_accounting import Slot, within
from cluster.lab.city.mix import CameraClass, GeometrySection, Mix
from loadtest.faults import inject
from loadtest.footage import Footage
from loadtest.profile import Profile, kind_at
from loadtest.result import FaultResult, Measurement, Tick
from loadtest.search import Search, Try
from loadtest.stage import Stage, on_stage
from loadtest.target import Target


@dataclass(frozen=True, slots=True)
class RunResult:
    """One test at a fixed number of streams. ``measurement``: before any fault; ``during``: while faults were injected;
    ``city``: see :func:`city`."""

    measurement: Measurement
    faults: tuple[FaultResult, ...] = ()
    during: Measurement | None = None
    ticks: tuple[Tick, ...] = ()
    city: Mapping[str, Any] | None = None

    @property
    def whole(self) -> Measurement:
        """The last measurement, whose windows are those of the whole test."""
        return self.during or self.measurement


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Maximum number of ``streams`` that a cluster of ``replicas`` kept up with. ``tries``: also those of a search that
    was resumed; ``best``: the measurement at that count; ``ticks``: of all starts, timed from the search's start."""

    replicas: int
    streams: int
    limit: str | None
    tries: tuple[Try, ...]
    best: Measurement | None = None
    ticks: tuple[Tick, ...] = ()

    @property
    def silent(self) -> int:
        """Most windows of one try that were neither answered nor counted."""
        return max((each.silent for each in self.tries), default=0)

    @property
    def reduced_share(self) -> float:
        """Largest share of cameras below full quality in a stable try of ``streams``."""
        found = (each.reduced_share for each in self.tries if each.stable and each.streams == self.streams)
        return max(found, default=0.0)


async def run_test(
    target: Target,
    profile: Profile,
    footage: Mapping[str, Footage],
    *,
    faults: Sequence[str] = (),
    on_tick: Callable[[Tick], None] = lambda _: None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> RunResult:
    """Bring up ``profile.streams`` cameras, measure for ``profile.measure_s``, then inject the faults in turn. Raises
    ``SightlineError``: the cluster cannot be reached or rejects the cameras, or a fault cannot be injected."""
    async with on_stage(target, profile, footage, on_tick=on_tick) as stage:
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
                results.append(await inject(stage, name))
            during = await stage.conclude(mark)
        simulated = city(stage, measurement) if target.config.engine == "simulated" else None
        return RunResult(measurement, tuple(results), during, tuple(stage.ticks), simulated)


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
    """Measure what ``search`` asks for until it is finished; ``save`` is called after every try. Raises
    ``SightlineError``: the cluster cannot be reached or rejects the cameras."""
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
        lost, reduced = measurement.silent, measurement.reduced_share
        result = Try(wanted.streams, verdict.stable, wanted.phase, fresh, verdict.limit, note, lost, reduced)
        search.tries.append(result)
        save()
        found.append((result, measurement))
        on_result(result, measurement)

    replicas = await asyncio.to_thread(target.replicas)
    starts, began_s = 0, time.monotonic()
    while (wanted := search.next()) is not None:
        starts += 1
        even = profile if wanted.phase == "coarse" else profile.model_copy(update={"phases": "even"})
        prefix = f"load-{starts}"
        async with on_stage(target, even, footage, on_tick=on_tick, prefix=prefix) as stage:
            await one(stage, wanted.fresh)
            # After an unstable try start afresh: its lost windows would count against the next, smaller one.
            while found[-1][0].stable and (again := search.next()) is not None and not again.fresh:
                await one(stage, fresh=False)
            ticks += [replace(tick, at_s=tick.at_s + stage.began_s - began_s) for tick in stage.ticks]
            if search.next() is not None:
                # The next start uses the same cluster, so these cameras have to leave it first.
                await stage.fleet.shrink(0)
    good = [measurement for result, measurement in found if result.stable and result.streams == search.stable]
    return SearchResult(
        replicas=replicas,
        streams=search.stable,
        limit=search.limit,
        tries=tuple(search.tries),
        best=good[-1] if good else None,
        ticks=tuple(ticks),
    )


def city(stage: Stage, found: Measurement) -> dict[str, Any]:
    """Input to simulate the same cluster with the city simulator: camera classes by footage with their measured demand,
    the cost model, and the measured results to compare with."""
    from cluster.models.loading import load_shape

    config, profile, questions = stage.target.config, stage.profile, stage.fleet.questions
    shape = load_shape(config.model.name)
    temporal = shape.geometry.temporal
    query_tokens = round(sum(len(shape.question_ids(each.text)) for each in questions) / len(questions))
    from_s, until_s = stage.began_s + found.from_s, stage.began_s + found.until_s
    seconds = max(1e-9, found.seconds)
    groups: dict[str, list[list[Slot]]] = {}
    there: dict[str, float] = {}
    phases: dict[str, list[float]] = {}
    for camera in stage.fleet.everyone():
        # Cameras that joined or left meanwhile count by the share of the time they were present.
        share = (min(until_s, camera.ledger.until_s) - max(from_s, camera.ledger.began_s)) / seconds
        if share > 0:
            kind = kind_at(profile, camera.script.rank, found.from_s)
            groups.setdefault(kind, []).append(within(camera.ledger.slots(until_s), from_s, until_s))
            there[kind] = there.get(kind, 0.0) + share
            phases.setdefault(kind, []).append(camera.script.phase)
    computed = found.measured - found.missing - found.gated
    classes = [
        CameraClass.of(_demand(config, kind, slots, temporal, query_tokens), max(1, round(there[kind])))
        for kind, slots in groups.items()
    ]
    return {
        "mix": Mix(geometry=GeometrySection(temporal=temporal), classes=classes).model_dump(mode="json"),
        "replicas": config.cluster.replicas,
        "seconds": found.seconds,
        "warmup_s": found.from_s,
        # With few cameras their exact phases decide which windows queue behind each other. With churn or storms the
        # phases are effectively random.
        "phases": profile.phases if profile.churn_per_min or profile.storm else [*chain(*phases.values())],
        "max_batch": config.cluster.max_batch,
        "per_stream": config.cluster.window_queue,
        "budget_s": config.scheduling.step_budget_s,
        "ladder": found.reduced_share > 0,
        "cost": asdict(costs.load(config.simulated.costs)) if config.simulated.costs else None,
        "measured": {
            "lag_p50_s": found.replica.p50,
            "lag_p99_s": found.replica.p99,
            "answered_per_s": computed / seconds,
            "gated_per_s": found.gated / seconds,
            "dropped_per_s": sum(found.lost.values()) / seconds,
        },
    }


def _demand(
    config: SightlineConfig, kind: str, cameras: Sequence[Sequence[Slot]], temporal: int, query_tokens: int
) -> Demand:
    seen = [slot for slots in cameras for slot in slots if slot.tokens is not None]
    camera = resolve(config, CameraEntry(name=kind))
    window, sampling = camera.window, camera.sampling
    frames = max(1.0, window.length_s * sampling.fps / temporal)
    whole = [slot.tokens for slot in seen if slot.tokens is not None]
    full, kept = (sum(getattr(tokens, name) for tokens in whole) for name in ("full", "kept"))
    # Anchors are always complete; Demand.kept is the share over the other frames.
    anchors = min(1.0, temporal / (sampling.fps * sampling.anchor_interval_s))
    share = kept / full if full else 1.0
    return Demand(
        kind,
        window_s=window.length_s,
        stride_s=window.stride_s,
        fps=sampling.fps,
        frame_tokens=max(1, round(full / max(1, len(whole)) / frames)),
        temporal=temporal,
        questions=max(1, len(config.questions)),
        query_tokens=query_tokens,
        kept=min(1.0, max(0.0, (share - anchors) / (1 - anchors))) if anchors < 1 else 1.0,
        busy=sum(not slot.gated for slot in seen) / max(1, len(seen)),
        anchor_interval_s=sampling.anchor_interval_s,
        refresh_budget=window.refresh_budget,
    )
