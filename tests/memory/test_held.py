"""A cap that holds, whatever comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.lab.bench.memory.held import HeldKV
from cluster.memory.head_memory import LayerKV
from cluster.registry import compressors

BOUNDED = sorted(set(compressors.names()) - {"none"})


def frame(number: int, count: int, layers: int = 3) -> list[LayerKV]:
    rng = torch.Generator().manual_seed(number)
    cell = torch.randperm(24, generator=rng)[:count].sort().values
    return [LayerKV.of_frame(*torch.randn(2, 2, count, 4, generator=rng), number, cell) for _ in range(layers)]


@pytest.mark.parametrize("name", BOUNDED)
@given(counts=st.lists(st.integers(0, 24), min_size=1, max_size=30))
def test_between_two_frames_no_layer_holds_more_than_the_cap(name: str, counts: list[int]) -> None:
    held = HeldKV(compressors.get(name)(6), cap=40)
    seen = 0
    for number, count in enumerate(counts):
        held.add(frame(number, count))
        seen += count
        assert all(layer.tokens <= 40 for layer in held.layers)
        assert held.tokens + held.dropped == seen
        assert held.nbytes == 3 * 2 * held.tokens * 2 * 4 * 4
    if seen > 40:
        assert held.compressions > 0


def test_the_newest_frame_is_held_whole() -> None:
    for name in BOUNDED:
        held = HeldKV(compressors.get(name)(6), cap=64)
        for number in range(30):
            held.add(frame(number, 3))
        newest = held.layers[0].frame[0] == 29
        assert int(newest.sum()) == 3, name


def test_a_frame_of_another_model_or_time_is_refused() -> None:
    held = HeldKV(compressors.get("sliding")(6), cap=40)
    held.add(frame(5, 4))
    with pytest.raises(ValueError, match="2 layers for a memory of 3"):
        held.add(frame(6, 4, layers=2))
    with pytest.raises(ValueError, match="time order"):
        held.add(frame(4, 4))
    assert held.tokens == 4
    with pytest.raises(ValueError, match="1 heads for a memory of 2"):
        held.add([LayerKV(each.key[:1], each.value[:1], each.frame[:1], each.cell[:1]) for each in frame(6, 4)])
    held.add(frame(6, 4))
    assert [layer.frame[0].tolist() for layer in held.layers] == [[5] * 4 + [6] * 4] * 3


def test_what_is_held_does_not_depend_on_when_it_is_looked_at() -> None:
    looked, unseen = (HeldKV(compressors.get("infinipot_v")(6), cap=40) for _ in range(2))
    for number in range(40):
        looked.add(frame(number, 5))
        unseen.add(frame(number, 5))
        assert looked.layers[0].tokens == looked.tokens == unseen.tokens
        assert looked.nbytes == unseen.nbytes
    for one, other in zip(looked.layers, unseen.layers, strict=True):
        assert torch.equal(one.key, other.key)
        assert torch.equal(one.frame, other.frame)


@pytest.mark.parametrize(("cap", "target"), [(0, 0.75), (10, 0.0), (10, 1.5), (1, 0.5)])
def test_a_cap_that_can_hold_nothing_is_refused(cap: int, target: float) -> None:
    with pytest.raises(ConfigError, match="can hold nothing"):
        HeldKV(compressors.get("sliding")(6), cap=cap, target=target)


def test_tokens_without_their_places_are_refused() -> None:
    key = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="every one of"):
        LayerKV(key, key, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[H, n, D\]"):
        LayerKV(key, key[:, :1], torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
