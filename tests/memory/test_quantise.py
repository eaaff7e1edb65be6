"""Blocks in eight bits, against steps counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.memory.quantise import dequantise, measure_channels, quantise
from cluster.memory.tiers.base import Block

WIDTH = 16


def block(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Block:
    """Normally distributed, but for a key's channel 3, which is 300 and varies by 5, as a bias before rotary makes."""
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, count, WIDTH, generator=rng)
    key[:, 3] = 300 + 5 * key[:, 3]
    return Block(key.to(dtype), value.to(dtype), *torch.randint(0, 99, (2, count), generator=rng, dtype=torch.int32))


def test_steps_by_hand() -> None:
    # Centres 1 and 10, spreads 0.5 and 2. Of 26.4 and 20.16 spreads the larger is 127 steps of 0.20787, in float16
    # 0.20788574; the other is 20.16 / 0.20788574 = 96.98 of them, so 97: 20.16492 spreads.
    channels = torch.tensor([[[1.0, 10.0], [0.5, 2.0]], [[0.0, 0.0], [1.0, 1.0]]])
    made = Block(torch.tensor([[14.2, 50.32]]), torch.tensor([[-127.0, 63.4]]), *torch.zeros(2, 1, dtype=torch.int32))
    (small,) = quantise([made], channels)
    assert small.key[0, :2].tolist() == [127, 97]
    assert small.value[0, :2].tolist() == [-127, 63]
    (back,) = dequantise([small], channels)
    scale = 0.20788574
    torch.testing.assert_close(back.key, torch.tensor([[1 + 127 * scale * 0.5, 10 + 97 * scale * 2]]))
    torch.testing.assert_close(back.value, torch.tensor([[-127.0, 63.0]]))


def test_channels_by_hand() -> None:
    key = torch.tensor([[1.0, 100.0, 0.0], [3.0, 140.0, 0.0]])
    channels = measure_channels(key, torch.ones(2, 3))
    assert channels[0, 0].tolist() == [2.0, 120.0, 0.0]
    # Deviations 1, 20 and 0, of which the last is raised to half of the median.
    assert channels[0, 1].tolist() == [1.0, 20.0, 0.5]
    # Nothing varies: a thousandth of the values' size.
    torch.testing.assert_close(channels[1, 1], torch.full((3,), 1e-3))
    assert measure_channels(torch.zeros(1, 3), torch.zeros(1, 3))[:, 1].tolist() == [[1.0] * 3] * 2


def test_a_first_block_that_is_not_finite_spoils_no_later_one() -> None:
    first = block(20, 1)
    first.key[3, 2] = torch.inf
    first.value[5] = torch.nan
    finite = [row for row in range(20) if row not in (3, 5)]
    wanted = measure_channels(first.key[finite], first.value[finite])
    assert torch.equal(measure_channels(first.key, first.value), wanted)
    nothing = measure_channels(first.key * torch.nan, first.value)
    assert bool(dequantise(quantise([block(5)], nothing), nothing)[0].key.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(count=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_number_is_off_by_half_a_step_of_its_channel(dtype: torch.dtype, count: int, seed: int) -> None:
    made = block(count, seed, dtype)
    channels = measure_channels(block(64, 99).key, block(64, 99).value)
    (small,) = quantise([made], channels)
    assert small.key.dtype == small.value.dtype == torch.int8
    assert small.key.shape == (count, WIDTH + 2)
    (back,) = dequantise([small], channels)
    assert torch.equal(back.frame, made.frame)
    assert torch.equal(back.cell, made.cell)
    for was, now, (centre, spread) in ((made.key, back.key, channels[0]), (made.value, back.value, channels[1])):
        apart = (was.float() - centre).abs() / spread
        step = apart.amax(1, keepdim=True) / 127
        # And what rounding the step to float16 adds to the largest, and float32 to a channel of 300.
        assert bool(((now - was.float()).abs() <= (0.5 * step + 127 * step * 2**-11) * spread + 1e-4).all())


def test_a_channel_that_is_large_and_nearly_constant_costs_the_others_nothing() -> None:
    """As one scale per token does: 300 / 127 is a step of 2.4, more than all that the other channels say."""
    made = block(64)
    channels = measure_channels(made.key, made.value)
    error = (dequantise(quantise([made], channels), channels)[0].key - made.key).square().mean(0).sqrt()
    # Of 16 normal channels the largest is about 2 deviations: steps of 0.016, an error of step / sqrt(12).
    assert float(error[[n for n in range(WIDTH) if n != 3]].max()) < 0.01
    assert float(error[3]) < 5 * 0.01


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_what_is_cut_joined_and_written_again_is_rounded_once(sizes: list[int], seed: int) -> None:
    blocks = [block(size, seed + at) for at, size in enumerate(sizes)]
    channels = measure_channels(blocks[0].key, blocks[0].value)
    small = quantise(blocks, channels)
    back = dequantise(small, channels)
    rows = torch.arange(0, sum(sizes), 2)
    joined = Block(
        *(torch.cat([getattr(each, part) for each in back])[rows] for part in ("key", "value", "frame", "cell"))
    )
    (again,) = quantise([joined], channels)
    assert torch.equal(again.key, torch.cat([each.key for each in small])[rows])
    assert torch.equal(again.value, torch.cat([each.value for each in small])[rows])


def test_what_is_not_finite_does_not_become_so() -> None:
    made = block(3)
    channels = measure_channels(made.key, made.value)
    made.key[1, 5] = torch.nan
    made.value[2, 0] = torch.inf
    (back,) = dequantise(quantise([made], channels), channels)
    assert back.key.isfinite().all(1).tolist() == [True, False, True]
    assert back.value.isfinite().all(1).tolist() == [True, True, False]


def test_no_blocks_are_none() -> None:
    assert quantise([], torch.zeros(2, 2, 4)) == dequantise([], torch.zeros(2, 2, 4)) == []
