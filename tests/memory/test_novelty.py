"""Novelty against brute force, and what it keeps of an object that came, stayed and went."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

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


def plain_novelty(keys: list[Tensor], frame: list[int], cell: list[int], rate: float) -> list[float]:
    """One minus the cosine with a moving average of the cell's directions, all heads side by side, token by token."""
    found, background = [], {}
    for number, here in enumerate(cell):
        side = np.concatenate([key[number].double().numpy() / float(key[number].double().norm()) for key in keys])
        side /= len(keys) ** 0.5
        middle = background.get(here)
        found.append(0.0 if middle is None else 1 - float(side @ middle) / float(np.linalg.norm(middle)))
        background[here] = side if middle is None else (1 - rate) * middle + rate * side
    return found


def plain_scores(keys: list[Tensor], frame: list[int], cell: list[int], columns: int, rate: float) -> list[float]:
    """Novelty in the mean of nine cells of the frame, absent ones 0."""
    alone = plain_novelty(keys, frame, cell, rate)
    places = [(number, *divmod(here, columns)) for number, here in zip(frame, cell, strict=True)]
    return [
        math.fsum(
            score
            for (other, r, c), score in zip(places, alone, strict=True)
            if other == number and abs(r - row) <= 1 and abs(c - column) <= 1
        )
        / 9
        for number, row, column in places
    ]


@given(seed=st.integers(0, 1000), frames=st.integers(1, 12), rate=st.sampled_from([0.05, 0.5, 1.0]))
def test_novelty_is_what_is_not_the_background_of_the_cell(seed: int, frames: int, rate: float) -> None:
    layer = made(seed, frames)
    unit = torch.cat([F.normalize(key, dim=1) for key in layer.key], dim=1) / layer.heads**0.5
    frame, cell = layer.frame[0], layer.cell[0]
    # In two pieces, as frames come.
    half = int((frame < frames // 2).sum())
    background = torch.zeros(6, unit.shape[1])
    found = [novelty(unit[at], frame[at], cell[at], background, rate) for at in (slice(half), slice(half, None))]
    wanted = plain_novelty(list(layer.key), frame.tolist(), cell.tolist(), rate)
    assert torch.cat(found).tolist() == pytest.approx(wanted, abs=1e-5)


@given(seed=st.integers(0, 1000), frames=st.integers(1, 80), share=st.floats(0.05, 0.9))
def test_the_choice_is_that_of_the_rule_token_by_token(seed: int, frames: int, share: float) -> None:
    layers = [made(seed, frames) for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.key.copy_(torch.randn(layer.key.shape, generator=torch.Generator().manual_seed(number)))
    frame, cell = layers[0].frame[0].tolist(), layers[0].cell[0].tolist()
    budget = max(1, int(share * len(frame)))
    # Two of five layers are the first quarter, rounded up.
    score = plain_scores([key for layer in layers[:2] for key in layer.key], frame, cell, 3, 0.05)
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


def test_a_token_is_scored_once_against_the_background_of_its_time() -> None:
    """An object among background; compressed to the object alone, it is still as new as it was, and so is one that
    comes when nothing of the background is held any more."""
    background, one, other = torch.eye(4)[:3]
    key = torch.stack([background, background, one, background, background])[None]
    frame, cell = torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.int64)
    compressor = Novelty(1)
    layer = LayerKV(key, key, frame, cell)
    chosen = compressor.select([layer], 1)
    (weight,) = compressor.weigh([layer], chosen)
    assert chosen[0].tolist() == [[2]]
    # Unlike the background, in one of nine cells.
    assert weight is not None
    assert weight[0].tolist() == pytest.approx([2 + 1 / 9])
    later = torch.stack([one, background, background, other, background])[None]
    weights = torch.cat([weight, torch.ones(1, 4)], dim=1)
    again = LayerKV(later, later, torch.tensor([[2, 40, 41, 80, 120]]), cell, weights)
    chosen = compressor.select([again], 2)
    (weight,) = compressor.weigh([again], chosen)
    assert chosen[0].tolist() == [[0, 3]]
    assert weight is not None
    assert weight[0].tolist() == pytest.approx([2 + 1 / 9, 2 + 1 / 9], abs=1e-3)


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


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="the rate of novelty"):
        Novelty(3, rate=rate)
