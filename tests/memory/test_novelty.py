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


def plain_novelty(keys: list[Tensor], cell: list[int], familiar: float) -> list[float]:
    """One minus the mean cosine (over heads) that a share of the cell's other tokens reach, token by token."""
    found = []
    for number, here in enumerate(cell):
        others = [other for other, there in enumerate(cell) if there == here and other != number]
        cosines = sorted(
            (
                math.fsum(float(torch.cosine_similarity(key[number], key[o], dim=0)) for key in keys) / len(keys)
                for o in others
            ),
            reverse=True,
        )
        found.append(1 - cosines[math.ceil(round(familiar * len(others), 9)) - 1] if others else 1.0)
    return found


def plain_scores(keys: list[Tensor], frame: list[int], cell: list[int], columns: int, familiar: float) -> list[float]:
    """Novelty in the mean of nine cells of the frame, absent ones 0."""
    alone = plain_novelty(keys, cell, familiar)
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


@given(seed=st.integers(0, 1000), frames=st.integers(1, 12), familiar=st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_novelty_is_what_few_of_the_cell_show(seed: int, frames: int, familiar: float) -> None:
    layer = made(seed, frames)
    everything = torch.ones(layer.tokens, dtype=torch.bool)
    found = novelty(list(layer.key), layer.cell[0], familiar, everything)
    wanted = plain_novelty(list(layer.key), layer.cell[0].tolist(), familiar)
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


@given(seed=st.integers(0, 1000), frames=st.integers(1, 80), share=st.floats(0.05, 0.9))
def test_the_choice_is_that_of_the_rule_token_by_token(seed: int, frames: int, share: float) -> None:
    layers = [made(seed, frames) for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.key.copy_(torch.randn(layer.key.shape, generator=torch.Generator().manual_seed(number)))
    frame, cell = layers[0].frame[0].tolist(), layers[0].cell[0].tolist()
    budget = max(1, int(share * len(frame)))
    # Two of five layers are the first quarter, rounded up.
    score = plain_scores([key for layer in layers[:2] for key in layer.key], frame, cell, 3, 0.1)
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


def test_a_token_is_scored_once_while_its_background_is_there() -> None:
    """An object among background; compressed to the object alone, it is still as new as it was."""
    background, other = torch.eye(4)[0], torch.eye(4)[1]
    key = torch.stack([background, background, other, background, background])[None]
    frame, cell = torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.int64)
    compressor = Novelty(1)
    layer = LayerKV(key, key, frame, cell)
    chosen = compressor.select([layer], 1)
    (weight,) = compressor.weigh([layer], chosen)
    assert chosen[0].tolist() == [[2]]
    # Unlike all others, in one of nine cells.
    assert weight is not None
    assert weight[0].tolist() == pytest.approx([2 + 1 / 9])
    # By then the cell shows the object for good: what comes is compared with it, its own score stays.
    later = torch.cat([layer.select(chosen[0]).key, other.expand(1, 4, 4)], dim=1)
    ones = torch.ones(1, 4)
    again = LayerKV(later, later, torch.tensor([[2, 9, 10, 11, 12]]), cell, torch.cat([weight, ones], dim=1))
    chosen = compressor.select([again], 2)
    (weight,) = compressor.weigh([again], chosen)
    assert chosen[0][0, 0] == 0
    assert weight is not None
    assert weight[0].tolist() == pytest.approx([2 + 1 / 9, 2.0])


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


@pytest.mark.parametrize("familiar", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(familiar: float) -> None:
    with pytest.raises(ValueError, match="familiar is a share"):
        Novelty(3, familiar=familiar)
