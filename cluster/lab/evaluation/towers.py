"""The vision tower as the settings of an evaluation use it: outputs shared, or reused where patches are similar."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from cluster.errors import ConfigError
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

    def __enter__(self) -> Self:
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


class SimilarityReuse:
    """Similarity reuse in the vision tower, after Déjà Vu (Hwang et al. 2025) without its training.

    A group of patches whose cosine similarity (of normalised pixels) to what its place showed when it was last encoded
    is ``similarity`` or more keeps that token; the others pass the tower, together. Of one stream, whose frames arrive
    whole and in order. ``flops``: of the tower, since it was last set to 0.

    Raises:
        ConfigError: a family that writes text around frames.
    """

    def __init__(self, model: VisionLanguageModel, similarity: float) -> None:
        self._model = model
        self._similarity = similarity
        self._patches: Tensor | None = None
        self._tokens = torch.empty(0)
        self.flops = 0

    @contextmanager
    def __call__(self, tower: TowerCache) -> Iterator[None]:
        """The model encodes so within the context; ``tower`` encodes what is not reused."""
        outer = self._model.encode
        self._model.encode = lambda frames: [self._frame(tower, frame) for frame in frames]  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._model.encode = outer  # type: ignore[method-assign]

    def _frame(self, tower: TowerCache, frame: PatchBatch) -> FrameTokens:
        if self._model.frame_text_tokens(frame.grid):
            raise ConfigError(f"similarity reuse cannot serve {self._model.family}, which writes text around frames")
        groups = frame.patches.reshape(len(frame.cells), frame.grid.merge**2, *frame.patches.shape[1:])
        if self._patches is None or self._patches.shape != groups.shape:
            fresh = torch.ones(len(groups), dtype=torch.bool)
            self._patches, self._tokens = groups.clone(), torch.empty(0)
        else:
            fresh = self._compare(groups, self._patches) < self._similarity
            self._patches[fresh] = groups[fresh]
        if fresh.any():
            part = PatchBatch(groups[fresh].flatten(0, 1), frame.cells[fresh], frame.grid, frame.time_s)
            (encoded,) = tower.tower([part])
            self.flops += self._model.tower_flops([part])
            tokens = self._tokens.clone() if len(self._tokens) else encoded.embeds.new_empty(encoded.embeds.shape)
            tokens[fresh] = encoded.embeds
            self._tokens = tokens
        return FrameTokens(self._tokens, frame.cells, frame.grid)

    def _compare(self, a: Tensor, b: Tensor) -> Tensor:
        """Cosine similarity of groups ``[g, merge**2, T, C, p, p]`` of pixels, normalised as for the tower."""
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self._model.mean, self._model.std))
        now, before = (((each / 255 - mean) / std).flatten(1) for each in (a, b))
        return torch.nn.functional.cosine_similarity(now, before)
