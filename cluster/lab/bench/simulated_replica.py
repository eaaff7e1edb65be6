"""One replica on simulated time: real window queue, real fleet, and steps that take what the cost model says.

No thread, no clock: an hour takes seconds, and the same seed gives the same run.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from cluster.config.cluster import ClusterConfig, SchedulingConfig
from cluster.control.costs import CostModel, WindowWork
from cluster.control.demand import NOTHING, Demand, Measured, work
from cluster.control.fleet import Fleet
from cluster.control.ladder import Rung, default
from cluster.replica.window_queue import DroppedWindow, WindowQueue
from cluster.types import MICROSECONDS, WindowRequest
from cluster.types.cameras import Priority

REPLICA = "replica-0"
_CLUSTER = ClusterConfig()
MOST_STRIDES = 16
"""More strides than overlap in a window of the usual lengths."""


@dataclass(slots=True)
class Class:
    """Windows of one priority class. ``due``: at the stride that was asked for, so that those which a longer stride or
    shedding leaves out count too; ``quality``: F1 of the answers, relative to full quality's; ``late``: answered after
    the next one was due."""

    due: int = 0
    answered: int = 0
    late: int = 0
    left_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    quality: float = 0.0
    lags_s: list[float] = field(default_factory=list)

    @property
    def unaccounted(self) -> int:
        """Windows neither answered nor counted."""
        return self.due - self.answered - self.left_out - sum(self.dropped.values()) - self.waiting


@dataclass(slots=True)
class Camera:
    """``busy``: the real share of windows that the gate lets through; ``pace``: windows for each that was declared;
    ``gated``, ``missed``: strides since its last computed window, whose frames are computed with the next one."""

    demand: Demand
    phase: float
    busy: float = 1.0
    pace: float = 1.0
    rung: int = 0
    skip: float = 0.0
    window: int = 0
    gated: int = 0
    missed: int = 0
    since: Measured = NOTHING

    def count(self, *, windows: int = 0, gated: int = 0, dropped: int = 0) -> None:
        """Count windows for the next heartbeat."""
        before = self.since
        self.since = before._replace(
            windows=before.windows + windows, gated=before.gated + gated, dropped=before.dropped + dropped
        )


@dataclass(slots=True)
class Run:
    """What came of a simulation. ``longest_s``: longest step."""

    classes: dict[Priority, Class]
    longest_s: float = 0.0

    def quality(self) -> float:
        """F1-weighted share of due windows that were answered."""
        return sum(c.quality for c in self.classes.values()) / max(1, sum(c.due for c in self.classes.values()))


class Replica:
    """One replica under an open-loop load.

    Args:
        fleet: decides on rungs, ``None`` to leave everyone at full quality.
        drop: share of windows that are thrown away as they come, at random.
        budget_s: of a step (:meth:`WindowQueue.take_batch`).
    """

    def __init__(
        self,
        cameras: Sequence[Camera],
        costs: CostModel,
        *,
        fleet: Fleet | None = None,
        drop: float = 0.0,
        budget_s: float = SchedulingConfig().step_budget_s,
        seed: int = 0,
    ) -> None:
        self.cameras = cameras
        self.now_s = 0.0
        self._costs, self._fleet = costs, fleet
        self._drop, self._budget_s = drop, budget_s
        self._random = random.Random(seed)
        self._queue = WindowQueue(per_stream=_CLUSTER.window_queue, capacity=100_000)
        self._names = {camera.demand.camera: camera for camera in cameras}
        self._works: dict[tuple[str, int, int, int], tuple[WindowWork, float]] = {}
        self._arrivals = [(camera.phase * camera.demand.stride_s, i) for i, camera in enumerate(cameras)]
        heapify(self._arrivals)
        self._ticked_s = self._busy_since_tick = 0.0
        self._steps = self._computed = 0
        self.run_ = Run({each: Class() for each in Priority})

    def run(self, seconds: float) -> Run:
        """Go on for so long; the same ``Run`` grows with every call."""
        until = self.now_s + seconds
        while self.now_s < until:
            self._arrive(self.now_s)
            batch = self._queue.take_batch(_CLUSTER.max_batch, self.now_s, self._budget_s)
            self._update_metrics(batch.dropped)
            if batch.requests:
                self._step(batch.requests)
            else:
                self.now_s = min(max(self._arrivals[0][0], self.now_s), until)
            if self._fleet is not None and self.now_s - self._ticked_s >= 1.0:
                self._tick(self._fleet)
        for each in self.run_.classes.values():
            each.waiting = 0
        for camera in self.cameras:
            self.run_.classes[camera.demand.priority].waiting += self._queue.waiting(camera.demand.camera)
        return self.run_

    def _rung(self, camera: Camera) -> Rung:
        return _FULL if self._fleet is None else self._fleet.ladder.rungs[camera.rung]

    def _arrive(self, until: float) -> None:
        while self._arrivals[0][0] <= until:
            at_s, index = self._arrivals[0]
            camera = self.cameras[index]
            heapreplace(self._arrivals, (at_s + camera.demand.stride_s / camera.pace, index))
            self._window(camera, at_s)

    def _window(self, camera: Camera, at_s: float) -> None:
        """A window is due at full quality's stride; what becomes of it."""
        mine, rung = self.run_.classes[camera.demand.priority], self._rung(camera)
        mine.due += 1
        camera.skip += 1.0
        if rung.shed or camera.skip < rung.stride:
            mine.left_out += 1
            return
        camera.skip = 0.0
        camera.window += 1
        if self._random.random() >= camera.busy:
            mine.answered += 1
            mine.quality += rung.f1
            camera.count(windows=1, gated=1)
            camera.gated += 1
            return
        if self._drop and self._random.random() < self._drop:
            mine.dropped["random"] += 1
            camera.missed += 1
            return
        demand = camera.demand
        end = round(at_s * MICROSECONDS)
        request = WindowRequest(demand.camera, camera.window, end - 1, end, at_s)
        seconds = self._work(camera)[1]
        stride_s = demand.stride_s * rung.stride
        self._update_metrics(
            self._queue.offer(
                request, stride_s=stride_s, late_s=demand.window_s, priority=demand.priority, seconds=seconds
            )
        )

    def _work(self, camera: Camera) -> tuple[WindowWork, float]:
        # What a window can hold of them; the rest has left it.
        gated, missed = min(camera.gated, MOST_STRIDES), min(camera.missed, MOST_STRIDES)
        key = (camera.demand.camera, camera.rung, gated, missed)
        if key not in self._works:
            asked = work(camera.demand, self._rung(camera), gated=gated, missed=missed)
            self._works[key] = asked, self._costs.window_seconds(asked)
        return self._works[key]

    def _step(self, requests: Sequence[WindowRequest]) -> None:
        cameras = [self._names[request.stream] for request in requests]
        spread = self._costs.spread
        scatter = math.exp(self._random.gauss(0.0, spread) - spread**2 / 2)
        seconds = self._costs.seconds([self._work(camera)[0] for camera in cameras]) * scatter
        for camera in cameras:
            camera.gated = camera.missed = 0
        self.now_s += seconds
        self._busy_since_tick += seconds
        self._steps += 1
        self._computed += len(requests)
        self.run_.longest_s = max(self.run_.longest_s, seconds)
        for camera, request in zip(cameras, requests, strict=True):
            mine = self.run_.classes[camera.demand.priority]
            lag_s = self.now_s - request.arrived_s
            mine.answered += 1
            mine.quality += self._rung(camera).f1
            mine.lags_s.append(lag_s)
            mine.late += lag_s > camera.demand.stride_s
            camera.count(windows=1)

    def _update_metrics(self, dropped: Sequence[DroppedWindow]) -> None:
        for gone in dropped:
            camera = self._names[gone.request.stream]
            self.run_.classes[camera.demand.priority].dropped[gone.reason] += 1
            camera.missed += 1
            camera.count(dropped=1)

    def _tick(self, fleet: Fleet) -> None:
        period_s = self.now_s - self._ticked_s
        for name, camera in self._names.items():
            fleet.observe_counts(name, camera.since._replace(period_s=period_s))
            camera.since = NOTHING
        backlog = sum(self._work(self._names[name])[1] for name in self._names if self._queue.waiting(name))
        share = min(1.0, self._busy_since_tick / period_s)
        fleet.replica_report(
            REPLICA,
            busy_share=share,
            backlog_s=backlog,
            now_s=self.now_s,
            steps=self._steps,
            windows=self._computed,
        )
        self._steps = self._computed = 0
        for step in fleet.tick(self.now_s):
            self._names[step.camera].rung = step.rung_to
        self._ticked_s, self._busy_since_tick = self.now_s, 0.0


_FULL = default().rungs[0]
