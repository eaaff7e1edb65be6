"""Novelty against brute force, and what it keeps of an object that came, stayed and went."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.memory.compress.novelty import Novelty, novelty
from cluster.memory.head_memory import LayerKV


def made(seed: int, frames: int, heads: int = 2, cells: int = 6) -> LayerKV:
    """Frames with any of the cells, at least one each."""
    rng = torch.Generator().manual_seed(seed)
    names = []
    for number in range(frames):
        there = (torch.rand(cells, generator=rng) < 0.5).nonzero()[:, 0].tolist() or [number % cells]
        names += [(number, cell) for cell in there]
    frame, cell = torch.tensor(names).T
    key, value = torch.randn(2, heads, len(names), 4, generator=rng)
    return LayerKV(key, value, frame.expand(heads, -1), cell.expand(heads, -1))


def plain_novelty(key: Tensor, cell: list[int], recent: int) -> list[float]:
    """One minus the largest cosine with the newest others of the cell, token by token."""
    found = []
    for number, here in enumerate(cell):
        same = [other for other, there in enumerate(cell) if there == here][-recent:]
        cosines = [float(torch.cosine_similarity(key[number], key[o], dim=0)) for o in same if o != number]
        found.append(1 - max(cosines, default=-1.0))
    return found


@given(seed=st.integers(0, 1000), frames=st.integers(1, 12), recent=st.integers(1, 4))
def test_novelty_is_what_the_newest_of_the_cell_do_not_show(seed: int, frames: int, recent: int) -> None:
    layer = made(seed, frames)
    found = novelty(layer, recent)
    for h in range(layer.heads):
        assert found[h].tolist() == pytest.approx(plain_novelty(layer.key[h], layer.cell[h].tolist(), recent), abs=1e-5)


@given(seed=st.integers(0, 1000), frames=st.integers(1, 80), share=st.floats(0.05, 0.9))
def test_the_choice_is_that_of_the_rule_token_by_token(seed: int, frames: int, share: float) -> None:
    layers = [made(seed, frames) for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.key.copy_(torch.randn(layer.key.shape, generator=torch.Generator().manual_seed(number)))
    frame, cell = layers[0].frame[0].tolist(), layers[0].cell[0].tolist()
    budget = max(1, int(share * len(frame)))
    # Two of five layers are the first quarter, rounded up.
    each = [plain_novelty(layer.key[h], cell, 2) for layer in layers[:2] for h in range(2)]
    score = [math.fsum(values) / 4 for values in zip(*each, strict=True)]
    for length in (4, 32):
        ranked = sorted(range(len(score)), key=lambda token: (-score[token], token))
        seen: dict[int, int] = {}
        divided = list(score)
        for token in ranked:
            seen[frame[token] // length] = seen.get(frame[token] // length, 0) + 1
            divided[token] = score[token] / seen[frame[token] // length]
        score = divided
    ordered = sorted(score, reverse=True)
    kept = Novelty(3).select(layers, budget)
    for stays in kept:
        for row in stays.tolist():
            assert len(row) == min(budget, len(frame))
            # Equal but for rounding.
            assert sorted((score[token] for token in row), reverse=True) == pytest.approx(ordered[: len(row)], abs=1e-5)


def test_a_passage_among_hours_of_background_is_kept() -> None:
    """One cell changes a little in every frame; in frames 200 to 202 something else is there."""
    rng = torch.Generator().manual_seed(1)
    background, other = torch.randn(2, 16, generator=rng)
    key = background + 0.05 * torch.randn(400, 16, generator=rng)
    key[200:203] = other + 0.05 * torch.randn(3, 16, generator=rng)
    layer = LayerKV(key[None], key[None], torch.arange(400)[None], torch.zeros(1, 400, dtype=torch.int64))
    (kept,) = Novelty(1).select([layer], 8)
    assert {200, 201, 202} & set(kept[0].tolist())
    # Those of one stretch share; the rest of the budget is for other times.
    assert len({frame // 32 for frame in kept[0].tolist()}) > 4


def test_a_comparison_with_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of their cell"):
        Novelty(3, recent=0)
