"""Window checkpoints: a manifest per stream in the memory tiers, from which another process continues its window.

A manifest is the stream's exported state (:mod:`cluster.engine.window.export`), whose header names the process that
wrote it. A tier (host arena, Redis, a node's tier over gRPC) is slow and may be down, and must never block the engine:
a background thread writes through.
"""

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from cluster.engine.window.export import Snapshot
from cluster.memory.manifest import read_header
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.types import StreamSpec

log = logging.getLogger(__name__)

MAX_BYTES = 15 * 2**20
"""Largest checkpoint: nodes accept messages of 16 MiB."""

HAND_OVER_S = 5.0
"""Longest wait for the tiers at a hand-over; after that the stream starts with an empty window elsewhere."""

PAUSE_S = 0.5
"""Pause after a ``RETRY``."""
DELETE_S = CLOSE_S = 30.0
"""Longest wait for a running tier call; tiers have shorter deadlines."""


class ManifestWriter:
    """Writes the newest manifest of each stream to ``tiers`` in the background. Thread-safe.

    Failed writes and deletions are retried; a deletion holds back only its own stream's manifest. A newer manifest
    replaces a queued one, so the queue is bounded by the number of streams.

    * ``retries``: of writes and deletions, so far
    """

    def __init__(self, tiers: TierStack) -> None:
        self.tiers = tiers
        self.retries = 0
        # Streams to be deleted, before anything of them is written, in order.
        self._clears: OrderedDict[str, None] = OrderedDict()
        # Until then (monotonic) none is tried, so that one which no tier confirms does not hold up other streams.
        self._clears_from = 0.0
        self._manifests: OrderedDict[str, Callable[[], bytes]] = OrderedDict()
        self._busy: str | None = None
        # Do not retry the job in flight.
        self._dismissed = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="window-writer", daemon=True)
        self._thread.start()

    def queue_manifest(self, stream: str, manifest: Callable[[], bytes]) -> None:
        """Queue a stream's manifest; ``manifest`` is called in the writing thread, and only if it is written."""
        with self._changed:
            self._manifests[stream] = manifest
            self._changed.notify_all()

    def read_manifest(self, stream: str) -> bytes | None:
        """The last written manifest; None if there is none or the tier is unavailable."""
        with self._changed:
            if stream in self._clears:
                return None
        return self.tiers.manifest(stream)[1]

    def queue_clear(self, stream: str) -> None:
        """Queue the deletion of everything the tier holds of a stream, and cancel its queued write."""
        with self._changed:
            self._cancel(stream)
            self._clears[stream] = None
            self._changed.notify_all()

    def cancel_stream(self, stream: str) -> None:
        """Cancel a stream's queued write, as another process may continue it."""
        with self._changed:
            self._cancel(stream)

    def delete_stream(self, stream: str, life: str = "") -> None:
        """Delete everything of a stream, in the tier too; blocks for at most the tier's deadline. ``life``: see
        :meth:`TierStack.drop`."""
        with self._changed:
            self._cancel(stream)
            self._clears.pop(stream, None)
            # A write in flight would arrive after the deletion.
            self._changed.wait_for(lambda: self._busy != stream, timeout=DELETE_S)
        self.tiers.drop(stream, life)

    def wait_stream_written(self, stream: str, deadline_s: float) -> bool:
        """Wait until nothing of a stream is queued; False after ``deadline_s``."""
        with self._changed:
            if stream in self._manifests:
                self._manifests.move_to_end(stream, last=False)
            return self._changed.wait_for(
                lambda: stream not in (self._busy, *self._manifests, *self._clears), timeout=deadline_s
            )

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is queued; False after ``deadline_s``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._clears and not self._manifests and self._busy is None, timeout=deadline_s
            )

    def close(self) -> None:
        """Stop writing; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_S)

    def _cancel(self, stream: str) -> None:
        self._manifests.pop(stream, None)
        self._dismissed = self._dismissed or self._busy == stream

    # -- the thread -------------------------------------------------------------------------------
    def _next(self) -> str | None:
        """The stream to be deleted or written next; None if nothing may be done now."""
        if self._clears and time.monotonic() >= self._clears_from:
            return next(iter(self._clears))
        return next((stream for stream in self._manifests if stream not in self._clears), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (stream := self._next()) is None and not self._closed:
                    pause = max(0.0, self._clears_from - time.monotonic()) if self._clears else None
                    self._changed.wait(pause)
                if stream is None or self._closed:
                    return
                manifest = None if stream in self._clears else self._manifests.pop(stream)
                self._busy, self._dismissed = stream, False
            try:
                if manifest is None:
                    outcome = Outcome.RETRY if self.tiers.drop(stream) is None else Outcome.HIT
                else:
                    outcome = self.tiers.put_manifest(stream, manifest())
            except Exception:
                log.exception("camera %s: its window could not be written to the tiers, or deleted there", stream)
                # A deletion is owed; the next step brings another manifest.
                outcome = Outcome.RETRY if manifest is None else Outcome.MISS
            with self._changed:
                self._busy = None
                if outcome is Outcome.RETRY:
                    self.retries += 1
                    if manifest is None:
                        self._clears_from = time.monotonic() + PAUSE_S
                        if stream in self._clears:
                            self._clears.move_to_end(stream)
                    elif not self._dismissed:
                        # Unless a newer one is queued.
                        self._manifests.setdefault(stream, manifest)
                elif manifest is None:
                    self._clears.pop(stream, None)
                self._changed.notify_all()
                if outcome is Outcome.RETRY and manifest is not None:
                    self._changed.wait_for(lambda: self._closed, timeout=PAUSE_S)


class WindowCheckpoints:
    """Writes the windows of one process to the tiers, and finds those of others. Called by the engine's thread."""

    def __init__(self, tiers: TierStack) -> None:
        self.tiers, self.writer = tiers, ManifestWriter(tiers)
        self._process = uuid.uuid4().hex

    def find_window(self, spec: StreamSpec) -> bytes | None:
        """The window another process saved of a camera. One saved by this process is stale and ignored."""
        window = self.writer.read_manifest(spec.stream)
        try:
            header = {} if window is None else read_header(window)
            return window if header["writer"] != self._process and header["life"] == spec.life else None
        except (ValueError, KeyError, TypeError):
            return None

    def queue_window(self, stream: str, window: Snapshot) -> bool:
        """Queue a checkpoint; False if it is too large.

        Serialised in the writing thread, and only if no newer one replaces it first.
        """
        if window.nbytes > MAX_BYTES:
            return False
        named = replace(window, header=window.header | {"writer": self._process})
        self.writer.queue_manifest(stream, named.dump)
        return True

    def hand_over(self, stream: str, window: Snapshot) -> bool:
        """Write a checkpoint where another process finds it; False if that is impossible or takes too long."""
        noted = self.queue_window(stream, window) and self.writer.wait_stream_written(stream, HAND_OVER_S)
        return noted and self.tiers.shared

    def discard_stale(self, stream: str) -> None:
        """Delete the tiers' checkpoint of a stream that starts anew, now or once they are available."""
        down = not all(state.up for state in self.tiers.states().values())
        # Without a search where there is nothing.
        if down or self.writer.read_manifest(stream) is not None or any(self.tiers.usage(stream).values()):
            self.writer.queue_clear(stream)

    def close(self) -> None:
        """Stop writing."""
        self.writer.close()
