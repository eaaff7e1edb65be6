"""Window checkpoints: a manifest per stream from which another process continues its window.

A manifest is the stream's exported state (:mod:`cluster.engine.window.export`) and the layout's record of its KV
blocks, both of the same step.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.engine.vllm.connector.tier_writer import TierWriter
from cluster.engine.window.export import Snapshot
from cluster.memory.tiers.stack import TierStack

VERSION = 2
"""Format version; 1 had no window."""

MAX_BYTES = 15 * 2**20
"""Largest checkpoint: nodes accept messages of 16 MiB."""

HAND_OVER_S = 5.0
"""Longest wait for the tiers at a hand-over; after that the stream starts with an empty window elsewhere."""

_HEAD = struct.Struct("<4sHI")  # magic, version, bytes of the JSON behind it
_MAGIC = b"SLVW"


@dataclass(frozen=True, slots=True)
class WindowManifest:
    """``window``: exported stream state; ``held``: the layout's record of KV blocks; ``writer``: id of the writing
    process."""

    window: bytes
    held: Mapping[str, Any]
    writer: str

    def pack(self) -> bytes:
        """Serialise."""
        body = json.dumps({"writer": self.writer, "held": self.held}).encode()
        return _HEAD.pack(_MAGIC, VERSION, len(body)) + body + self.window


def unpack(manifest: bytes | None) -> WindowManifest | None:
    """Inverse of :meth:`WindowManifest.pack`; None for another version, another engine, or damage."""
    if manifest is None or len(manifest) < _HEAD.size:
        return None
    magic, version, length = _HEAD.unpack_from(manifest)
    if (magic, version) != (_MAGIC, VERSION):
        return None
    try:
        body = json.loads(manifest[_HEAD.size : _HEAD.size + length])
        return WindowManifest(manifest[_HEAD.size + length :], dict(body["held"]), str(body["writer"]))
    except (ValueError, KeyError, TypeError):
        return None


class WindowCheckpoints:
    """Writes the windows of one process to the tiers, and finds those of others. Called by the engine's thread.

    * ``too_large``: windows not written because of their size

    Args:
        tiers: what ``writer`` writes to.
        held: the layout's record of a stream's KV blocks, JSON-compatible.
    """

    def __init__(self, tiers: TierStack, writer: TierWriter, held: Callable[[str], Mapping[str, Any]]) -> None:
        self.tiers, self.writer = tiers, writer
        self.too_large = 0
        self._held = held
        self._process = uuid.uuid4().hex

    def find_window(self, stream: str) -> bytes | None:
        """The window another process saved of a stream. One saved by this process is stale and ignored."""
        kept = unpack(self.writer.read_manifest(stream))
        return None if kept is None or kept.writer == self._process else kept.window

    def queue_window(self, stream: str, window: Snapshot) -> bool:
        """Queue a checkpoint; False if it is too large.

        Serialised in the writing thread, and only if no newer one replaces it first.
        """
        if window.nbytes > MAX_BYTES:
            self.too_large += 1
            return False
        held = self._held(stream)
        self.writer.queue_manifest(stream, lambda: WindowManifest(window.dump(), held, self._process).pack())
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
            self.clear_stream(stream)

    def clear_stream(self, stream: str) -> None:
        """Delete a stream's checkpoint."""
        self.writer.queue_clear(stream)
