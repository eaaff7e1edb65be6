"""Prefetcher: loads the blocks the next layer will probably read while this layer computes (Mosaic, section VII-B).

While layer ``l`` computes, a predicted query of layer ``l + 1`` selects its clusters (:meth:`Prefetcher.prefetch`).
Given the actual query, :meth:`Prefetcher.fetch` returns the blocks wanted: predicted ones are loaded or in flight,
those in this process's memory are copied by the caller in one call, and the others are loaded now. Predictions affect
when blocks arrive, never which.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TypeAlias

from cluster.memory.tiers.base import BlockKey, Loaded, Outcome, Tier

log = logging.getLogger(__name__)

Load = Callable[[Sequence[BlockKey]], list[Loaded]]

MIN_LOAD_BLOCKS = 64
"""Minimum number of blocks per load when a layer is split: fewer take less time than a second call."""

PARTS = 2
"""Maximum number of concurrent loads per layer. While as many predicted (or wanted) loads of earlier calls are running,
no predicted (or wanted) one starts, which limits the load on a hanging tier."""

_JOIN_S = 5.0
# Shared by the process, so that only the first question starts threads.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="prefetch")
_totals = threading.Lock()
_NOT_NOW = Loaded(Outcome.RETRY)


@dataclass(frozen=True, slots=True)
class FetchEvent:
    """One finished load. Times are from ``time.perf_counter``; ``blocks`` and ``bytes`` count what was returned."""

    layer: int
    began_s: float
    ended_s: float
    blocks: int
    bytes: int
    predicted: bool


@dataclass(slots=True)
class PrefetchStats:
    """Counters of one prefetcher.

    * ``predicted``: blocks prefetched; of these ``used`` were fetched (``late``: while still in flight) and ``wasted``
      were not
    * ``at_hand``: fetched from this process's memory; ``missed``: fetched from a lower tier without a successful
      prediction; ``expired``: not loaded before the deadline
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


