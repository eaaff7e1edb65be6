"""Frames of a replica's cameras into the engine, and the windows that they close into the queue."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

from cluster.engine.base import Engine
from cluster.replica.open_stream import Offer, OpenStream
from cluster.replica.steps import Steps, WorkerEvents
from cluster.replica.window_queue import WindowQueue


class Intake:
    """Called on the engine's thread.

    Args:
        lock: held while a camera's inbox changes, into which other threads put frames.
        queue: where windows wait; ``steps``: puts them there.
    """

    def __init__(
        self, engine: Engine, events: WorkerEvents, lock: threading.Condition, *, queue: WindowQueue, steps: Steps
    ) -> None:
        self._engine = engine
        self._events = events
        self._lock = lock
        self._queue = queue
        self._steps = steps

    def take(self, stream: OpenStream) -> Literal["stays", "ended", "leaves"]:
        """Every frame of a camera that may be taken now. ``ended``: its source had ended, and its last window is
        answered; ``leaves``: another replica is to have it, and nothing of it waits here."""
        while stream.inbox and not self.must_wait(stream):
            with self._lock:
                offer = stream.inbox.popleft()
            try:
                self._push(stream, offer)
            except ValueError as error:
                offer.taken.set_exception(error)
            else:
                offer.taken.set_result(None)
        if stream.ending and not stream.inbox:
            self._flush(stream)
            return "stays" if self._queue.waiting(stream.spec.stream) else "ended"
        if stream.leaving is not None and not stream.inbox and not self._queue.waiting(stream.spec.stream):
            return "leaves"
        return "stays"

    def must_wait(self, stream: OpenStream) -> bool:
        """Whether its next frame may not be taken yet: a fresh one makes the engine forget the windows that still wait;
        a patient camera loses none either way."""
        waiting = self._queue.waiting(stream.spec.stream)
        return waiting > 0 and (stream.spec.patient or not self._goes_on(stream, stream.inbox[0]))

    @staticmethod
    def _goes_on(stream: OpenStream, offer: Offer) -> bool:
        anew = bool(stream.broken) and offer.sample.random_access
        return not anew and stream.book.goes_on(offer.sample, offer.arrived_s, patient=stream.spec.patient)

    def lose(self, stream: OpenStream, windows: int) -> None:
        """Count windows of which video never came."""
        if windows:
            stream.counts["windows_lost"] += windows
            self._events.lost(stream.spec.stream, windows)

    def _push(self, stream: OpenStream, offer: Offer) -> None:
        sample, spec = offer.sample, stream.spec
        if not self._goes_on(stream, offer):
            stream.broken = ""
            sample = replace(sample, fresh=True, gap=False)
            self.lose(stream, stream.book.fresh(sample, offer.arrived_s, spec.stride_s, patient=spec.patient))
        elif stream.broken:
            raise ValueError(stream.broken)
        elif sample.gap:
            stream.book.gap(sample)
        closed = self._engine.push(sample)
        self.lose(stream, stream.book.frame(sample, offer.arrived_s, closed))
        self._steps.enqueue(stream, [replace(request, arrived_s=offer.arrived_s) for request in closed])

    def _flush(self, stream: OpenStream) -> None:
        """What is left of a camera whose source ended is a window too."""
        if stream.book.under_way:
            stream.book.settled()
            self._steps.enqueue(stream, self._engine.flush(stream.spec.stream))
