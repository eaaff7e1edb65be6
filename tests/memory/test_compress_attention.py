"""Compressors that rank by attention: hand-computed cases, brute force, and what they do without queries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.memory.compress import rank_in_frame
from cluster.memory.compress.attention import AttentionCompressor, InfiniPot, LiveVLM, SnapKV, StreamMem, mean_attention
from cluster.memory.head_memory import LayerKV
from cluster.registry import compressors

NAMES = ["infinipot", "livevlm", "snapkv", "streammem"]
ASKED = torch.tensor([[[1.0]]])
"""One row of one head of width 1: attention follows the keys."""


def one_head(keys: list[float], frames: list[int] | None = None) -> LayerKV:
    key = torch.tensor(keys)[None, :, None]
    frame = torch.arange(len(keys)) if frames is None else torch.tensor(frames)
    return LayerKV(key, torch.zeros_like(key), frame[None], torch.zeros(1, len(keys), dtype=torch.int64))


def kept(compressor: AttentionCompressor, layer: LayerKV, budget: int) -> list[int]:
    compressor.observe([ASKED])
    (chosen,) = compressor.select([layer], budget)
    return chosen[0].tolist()


def test_attention_is_a_softmax_over_the_tokens_averaged_over_the_rows() -> None:
    key = torch.tensor([[[0.0, 0.0], [math.sqrt(2) * math.log(3.0), 0.0]]])
    found = mean_attention(key, torch.tensor([[[1.0, 0.0], [0.0, 5.0]]]))
    # One row sees weights 1 and 3, the other is indifferent.
    torch.testing.assert_close(found, torch.tensor([[(0.25 + 0.5) / 2, (0.75 + 0.5) / 2]]))


def test_attention_is_what_a_loop_over_heads_rows_and_tokens_gives() -> None:
    rng = torch.Generator().manual_seed(0)
    key, rows = torch.randn(2, 7, 4, generator=rng), torch.randn(2, 3, 4, generator=rng)
    found = mean_attention(key, rows)
    for head in range(2):
        total = [0.0] * 7
        for row in rows[head]:
            weight = [math.exp(float(row @ key[head, token]) / 2) for token in range(7)]
            total = [sum_ + w / sum(weight) / 3 for sum_, w in zip(total, weight, strict=True)]
        assert found[head].tolist() == pytest.approx(total, abs=1e-6)


def test_ranks_start_anew_in_each_frame() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 9.0, 0.0, 5.0]])
    assert rank_in_frame(scores, torch.tensor([[0, 0, 0, 1, 2, 2]])).tolist() == [[2, 0, 1, 0, 1, 0]]


# -- each by hand ---------------------------------------------------------------------------------
def test_snapkv_keeps_the_window_and_the_highest() -> None:
    layer = one_head([3.0, 0.0, 5.0, 1.0, -4.0])
    assert kept(SnapKV(1, window=1, kernel=1), layer, 3) == [0, 2, 4]
    # A window of more than the budget is the newest tokens.
    assert kept(SnapKV(1, window=9, kernel=1), layer, 2) == [3, 4]


def test_snapkv_pools_over_neighbours_in_time() -> None:
    """Two middling tokens around a low one outdo a single high one, as a mean of three; not as a maximum."""
    layer = one_head([math.log(x) for x in (6.0, 1.0, 1.0, 5.0, 1.0, 5.0, 1.0)])
    assert kept(SnapKV(1, window=0, kernel=3), layer, 1) == [4]
    assert kept(SnapKV(1, window=0, kernel=3, pool="max"), layer, 2) == [0, 1]


def test_infinipot_keeps_the_newest_share_and_the_highest() -> None:
    layer = one_head([3.0, 0.0, 5.0, 1.0, -4.0])
    assert kept(InfiniPot(1, recent=0.5), layer, 2) == [2, 4]
    assert kept(InfiniPot(1, recent=0.0), layer, 2) == [0, 2]


def test_streammem_keeps_something_of_every_frame() -> None:
    layer = one_head([5.0, 4.0, 3.0, 0.0, 1.0], [0, 0, 0, 1, 1])
    assert kept(StreamMem(1), layer, 2) == [0, 4]
    assert kept(StreamMem(1), layer, 3) == [0, 1, 4]
    # Of two frames that do not both fit, the more salient.
    assert kept(StreamMem(1), layer, 1) == [0]


def test_livevlm_keeps_the_newest_and_an_even_share_of_the_others() -> None:
    """Four and two older tokens, two newer ones: of four to keep, the newest two and one of each older frame; of five,
    one more of the larger frame, though the smaller one's would be more attended."""
    layer = one_head([1.0, 2.0, 4.0, 3.0, 9.0, 8.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 2, 2])
    assert kept(LiveVLM(1, short=0.5), layer, 4) == [2, 4, 6, 7]
    assert kept(LiveVLM(1, short=0.4), layer, 5) == [2, 3, 4, 6, 7]
    assert kept(LiveVLM(1, short=0.0), layer, 1) == [4]


# -- who asks -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_before_anybody_asked_the_newest_keys_do(name: str) -> None:
    rng = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 2, 60, 8, generator=rng)
    layer = LayerKV(key, value, torch.arange(60).expand(2, -1), torch.zeros(2, 60, dtype=torch.int64))
    silent, told, other = (compressors.get(name)(4) for _ in range(3))
    told.observe([key[:, -32:]])
    other.observe([-20 * key[:, -32:]])
    assert torch.equal(silent.select([layer], 40)[0], told.select([layer], 40)[0])
    assert not torch.equal(silent.select([layer], 40)[0], other.select([layer], 40)[0])
    # Nobody asked in the last window.
    other.observe([key[:, :0]])
    assert torch.equal(silent.select([layer], 40)[0], other.select([layer], 40)[0])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(seed=st.integers(0, 50), rows=st.integers(1, 40), budget=st.integers(1, 47))
def test_bounds_hold_whoever_asks(name: str, seed: int, rows: int, budget: int) -> None:
    """Ragged frames, other tokens in each head, rows of any number; and the same again gives the same."""
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 2, 48, 4, generator=rng)
    frame = torch.randint(0, 9, (2, 48), generator=rng).sort(dim=1).values
    layer = LayerKV(key, value, frame, torch.randint(0, 16, (2, 48), generator=rng))
    compressor = compressors.get(name)(4)
    compressor.observe([torch.randn(2, rows, 4, generator=rng)])
    (chosen,) = compressor.select([layer], budget)
    assert chosen.shape == (2, budget)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    assert torch.equal(chosen, compressor.select([layer], budget)[0])


@pytest.mark.parametrize("name", ["infinipot_v", "cords", "uniform", "sliding"])
def test_those_that_look_at_no_queries_choose_the_same(name: str) -> None:
    layer = one_head([3.0, 0.0, 5.0, 1.0, -4.0])
    silent, told = compressors.get(name)(1), compressors.get(name)(1)
    told.observe([ASKED])
    assert torch.equal(silent.select([layer], 3)[0], told.select([layer], 3)[0])


@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"pool": "sum"}),
        (SnapKV, {"window": -1}),
        (InfiniPot, {"recent": 1.5}),
        (LiveVLM, {"short": -0.1}),
        (StreamMem, {"stand_in": 0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(compressor: type[AttentionCompressor], options: dict) -> None:
    with pytest.raises(ValueError, match=r"must be between 0 and 1|pool|must be at least 1"):
        compressor(1, **options)
