"""One simulated replica: the production window queue before an engine that takes the time the cost model says."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from cluster.control.costs import CostModel
from cluster.control.demand import Demand, stride_at, work
from cluster.control.ladder import Ladder
from cluster.lab.city import Floats, Ints
from cluster.replica.window_queue import DroppedWindow, WindowQueue
from cluster.types.cameras import Priority


class WorkTable:
    """``seconds[kind, rung, held, strides]`` that a window adds to a step, by production's own estimate: one ``held``
    strides long, as windows grow after a fresh start, with ``strides`` of new frames, all but the last of them gated.
    ``more`` ``[kind, rung, held]``: of each window before it that was dropped instead.

    ``alike``: windows cost the same whatever was gated or lost before them: ``costs`` were measured over such windows.
    """

    def __init__(self, demands: Sequence[Demand], ladder: Ladder, costs: CostModel, *, alike: bool = False) -> None:
        longest = max(math.ceil(demand.window_s / demand.stride_s) for demand in demands)
        shape = (len(demands), len(ladder.rungs), longest + 1, 2 if alike else longest + 1)
        self.seconds: Floats = np.zeros(shape)
        self.more: Floats = np.zeros(shape[:3])
        for kind, rung, held in np.ndindex(shape[:3]):
            now = ladder.rungs[rung]
            if not held or now.shed:
                continue
            length_s = min(demands[kind].window_s, held * stride_at(demands[kind], now))
            demand = replace(demands[kind], window_s=length_s)
            for strides in range(1, shape[3]):
                asked = work(demand, now, gated=None if alike else min(strides, held) - 1)
                self.seconds[kind, rung, held, strides] = costs.window_seconds(asked)
            if not alike:
                missed = costs.window_seconds(work(demand, now, gated=0, missed=1))
                self.more[kind, rung, held] = missed - self.seconds[kind, rung, held, 1]

    def of(self, kind: Ints, rung: Ints, held: Floats, strides: Floats) -> tuple[Floats, Floats]:
        """Predicted seconds of each window, without its part of the step, and of one more stride."""
        held_at, strides_at = (
            np.clip(each, 1, most - 1).astype(np.int64)
            for each, most in zip((held, strides), self.seconds.shape[2:], strict=True)
        )
        return self.seconds[kind, rung, held_at, strides_at], self.more[kind, rung, held_at]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How every replica forms its steps, named as the configuration names them.

    ``budget_s``: predicted seconds of a step at most.
    """

    max_batch: int = 8
    per_stream: int = 2
    budget_s: float = 1.0


