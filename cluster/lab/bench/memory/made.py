"""KV of frames without a model: scenes that change, places that stay what they are, and noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cluster.memory.chunk import KVChunk
from cluster.types import MICROSECONDS

_SCENE = 64
_LOOK = 16
_NOISE = 0.3


def made_chunks(
    stream: str, frames: int, *, layers: int, heads: int, rows: int, columns: int, width: int, seed: int = 0
) -> Iterator[KVChunk]:
    """``frames`` frames, one a second, of ``rows * columns`` tokens; another scene every 64 of them.

    Keys ``[layers, heads, t, width]`` are the sum of what a place always looks like, what the scene looks like, and
    noise, so that tokens form clusters, and ever new ones.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = rows * columns
    place = torch.randn(layers, heads, tokens, width, generator=rng)
    scene, look = torch.zeros(layers, heads, 1, width), torch.zeros(_LOOK)
    for number in range(frames):
        if number % _SCENE == 0:
            scene = torch.randn(layers, heads, 1, width, generator=rng)
            look = torch.randn(_LOOK, generator=rng)
        noise = _NOISE * torch.randn(layers, heads, tokens, width, generator=rng)
        yield KVChunk(
            stream=stream,
            index=number,
            pts=number * MICROSECONDS,
            key=place + scene + noise,
            value=torch.randn(layers, heads, tokens, width, generator=rng),
            cell=torch.arange(tokens),
            rows=rows,
            columns=columns,
            look=look + _NOISE * torch.randn(_LOOK, generator=rng),
        )
