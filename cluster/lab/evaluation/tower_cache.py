"""Tower outputs that the settings of an evaluation share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from cluster.models.base import FrameTokens, PatchBatch, VisionLanguageModel


class TowerCache:
    """Within its context, equal frames pass the model's tower once.

    The engine counts the tower's operations as ever. ``saved_s``: seconds that known outputs took when they were
    computed, summed since it was last set to 0; latencies add them.
    """

    def __init__(self, model: VisionLanguageModel) -> None:
        self._model = model
        self._known: dict[bytes, tuple[FrameTokens, float]] = {}
        self.saved_s = 0.0
        # The tower itself, for those who time it.
        self.tower = model.encode

    def __enter__(self) -> TowerCache:
        self._model.encode = self._encode  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._model.encode = self.tower  # type: ignore[method-assign]

    def _encode(self, frames: Sequence[PatchBatch]) -> list[FrameTokens]:
        keys = [_digest(frame) for frame in frames]
        for key in keys:
            if key in self._known:
                self.saved_s += self._known[key][1]
        fresh = {key: frame for key, frame in zip(keys, frames, strict=True) if key not in self._known}
        began = time.perf_counter()
        encoded = self.tower(list(fresh.values()))
        seconds = (time.perf_counter() - began) / max(1, sum(len(frame.patches) for frame in fresh.values()))
        for (key, frame), tokens in zip(fresh.items(), encoded, strict=True):
            self._known[key] = tokens, seconds * len(frame.patches)
        return [self._known[key][0] for key in keys]


def _digest(frame: PatchBatch) -> bytes:
    hasher = hashlib.blake2b(f"{frame.grid} {frame.time_s}".encode(), digest_size=16)
    for part in (frame.cells, frame.patches):
        hasher.update(part.contiguous().numpy().data)
    return hasher.digest()
