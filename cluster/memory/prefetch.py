"""Loads the blocks that the next layer will probably read while this one computes (Mosaic, section VII-B).

The query of layer ``l`` says which clusters layer ``l + 1`` will want (:meth:`Prefetcher.begin`). Once the query of
layer ``l + 1`` is there, :meth:`Prefetcher.take` gives the blocks it really wants: what was predicted is there or on
its way, the rest is loaded now, so the prediction changes when blocks come and never which.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType

from cluster.memory.tiers.base import BlockKey, Loaded, Outcome

log = logging.getLogger(__name__)

Load = Callable[[Sequence[BlockKey]], list[Loaded]]

_JOIN_S = 5.0
_totals = threading.Lock()
_NOT_NOW = Loaded(Outcome.RETRY)


@dataclass(frozen=True, slots=True)
class FetchEvent:
    """One load. Times are ``time.perf_counter``'s; ``blocks`` and ``bytes`` are those that came."""

    layer: int
    began_s: float
    ended_s: float
    blocks: int
    bytes: int
    predicted: bool


@dataclass(slots=True)
class PrefetchStats:
    """What happened so far.

    * ``predicted`` blocks asked for ahead; of these ``used`` were taken, ``late`` of them while still on their way, and
      ``wasted`` were not
    * ``missed`` blocks were taken and not predicted (or their load had failed), ``expired`` ones did not come in time
    * ``waited_s``: how long the caller stood still; ``transfer_s``: how long at least one load was under way
    * ``bytes`` of blocks that came, wasted ones too
    """

    predicted: int = 0
    used: int = 0
    wasted: int = 0
    late: int = 0
    missed: int = 0
    expired: int = 0
    waited_s: float = 0.0
    transfer_s: float = 0.0
    bytes: int = 0


TOTALS = PrefetchStats()
"""What all prefetchers of this process that were closed did, for its metrics."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks of one layer that one call loads; ``wanted`` shrinks as they turn out not to be."""

    layer: int
    wanted: dict[BlockKey, None]
    predicted: bool
    urgent: bool
    over: bool = False
    answers: dict[BlockKey, Loaded] = field(default_factory=dict)
    error: Exception | None = None


