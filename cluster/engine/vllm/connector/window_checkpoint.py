"""Windows that outlive their process: what another one needs to go on with a stream, one manifest for each.

A manifest is the stream's frames with their embeddings (:mod:`cluster.engine.window.export`) and what the layout knows
of their KV, which lies beside it in blocks. Both are of the same step.
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
"""Of the format. Number 1 had no window in it."""

MAX_BYTES = 15 * 2**20
"""A larger window is not kept: a node takes messages of 16 MiB."""

HAND_OVER_S = 5.0
"""Longest that a stream which leaves waits for the tiers; then it begins anew where it goes."""

_HEAD = struct.Struct("<4sHI")  # magic, version, bytes of the JSON behind it
_MAGIC = b"SLVW"


@dataclass(frozen=True, slots=True)
class WindowManifest:
    """``window``: a stream's state as bytes; ``held``: what the layout knows of its KV; ``writer``: which process."""

    window: bytes
    held: Mapping[str, Any]
    writer: str

    def pack(self) -> bytes:
        """As a manifest."""
        body = json.dumps({"writer": self.writer, "held": self.held}).encode()
        return _HEAD.pack(_MAGIC, VERSION, len(body)) + body + self.window


def unpack(manifest: bytes | None) -> WindowManifest | None:
    """The inverse of :meth:`WindowManifest.pack`; None for anything else, as of another version or another engine."""
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
    """Writes the windows of one process to the tiers, and finds those of another. Called by the engine's thread.

    * ``too_large``: windows that were not kept because of their size

    Args:
        tiers: where ``writer`` brings what it is given.
        held: what the layout knows of a stream's KV, as JSON takes it.
    """

    def __init__(self, tiers: TierStack, writer: TierWriter, held: Callable[[str], Mapping[str, Any]]) -> None:
        self.tiers, self.writer = tiers, writer
        self.too_large = 0
        self._held = held
        self._process = uuid.uuid4().hex

    def find_window(self, stream: str) -> bytes | None:
        """The window that another process left of a stream. What this one wrote itself it has let go of since: it is
        not gone on with."""
        kept = unpack(self.writer.read_manifest(stream))
        return None if kept is None or kept.writer == self._process else kept.window

    def queue_window(self, stream: str, window: Snapshot) -> bool:
        """Write down how things stand, some time soon; false where that is too much.

        It becomes bytes in the thread that writes it, and not at all where a newer one is noted before that.
        """
        if window.nbytes > MAX_BYTES:
            self.too_large += 1
            return False
        held = self._held(stream)
        self.writer.queue_manifest(stream, lambda: WindowManifest(window.dump(), held, self._process).pack())
        return True

    def hand_over(self, stream: str, window: Snapshot) -> bool:
        """Have it written down where another process finds it; false where that cannot be."""
        noted = self.queue_window(stream, window) and self.writer.wait_stream_written(stream, HAND_OVER_S)
        return noted and self.tiers.shared

    def discard_stale(self, stream: str) -> None:
        """What the tiers hold of a stream that begins anew is of no use: drop it, now or once they can be asked."""
        down = not all(state.up for state in self.tiers.states().values())
        # Where there is nothing they are spared the search for it.
        if down or self.writer.read_manifest(stream) is not None or any(self.tiers.usage(stream).values()):
            self.clear_stream(stream)

    def clear_stream(self, stream: str) -> None:
        """Nothing of this stream is to be in the tiers."""
        self.writer.queue_clear(stream)
