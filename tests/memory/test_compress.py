"""Compressors against hand-computed cases, brute force, and what must hold for every one of them."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from cluster.lab.bench.memory.compressors import SPACES, coverage_area, nearest_distances
from cluster.memory.compress import simple, top_tokens
from cluster.memory.compress.cords import (
    CoRDS,
    cell_groups,
    centroids,
    greedy_cover,
    insertion_scores,
    reassign_weights,
    tail_distances,
)
from cluster.memory.compress.infinipot_v import InfiniPotV, pool_steps, pooled_norms, temporal_redundancy, variation
from cluster.memory.head_memory import LayerKV
from cluster.registry import compressors

COLUMNS = 4


def of_frame(key, value, number: int, cell) -> LayerKV:
    """One frame's tokens ``[H, t, D]``."""
    heads, tokens = key.shape[:2]
    return LayerKV(key, value, torch.full((heads, tokens), number), cell.expand(heads, tokens))


def joined(parts) -> LayerKV:
    """The tokens of several, one after the other."""
    names = ("key", "value", "frame", "cell", *(("weight",) if parts[0].weight is not None else ()))
    return LayerKV(*(torch.cat([getattr(p, name) for p in parts], dim=1) for name in names))


def ragged(seed: int, frames: int, heads: int = 2, width: int = 8, layers: int = 4) -> list[LayerKV]:
    """A first frame of 12 cells and then frames with any of them, the same cells in every layer."""
    rng = torch.Generator().manual_seed(seed)
    made: list[LayerKV | None] = [None] * layers
    for number in range(frames):
        cell = torch.arange(12) if number == 0 else (torch.rand(12, generator=rng) < 0.4).nonzero()[:, 0]
        for index, before in enumerate(made):
            key, value = torch.randn(2, heads, len(cell), width, generator=rng)
            frame = of_frame(key, value, number, cell)
            made[index] = frame if before is None else joined([before, frame])
    return made  # type: ignore[return-value]


bounded = sorted(set(compressors.names()) - {"none"})


@pytest.mark.parametrize("name", compressors.names())
def test_a_budget_of_everything_is_the_identity(name: str) -> None:
    layers = ragged(1, 6)
    for layer, kept in zip(layers, compressors.get(name)(COLUMNS).select(layers, layers[0].tokens), strict=True):
        assert torch.equal(kept, torch.arange(layer.tokens).expand(2, -1))


@pytest.mark.parametrize("name", bounded)
@given(seed=st.integers(0, 50), frames=st.integers(1, 9), share=st.floats(0.05, 0.99))
def test_never_more_than_the_budget_and_each_token_once(name: str, seed: int, frames: int, share: float) -> None:
    layers = ragged(seed, frames)
    budget = max(1, int(share * layers[0].tokens))
    for layer, kept in zip(layers, compressors.get(name)(COLUMNS).select(layers, budget), strict=True):
        assert kept.shape == (2, min(budget, layer.tokens))
        assert bool((kept[:, 1:] > kept[:, :-1]).all())
        assert int(kept.min()) >= 0
        assert int(kept.max()) < layer.tokens
        layer.select(kept)


@pytest.mark.parametrize("name", bounded)
def test_after_room_for_nothing_there_is_room_again(name: str) -> None:
    compressor = compressors.get(name)(COLUMNS)
    assert all(kept.shape == (2, 0) for kept in compressor.select(ragged(2, 3), 0))
    assert all(kept.shape == (2, 5) for kept in compressor.select(ragged(2, 6), 5))


@given(seed=st.integers(0, 200), count=st.integers(0, 12))
def test_the_best_are_those_of_a_stable_sort(seed: int, count: int) -> None:
    """Scores of few values, so that equals are common, and infinite ones."""
    scores = torch.randint(0, 4, (3, 11), generator=torch.Generator().manual_seed(seed)).float()
    scores[scores == 3] = math.inf
    wanted = scores.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    assert torch.equal(top_tokens(scores, count), wanted)