class Prefetcher:
    """Serves one question at a time, from one thread; a context manager.

    Args:
        load: a tier's ``load``, called from several threads at once. It ends within the tier's own deadline.
        threads: loads of predicted blocks at once; as many again are kept free for those that are wanted now. A
            layer's blocks are split into this many loads, so that their latencies pass side by side.
        deadline_s: longest wait of one :meth:`take`.
        on_event: told of every load, in the thread that made it.
        weigh: about how many bytes a block has, to split a layer's blocks evenly; all count the same without it.
        capacity: most blocks that are predicted and not taken; beyond it the oldest are given up.
    """

    def __init__(
        self,
        load: Load,
        *,
        threads: int = 2,
        deadline_s: float = 2.0,
        on_event: Callable[[FetchEvent], None] | None = None,
        weigh: Callable[[BlockKey], int] | None = None,
        capacity: int = 65536,
    ) -> None:
        if threads < 1 or capacity < 1 or deadline_s <= 0:
            raise ValueError(
                f"a prefetcher of {threads} threads, {capacity} blocks and {deadline_s:g} s can do nothing"
            )
        self.stats = PrefetchStats()
        self._load, self._on_event, self._weigh = load, on_event, weigh
        self._threads, self._deadline_s, self._capacity = threads, deadline_s, capacity
        self._lock = threading.Lock()
        self._to_do = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queue: list[_Fetch] = []
        self._expected: dict[BlockKey, _Fetch] = {}
        self._running: list[_Fetch] = []
        self._busy_since = 0.0
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"prefetch {number}", daemon=True) for number in range(2 * threads)
        ]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Start loading what will probably be wanted, the likeliest first; returns at once.

        What is there or on its way already is not asked for twice.

        Raises:
            RuntimeError: the prefetcher is closed.
        """
        with self._lock:
            self._check_open()
            fresh = [key for key in dict.fromkeys(keys) if key not in self._expected][: self._capacity]
            for oldest in list(self._expected)[: max(0, len(self._expected) + len(fresh) - self._capacity)]:
                self._give_up(oldest)
            self.stats.predicted += len(fresh)
            for fetch in self._split(fresh, predicted=True):
                self._queue.append(fetch)
                self._expected.update(dict.fromkeys(fetch.wanted, fetch))
            self._to_do.notify(len(self._queue))

    def fetch(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """The blocks that are wanted, in the order of ``keys``; ``RETRY`` for those that did not come in time.

        Predicted blocks of the same layers that are not among them are given up.

        Raises:
            RuntimeError: the prefetcher is closed.
            Exception: what ``load`` raised.
        """
        began = time.perf_counter()
        with self._lock:
            self._check_open()
            sources = self._sources(dict.fromkeys(keys))
            layers = {(key.stream, key.layer) for key in sources}
            for key in [key for key in self._expected if (key.stream, key.layer) in layers]:
                self._give_up(key)
            self._to_do.notify(len(self._queue))
            pending = list(dict.fromkeys(sources.values()))
            until = began + self._deadline_s
            while not self._closed and any(not fetch.over for fetch in pending):
                left = until - time.perf_counter()
                if left <= 0:
                    break
                self._done.wait(left)
            self.stats.waited_s += time.perf_counter() - began
            answers = {key: self._answer(key, fetch) for key, fetch in sources.items()}
        return [answers[key] for key in keys]

    def discard_predictions(self) -> None:
        """Give up all that is predicted: the question is answered, and another may come."""
        with self._lock:
            for key in list(self._expected):
                self._give_up(key)

    def close(self) -> None:
        """Give everything up and end the threads; a load that does not end is left behind. Harmless when repeated."""
        self.discard_predictions()
        with self._lock:
            if not self._closed:
                self._tell()
            self._closed = True
            self._queue.clear()
            self._to_do.notify_all()
            self._done.notify_all()
        until = time.perf_counter() + _JOIN_S
        for worker in self._workers:
            worker.join(max(0.0, until - time.perf_counter()))

    def _tell(self) -> None:
        with _totals:
            for counter in fields(PrefetchStats):
                setattr(TOTALS, counter.name, getattr(TOTALS, counter.name) + getattr(self.stats, counter.name))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this prefetcher is closed; make another for the next question")

    def _sources(self, wanted: Iterable[BlockKey]) -> dict[BlockKey, _Fetch]:
        """The load that each block comes with: one that was begun before, or one that is wanted now."""
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
        self.stats.missed += len(missing)
        for fetch in self._split(missing, predicted=False):
            self._queue.append(fetch)
            sources.update(dict.fromkeys(fetch.wanted, fetch))
        return sources

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
        """Loads of one layer each, at most ``threads`` a layer, of about equal weight, in the order of ``keys``."""
        by_layer: dict[int, list[BlockKey]] = {}
        for key in keys:
            by_layer.setdefault(key.layer, []).append(key)
        fetches = []
        for layer, members in by_layer.items():
            weights = [self._weigh(key) if self._weigh else 1 for key in members]
            share = max(sum(weights), 1) / self._threads
            parts: dict[int, dict[BlockKey, None]] = {}
            before = 0
            for key, weight in zip(members, weights, strict=True):
                # The part that a block's middle falls into, so that one large block does not drag others along.
                part = min(int((before + weight / 2) / share), self._threads - 1)
                parts.setdefault(part, {})[key] = None
                before += weight
            fetches += [_Fetch(layer, part, predicted, urgent=not predicted) for part in parts.values()]
        return fetches

    def _next(self) -> _Fetch | None:
        """What is wanted now before what may be; the latter only on its own share of the threads."""
        ahead = sum(not fetch.urgent for fetch in self._running)
        for urgent in (True, False):
            for fetch in self._queue:
                if fetch.urgent is urgent and (urgent or ahead < self._threads):
                    self._queue.remove(fetch)
                    return fetch
        return None

    def _work(self) -> None:
        while True:
            with self._lock:
                while (fetch := self._next()) is None:
                    if self._closed:
                        return
                    self._to_do.wait()
                keys = list(fetch.wanted)
                if not self._running:
                    self._busy_since = time.perf_counter()
                self._running.append(fetch)
            self._run(fetch, keys)

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
                log.warning("a load ahead of layer %d failed", fetch.layer, exc_info=failure)
            self._running.remove(fetch)
            self.stats.bytes += sum(came)
            if not self._running:
                self.stats.transfer_s += ended - self._busy_since
            self._done.notify_all()
        if self._on_event is not None:
            try:
                self._on_event(FetchEvent(fetch.layer, began, ended, len(came), sum(came), fetch.predicted))
            except Exception:
                log.exception("whoever listens to loads failed; loading goes on")


def _may_come_yet(answer: Loaded | None) -> bool:
    """Whether asking again may give more than what the load ahead brought."""
    return answer is not None and answer.outcome in (Outcome.PENDING, Outcome.RETRY)
