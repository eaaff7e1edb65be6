"""What it takes to go on with a stream, on its way to a tier of memory in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome

PAUSE_S = 0.5
"""Between two attempts at a tier that cannot take something now."""
FORGET_S = CLOSE_S = 30.0
"""Longest wait for a call of a tier that is under way; tiers end their calls earlier themselves."""


class Shelf(Protocol):
    """A tier of :mod:`cluster.memory.tiers`, or a stack of them. Thread-safe, and no call raises."""

    def store(self, items: Sequence[tuple[BlockKey, Block]], /) -> list[Outcome]: ...

    def load(self, keys: Sequence[BlockKey], /) -> list[Loaded]: ...

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None, /) -> int | None: ...

    def put_manifest(self, stream: str, manifest: bytes, /) -> Outcome: ...

    def manifest(self, stream: str, /) -> tuple[Outcome, bytes | None]: ...


@dataclass(frozen=True, slots=True)
class Errand:
    """One thing to do at a tier. ``again`` and ``done`` are called with the lock held: after a ``RETRY``, and after
    anything else."""

    stream: str
    run: Callable[[], Outcome]
    again: Callable[[], None]
    done: Callable[[Outcome], None]


class Post:
    """Brings manifests to ``tier``: of each stream the newest, with nobody waiting for it. Thread-safe.

    A tier that cannot take one now is tried again; a newer one takes the place of one that waits, so that no more of
    them wait than there are streams.

    * ``counts``: ``retries``; manifests that were ``noted``, or ``refused`` for good
    """

    def __init__(self, tier: Shelf) -> None:
        self.tier = tier
        self.counts: Counter[str] = Counter()
        self._manifests: dict[str, Callable[[], bytes]] = {}
        # Streams of which everything is to go before anything else is done for them.
        self._clearing: dict[str, None] = {}
        self._busy: str | None = None
        # What is on its way just now is not to be tried again.
        self._dismissed = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kv-post", daemon=True)
        self._thread.start()

    def note(self, stream: str, manifest: Callable[[], bytes]) -> None:
        """Write down what it takes to go on with the stream, once all else of it that waits now is written.

        ``manifest`` is called in the thread that writes, if it is written at all.
        """
        with self._changed:
            self._manifests[stream] = manifest
            self._changed.notify_all()

    def noted(self, stream: str) -> bytes | None:
        """What :meth:`note` wrote last; None where the tier has none, or cannot be asked."""
        with self._changed:
            if stream in self._clearing:
                return None
        return self.tier.manifest(stream)[1]

    def clear(self, stream: str) -> None:
        """Drop what the tier holds of a stream, some time soon; from now on nothing of it is noted."""
        with self._changed:
            self._cancel(stream)
            self._clearing[stream] = None
            self._changed.notify_all()

    def release(self, stream: str) -> None:
        """Another process may go on with the stream: write nothing of it any more; what still waits is lost."""
        with self._changed:
            self._cancel(stream)

    def forget(self, stream: str) -> None:
        """Forget everything of a stream, in the tier too; waits for the tier, within its deadline."""
        with self._changed:
            self._cancel(stream)
            self._clearing.pop(stream, None)
            # What is on its way just now would arrive after the stream was forgotten.
            self._changed.wait_for(lambda: self._busy != stream, timeout=FORGET_S)
        self.tier.drop(stream)

    def settle(self, stream: str, deadline_s: float) -> bool:
        """Wait until nothing of a stream waits to be written; false where that takes longer."""
        with self._changed:
            self._hurry(stream)
            return self._changed.wait_for(lambda: self._busy != stream and not self._waits(stream), timeout=deadline_s)

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing waits to be written; false where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle() and self._busy is None, timeout=deadline_s)

    def close(self) -> None:
        """Stop writing; what still waits is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_S)

    # -- under the lock ---------------------------------------------------------------------------
    def _idle(self) -> bool:
        return not self._manifests and not self._clearing

    def _waits(self, stream: str) -> bool:
        """Whether anything of a stream waits."""
        return stream in self._manifests or stream in self._clearing

    def _ready(self, stream: str) -> bool:
        """Whether a stream's manifest may be written: all that it names is."""
        del stream
        return True

    def _hurry(self, stream: str) -> None:
        """Somebody waits for this stream."""
        if stream in self._manifests:
            self._manifests = {stream: self._manifests.pop(stream), **self._manifests}

    def _cancel(self, stream: str) -> None:
        """What waits for a stream is not to be written."""
        self._manifests.pop(stream, None)
        self._dismissed = self._dismissed or self._busy == stream

    def _take(self) -> Errand | None:
        """What to do next, taken out of what waits."""
        if self._clearing:
            return self._to_clear(next(iter(self._clearing)))
        stream = next((stream for stream in self._manifests if self._ready(stream)), None)
        return None if stream is None else self._to_note(stream, self._manifests.pop(stream))

    def _to_clear(self, stream: str) -> Errand:
        def clear() -> Outcome:
            return Outcome.RETRY if self.tier.drop(stream) is None else Outcome.HIT

        # It stays in the list until it is done: until then the stream has no manifest.
        return Errand(stream, clear, lambda: None, lambda _: self._cleared(stream))

    def _cleared(self, stream: str) -> None:
        self._clearing.pop(stream, None)

    def _to_note(self, stream: str, manifest: Callable[[], bytes]) -> Errand:
        def again() -> None:
            self._manifests.setdefault(stream, manifest)

        def done(outcome: Outcome) -> None:
            self.counts["noted" if outcome is Outcome.HIT else "refused"] += 1

        return Errand(stream, lambda: self.tier.put_manifest(stream, manifest()), again, done)

    # -- the thread -------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._idle())
                errand = None if self._closed else self._take()
                if errand is None:
                    return
                self._busy, self._dismissed = errand.stream, False
            outcome = errand.run()
            with self._changed:
                self._busy = None
                later = outcome is Outcome.RETRY and not self._closed
                if later:
                    self.counts["retries"] += 1
                    if not self._dismissed:
                        errand.again()
                else:
                    errand.done(outcome)
                self._changed.notify_all()
                if later:
                    self._changed.wait_for(lambda: self._closed, timeout=PAUSE_S)