@given(equals=st.integers(1, 30), data=st.data())
def test_of_equals_an_even_choice_takes_the_middles_of_equal_stretches(equals: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, equals))
    scores = torch.cat([torch.tensor([7.0]), torch.ones(equals), torch.zeros(3)])
    wanted = [0] + [1 + (2 * j + 1) * equals // (2 * count) for j in range(count)]
    assert top_tokens(scores[None], count + 1, evenly=True)[0].tolist() == wanted


def test_what_is_not_a_number_is_the_least() -> None:
    assert top_tokens(torch.tensor([[math.nan, -1.0, math.nan, -2.0]]), 3).tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("name", bounded)
def test_layers_and_heads_choose_as_if_alone(name: str) -> None:
    """Heads that hold other tokens, as they do after a compression: each chooses what it would choose alone."""
    layers = ragged(3, 12)
    rng = torch.Generator().manual_seed(1)
    drawn = [torch.rand(2, layer.tokens, generator=rng).argsort(1)[:, :30].sort(1).values for layer in layers]
    layers = [layer.select(kept) for layer, kept in zip(layers, drawn, strict=True)]
    # Of InfiniPot-V the pools are chosen by all layers, or by depth, unless they are given.
    pooled = name.startswith("infinipot_v")
    options = {"pools": "thresholds", "steps": (0.15, 0.25, 0.4)} if pooled else {}
    make = partial(compressors.get(name), COLUMNS, **options)
    # A layer below decides for CoRDS' followers, so that only its first one can be alone.
    for index, kept in enumerate(make().select(layers, 17)[: 1 if name == "cords" else 4]):
        for head in range(2):
            layer = layers[index]
            alone = LayerKV(*(getattr(layer, part)[head : head + 1] for part in ("key", "value", "frame", "cell")))
            (found,) = make().select([alone], 17)
            if not pooled:  # Its pool is chosen for a layer, by all heads.
                assert torch.equal(found[0], kept[head])
        (found,) = make().select([layers[index]], 17)
        assert torch.equal(found, kept)


# -- uniform frames -------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 3])
def test_uniform_frames_stay_at_even_distances_however_often_they_are_chosen(tokens: int) -> None:
    """A thousand frames, of which 64 fit and 48 stay each time: InfiniPot-V's "regular intervals" (B.3)."""
    held: list[int] = []
    for number in range(1000):
        held.append(number)
        if len(held) == 64:
            frame = torch.tensor(held).repeat_interleave(tokens)[None]
            key = torch.zeros(1, frame.shape[1], 2)
            (kept,) = compressors.get("uniform")(COLUMNS).select(
                [LayerKV(key, key, frame, torch.zeros_like(frame))], 48 * tokens
            )
            held, sizes = (each.tolist() for each in torch.unique(frame[0, kept[0]], return_counts=True))
            assert set(sizes) == {tokens}
            assert (held[0], held[-1]) == (0, number)
            gaps = np.diff(held)
            assert gaps.max() <= 2 * gaps.min()


def test_uniform_frames_are_chosen_once_for_all_heads_that_hold_the_same(monkeypatch) -> None:
    left, delete = [], simple.np.delete
    monkeypatch.setattr(simple.np, "delete", lambda *given: left.append(given) or delete(*given))
    frame = torch.arange(40).repeat_interleave(2).expand(4, -1)
    other = torch.cat([frame[:2], frame[:2] + (frame[:2] > 20)])
    key = torch.zeros(4, 80, 2)
    layers = [LayerKV(key, key, each, torch.zeros_like(each)) for each in (frame, frame, other)]
    found = compressors.get("uniform")(COLUMNS).select(layers, 60)
    assert len(left) == 2 * 10, "ten of forty frames leave, of two kinds of heads"
    for layer, kept in zip(layers, found, strict=True):
        for head in range(4):
            alone = [LayerKV(key[:1], key[:1], layer.frame[head][None], torch.zeros(1, 80, dtype=torch.int64))]
            assert torch.equal(compressors.get("uniform")(COLUMNS).select(alone, 60)[0][0], kept[head])


# -- InfiniPot-V ----------------------------------------------------------------------------------
def redundancy(
    key: torch.Tensor, frame: torch.Tensor, cell: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """That of one head whose frames are numbered from 0."""
    scores, last = temporal_redundancy(key[None], frame[None], cell[None], torch.tensor([first]))
    return scores[0], last[0]


def tokens(*each: tuple[int, int, list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(frame, cell, key) of each token -> key, frame, cell."""
    frame, cell, key = zip(*each, strict=True)
    return torch.tensor(key), torch.tensor(frame), torch.tensor(cell)


def test_redundancy_is_minus_the_mean_cosine_with_the_recent_frames_at_the_cell() -> None:
    key, frame, cell = tokens(
        (0, 0, [1.0, 0.0]), (0, 1, [0.0, 2.0]), (1, 0, [0.0, 1.0]), (2, 0, [1.0, 1.0]), (2, 1, [0.0, -1.0])
    )
    found, _ = redundancy(key, frame, cell, first=1)
    # Cell 0 showed (0, 1) and (1, 1): cosines 0 and 0.707. Cell 1 was not seen anew in frame 1: (0, 1), then (0, -1).
    assert found[0] == pytest.approx(-(0 + math.sqrt(0.5)) / 2, abs=1e-6)
    assert found[1] == pytest.approx(-(1 - 1) / 2, abs=1e-6)


def test_redundancy_of_complete_frames_is_the_papers() -> None:
    frames, cells, recent = 7, 6, 2
    key = torch.randn(frames, cells, 5, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(key, dim=-1)
    wanted = -torch.einsum("tcd,rcd->tc", unit, unit[-recent:]) / recent
    frame = torch.arange(frames).repeat_interleave(cells)
    found, _ = redundancy(key.flatten(0, 1), frame, torch.arange(cells).repeat(frames), frames - recent)
    torch.testing.assert_close(found, wanted.flatten())


def test_the_only_token_of_a_cell_is_known_as_such() -> None:
    cell = torch.tensor([3, 1, 3, 0, 1, 2])
    _, only = redundancy(torch.ones(6, 2), torch.arange(6), cell, first=5)
    assert only.tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize("pool", [1, 3, 5, 7])
def test_pooled_norms_are_means_over_the_tokens_around(pool: int) -> None:
    rng = torch.Generator().manual_seed(pool)
    frame = torch.tensor([0] * 12 + [1] * 5)
    cell = torch.cat([torch.arange(12), torch.tensor([0, 1, 5, 6, 11])])
    norms = torch.rand(17, generator=rng)
    reach = pool // 2
    (found,) = pooled_norms(norms[None], frame[None], cell[None], COLUMNS, torch.tensor([reach]))
    for index in range(17):
        near = [
            float(norms[other])
            for other in range(17)
            if frame[other] == frame[index]
            and abs(int(cell[other]) // COLUMNS - int(cell[index]) // COLUMNS) <= reach
            and abs(int(cell[other]) % COLUMNS - int(cell[index]) % COLUMNS) <= reach
        ]
        assert found[index] == pytest.approx(sum(near) / len(near), abs=1e-5)


def test_what_is_new_at_its_place_and_what_is_there_now_stay() -> None:
    """A still picture of four cells over 16 frames in which one token, long ago, was unlike all others."""
    key = torch.ones(1, 64, 3) + 0.01 * torch.randn(1, 64, 3, generator=torch.Generator().manual_seed(0))
    key[0, 21] = torch.tensor([-1.0, 1.0, 0.0])
    layer = LayerKV(
        key, torch.ones(1, 64, 3), torch.arange(16).repeat_interleave(4)[None], torch.arange(4).repeat(16)[None]
    )
    (kept,) = InfiniPotV(2, recent=0.125).select([layer], 20)
    assert 21 in kept[0].tolist()
    # Two recent frames.
    assert set(range(56, 64)) <= set(kept[0].tolist())


def test_what_a_small_memory_holds_is_not_all_of_it_the_present() -> None:
    """Half a picture of room: cells that were seen twice, the second time quite unlike the first. Of 32 tokens the two
    newest stay for being new; the rest are the most unlike what their cells show now, whether it came first or last."""
    key = torch.randn(1, 32, 6, generator=torch.Generator().manual_seed(3))
    cell = torch.arange(16).repeat(2)[None]
    (kept,) = InfiniPotV(COLUMNS).select([LayerKV(key, key, torch.arange(2).repeat_interleave(16)[None], cell)], 8)
    assert {30, 31} <= set(kept[0].tolist())
    older = [token for token in kept[0].tolist() if token < 16]
    cosine = F.cosine_similarity(key[0, :16], key[0, 16:], dim=1)
    # 90 % of 8 tokens, less the two.
    assert len(older) >= 5
    assert set(cosine.argsort()[:5].tolist()) <= set(older)


def test_the_only_copy_of_a_still_cell_survives() -> None:
    """Cell 3 is seen once, in the first frame; the others in every frame."""
    frames = [torch.arange(4)] + [torch.arange(3)] * 15
    rng = torch.Generator().manual_seed(4)
    parts = [
        of_frame(*torch.randn(2, 1, len(cells), 6, generator=rng), number, cells) for number, cells in enumerate(frames)
    ]
    (kept,) = InfiniPotV(2).select([joined(parts)], 12)
    assert 3 in kept[0].tolist()


def test_pool_steps_are_quartiles() -> None:
    assert pool_steps([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx((0.2, 0.3, 0.4))


def test_pools_narrow_by_quartiles_of_the_layers_at_hand() -> None:
    """Norms 1 and 1 + d by turns vary by d / (2 + d). Whatever the level of all four layers, the calmest has pools of 7
    and the wildest of 1 cell."""
    for scale in (0.01, 1.0):
        deltas = [scale * d for d in (0.4, 0.1, 0.2, 0.3)]
        norms = [torch.ones(2, 8) + d * torch.arange(8).remainder(2) for d in deltas]
        assert [float(variation(each)) for each in norms] == pytest.approx([d / (2 + d) for d in deltas], rel=1e-3)
        assert InfiniPotV(2)._reach(norms).tolist() == [0, 3, 2, 1]
        fixed = InfiniPotV(2, pools="thresholds", steps=(0.06, 0.1, 0.14))._reach(norms).tolist()
        assert fixed == ([3, 3, 3, 3] if scale < 1 else [0, 3, 2, 1])


# -- CoRDS ----------------------------------------------------------------------------------------
def order_of(keys: torch.Tensor, values: torch.Tensor, count: int, **weights: float) -> list[int]:
    """The first ``count`` frames that one head chooses among frames of one token each, of which the last stays."""
    one = torch.ones(1, len(keys), dtype=torch.int64)
    stays = torch.arange(len(keys))[None] == len(keys) - 1
    (rank,) = greedy_cover(keys[None], values[None], one, stays, count, **weights)
    return rank.argsort()[:count].tolist()


def test_without_bonus_each_choice_is_the_farthest_from_those_before() -> None:
    keys, values = torch.randn(2, 15, 6, generator=torch.Generator().manual_seed(2))
    order = order_of(keys, values, 15, key_weight=0.25, bonus=0.0, bonus_key_weight=0.25)
    assert sorted(order) == list(range(15))
    for step in range(1, 14):
        chosen, rest = order[:step], order[step:]

        def apart(i: int, chosen: list[int] = chosen) -> float:
            return min(
                float(0.25 * (keys[i] - keys[j]).square().sum() + 0.75 * (values[i] - values[j]).square().sum())
                for j in chosen
            )

        assert apart(order[step]) == pytest.approx(max(map(apart, rest)))


def log_det_greedy(vectors: torch.Tensor, count: int, epsilon: float = 1e-6) -> torch.Tensor:
    """CoRDS' theorem 2, which the bonus stands for: the order ``[count]`` in which exact log-det greedy (pivoted
    Cholesky of the Gram matrix) chooses among ``vectors [f, D]``."""
    left = vectors.double().clone()
    order: list[int] = []
    for _ in range(min(count, len(vectors))):
        residual = left.square().sum(-1)
        residual[order] = -1.0
        pivot = int(residual.argmax())
        order.append(pivot)
        direction = left[pivot] / (residual[pivot].sqrt() + epsilon)
        left = left - (left @ direction)[:, None] * direction
    return torch.tensor(order, dtype=torch.int64)


def test_the_bonus_prefers_new_directions_as_pivoted_cholesky_does() -> None:
    """Three directions, many frames of each at slightly different lengths: with the bonus alone, three choices cover
    all three, which are the ones exact log-det greedy takes."""
    rng = torch.Generator().manual_seed(5)
    direction = torch.eye(3).repeat_interleave(6, dim=0)
    vectors = direction * (1 + 0.05 * torch.rand(18, 1, generator=rng)) + 0.01 * torch.randn(18, 3, generator=rng)
    still = torch.zeros(18, 3)
    order = order_of(vectors, still, 3, key_weight=0.0, bonus=1.0, bonus_key_weight=1.0)
    assert {i // 6 for i in order} == {0, 1, 2}
    assert {int(i) // 6 for i in log_det_greedy(vectors, 3)} == {0, 1, 2}


@given(seed=st.integers(0, 100))
def test_pivoted_cholesky_is_the_greedy_log_determinant(seed: int) -> None:
    vectors = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order = log_det_greedy(vectors, 4, epsilon=0.0).tolist()
    for step in range(4):
        gains = {
            i: float(torch.logdet(vectors[[*order[:step], i]] @ vectors[[*order[:step], i]].T))
            for i in range(7)
            if i not in order[:step]
        }
        assert order[step] == max(gains, key=gains.__getitem__)


def test_a_frame_is_the_mean_of_its_tokens() -> None:
    found = centroids(torch.tensor([[[1.0], [3.0], [10.0]]]), torch.tensor([[0, 0, 1]]))
    assert found.tolist() == [[[2.0], [10.0]]]


def test_heads_with_other_frames_choose_as_if_alone() -> None:
    """Frames of other sizes in each head, one head with fewer of them: padding is never chosen, and the order of a head
    does not depend on how long another one goes on."""
    rng = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 3, 9, 5, generator=rng)
    sizes = torch.randint(1, 5, (3, 9), generator=rng)
    frames = (9, 4, 7)
    for head, count in enumerate(frames):
        sizes[head, count:] = 0
    weights = {"key_weight": 0.25, "bonus": 0.25, "bonus_key_weight": 0.25}
    stays = torch.zeros(3, 9, dtype=torch.bool)
    stays[0, 7:], stays[1, 2], stays[2, 6] = True, True, True
    rank = greedy_cover(keys, values, sizes, stays, 12, **weights)
    for head, count in enumerate(frames):
        alone = greedy_cover(
            keys[head : head + 1, :count],
            values[head : head + 1, :count],
            sizes[head : head + 1, :count],
            stays[head : head + 1, :count],
            99,
            **weights,
        )[0]
        ranked = rank[head] < 9
        assert ranked.sum() == count or int(sizes[head][ranked].sum()) >= 12
        assert torch.equal(rank[head][ranked], alone[ranked[:count]])
        assert not ranked[count:].any()


def test_frames_are_covered_from_those_of_the_tail() -> None:
    """Five frames at 0, 8, 9, 20 and 1, of which the two newest stay: 9 is farthest from both, then 0 and 8 are 1 away
    from what was chosen, and the earlier comes first."""
    keys = torch.tensor([[0.0], [8.0], [9.0], [20.0], [1.0]])[None]
    one, stays = torch.ones(1, 5, dtype=torch.int64), torch.tensor([[False, False, False, True, True]])
    weights = {"key_weight": 1.0, "bonus": 0.0, "bonus_key_weight": 0.5}
    (rank,) = greedy_cover(keys, keys, one, stays, 5, **weights)
    assert rank.tolist() == [2, 3, 1, 0, 0]
    (rank,) = greedy_cover(keys, keys, one, stays, 3, **weights)
    assert rank.tolist() == [5, 5, 1, 0, 0]


def test_of_the_last_frame_what_fits_is_spread_over_it() -> None:
    """Three frames of four tokens and room for six, of which the newest three stay: the newest frame's fourth token
    is the same as those, so that the frame unlike it comes next, with the three that still fit."""
    key = torch.tensor([5.0, 1.0, 1.0]).repeat_interleave(4)[None, :, None]
    layer = LayerKV(key, key, torch.arange(3).repeat_interleave(4)[None], torch.arange(4).repeat(3)[None])
    (kept,) = CoRDS(2, objective="paper", recent=0.5).select([layer], 6)
    assert kept[0].tolist() == [0, 2, 3, 9, 10, 11]
    (kept,) = CoRDS(2, objective="paper", recent=0.5).select([layer], 8)
    assert kept[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_an_object_smaller_than_a_frame_is_kept_by_its_tokens() -> None:
    """Sixteen frames of twelve cells that look the same but for two cells of frames 3 and 9."""
    place = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
    noise = 0.05 * torch.randn(16, 12, 6, generator=torch.Generator().manual_seed(4))
    key = place + noise
    key[3, 5] += 2.0
    key[9, 7] -= 2.0
    frame, cell = torch.arange(16).repeat_interleave(12)[None], torch.arange(12).repeat(16)[None]
    layer = LayerKV(key.view(1, -1, 6), key.view(1, -1, 6), frame, cell)
    objects = {3 * 12 + 5, 9 * 12 + 7}
    assert objects <= set(CoRDS(COLUMNS).select([layer], 24)[0][0].tolist())
    assert not objects <= set(CoRDS(COLUMNS, objective="paper").select([layer], 24)[0][0].tolist())


@given(seed=st.integers(0, 100), count=st.integers(3, 30), rarity=st.sampled_from([0.0, 1.0, 2.0]))
def test_tokens_are_chosen_as_by_greedy_search_over_all_cells(seed: int, count: int, rarity: float) -> None:
    """Against a search that in every step looks at every token of every cell."""
    layer = ragged(seed, 9, heads=2, layers=1)[0]
    weight = 1 + torch.randint(0, 5, layer.frame.shape, generator=torch.Generator().manual_seed(seed)).float()
    layer = replace(layer, weight=weight)
    (kept,) = CoRDS(COLUMNS, rarity=rarity).select([layer], count)
    newest = max(1, int(0.125 * count))
    for head in range(2):
        cells = layer.cell[head].tolist()
        points = np.concatenate([0.5 * layer.key[head].numpy(), 0.75**0.5 * layer.value[head].numpy()], axis=1)
        apart = ((points[:, None].astype(float) - points[None]) ** 2).sum(-1)
        factor = np.ones(layer.tokens)
        for cell in set(cells) if rarity else ():
            there = [i for i, each in enumerate(cells) if each == cell]
            middle = np.average(points[there], axis=0, weights=weight[head][there])
            factor[there] = ((points[there] - middle) ** 2).sum(-1) ** rarity
        tail = set(range(layer.tokens - newest, layer.tokens))
        taken = set(tail)
        while len(taken) < count:
            rest = [i for i in range(layer.tokens) if i not in taken]
            # What a token is covered by: the newest ones, and those taken of its cell.
            near = {i: min(apart[i, j] for j in taken if j in tail or cells[j] == cells[i]) for i in rest}
            taken.add(max(rest, key=lambda i: near[i] * factor[i]))
        assert set(kept[head].tolist()) == taken


def test_the_scores_of_a_group_by_hand() -> None:
    """Points 0, 1, 5 and 7 on a line, the last of which is taken: 0 is 49 away, then 5 has 4 and 1 has 1. With 0
    counting a hundredth, 1 comes first with 36, and then 0 has 1/100. Where something of another group is 0.5 from 0
    and from 1, 5 comes first."""
    points = torch.tensor([[[0.0], [1.0], [5.0], [7.0]]])
    apart, candidate = torch.tensor([[49.0, 36.0, 4.0, 0.0]]), torch.tensor([[True, True, True, False]])
    (scores,) = insertion_scores(points, torch.ones(1, 4), apart, candidate)
    assert scores.tolist() == pytest.approx([49.0, 1.0, 4.0, 0.0], abs=1e-4)
    (scores,) = insertion_scores(points, torch.tensor([[0.01, 1.0, 1.0, 1.0]]), apart, candidate)
    assert scores.tolist() == pytest.approx([0.01, 36.0, 4.0, 0.0], abs=1e-4)
    (scores,) = insertion_scores(points, torch.ones(1, 4), torch.tensor([[0.25, 0.25, 4.0, 0.0]]), candidate)
    assert scores.tolist() == pytest.approx([0.25, 0.25, 4.0, 0.0], abs=1e-4)


def test_distances_to_the_tail_are_to_the_nearest_of_it() -> None:
    points = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(1))
    found = tail_distances(points, 3)
    for head in range(2):
        for i in range(27):
            wanted = min(float((points[head, i] - points[head, j]).square().sum()) for j in (27, 28, 29))
            assert float(found[head, i]) == pytest.approx(wanted, rel=1e-4)


def test_groups_hold_every_token_of_a_cell_once_and_at_most_512() -> None:
    def grouped(cell: torch.Tensor) -> list[list[int]]:
        found = (zip(*each, strict=True) for each in cell_groups(cell))
        return sorted(at[there].tolist() for pairs in found for at, there in pairs)

    cell = torch.tensor([[3, 1, 3, 3, 7], [1, 1, 1, 1, 1]])
    assert grouped(cell) == [[0, 2, 3], [1], [4], [5, 6, 7, 8, 9]]
    # The newest 512 of a cell are together.
    numbers = list(range(1100))
    assert grouped(torch.zeros(1, 1100, dtype=torch.int64)) == [numbers[:76], numbers[76:588], numbers[588:]]


def test_what_was_common_stays_common_after_most_of_it_was_dropped() -> None:
    """One cell: a look that stood for twenty tokens, and another for one. Weighed, the second is the rare one."""
    key = torch.tensor([0.0, 1.0, 0.5])[None, :, None]
    at = torch.zeros(1, 3, dtype=torch.int64)
    for weight, second in (([20.0, 1.0, 1.0], 1), ([1.0, 20.0, 1.0], 0)):
        layer = LayerKV(key, key, torch.arange(3)[None], at, torch.tensor([weight]))
        assert CoRDS(COLUMNS).select([layer], 2)[0][0].tolist() == [second, 2]


@given(seed=st.integers(0, 50))
def test_what_is_held_of_a_cell_stands_for_all_there_was(seed: int) -> None:
    """What is compressed again and again: a cell's weights add up to its tokens since it last had none."""
    compressor = CoRDS(COLUMNS)
    layers = ragged(seed, 14, layers=1)[0]
    layers = replace(layers, weight=torch.ones(layers.frame.shape))
    held, compressions = layers.select(torch.zeros(2, 0, dtype=torch.int64)), 0
    came = torch.zeros(2, 12)
    for number in range(14):
        (at,) = (layers.frame[0] == number).nonzero(as_tuple=True)
        held = joined([held, layers.select(at.expand(2, -1))])
        came[:, layers.cell[0, at]] += 1
        if held.tokens > 30:
            kept = compressor.select([held], 22)
            (weight,) = compressor.weigh([held], kept)
            held, compressions = replace(held.select(kept[0]), weight=weight), compressions + 1
            for head in range(2):
                came[head][~torch.isin(torch.arange(12), held.cell[head])] = 0
    assert compressions > 1
    assert held.weight is not None
    found = torch.zeros(2, 12).scatter_add_(1, held.cell, held.weight)
    assert torch.allclose(found, came, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"objective": "frames"}, "rare or paper"), ({"rarity": -1.0}, "not be negative"), ({"recent": 2.0}, "between 0")],
)
def test_bad_settings_of_cords_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CoRDS(COLUMNS, **options)


