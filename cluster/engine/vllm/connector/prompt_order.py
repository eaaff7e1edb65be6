"""A window in the order in which vLLM can be given KV from outside: ``[system | reused | refreshed, new | question]``.

What is reused must be a prefix there. Positions stay those of the time order, so the only thing that changes is what a
refreshed token sees: reused tokens that come later in time as well (the refresh policy ``anchors_last`` is the same
order in the native engine).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.engine.vllm.connector.transfer import Load, Save, Transfer
from cluster.engine.window.planner import BoolArray, IntArray, prefix_order

Holds = Callable[[str, int], bool]
"""Whether there is a block of this key, with so many tokens."""


@dataclass(frozen=True, slots=True)
class WindowFrame:
    """One frame of a window, in time order.

    * ``content``: digest of what was encoded of it: its mask's digest (which knows index and time) and its embeddings
    * ``tokens``: visual tokens; a frame of none takes part in nothing
    * ``block``: key of the block that holds its KV; None where no window computed it yet
    """

    content: str
    tokens: int
    block: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one frame that stand next to each other in the prompt, from token ``start`` on; None: all its rows."""

    frame: int
    rows: tuple[int, ...] | None
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """How a window is laid out for vLLM.

    * ``slots`` ``[n]``: the window's slots (system prompt, then visual tokens in time order) in the prompt's order
    * ``positions`` ``[axes, n]``: of those tokens, in the prompt's order
    * ``pieces``: the visual tokens behind the system prompt, in the prompt's order
    * ``computed`` ``[visual]``: which visual tokens are computed, in time order; more than was asked for where a block
      is gone
    * ``transfer``: what the request that computes the window loads and saves; the window's other questions ask for
      ``transfer.loads`` alone (:attr:`followers`)
    * ``salt``: vLLM's ``cache_salt`` of all the window's questions. Windows share nothing in vLLM's own cache: there a
      token's KV goes by the tokens before it, and here it also depends on when these were computed
    * ``keys``: per frame, the key under which its KV is held once the window is computed
    """

    slots: IntArray
    positions: IntArray
    pieces: tuple[Piece, ...]
    computed: BoolArray
    transfer: Transfer
    salt: str
    keys: tuple[str | None, ...]

    @property
    def followers(self) -> Transfer:
        """What the window's other questions ask for: to load what vLLM's own cache has let go of, and save nothing."""
        return Transfer(self.transfer.loads, (), self.transfer.positions)

    @property
    def reused(self) -> int:
        """Visual tokens that are loaded."""
        return int(np.count_nonzero(~self.computed))


def reordered(
    stream: str,
    system: WindowFrame,
    frames: Sequence[WindowFrame],
    computed: BoolArray,
    positions: IntArray,
    holds: Holds,
) -> Order:
    """Lay out a window.

    Args:
        stream: whose window it is; blocks of two streams never meet.
        system: the system prompt as a frame; its ``block`` is set always, and it is computed where that is not held.
        computed: ``[visual]``: visual tokens, in time order, that a refresh policy or their newness wants computed.
        positions: ``[axes, system + visual]``, in time order.
        holds: asked for every block that would be loaded; a frame whose block is gone is computed as a whole, and
            where the system prompt's is, everything is.
    """
    assert system.block is not None
    starts = np.concatenate(([0], np.cumsum([frame.tokens for frame in frames], dtype=np.int64)))
    computed = computed.copy()
    has_system = holds(system.block, system.tokens)
    for index, frame in enumerate(frames):
        mine = computed[starts[index] : starts[index + 1]]
        if frame.tokens and not (has_system and frame.block is not None and holds(frame.block, frame.tokens)):
            mine[:] = True

    slots = prefix_order(system.tokens, computed, system.tokens + len(computed))
    in_order = positions[:, slots]
    loads = [Load(system.block, system.tokens)] if has_system else []
    pieces: list[Piece] = []
    at = system.tokens
    for index, frame in enumerate(frames):
        rows = np.flatnonzero(~computed[starts[index] : starts[index + 1]])
        if len(rows) and frame.block is not None:
            chosen = _chosen(rows, frame.tokens)
            loads.append(Load(frame.block, frame.tokens, chosen))
            pieces.append(Piece(index, chosen, at))
            at += len(rows)
    behind = len(pieces)
    for index in range(len(frames)):
        rows = np.flatnonzero(computed[starts[index] : starts[index + 1]])
        if len(rows):
            pieces.append(Piece(index, _chosen(rows, frames[index].tokens), at))
            at += len(rows)

    salt = _digest(stream, system, frames, loads, pieces[behind:], in_order)
    keys = [frame.block for frame in frames]
    saves = [] if has_system else [Save(system.block, system.tokens, 0)]
    for piece in pieces[behind:]:
        frame = frames[piece.frame]
        key = keys[piece.frame] = f"{stream}/{frame.content}/{salt}"
        saves.append(Save(key, frame.tokens, piece.start, piece.rows, None if piece.rows is None else frame.block))
    return Order(
        slots, in_order, tuple(pieces), computed, Transfer(tuple(loads), tuple(saves), in_order), salt, tuple(keys)
    )


def _chosen(rows: IntArray, tokens: int) -> tuple[int, ...] | None:
    return None if len(rows) == tokens else tuple(rows.tolist())


def _digest(
    stream: str,
    system: WindowFrame,
    frames: Sequence[WindowFrame],
    loads: Sequence[Load],
    pieces: Sequence[Piece],
    positions: IntArray,
) -> str:
    """Key of everything a window's KV depends on: what is loaded, what is computed behind it, and where both stand."""
    hasher = hashlib.blake2b(repr((stream, system.content)).encode(), digest_size=16)
    hasher.update(repr([(load.key, load.rows) for load in loads]).encode())
    hasher.update(repr([(frames[piece.frame].content, piece.rows) for piece in pieces]).encode())
    hasher.update(np.ascontiguousarray(positions, dtype=np.int64).tobytes())
    return hasher.hexdigest()