class Arrival(NamedTuple):
    """One computed window on its way to a replica. It has what the queue reads of a :class:`WindowRequest` and is taken
    for one: a city's hour has tens of millions, and each would be made twice.

    * ``camera``: the number of its camera; ``arrived_s``: when its last frame came, which is when it ended
    * ``expected_s`` is predicted, ``work_s`` what it will take, both without its part of the step
    * ``strides`` of frames are in it that no window before it takes in; each more takes ``more_s``
    * ``value_s``: seconds of video that it stands for, times what an answer is worth
    """

    stream: str
    camera: int
    arrived_s: float
    stride_s: float
    expected_s: float
    work_s: float
    strides: float = 1.0
    more_s: float = 0.0
    value_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the queue is told of each camera, by number. ``late_s``: after that an answer helps nobody."""

    priorities: Sequence[Priority]
    late_s: Sequence[float]


@dataclass(slots=True)
class Outcome:
    """What a stretch of time brought: windows answered, and when; windows dropped, by reason.

    ``unencoded``: those of the dropped whose frames no window that waits will take in.
    """

    answered: list[Arrival] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    dropped: dict[str, list[Arrival]] = field(default_factory=dict)
    unencoded: list[Arrival] = field(default_factory=list)


class Replica:
    """An engine that runs one step after the other. ``spread``: see :class:`CostModel`."""

    def __init__(
        self,
        costs: CostModel,
        settings: EngineSettings,
        facts: Facts,
        rng: np.random.Generator,
        now_s: float = 0.0,
    ) -> None:
        self.free_s = now_s
        self.busy_share = 0.0
        self.steps = self.computed = 0
        self._costs = costs
        self._settings = settings
        self._facts = facts
        self._rng = rng
        self._queue = WindowQueue(per_stream=settings.per_stream)
        self._waiting_s = self._busy_s = self._told_s = 0.0
        self._steps = self._computed = 0
        self._noise: list[float] = []
        self._under_way: list[Arrival] = []
        # Strides of frames by camera that dropped windows have left to the next one that waits.
        self._left: dict[int, float] = {}

    @property
    def waiting(self) -> int:
        """Windows in its queue, and in the step under way."""
        return len(self._under_way) + len(self._queue)

    def backlog_s(self, now_s: float) -> float:
        """Predicted seconds until everything that waits is answered."""
        return max(0.0, self.free_s - now_s) + self._waiting_s

    def spend(self, until_s: float, over_s: float) -> float:
        """Seconds of work since the last call, of ``over_s``: what it reports, with its steps and their windows."""
        busy_s = self._busy_s - max(0.0, self.free_s - until_s)
        spent, self._told_s = busy_s - self._told_s, busy_s
        self.busy_share = spent / over_s
        self.steps, self.computed, self._steps, self._computed = self._steps, self._computed, 0, 0
        return spent

    def run(self, arrivals: Sequence[Arrival], from_s: float, until_s: float, out: Outcome) -> None:
        """Take these windows, ordered by arrival and none later than ``until_s``, and begin every step from ``from_s``
        to before it.

        ``out`` gets what came of it; what is answered after ``until_s`` is told by a later call.
        """
        queue, max_batch, budget_s = self._queue, self._settings.max_batch, self._settings.budget_s
        # Arrivals pass for requests: see there.
        offer: Callable[..., list[DroppedWindow]] = queue.offer
        take: Callable[..., tuple[list[Any], list[DroppedWindow]]] = queue.take_batch
        late_s, priorities = self._facts.late_s, self._facts.priorities
        if self._under_way and self.free_s <= until_s:
            self._finish(out, self.free_s)
        now, at, count = max(self.free_s, from_s), 0, len(arrivals)
        while True:
            if not len(queue):
                # Sums of floats that were added and taken away drift.
                self._waiting_s = 0.0
                if at == count:
                    break
                now = max(now, arrivals[at].arrived_s)
            over = now >= until_s
            while at < count and (over or arrivals[at].arrived_s <= now):
                arrival = arrivals[at]
                camera, expected_s = arrival.camera, arrival.expected_s
                self._waiting_s += expected_s
                dropped = offer(
                    arrival,
                    stride_s=arrival.stride_s,
                    late_s=late_s[camera],
                    priority=priorities[camera],
                    seconds=expected_s,
                )
                if dropped:
                    self._drop(dropped, out)
                at += 1
            if over:
                break
            taken, dropped = take(max_batch, now, budget_s)
            if dropped:
                self._drop(dropped, out)
            if not taken:
                continue
            seconds, waiting_s = self._costs.step_s, self._waiting_s
            for arrival in taken:
                seconds += arrival.work_s
                waiting_s -= arrival.expected_s
            self._waiting_s = waiting_s
            if self._left:
                seconds += sum(self._left.pop(arrival.camera, 0.0) * arrival.more_s for arrival in taken)
            seconds *= self._scatter()
            now += seconds
            self._busy_s += seconds
            self._steps += 1
            self._computed += len(taken)
            self._under_way = taken
            if now <= until_s:
                self._finish(out, now)
        self.free_s = now

    def release(self, stream: str) -> list[Arrival]:
        """The waiting windows of a camera that goes elsewhere."""
        gone = cast(list[Arrival], self._queue.discard(stream))
        for arrival in gone:
            self._waiting_s -= arrival.expected_s
            self._left.pop(arrival.camera, None)
        return gone

    def die(self, streams: Iterable[str]) -> list[Arrival]:
        """All that waits, of these cameras, and the step under way."""
        return [*self._under_way, *(arrival for stream in streams for arrival in self.release(stream))]

    def _finish(self, out: Outcome, at_s: float) -> None:
        out.answered += self._under_way
        out.finish_s += [at_s] * len(self._under_way)
        self._under_way = []

    def _drop(self, gone: Sequence[DroppedWindow], out: Outcome) -> None:
        for each in gone:
            arrival = cast(Arrival, each.request)
            self._waiting_s -= arrival.expected_s
            out.dropped.setdefault(each.reason, []).append(arrival)
            if self._queue.waiting(arrival.stream):
                self._left[arrival.camera] = self._left.get(arrival.camera, 0.0) + arrival.strides
            else:
                out.unencoded.append(arrival)

    def _scatter(self) -> float:
        """Factor on a step's seconds; its mean is 1."""
        spread = self._costs.spread
        if spread == 0:
            return 1.0
        if not self._noise:
            self._noise = self._rng.lognormal(-spread * spread / 2, spread, 1024).tolist()
        return self._noise.pop()
