"""Content-free baselines: keep all, sliding window, uniform frame sampling."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.memory.compress import Compressor, all_tokens, top_tokens
from cluster.memory.head_memory import LayerKV


class Full(Compressor):
    """Keeps everything, ignoring the budget: the reference."""

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        del budget
        return [all_tokens(layer) for layer in layers]


class Sliding(Compressor):
    """Keeps the newest tokens."""

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        return [all_tokens(layer)[:, max(0, layer.tokens - budget) :] for layer in layers]


class Uniform(Compressor):
    """Uniform Select (papers: infinipot-v, B.3): keeps whole frames evenly spaced in time, including the newest, and
    as much of one more as fits.

    The frame whose neighbours are nearest to each other is removed first. Re-spacing the held frames by index at every
    compression would eventually leave only the oldest and newest frames.
    """

    def select(self, layers: Sequence[LayerKV], budget: int) -> list[Tensor]:
        # Heads and layers usually hold the same frames.
        held = [[frame.numpy(force=True).tobytes() for frame in layer.frame] for layer in layers]
        frames = {
            key: frame
            for keys, layer in zip(held, layers, strict=True)
            for key, frame in zip(keys, layer.frame, strict=True)
        }
        kept = {key: self._of_head(frame, budget) for key, frame in frames.items()}
        return [torch.stack([kept[key] for key in keys]) for keys in held]

    def _of_head(self, frame: Tensor, budget: int) -> Tensor:
        numbers, index, sizes = torch.unique_consecutive(frame, return_inverse=True, return_counts=True)
        size, held = sizes.tolist(), np.arange(len(numbers))
        time, left = numbers.numpy(force=True), frame.numel()
        rank = torch.zeros(len(numbers), device=frame.device)
        while left > budget and len(held) > 1:
            at = time[held]
            out = 1 + int((at[2:] - at[:-2]).argmin()) if len(held) > 2 else 0
            rank[int(held[out])] = len(held)
            left -= size[held[out]]
            held = np.delete(held, out)
        return top_tokens(-rank[index][None], budget)[0]
