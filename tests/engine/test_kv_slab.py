"""The slab against a list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.window.kv import ROUNDING, SLACK, KVSlab

LAYERS, HEADS, SIZE = 2, 3, 4


def slab() -> KVSlab:
    return KVSlab(LAYERS, HEADS, SIZE, torch.float32, torch.device("cpu"))


def value(token: int) -> torch.Tensor:
    return torch.arange(LAYERS * HEADS * SIZE, dtype=torch.float32).view(LAYERS, HEADS, SIZE) + 1000 * token


@settings(deadline=None)
@given(
    front=st.integers(0, 5),
    steps=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.integers(0, 9)), max_size=30),
)
def test_what_is_held_survives_growing_and_moving(front: int, steps: list[tuple[float, int, int]]) -> None:
    kv, held, fresh, most = slab(), [], 0, 0
    prompt = torch.stack([-value(i + 1) for i in range(front)], dim=2) if front else torch.zeros(LAYERS, HEADS, 0, SIZE)
    for leave, enter, extra in steps:
        gone = round(leave * len(held))
        kv.drop_slots(gone)
        held = held[gone:]
        new = list(range(fresh, fresh + enter))
        fresh += enter
        most = max(most, len(held) + enter + extra)
        kv.reserve(front, len(held) + enter + extra)
        kv.prepend(prompt, prompt)
        for offset, token in enumerate(new):
            kv.k[:, :, kv.start + len(held) + offset] = value(token)
            kv.v[:, :, kv.start + len(held) + offset] = -value(token)
        held += new
        kv.length = len(held)
        k, v = kv.live_kv()
        expected = torch.stack([value(t) for t in held], dim=2) if held else torch.zeros(LAYERS, HEADS, 0, SIZE)
        assert torch.equal(k, expected)
        assert torch.equal(v, -expected)
        assert torch.equal(kv.k[:, :, kv.start - front : kv.start], prompt)
        # Bounded by what was ever needed at once, not by what passed through.
        assert kv.capacity <= front + SLACK * most + ROUNDING
        assert kv.nbytes == 2 * LAYERS * HEADS * kv.capacity * SIZE * 4


def test_more_than_is_held_cannot_be_dropped() -> None:
    with pytest.raises(ValueError, match="3 slots cannot be dropped of 0"):
        slab().drop_slots(3)
