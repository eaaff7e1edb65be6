"""Prefetcher: load the blocks that the next layer will probably read while this layer computes (Mosaic, section VII-B).

While layer ``l`` computes, a predicted query of layer ``l + 1`` names its clusters (:meth:`Prefetcher.prefetch`). With
the query of layer ``l + 1``, :meth:`Prefetcher.fetch` returns the blocks actually wanted: predicted ones are loaded or
in flight, those in this process's memory are copied in one piece by the caller, and the others are loaded now. A
prediction changes when blocks arrive, never which.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Self

from cluster.memory.tiers.base import BlockKey, Loaded, Outcome, Tier

log = logging.getLogger(__name__)

Load = Callable[[Sequence[BlockKey]], list[Loaded]]

WORTH = 64
"""Blocks of a load: fewer take less time than a second call."""

_JOIN_S = 5.0
# Kept by the process: after the first, a question starts no threads.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="prefetch")
_totals = threading.Lock()
_NOT_NOW = Loaded(Outcome.RETRY)


@dataclass(frozen=True, slots=True)
class FetchEvent:
    """One finished load. Times are of ``time.perf_counter``; ``blocks`` and ``bytes`` count what was returned."""

    layer: int
    began_s: float
    ended_s: float
    blocks: int
    bytes: int
    predicted: bool


@dataclass(slots=True)
class PrefetchStats:
    """Counters of one prefetcher.

    * ``predicted`` blocks that were not at hand; of these ``used`` were fetched (``late``: while still in flight) and
      ``wasted`` were not
    * ``at_hand``: fetched from this process's memory; ``missed``: from further away without a prediction, or after its
      load failed; ``expired``: not loaded before the deadline
    * ``waited_s``: time the caller was blocked; ``transfer_s``: time with at least one load in flight
    * ``bytes`` loaded, wasted ones included
    """

    predicted: int = 0
    used: int = 0
    wasted: int = 0
    late: int = 0
    at_hand: int = 0
    missed: int = 0
    expired: int = 0
    waited_s: float = 0.0
    transfer_s: float = 0.0
    bytes: int = 0


TOTALS = PrefetchStats()
"""Sum over all closed prefetchers of this process, for its metrics."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks of one layer loaded in one call; ``wanted`` shrinks as predictions are discarded."""

    layer: int
    wanted: dict[BlockKey, None]
    predicted: bool
    urgent: bool
    over: bool = False
    answers: dict[BlockKey, Loaded] = field(default_factory=dict)
    error: Exception | None = None