def test_tokens_without_their_places_are_refused() -> None:
    key = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="every one of"):
        LayerKV(key, key, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[H, n, D\]"):
        LayerKV(key, key[:, :1], torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("name", sorted(bounded))
def test_the_newest_frame_stays_whole(name: str) -> None:
    """Thirty frames of three tokens, 64 of which are held."""
    frames = [
        of_frame(*torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(number)), number, torch.arange(3))
        for number in range(30)
    ]
    compressor, held = compressors.get(name)(6), frames[0]
    for frame in frames[1:]:
        held = joined([held, frame])
        if held.tokens > 64:
            held = held.select(compressor.select([held], 48)[0])
    assert int((held.frame[0] == 29).sum()) == 3


def test_weights_go_to_the_nearest_that_stays() -> None:
    points, weight = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(8)), torch.rand(2, 40)
    stays = torch.rand(2, 40, generator=torch.Generator().manual_seed(9)) < 0.2
    found = reassign_weights(points, weight, stays)
    assert not bool(reassign_weights(points, weight, torch.zeros_like(stays)).any())
    for head in range(2):
        wanted = torch.zeros(40)
        for i in range(40):
            apart = [
                float((points[head, i] - points[head, j]).norm()) if stays[head, j] else math.inf for j in range(40)
            ]
            wanted[apart.index(min(apart))] += weight[head, i]
        torch.testing.assert_close(found[head], wanted)


