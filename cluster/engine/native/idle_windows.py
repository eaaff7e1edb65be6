"""Offloads windows between their strides from the KV pool to pinned host memory."""

import logging
from collections.abc import Mapping, Sequence, Set

import torch

from cluster.engine.window.kv import KVPool
from cluster.engine.window.step import last_valid_answers
from cluster.engine.window.stream import Stream

log = logging.getLogger(__name__)

LOAD_AHEAD_US = 1_000_000
"""Lead time, in microseconds before its end, for loading a window: many times what the copy takes, so that its newest
frames can be computed ahead, and a small part of a stride."""


class IdleWindows:
    """Moves windows between a pool and host memory, overlapped with computation.

    * ``share``: share of the pool for windows between their strides; the excess moves to host memory
    * ``busy``: streams of the current batch, which are never moved
    * ``loads``: windows loaded back; ``loads_ahead``: those loaded before the step that needs them was planned
    """

    def __init__(self, pool: KVPool, streams: Mapping[str, Stream], share: float) -> None:
        self.share = share
        self.busy: Set[str] = frozenset()
        self.loads = self.loads_ahead = 0
        self._pool = pool
        self._streams = streams
        self._refused = False
        pool.make_room = self.make_room

    def make_room(self, slots: int) -> None:
        """Free ``slots`` slots of windows, or fewer if host memory fills up: first of windows already copied there,
        then of windows that are not due, those that end last first."""
        idle = [s for s in self._held(self.busy) if not s.kv.on_host]
        idle.sort(key=lambda s: (not s.kv.copied, bool(s.outstanding), -_remaining(s)))
        self._move(idle, slots, wait=True)

    def park(self, busy: Set[str] = frozenset()) -> None:
        """Copy windows that are neither due nor ``busy`` to host memory while they exceed their share of the pool,
        those that end last first; free the slots of windows whose copy is complete."""
        allowed = self.share * self._pool.capacity
        if not self._pool.host_capacity or self._pool.used <= allowed:
            return
        idle = [s for s in self._held(busy) if not (s.kv.on_host or s.outstanding or _ends_soon(s))]
        excess = sum(len(stream.kv) for stream in idle) - allowed
        idle.sort(key=lambda s: (s.kv.copied, _remaining(s)), reverse=True)
        self._move(idle, excess, wait=False)

    def load_ahead(self, stream: Stream, closed: int | None) -> bool:
        """Start loading a window that ends soon, or has ended at ``closed``, if it will be computed and the pool has
        room; returns whether it did."""
        kv = stream.kv
        if not kv.copied or (closed is None and not _ends_soon(stream)):
            return False
        if kv.on_host and len(kv) > self._pool.capacity - self._pool.used:
            return False
        if last_valid_answers(stream, stream.clock.end if closed is None else closed) is not None:
            return False
        try:
            came = kv.load()
        except torch.OutOfMemoryError:
            # Left to the window's step: receiving a frame must not fail because of this.
            return False
        self.loads += came
        self.loads_ahead += came
        return True

    def _held(self, busy: Set[str]) -> list[Stream]:
        return [stream for name, stream in self._streams.items() if len(stream.kv) and name not in busy]

    def _move(self, streams: Sequence[Stream], slots: float, *, wait: bool) -> None:
        """Move these windows in order until ``slots`` slots are freed, or host memory is full."""
        for stream in streams:
            if slots <= 0 or not self._copy(stream):
                return
            slots -= len(stream.kv)
            stream.kv.release(wait=wait)

    def _copy(self, stream: Stream) -> bool:
        """Start copying a window to host memory; returns whether it fits there."""
        if stream.kv.copied:
            return True
        used = self._pool.host_used + sum(each.moved_nbytes for each in self._streams.values())
        if used + stream.device_nbytes > self._pool.host_capacity:
            return False
        try:
            stream.copy_to_host()
        except RuntimeError as error:
            # The host has no more memory to pin, which CUDA reports like a device error.
            if "out of memory" not in str(error):
                raise
            if not self._refused:
                log.warning("windows stay in the KV pool; copying them to host memory failed: %s", error)
            self._refused = True
            return False
        return True


def _remaining(stream: Stream) -> int:
    """Microseconds of video until a stream's current window ends."""
    newest = stream.frames[-1] if stream.frames else None
    return stream.clock.end - (0 if newest is None else newest.window_time + newest.duration)


def _ends_soon(stream: Stream) -> bool:
    """Whether the current window must be in the pool by now, before the frame that may end it."""
    return bool(stream.frames) and _remaining(stream) <= max(LOAD_AHEAD_US, stream.frames[-1].duration)
