"""InfiniPot-V as published: the compressor against the rule in numpy, and where pruned frames make a difference."""

import warnings

import numpy as np
import pytest
import torch

from cluster.lab.bench.memory.published import published_selection
from cluster.memory.compress.infinipot_v import InfiniPotV, InfiniPotVPaper, padded_pool, variation
from cluster.memory.head_memory import LayerKV

HEADS, WIDTH = 2, 16


def whole(frames: int, rows: int, columns: int, *, layers: int, seed: int) -> list[LayerKV]:
    """Frames with a token in every cell that drift from what their cells showed first."""
    rng = torch.Generator().manual_seed(seed)
    cells = rows * columns
    frame = torch.arange(frames).repeat_interleave(cells).expand(HEADS, -1)
    cell = torch.arange(cells).repeat(frames).expand(HEADS, -1)
    found = []
    for _ in range(layers):
        still = torch.randn(2, HEADS, 1, cells, WIDTH, generator=rng)
        drift = 0.3 * torch.randn(2, HEADS, frames, cells, WIDTH, generator=rng).cumsum(dim=2)
        key, value = (still + drift).flatten(2, 3)
        found.append(LayerKV(key, value, frame, cell))
    return found


def published(layer: LayerKV, rows: int, columns: int, budget: int, quarter: int) -> list[list[int]]:
    key, value = layer.key.double().numpy(), layer.value.double().numpy()
    return published_selection(key, value, (rows, columns), budget, quarter).tolist()


@pytest.mark.parametrize("share", [1 / 4, 3 / 4])
@pytest.mark.parametrize(
    ("frames", "rows", "columns"),
    # Grids wider than, as wide as and narrower than the pools, of even and odd sizes; frames too few for seven.
    [(32, 8, 9), (24, 7, 7), (16, 4, 6), (40, 2, 5), (12, 3, 3), (8, 9, 8), (20, 1, 6)],
)
def test_whole_frames_leave_what_the_published_code_leaves(frames: int, rows: int, columns: int, share: float) -> None:
    layers = whole(frames, rows, columns, layers=8, seed=frames)
    budget = round(share * frames) * rows * columns
    for number, kept in enumerate(InfiniPotVPaper(columns).select(layers, budget)):
        assert kept.tolist() == published(layers[number], rows, columns, budget, number // 2)


@pytest.mark.parametrize(
    ("count", "quarters"), [(3, [0, 1, 2]), (6, [0, 1, 2, 3, 3, 3]), (9, [0, 0, 1, 1, 2, 2, 3, 3, 3])]
)
def test_depths_that_four_does_not_divide_end_without_pools(count: int, quarters: list[int]) -> None:
    layers = whole(8, 4, 4, layers=count, seed=count)
    for layer, kept, quarter in zip(layers, InfiniPotVPaper(4).select(layers, 96), quarters, strict=True):
        assert kept.tolist() == published(layer, 4, 4, 96, quarter)


def test_of_equal_tokens_the_first_stay() -> None:
    """Eight frames of which all tokens are alike: the last frame stays, then TaR's half of three frames."""
    layer = whole(8, 2, 2, layers=1, seed=0)[0]
    still = LayerKV(torch.ones_like(layer.key), torch.ones_like(layer.value), layer.frame, layer.cell)
    # Four layers, of which the last has no pools; of 12 tokens 2 by TaR and 6 by norm beside the last frame's 4.
    *_, kept = InfiniPotVPaper(2).select([still] * 4, 12)
    assert kept.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 28, 29, 30, 31]] * HEADS


def test_where_recent_frames_exceed_the_budget_the_newest_tokens_stay() -> None:
    """The published code ends with an error."""
    layer = whole(16, 2, 2, layers=1, seed=1)[0]
    with pytest.raises(ValueError, match="published rule does not apply"):
        published(layer, 2, 2, 6, 0)
    (kept,) = InfiniPotVPaper(2).select([layer], 6)
    assert kept.tolist() == [list(range(58, 64))] * HEADS


@pytest.mark.parametrize(("tokens", "budget"), [(30, 16), (28, 16)])
def test_the_published_rule_takes_whole_frames_of_which_some_are_recent(tokens: int, budget: int) -> None:
    key = np.random.default_rng(0).standard_normal((1, tokens, 4))
    with pytest.raises(ValueError, match=f"{tokens} tokens of 4 a frame"):
        published_selection(key, key, (2, 2), budget, 0)


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_padded_pools_leave_missing_cells_out_and_count_what_is_outside(reach: int) -> None:
    """Ten frames of 9 x 8 cells, a third of them missing; the second head has seven frames."""
    frames, rows, columns = 10, 9, 8
    rng = torch.Generator().manual_seed(reach)
    there = torch.rand(2, frames, rows, columns, generator=rng) < 0.66
    there[:, :, 0, 0] = there[:, 0, -1, -1] = True
    there[1, 7:] = False
    count = int(there.flatten(1).sum(dim=1).amin())
    place = torch.stack([each.flatten().nonzero()[:count, 0] for each in there])
    norms = torch.rand(2, count, generator=rng)
    slot, cell = place // (rows * columns), place % (rows * columns)
    found = padded_pool(norms, slot, cell, columns, reach)
    pool = 2 * reach + 1
    for head in range(2):
        held = {int(at): float(norm) for at, norm in zip(place[head], norms[head], strict=True)}
        last = int(slot[head, -1])
        for index in range(0, count, 17):
            f, r, c = int(slot[head, index]), *divmod(int(cell[head, index]), columns)
            total = missing = 0.0
            if reach == 1:
                at = int(place[head, index])
                around = [at - 1, at, at + 1]
                inside = [each for each in around if 0 <= each < (last + 1) * rows * columns]
            else:
                deep = range(f - reach, f + reach + 1) if reach == 3 else [f]
                inside = [
                    (z * rows + y) * columns + x
                    for z in deep
                    for y in range(r - reach, r + reach + 1)
                    for x in range(c - reach, c + reach + 1)
                    if 0 <= z <= last and 0 <= y < rows and 0 <= x < columns
                ]
            total = sum(held.get(each, 0.0) for each in inside)
            missing = sum(each not in held for each in inside)
            assert found[head, index] == pytest.approx(total / (pool**reach - missing), rel=1e-4)


def test_layers_without_tokens_vary_by_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(variation(torch.zeros(2, 0))) == 0
        assert float(variation(torch.ones(1, 1))) == 0
        layer = whole(4, 2, 2, layers=1, seed=2)[0]
        empty = layer.select(torch.zeros(HEADS, 0, dtype=torch.int64))
        for pools in ("quartiles", "depth"):
            none, kept = InfiniPotV(2, pools=pools).select([empty, layer], 8)
            assert (none.shape, kept.shape) == ((HEADS, 0), (HEADS, 8))


@pytest.mark.parametrize("options", [{"pools": "thresholds"}, {"steps": (0.1, 0.2, 0.3)}])
def test_thresholds_and_steps_belong_together(options: dict) -> None:
    for kind in (InfiniPotV, InfiniPotVPaper):
        with pytest.raises(ValueError, match="pools by thresholds take steps"):
            kind(2, **options)
