"""The same windows answered by several engines in turns, so that a machine that slows down slows them all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

from cluster.engine.base import Engine
from cluster.engine.window.windowed_engine import StepStats, WindowStats
from cluster.lab.bench.engines.contestants import Contestant
from cluster.types import MICROSECONDS, Answer, FrameSample, StreamSpec, WindowRequest


class Counting(Protocol):
    """What a step did, as every engine here tells it."""

    stats: StepStats


@runtime_checkable
class PrefixCached(Protocol):
    """An engine with a prefix cache that counts the tokens it was asked for (``queries``) and had (``hits``)."""

    @property
    def vllm_stats(self) -> Any: ...


@dataclass(slots=True)
class Measured:
    """What one contestant's steps after the first whole window cost and said; a step answers one window of each
    stream. ``queries``, ``hits``: tokens of its prefix cache, where it has one."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    windows: list[WindowStats] = field(default_factory=list)
    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that its prefix cache had."""
        return self.hits / self.queries if self.queries else None

    @property
    def latency_s(self) -> float:
        """Mean seconds from the last frame in to the answers of a batch."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def windows_per_s(self) -> float:
        return len(self.windows) / sum(self.seconds)

    def mean(self, number: Callable[[WindowStats], float]) -> float:
        """Of a number over all windows."""
        return sum(map(number, self.windows)) / len(self.windows)


@dataclass(slots=True)
class Entrant:
    """A contestant on its way: its engine, what it is sent (``samples[i]`` of stream ``i``), and its results."""

    contestant: Contestant
    engine: Engine
    samples: Sequence[Sequence[FrameSample]]
    measured: Measured = field(default_factory=Measured)

    def admit(self, spec: StreamSpec) -> None:
        """Take all streams in."""
        for samples in self.samples:
            contestant = self.contestant
            self.engine.admit(
                replace(
                    spec,
                    stream=samples[0].stream,
                    refresh=contestant.refresh,
                    refresh_budget=contestant.budget,
                )
            )

    def push(self, index: int) -> list[WindowRequest]:
        """Give every stream its frame; returns the windows that closed."""
        return [request for samples in self.samples for request in self.engine.push(samples[index])]

    def step(self, requests: Sequence[WindowRequest], *, counted: bool) -> float:
        """Answer a batch; returns its seconds."""
        queries, hits = self._cached()
        began = time.perf_counter()
        answers = self.engine.step(requests)
        seconds = time.perf_counter() - began
        if counted:
            self.measured.seconds.append(seconds)
            self.measured.answers += answers
            self.measured.windows += cast(Counting, self.engine).stats.windows
            after = self._cached()
            self.measured.queries += after[0] - queries
            self.measured.hits += after[1] - hits
        return seconds

    def _cached(self) -> tuple[int, int]:
        if not isinstance(self.engine, PrefixCached):
            return 0, 0
        stats = self.engine.vllm_stats
        return stats.queries, stats.hits


def run_interleaved(entrants: Sequence[Entrant], spec: StreamSpec, progress: Callable[[str], None]) -> None:
    """Send all frames to all entrants and let each answer every batch of windows, one entrant after the other.

    The first whole window of each stream warms up: caches hold then what they hold later. Those after it are counted.
    """
    streams = len(entrants[0].samples)
    length = round(spec.window_s * MICROSECONDS)
    stride = round(spec.stride_s * MICROSECONDS)
    for entrant in entrants:
        entrant.admit(spec)
    waiting: dict[str, list[WindowRequest]] = {entrant.contestant.name: [] for entrant in entrants}
    batches = 0
    for index in range(min(len(samples) for entrant in entrants for samples in entrant.samples)):
        for entrant in entrants:
            waiting[entrant.contestant.name] += entrant.push(index)
        # Clips of other frame rates close their windows a frame apart.
        while all(len({r.stream for r in requests}) == streams for requests in waiting.values()):
            batches += 1
            times: list[str] = []
            for entrant in entrants:
                name = entrant.contestant.name
                batch, waiting[name] = _batch(waiting[name])
                age = batches * stride
                if entrant.contestant.goes_on or age + stride > length:
                    seconds = entrant.step(batch, counted=age > length)
                    times.append(f"{name} {seconds:.2f}")
            progress(f"window {batches} of {streams} streams, seconds: {', '.join(times) or '-'}")


def _batch(waiting: Sequence[WindowRequest]) -> tuple[list[WindowRequest], list[WindowRequest]]:
    """The oldest window of each stream, and the rest."""
    batch: dict[str, WindowRequest] = {}
    rest: list[WindowRequest] = []
    for request in waiting:
        if request.stream in batch:
            rest.append(request)
        else:
            batch[request.stream] = request
    return list(batch.values()), rest