_Load: TypeAlias = Future[dict[BlockKey, Loaded]]


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """Loads blocks for one question at a time, called from one thread; a context manager.

    Args:
        load: a tier's ``load``; called from several threads, returns within the tier's deadline.
        at_hand: the uppermost tier, if it is in this process's memory; its blocks are not prefetched but copied by the
            calling thread.
        deadline_s: maximum wait of one :meth:`fetch`.
        on_event: called after every load, in the loading thread.
    """

    def __init__(
        self,
        load: Load,
        *,
        at_hand: Tier | None = None,
        deadline_s: float = 2.0,
        on_event: Callable[[FetchEvent], None] | None = None,
    ) -> None:
        self.stats = PrefetchStats()
        self._load, self._on_event, self._at_hand, self._deadline_s = load, on_event, at_hand, deadline_s
        self._expected: dict[BlockKey, _Load] = {}
        # Loads in flight: whether they are predictions.
        self._running: dict[_Load, bool] = {}
        self._busy_since = 0.0
        self._lock = threading.Lock()
        self._closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Start loading predicted blocks; returns at once. Blocks loaded or in flight are not requested twice, and none
        are while earlier predictions hang. ``RuntimeError`` once closed."""
        self._check_open()
        fresh = [key for key in dict.fromkeys(keys) if key not in self._expected]
        if self._at_hand is not None:
            there = self._at_hand.lookup(fresh)
            fresh = [key for key, outcome in zip(fresh, there, strict=True) if outcome is not Outcome.HIT]
        loads = self._begin(fresh, predicted=True)
        self.stats.predicted += len(loads)
        self._expected |= loads

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> list[Loaded]:
        """The wanted blocks in the order of ``keys``; ``RETRY`` for those not loaded within ``deadline_s`` (default:
        the prefetcher's). Discards other predictions for the same layers. Raises what ``load`` raised, and
        ``RuntimeError`` once closed."""
        self._check_open()
        began, stats = time.perf_counter(), self.stats
        until = began + (self._deadline_s if deadline_s is None else deadline_s)
        wanted = dict.fromkeys(keys)
        sources = {key: load for key in wanted if (load := self._expected.get(key)) and not _has_failed(load, key)}
        for key in sources:
            del self._expected[key]
        stats.used += len(sources)
        stats.late += sum(not load.done() for load in sources.values())
        layers = {(key.stream, key.layer) for key in keys}
        self._discard([key for key in self._expected if (key.stream, key.layer) in layers])
        missing = [key for key in wanted if key not in sources]
        answers: dict[BlockKey, Loaded] = {}
        if self._at_hand is not None and missing:
            copies = zip(missing, self._at_hand.load(missing), strict=True)
            answers = {key: one for key, one in copies if one.outcome is Outcome.HIT}
            stats.at_hand += len(answers)
        missing = [key for key in missing if key not in answers]
        stats.missed += len(missing)
        sources |= self._begin(missing, predicted=False)
        futures.wait(set(sources.values()), max(0.0, until - time.perf_counter()))
        stats.waited_s += time.perf_counter() - began
        answers |= {key: load.result()[key] for key, load in sources.items() if load.done()}
        stats.expired += len(wanted) - len(answers)
        return [answers.get(key, _NOT_NOW) for key in keys]

    def discard_predictions(self) -> None:
        self._discard(list(self._expected))

    def close(self, *, wait: bool = True) -> None:
        """Discard all predictions; with ``wait``, let loads in flight end, abandoning hanging ones. Idempotent."""
        self.discard_predictions()
        if wait:
            futures.wait(list(self._running), _JOIN_S)
        if not self._closed:
            with _totals:
                for name in (counter.name for counter in fields(PrefetchStats)):
                    setattr(TOTALS, name, getattr(TOTALS, name) + getattr(self.stats, name))
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this prefetcher is closed; create another for the next question")

    def _discard(self, keys: Sequence[BlockKey]) -> None:
        self.stats.wasted += len(keys)
        for key in keys:
            del self._expected[key]

    def _begin(self, keys: Sequence[BlockKey], *, predicted: bool) -> dict[BlockKey, _Load]:
        """Start loads of these blocks, at most :data:`PARTS` per layer, with the blocks dealt round-robin."""
        if sum(alike is predicted for load, alike in list(self._running.items()) if not load.done()) >= PARTS:
            return {}
        by_layer: dict[int, list[BlockKey]] = {}
        for key in keys:
            by_layer.setdefault(key.layer, []).append(key)
        loads: dict[BlockKey, _Load] = {}
        for layer, members in by_layer.items():
            parts = max(1, min(PARTS, len(members) // MIN_LOAD_BLOCKS))
            for mine in (members[at::parts] for at in range(parts)):
                with self._lock:
                    if not self._running:
                        self._busy_since = time.perf_counter()
                    load = _THREADS.submit(self._run, layer, mine, predicted)
                    self._running[load] = predicted
                load.add_done_callback(self._ended)
                loads |= dict.fromkeys(mine, load)
        return loads

    def _run(self, layer: int, keys: list[BlockKey], predicted: bool) -> dict[BlockKey, Loaded]:
        began = time.perf_counter()
        try:
            loaded = self._load(keys)
            if len(loaded) != len(keys):
                raise ValueError(f"{len(keys)} blocks were asked for and {len(loaded)} returned")
        except Exception:
            if predicted:
                log.warning("prefetching layer %d failed", layer, exc_info=True)
            raise
        came = [one.block.nbytes for one in loaded if one.block is not None]
        with self._lock:
            self.stats.bytes += sum(came)
        if self._on_event is not None:
            self._on_event(FetchEvent(layer, began, time.perf_counter(), len(came), sum(came), predicted))
        return dict(zip(keys, loaded, strict=True))

    def _ended(self, load: _Load) -> None:
        with self._lock:
            del self._running[load]
            if not self._running:
                self.stats.transfer_s += time.perf_counter() - self._busy_since


def _has_failed(load: _Load, key: BlockKey) -> bool:
    """Whether a finished load failed for a block, so that another attempt may succeed."""
    return load.done() and (load.exception() is not None or load.result()[key].outcome is Outcome.RETRY)
