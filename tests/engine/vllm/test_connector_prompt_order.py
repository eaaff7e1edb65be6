"""The order of a window for vLLM, what it loads and saves, and what makes two windows the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from connector_rig import system_transfer
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.vllm.connector.prompt_order import Order, Piece, WindowFrame, reordered
from cluster.engine.vllm.connector.transfer import FIELD, Load, Save, Transfer
from cluster.engine.window.planner import prefix_order
from cluster.errors import ConfigError

SYSTEM = WindowFrame("system", 2, "sys")
# An anchor of two that is refreshed, one of which only the second row is, an empty one, one that is new.
FRAMES = (WindowFrame("A", 2, "a"), WindowFrame("B", 3, "b"), WindowFrame("C", 0), WindowFrame("D", 2))
COMPUTED = np.array([1, 1, 0, 1, 0, 1, 1], dtype=bool)
POSITIONS = np.arange(27, dtype=np.int64).reshape(3, 9)


def lay(
    frames: Iterable[WindowFrame] = FRAMES, computed: np.ndarray = COMPUTED, lost: Iterable[str] = (), **other: Any
) -> Order:
    arguments = {"stream": "gate", "system": SYSTEM, "positions": POSITIONS, **other}
    return reordered(frames=tuple(frames), computed=computed, holds=lambda key, _: key not in lost, **arguments)


def test_a_window_by_hand() -> None:
    order = lay()
    assert order.slots.tolist() == [0, 1, 4, 6, 2, 3, 5, 7, 8]
    assert order.positions.tolist() == POSITIONS[:, [0, 1, 4, 6, 2, 3, 5, 7, 8]].tolist()
    assert order.pieces == (Piece(1, (0, 2), 2), Piece(0, None, 4), Piece(1, (1,), 6), Piece(3, None, 7))
    assert order.transfer.loads == (Load("sys", 2), Load("b", 3, (0, 2)))
    a, b, d = (f"gate/{name}/{order.salt}" for name in "ABD")
    assert order.transfer.saves == (Save(a, 2, 4), Save(b, 3, 6, (1,), "b"), Save(d, 2, 7))
    assert order.keys == (a, b, None, d)
    assert order.reused == 2
    assert order.followers.loads == order.transfer.loads
    assert not order.followers.saves


def test_a_block_that_is_gone_is_computed_whole() -> None:
    order = lay(lost=["b"])
    assert order.computed.tolist() == [True] * 7
    assert order.transfer.loads == (Load("sys", 2),)
    assert Save(f"gate/B/{order.salt}", 3, 4) in order.transfer.saves


def test_without_the_system_prompt_nothing_is_reused() -> None:
    order = lay(lost=["sys"])
    assert order.computed.all()
    assert order.transfer.loads == ()
    assert order.transfer.saves[0] == Save("sys", 2, 0)
    assert order.slots.tolist() == list(range(9))


def test_windows_that_differ_in_anything_share_nothing() -> None:
    shown_otherwise = [WindowFrame("X", 2, "a"), *FRAMES[1:]]
    held_otherwise = [FRAMES[0], WindowFrame("B", 3, "b2"), *FRAMES[2:]]
    salts = [
        lay().salt,
        lay(computed=np.array([1, 1, 0, 0, 0, 1, 1], dtype=bool)).salt,
        lay(positions=POSITIONS + 1).salt,
        lay(stream="yard").salt,
        lay(shown_otherwise).salt,
        lay(held_otherwise).salt,
        lay(lost=["b"]).salt,
    ]
    assert len(set(salts)) == len(salts)
    assert lay().salt == salts[0]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 2**32 - 1),
)
def test_any_window_is_covered_once(shapes: list[tuple[int, bool, bool]], seed: int) -> None:
    """Every token stands once in the prompt; loads and pieces name the same tokens; saves name what is computed."""
    frames = [WindowFrame(f"c{i}", tokens, f"k{i}" if held else None) for i, (tokens, held, _) in enumerate(shapes)]
    lost = [f"k{i}" for i, (_, _, gone) in enumerate(shapes) if gone]
    visual = sum(frame.tokens for frame in frames)
    computed = np.random.default_rng(seed).random(visual) < 0.5
    positions = np.arange(visual + 2, dtype=np.int64)[None]
    order = lay(frames, computed, lost, positions=positions)
    assert order.slots.tolist() == prefix_order(2, order.computed, visual + 2).tolist()
    assert not (computed & ~order.computed).any()
    starts = np.cumsum([2] + [frame.tokens for frame in frames])

    def slots(index: int, rows: tuple[int, ...] | None) -> list[int]:
        return [int(starts[index]) + row for row in (range(frames[index].tokens) if rows is None else rows)]

    assert [0, 1, *[slot for p in order.pieces for slot in slots(p.frame, p.rows)]] == order.slots.tolist()
    loaded = [slot for load in order.transfer.loads[1:] for slot in slots(int(load.key[1:]), load.rows)]
    assert loaded == order.slots[2 : order.transfer.loaded].tolist()
    for save in order.transfer.saves:
        index = int(save.key.split("/")[1][1:])
        assert slots(index, save.rows) == order.slots[save.start : save.start + len(save)].tolist()
        assert order.keys[index] == save.key


def test_transfers_survive_the_way() -> None:
    transfer = lay().transfer
    back = Transfer.from_params(transfer.to_params())
    assert back is not None
    assert (back.loads, back.saves) == (transfer.loads, transfer.saves)
    assert back.positions.tolist() == transfer.positions.tolist()
    assert Transfer.from_params({}) is None
    assert Transfer.from_params(None) is None
    assert system_transfer("sys", 4, 3).saved_by == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 9}, "version 9"),
        ({"loads": [["a", 2, None], ["b", 30, None]]}, "needs positions"),
        ({"loads": [["a", 2, [1, 0]]]}, "must ascend"),
        ({"loads": [["a", 2, [0, 2]]]}, "must ascend"),
        ({"loads": [["a", 0, None]]}, "stands for none"),
        ({"saves": [["a", 2, 1, None, None]]}, "save only what is computed"),
        ({"saves": [["a", 2, 5, [0], None]]}, "needs a base"),
        ({"loads": 3}, "cannot be read"),
        ({"positions": b"abc"}, "cannot be read"),
    ],
)
def test_a_transfer_that_makes_no_sense_is_refused(change: dict[str, Any], sentence: str) -> None:
    params = lay().transfer.to_params()
    params[FIELD].update(change)
    with pytest.raises(ConfigError, match=sentence):
        Transfer.from_params(params)
