"""Room below the cap: what stays of a stream's memory when more would come than fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cluster.memory.layer import LayerKV

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

# Of the room in the lowest tier, what is used; and how much more than the tokens before them new ones are taken to
# need, for they come in smaller clusters, which tiers round up more.
_ROUNDING = 0.9
_FRESH = 1.6
# Compressions in a row: thinner clusters do not always take less room.
_TRIES = 6


def make_room(memory: StreamMemory, frames: list[LayerKV]) -> list[LayerKV] | None:
    """Compress a memory until these new frames fit below its cap.

    Returns what of them is to be taken in, or None while what would have to be compressed is out of reach.
    """
    capacity = min(memory.spec.cap_bytes, memory.tiers.capacity(memory.stream)) * _ROUNDING
    wanted = _bytes_of(memory, frames)
    for _ in range(_TRIES):
        held = memory.held_bytes
        if held + wanted <= capacity or not held:
            break
        if not compress(memory, min(memory.spec.target, max(0.1, 0.9 * (capacity - wanted) / held))):
            return None
        wanted = _bytes_of(memory, frames)
    settled = memory.log.numbers[: len(memory.log) - len(memory.recent)]
    if memory.held_bytes + wanted > capacity and settled:
        # As rounding may leave it for a cap of few blocks: the older half goes.
        memory.forget(before_frame=settled[len(settled) // 2])
    room = capacity - memory.held_bytes
    return frames if wanted <= room else memory.thinned(frames, max(0.0, room / wanted))


def compress(memory: StreamMemory, share: float) -> bool:
    """Leave ``share`` of the tokens, as the stream's compressor chooses; False, and nothing done, while some of them
    are out of reach."""
    whole: list[list[LayerKV]] = []
    for number, heads in enumerate(memory.heads):
        found = [_all_of(memory, number, h) for h in range(len(heads))]
        layer = [kv for kv in found if kv is not None]
        if len(layer) < len(found):
            return False
        whole.append(layer)
    memory.counts.compressions += 1
    if all(kv.tokens == heads[0].tokens for heads in whole for kv in heads):
        layers = [_stacked(heads) for heads in whole]
        chosen = memory.compressor.select(layers, int(share * layers[0].tokens))
        kept = [list(stays) for stays in chosen]
    else:
        # Heads that lost blocks hold fewer tokens than others: each is chosen from by itself.
        columns = [
            memory.compressor_of_head(h).select(
                [heads[h] for heads in whole], int(share * max(heads[h].tokens for heads in whole))
            )
            for h in range(len(whole[0]))
        ]
        kept = [[column[number][0] for column in columns] for number in range(len(whole))]
    changes = []
    for number, h, head in memory.every_head():
        before = head.tokens
        changes.append((number, h, head.keep(kept[number][h].cpu(), memory.loader(number, h))))
        memory.counts.compressed_away += before - head.tokens
    memory.carry_out(changes)
    return True


def _bytes_of(memory: StreamMemory, frames: Sequence[LayerKV]) -> float:
    """What more frames will take, going by what is held: tiers round blocks up, small ones most."""
    tokens = sum(layer.heads * layer.tokens for layer in frames)
    settled = sum(head.tokens for _, _, head in memory.every_head())
    return _FRESH * tokens * max(memory.token_bytes, memory.held_bytes / settled if settled else 0.0)


def _all_of(memory: StreamMemory, layer: int, h: int) -> LayerKV | None:
    """All tokens of a head in time order, from the tiers; what is gone for good is lost, None while some is out of
    reach."""
    head = memory.heads[layer][h]
    blocks, later = head.blocks(memory.loader(layer, h))
    if later:
        return None
    for uid in head.organiser.table.uid.tolist():
        if uid not in blocks:
            memory.lose(layer, h, uid)
    at = head.uids()
    key = torch.empty(head.tokens, head.organiser.table.mean.shape[1], dtype=memory.dtype)
    value = torch.empty_like(key)
    order = at.argsort(stable=True)
    uids, counts = torch.unique_consecutive(at[order], return_counts=True)
    for uid, rows in zip(uids.tolist(), torch.split(order, counts.tolist()), strict=True):
        key[rows], value[rows] = blocks[uid].key.cpu(), blocks[uid].value.cpu()
    return LayerKV(key[None], value[None], head.frame[None].to(torch.int64), head.cell[None].to(torch.int64))


def _stacked(heads: Sequence[LayerKV]) -> LayerKV:
    return LayerKV(*(torch.cat([getattr(kv, name) for kv in heads]) for name in ("key", "value", "frame", "cell")))
