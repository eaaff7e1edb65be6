"""Window checkpoints: a manifest per stream in the memory tiers, from which another process continues its window.

A manifest is the stream's exported state (:mod:`cluster.engine.window.export`), whose header names the process that
wrote it. Tiers (host arena, Redis, a node's tier over gRPC) are slow and may be down, so steps never wait for them:
background threads write. Opening, moving and deleting a camera do wait, up to the tiers' deadlines.
"""

import logging
import uuid
from concurrent.futures import wait
from dataclasses import replace

from cluster.engine.window.export import Snapshot
from cluster.memory.manifest import read_header
from cluster.memory.tiers.base import Outcome
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import MemoryWriter
from cluster.types import StreamSpec

log = logging.getLogger(__name__)

HAND_OVER_S = 5.0
"""Maximum wait for a running write on hand-over; after that, the stream starts elsewhere with an empty window."""

DELETE_S = CLOSE_S = 30.0
"""Maximum wait for a running tier call; tiers have shorter deadlines."""


class WindowCheckpoints:
    """Writes this process's windows to the tiers, and finds those of other processes. Called by the engine's thread.

    A newer window replaces a queued one, so at most one per stream is queued. A failed write is not retried: the
    stream's next step queues another. The stack retries deletions, and accepts no writes to their streams until then.
    """

    def __init__(self, tiers: TierStack) -> None:
        self.tiers, self.writer = tiers, MemoryWriter(self._write)
        self._process = uuid.uuid4().hex
        self._waiting: dict[str, Snapshot] = {}
        # Streams to delete from the tiers before their next write.
        self._clears: set[str] = set()
        self._refused = False

    def find_window(self, spec: StreamSpec) -> bytes | None:
        """The window that another process saved of a camera; one saved by this process is stale and ignored."""
        window = self.read_manifest(spec.stream)
        try:
            header = {} if window is None else read_header(window)
            return window if header["writer"] != self._process and header["life"] == spec.life else None
        except (ValueError, KeyError, TypeError):
            return None

    def read_manifest(self, stream: str) -> bytes | None:
        """The last manifest written; None if there is none or the tier is unavailable."""
        return None if stream in self._clears else self.tiers.manifest(stream)[1]

    def queue_window(self, stream: str, window: Snapshot) -> None:
        """Queue a checkpoint, unless it exceeds the stream's cap. It is serialised in the writer thread, unless a newer
        one replaces it first."""
        if self._fits(stream, window):
            self._waiting[stream] = window
            self.writer.schedule(stream)

    def hand_over(self, stream: str, window: Snapshot) -> bool:
        """Write a checkpoint for another process; False if that is impossible or takes too long."""
        self.cancel_window(stream)
        fits = self.tiers.shared and self._fits(stream, window)
        if not fits or not self._finish_write(stream, HAND_OVER_S):
            return False
        return self.tiers.put_manifest(stream, self._serialised(window)) is Outcome.HIT

    def cancel_window(self, stream: str) -> None:
        """Cancel a stream's queued write, because another process may continue the stream."""
        self._waiting.pop(stream, None)

    def queue_clear(self, stream: str) -> None:
        """Queue the deletion of everything that the tiers hold of a stream, and cancel its queued write."""
        self.cancel_window(stream)
        self._clears.add(stream)
        self.writer.schedule(stream)

    def delete_stream(self, stream: str, life: str = "") -> None:
        """Delete everything saved of a stream, blocking for at most the tiers' deadline. ``life``: see
        :meth:`TierStack.drop`."""
        self.cancel_window(stream)
        self._clears.discard(stream)
        # A write in flight would arrive after the deletion.
        self._finish_write(stream, DELETE_S)
        self.tiers.drop(stream, life)

    def close(self) -> None:
        """Stop writing; queued writes are dropped."""
        self.writer.end(CLOSE_S)

    def _fits(self, stream: str, window: Snapshot) -> bool:
        """Whether the window is within the stream's cap; asking the tiers would take as long as writing it."""
        if window.nbytes <= (cap := self.tiers.lowest.cap(stream)):
            return True
        if not self._refused:
            sizes = f"{window.nbytes // 2**10} KiB exceeds its cap of {cap // 2**10} KiB (memory.cap, tiers)"
            log.warning("camera %s: its window of %s and is not saved; raise the cap to save it", stream, sizes)
        self._refused = True
        return False

    def _finish_write(self, stream: str, deadline_s: float) -> bool:
        return bool(wait([self.writer.schedule(stream)], deadline_s).done)

    def _serialised(self, window: Snapshot) -> bytes:
        return replace(window, header=window.header | {"writer": self._process}).dump()

    def _write(self, stream: str) -> None:
        if stream in self._clears:
            try:
                self.tiers.clear(stream)
            finally:
                self._clears.discard(stream)
        if (window := self._waiting.pop(stream, None)) is not None:
            self.tiers.put_manifest(stream, self._serialised(window))
