"""Eviction: compress a stream's memory until new frames fit below its byte cap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.memory.head_memory import NAMES_BYTES, BlocksLostError, BlocksUnavailableError, LayerKV
from cluster.memory.tiers.base import Block

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

# Usable share of the lowest tier, and cost of new tokens over stored ones (small clusters are rounded up more).
_ROUNDING = 0.9
_FRESH = 1.6
# Most compressions in a row: thinned clusters do not always take less space.
_TRIES = 6


def evict(memory: StreamMemory, frames: list[LayerKV]) -> list[LayerKV] | None:
    """Compress a memory until ``frames`` fit below its cap.

    Returns the part of ``frames`` to store, or None while blocks that must be compressed are unavailable.
    """
    heads = len(memory.heads) * len(memory.heads[0])
    # Both versions of a head's blocks exist during a rewrite.
    capacity = memory.max_bytes * _ROUNDING * heads / (heads + 1) - _fixed(memory)
    wanted = _bytes_of(memory, frames)
    for _ in range(_TRIES):
        held = _token_cost(memory)
        if held + wanted <= capacity or not held:
            break
        if not compress(memory, min(memory.spec.target, max(0.1, 0.9 * (capacity - wanted) / held))):
            return None
        # Thinned clusters cost more per token; new ones are not thinned.
        wanted = min(wanted, _bytes_of(memory, frames))
    settled = memory.settled_frames()
    if _token_cost(memory) + wanted > capacity and settled:
        # Rounding can prevent a fit under a cap of few blocks: delete the older half.
        memory.delete_frames(before_frame=settled[len(settled) // 2])
    room = capacity - _token_cost(memory)
    return frames if wanted <= room else memory.compress_frames(frames, max(0.0, room / wanted))


def compress(memory: StreamMemory, share: float) -> bool:
    """Compress to ``share`` of the tokens with the stream's compressor; False if blocks are unavailable or cannot be
    written."""
    whole: list[list[LayerKV]] = []
    loaded: list[list[dict[int, Block]]] = []
    for number in range(len(memory.heads)):
        found = [_load_head(memory, number, h) for h in range(len(memory.heads[number]))]
        layer = [kv for kv in found if kv is not None]
        if len(layer) < len(found):
            return False
        whole.append([kv for kv, _ in layer])
        loaded.append([blocks for _, blocks in layer])
    memory.counts.compressions += 1
    if all(kv.tokens == heads[0].tokens for heads in whole for kv in heads):
        layers = [_stacked(heads) for heads in whole]
        chosen = memory.compressor.select(layers, int(share * layers[0].tokens))
        kept = [list(stays) for stays in chosen]
        weights: list[Sequence[Tensor | None]] = [
            [None] * len(stays) if of is None else list(of)
            for of, stays in zip(memory.compressor.weigh(layers, chosen), kept, strict=True)
        ]
    else:
        # Heads that lost blocks hold fewer tokens: compress each separately.
        columns = []
        for h in range(len(whole[0])):
            layers = [heads[h] for heads in whole]
            compressor = memory.compressor_of_head(h)
            chosen = compressor.select(layers, int(share * max(layer.tokens for layer in layers)))
            new = [None if of is None else of[0] for of in compressor.weigh(layers, chosen)]
            columns.append(([stays[0] for stays in chosen], new))
        kept = [[column[number] for column, _ in columns] for number in range(len(whole))]
        weights = [[column[number] for _, column in columns] for number in range(len(whole))]
    for number, h, head in memory.iter_heads():
        before = head.tokens
        weight = weights[number][h]
        weight = None if weight is None else weight.cpu()
        if not memory.keep_tokens(number, h, kept[number][h].cpu(), loaded[number][h], weight):
            return False
        memory.counts.compressed_away += before - len(kept[number][h])
    return memory.publish() and memory.make_durable()


def _bytes_of(memory: StreamMemory, frames: Sequence[LayerKV]) -> float:
    """Estimate the bytes of more frames from the bytes per stored token: tiers round small blocks up most."""
    tokens = sum(layer.heads * layer.tokens for layer in frames)
    settled = sum(head.tokens for _, _, head in memory.iter_heads())
    return _FRESH * tokens * max(memory.token_bytes, _token_cost(memory) / settled if settled else 0.0)


def _token_cost(memory: StreamMemory) -> int:
    """Stored bytes that scale with the number of tokens."""
    return max(0, memory.stored.named_bytes - _fixed(memory))


def _fixed(memory: StreamMemory) -> int:
    return len(memory.heads) * len(memory.heads[0]) * NAMES_BYTES


def _load_head(memory: StreamMemory, layer: int, h: int) -> tuple[LayerKV, dict[int, Block]] | None:
    """All tokens of a head in time order, with their blocks by number. Lost blocks are dropped; None while some are
    unavailable."""
    memory.yield_to_engine()
    while True:
        head = memory.heads[layer][h]
        try:
            blocks = head.load_blocks(range(len(head.table)), memory.block_loader(layer, h))
            break
        except BlocksLostError as error:
            memory.drop_lost_clusters(layer, h, error.uids)
        except BlocksUnavailableError:
            return None
    of_token = head.table.of_token
    key = torch.empty(head.tokens, head.table.mean.shape[1], dtype=memory.dtype)
    value = torch.empty_like(key)
    order = of_token.argsort(stable=True)
    for cluster, rows in enumerate(torch.split(order, head.table.count.tolist())):
        key[rows], value[rows] = blocks[cluster].key.cpu(), blocks[cluster].value.cpu()
    weight = head.weight if len(head.weight) else torch.ones(head.tokens)
    frame, cell = head.frame.to(torch.int64), head.cell.to(torch.int64)
    kv = LayerKV(key[None], value[None], frame[None], cell[None], weight[None])
    return kv, {int(head.table.block[cluster]): block for cluster, block in blocks.items()}


def _stacked(heads: Sequence[LayerKV]) -> LayerKV:
    names = ("key", "value", "frame", "cell", "weight")
    return LayerKV(*(torch.cat([getattr(kv, name) for kv in heads]) for name in names))
