"""One simulated replica: the production window queue in front of an engine whose steps take the cost model's time."""

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
    """Predicted cost of windows, by production's own estimate.

    ``seconds[kind, rung, held, strides]``: seconds that a window adds to a step. It is ``held`` strides long (windows
    grow after a start) and encodes ``strides`` strides of new frames, all but the last from gated windows.
    ``more[kind, rung, held]``: extra seconds per dropped window before it.

    ``alike``: gated and dropped predecessors add no cost, because ``costs`` were averaged over windows that had them.
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
        """Predicted seconds of each window, excluding the fixed cost of a step, and of one more stride."""
        held_at, strides_at = (
            np.clip(each, 1, most - 1).astype(np.int64)
            for each, most in zip((held, strides), self.seconds.shape[2:], strict=True)
        )
        return self.seconds[kind, rung, held_at, strides_at], self.more[kind, rung, held_at]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Batching of a replica's steps, named as in the configuration. ``budget_s``: maximum predicted seconds."""

    max_batch: int = 8
    per_stream: int = 2
    budget_s: float = 1.0


class Arrival(NamedTuple):
    """A window to be computed by a replica. It has the fields that the queue reads from a :class:`WindowRequest` and is
    passed in its place: a simulated hour has tens of millions of windows, and each would be built twice.

    * ``camera``: camera index; ``arrived_s``: arrival of its last frame, which is the window's end
    * ``expected_s``: predicted seconds; ``work_s``: actual seconds; both exclude the fixed cost of a step
    * ``strides``: strides of frames that no earlier window encodes; ``more_s``: seconds per additional one
    * ``value_s``: seconds of video that it accounts for, times the value of an answer at its rung
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
    """Queue parameters by camera index. ``late_s``: lag after which an answer is useless."""

    priorities: Sequence[Priority]
    late_s: Sequence[float]


@dataclass(slots=True)
class Outcome:
    """Results of a tick: answered windows with their finish times, and dropped windows by reason.

    ``unencoded``: dropped windows whose frames no waiting window will encode.
    """

    answered: list[Arrival] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    dropped: dict[str, list[Arrival]] = field(default_factory=dict)
    unencoded: list[Arrival] = field(default_factory=list)


class Replica:
    """A queue and an engine that runs one step at a time."""

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
        self._waiting_s = self._busy_s = self._reported_s = 0.0
        self._steps = self._computed = 0
        self._noise: list[float] = []
        self._in_flight: list[Arrival] = []
        # By camera: strides of frames of dropped windows that its next waiting window must encode.
        self._missed_strides: dict[int, float] = {}

    @property
    def waiting(self) -> int:
        """Windows in the queue and in the current step."""
        return len(self._in_flight) + len(self._queue)

    def backlog_s(self, now_s: float) -> float:
        """Predicted seconds until all waiting windows are answered."""
        return max(0.0, self.free_s - now_s) + self._waiting_s

    def spend(self, until_s: float, over_s: float) -> float:
        """Return the busy seconds since the last call, ``over_s`` ago, and update the reported figures."""
        busy_s = self._busy_s - max(0.0, self.free_s - until_s)
        spent, self._reported_s = busy_s - self._reported_s, busy_s
        self.busy_share = spent / over_s
        self.steps, self.computed, self._steps, self._computed = self._steps, self._computed, 0, 0
        return spent

    def run(self, arrivals: Sequence[Arrival], from_s: float, until_s: float, out: Outcome) -> None:
        """Enqueue ``arrivals`` (ordered, none after ``until_s``) and start every step in ``[from_s, until_s)``.

        Results are appended to ``out``; a step that finishes after ``until_s`` is reported by a later call.
        """
        queue, max_batch, budget_s = self._queue, self._settings.max_batch, self._settings.budget_s
        # Arrivals stand in for WindowRequests: see Arrival.
        offer: Callable[..., list[DroppedWindow]] = queue.offer
        take: Callable[..., tuple[list[Any], list[DroppedWindow]]] = queue.take_batch
        late_s, priorities = self._facts.late_s, self._facts.priorities
        if self._in_flight and self.free_s <= until_s:
            self._finish(out, self.free_s)
        now, at, count = max(self.free_s, from_s), 0, len(arrivals)
        while True:
            if not len(queue):
                # Reset the accumulated rounding error.
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
            if self._missed_strides:
                seconds += sum(self._missed_strides.pop(arrival.camera, 0.0) * arrival.more_s for arrival in taken)
            seconds *= self._noise_factor()
            now += seconds
            self._busy_s += seconds
            self._steps += 1
            self._computed += len(taken)
            self._in_flight = taken
            if now <= until_s:
                self._finish(out, now)
        self.free_s = now

    def release(self, stream: str) -> list[Arrival]:
        """Remove and return the waiting windows of a camera that moves to another replica."""
        gone = cast(list[Arrival], self._queue.discard(stream))
        for arrival in gone:
            self._waiting_s -= arrival.expected_s
            self._missed_strides.pop(arrival.camera, None)
        return gone

    def die(self, streams: Iterable[str]) -> list[Arrival]:
        """Remove and return the waiting windows of these cameras and those in the current step."""
        return [*self._in_flight, *(arrival for stream in streams for arrival in self.release(stream))]

    def _finish(self, out: Outcome, at_s: float) -> None:
        out.answered += self._in_flight
        out.finish_s += [at_s] * len(self._in_flight)
        self._in_flight = []

    def _drop(self, gone: Sequence[DroppedWindow], out: Outcome) -> None:
        for each in gone:
            arrival = cast(Arrival, each.request)
            self._waiting_s -= arrival.expected_s
            out.dropped.setdefault(each.reason, []).append(arrival)
            if self._queue.waiting(arrival.stream):
                self._missed_strides[arrival.camera] = self._missed_strides.get(arrival.camera, 0.0) + arrival.strides
            else:
                out.unencoded.append(arrival)

    def _noise_factor(self) -> float:
        """Random factor on a step's seconds; its mean is 1."""
        spread = self._costs.spread
        if spread == 0:
            return 1.0
        if not self._noise:
            self._noise = self._rng.lognormal(-spread * spread / 2, spread, 1024).tolist()
        return self._noise.pop()