def test_the_papers_anchors_of_28_layers_and_what_follows_them() -> None:
    assert CoRDS(COLUMNS).anchors(28) == [0, 2, 4]
    assert CoRDS(COLUMNS).anchors(2) == [0]
    layers = ragged(3, 8, layers=16)
    kept = CoRDS(COLUMNS).select(layers, 20)
    assert torch.equal(kept[1], kept[0])
    assert torch.equal(kept[15], kept[2])
    assert not torch.equal(kept[2], kept[0])


# -- coverage -------------------------------------------------------------------------------------
def test_kept_tokens_have_distance_zero_and_others_that_of_the_nearest() -> None:
    layer = ragged(6, 5)[0]
    kept = torch.tensor([[0, 4, 9], [1, 2, 3]])
    apart = {
        part: 1 - F.cosine_similarity(of[1, 7], of[1, 1:4], dim=1)
        for part, of in (("key", layer.key), ("value", layer.value))
    }
    wanted = {**apart, "joint": (apart["key"] + apart["value"]) / 2}
    for space in SPACES:
        found = nearest_distances(layer, layer.select(kept), space)
        assert found.gather(1, kept).abs().max() < 1e-5
        assert float(found[1, 7]) == pytest.approx(float(wanted[space].min()), abs=1e-5)


def test_the_area_is_one_where_everything_is_kept() -> None:
    assert coverage_area(torch.zeros(5), 2.0) == 1.0
    assert coverage_area(torch.tensor([0.0, 1.0, 2.0, 5.0]), 2.0) == pytest.approx((1 + 0.5) / 4)