class Prefetcher:
    """Loads blocks for one question at a time, called from one thread; a context manager.

    Args:
        load: a tier's ``load``; called from several threads, returns within the tier's own deadline.
        at_hand: the uppermost tier, if that is in this process's memory: what it has is neither predicted nor left to
            another thread.
        threads: concurrent loads of predicted blocks; as many more are reserved for blocks wanted now. A layer's blocks
            are split into as many loads, none of which has less than :data:`WORTH` blocks.
        deadline_s: longest wait of one :meth:`fetch`.
        on_event: called after every load, in the loading thread.
        capacity: most predicted blocks not yet fetched; beyond it the oldest are discarded.
    """

    def __init__(
        self,
        load: Load,
        *,
        at_hand: Tier | None = None,
        threads: int = 2,
        deadline_s: float = 2.0,
        on_event: Callable[[FetchEvent], None] | None = None,
        capacity: int = 65536,
    ) -> None:
        if threads < 1 or capacity < 1 or deadline_s <= 0:
            raise ValueError(
                f"a prefetcher of {threads} threads, {capacity} blocks and {deadline_s:g} s can do nothing"
            )
        self.stats = PrefetchStats()
        self._load, self._on_event, self._at_hand = load, on_event, at_hand
        self._threads, self._deadline_s, self._capacity = threads, deadline_s, capacity
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._queue: list[_Fetch] = []
        self._expected: dict[BlockKey, _Fetch] = {}
        self._running: list[_Fetch] = []
        # Loads whose event is not out yet.
        self._active = 0
        self._busy_since = 0.0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Start loading predicted blocks, the most likely first; returns at once. Blocks loaded or in flight are not
        requested twice. ``RuntimeError`` once closed."""
        with self._lock:
            self._check_open()
            fresh = [key for key in dict.fromkeys(keys) if key not in self._expected]
            if self._at_hand is not None:
                there = self._at_hand.lookup(fresh)
                fresh = [key for key, outcome in zip(fresh, there, strict=True) if outcome is not Outcome.HIT]
            del fresh[self._capacity :]
            for oldest in list(self._expected)[: max(0, len(self._expected) + len(fresh) - self._capacity)]:
                self._give_up(oldest)
            self.stats.predicted += len(fresh)
            ahead = self._split(fresh, predicted=True)
            self._queue += ahead
            self._expected |= {key: fetch for fetch in ahead for key in fetch.wanted}
            self._start_loads()

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> list[Loaded]:
        """The wanted blocks in the order of ``keys``; ``RETRY`` for those that miss the deadline, which may be given.
        Other predictions for the same layers are discarded. Raises what ``load`` raised, and ``RuntimeError`` once
        closed."""
        began = time.perf_counter()
        layers = {(key.stream, key.layer) for key in keys}
        with self._lock:
            self._check_open()
            sources, missing = self._predicted_sources(dict.fromkeys(keys))
            for key in [key for key in self._expected if (key.stream, key.layer) in layers]:
                self._give_up(key)
        answers: dict[BlockKey, Loaded] = {}
        if self._at_hand is not None and missing:
            copies = zip(missing, self._at_hand.load(missing), strict=True)
            answers = {key: one for key, one in copies if one.outcome is Outcome.HIT}
        with self._lock:
            self.stats.at_hand += len(answers)
            urgent = self._split([key for key in missing if key not in answers], predicted=False)
            self._queue += urgent
            sources |= {key: fetch for fetch in urgent for key in fetch.wanted}
            self.stats.missed += sum(len(fetch.wanted) for fetch in urgent)
            self._start_loads()
            pending = list(dict.fromkeys(sources.values()))
            until = began + (self._deadline_s if deadline_s is None else deadline_s)
            while not self._closed and any(not fetch.over for fetch in pending):
                left = until - time.perf_counter()
                if left <= 0:
                    break
                self._done.wait(left)
            self.stats.waited_s += time.perf_counter() - began
            answers |= {key: self._answer(key, fetch) for key, fetch in sources.items()}
        return [answers[key] for key in keys]

    def discard_predictions(self) -> None:
        with self._lock:
            for key in list(self._expected):
                self._give_up(key)

    def close(self, *, wait: bool = True) -> None:
        """Discard everything and, to ``wait``, let loads in flight end; a hanging one is abandoned. Idempotent."""
        self.discard_predictions()
        with self._lock:
            if not self._closed:
                with _totals:
                    for name in (counter.name for counter in fields(PrefetchStats)):
                        setattr(TOTALS, name, getattr(TOTALS, name) + getattr(self.stats, name))
            self._closed = True
            self._queue.clear()
            self._done.notify_all()
            if wait:
                self._done.wait_for(lambda: not self._active, _JOIN_S)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this prefetcher is closed; make another for the next question")

    def _predicted_sources(self, wanted: Iterable[BlockKey]) -> tuple[dict[BlockKey, _Fetch], list[BlockKey]]:
        """The earlier prediction that each block comes with, and the blocks that none brings."""
        sources: dict[BlockKey, _Fetch] = {}
        missing = []
        for key in wanted:
            fetch = self._expected.get(key)
            if fetch is None or fetch.error is not None or _may_come_yet(fetch.answers.get(key)):
                if fetch is not None:
                    self._give_up(key)
                missing.append(key)
                continue
            del self._expected[key]
            sources[key] = fetch
            fetch.urgent = True
            self.stats.used += 1
            self.stats.late += not fetch.over
        return sources, missing

    def _answer(self, key: BlockKey, fetch: _Fetch) -> Loaded:
        if fetch.error is not None:
            raise fetch.error
        if fetch.over:
            return fetch.answers.pop(key)
        self.stats.expired += 1
        self._forget(key, fetch)
        return _NOT_NOW

    def _give_up(self, key: BlockKey) -> None:
        self.stats.wasted += 1
        self._forget(key, self._expected.pop(key))

    def _forget(self, key: BlockKey, fetch: _Fetch) -> None:
        fetch.wanted.pop(key, None)
        fetch.answers.pop(key, None)
        if not fetch.wanted and fetch in self._queue:
            self._queue.remove(fetch)

    def _split(self, keys: Sequence[BlockKey], *, predicted: bool) -> list[_Fetch]:
        """At most ``threads`` fetches per layer, to which its blocks go in turn, in the order of ``keys``."""
        by_layer: dict[int, list[BlockKey]] = {}
        for key in keys:
            by_layer.setdefault(key.layer, []).append(key)
        fetches = []
        for layer, members in by_layer.items():
            parts = max(1, min(self._threads, len(members) // WORTH))
            fetches += [
                _Fetch(layer, dict.fromkeys(members[at::parts]), predicted, urgent=not predicted) for at in range(parts)
            ]
        return fetches

    def _next(self) -> _Fetch | None:
        """The next fetch: urgent ones first; predictions only on their share of the threads."""
        ahead = sum(not fetch.urgent for fetch in self._running)
        for urgent in (True, False):
            for fetch in self._queue:
                if fetch.urgent is urgent and (urgent or ahead < self._threads):
                    self._queue.remove(fetch)
                    return fetch
        return None

    def _start_loads(self) -> None:
        """Hand queued fetches to idle threads; under the lock."""
        while len(self._running) < 2 * self._threads and (fetch := self._next()) is not None:
            if not self._running:
                self._busy_since = time.perf_counter()
            self._running.append(fetch)
            self._active += 1
            _THREADS.submit(self._run, fetch, list(fetch.wanted))

    def _run(self, fetch: _Fetch, keys: list[BlockKey]) -> None:
        began = time.perf_counter()
        loaded: list[Loaded] = []
        failure: Exception | None = None
        try:
            loaded = self._load(keys)
            if len(loaded) != len(keys):
                raise ValueError(f"{len(keys)} blocks were asked for and {len(loaded)} answered; a load answers each")
        except Exception as error:
            failure = error
        ended = time.perf_counter()
        came = [one.block.nbytes for one in loaded if one.block is not None]
        with self._lock:
            fetch.over, fetch.error = True, failure
            if failure is None:
                fetch.answers = {key: one for key, one in zip(keys, loaded, strict=True) if key in fetch.wanted}
            elif not fetch.urgent:
                log.warning("prefetching layer %d failed", fetch.layer, exc_info=failure)
            self._running.remove(fetch)
            self.stats.bytes += sum(came)
            if not self._running:
                self.stats.transfer_s += ended - self._busy_since
            self._start_loads()
            self._done.notify_all()
        if self._on_event is not None:
            try:
                self._on_event(FetchEvent(fetch.layer, began, ended, len(came), sum(came), fetch.predicted))
            except Exception:
                log.exception("the on_event callback failed; loading continues")
        with self._lock:
            self._active -= 1
            self._done.notify_all()


def _may_come_yet(answer: Loaded | None) -> bool:
    """Whether loading again may return more."""
    return answer is not None and answer.outcome is Outcome.RETRY
