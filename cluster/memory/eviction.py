"""Room below the cap: what stays of a stream's memory when more would come than fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cluster.memory.head_memory import NAMES_BYTES, BlocksLostError, BlocksUnavailableError, LayerKV
from cluster.memory.tiers.base import Block

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

# Of the room in the lowest tier, what is used; and how much more than the tokens before them new ones are taken to
# need, for they come in smaller clusters, which tiers round up more.
_ROUNDING = 0.9
_FRESH = 1.6
# Compressions in a row: thinner clusters do not always take less room.
_TRIES = 6


def evict(memory: StreamMemory, frames: list[LayerKV]) -> list[LayerKV] | None:
    """Compress a memory until these new frames fit below its cap.

    Returns what of them is to be taken in, or None while what would have to be compressed is out of reach.
    """
    heads = len(memory.heads) * len(memory.heads[0])
    # While a head's blocks are written anew, both versions of them are there.
    capacity = memory.max_bytes * _ROUNDING * heads / (heads + 1) - _fixed(memory)
    wanted = _bytes_of(memory, frames)
    for _ in range(_TRIES):
        held = _token_cost(memory)
        if held + wanted <= capacity or not held:
            break
        if not compress(memory, min(memory.spec.target, max(0.1, 0.9 * (capacity - wanted) / held))):
            return None
        # Clusters that were thinned take more a token; new ones are not.
        wanted = min(wanted, _bytes_of(memory, frames))
    settled = memory.settled_frames()
    if _token_cost(memory) + wanted > capacity and settled:
        # As rounding may leave it for a cap of few blocks: the older half goes.
        memory.delete_frames(before_frame=settled[len(settled) // 2])
    room = capacity - _token_cost(memory)
    return frames if wanted <= room else memory.compress_frames(frames, max(0.0, room / wanted))


def compress(memory: StreamMemory, share: float) -> bool:
    """Leave ``share`` of the tokens, as the stream's compressor chooses; False while some of them are out of reach, or
    what stays cannot be written."""
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
    else:
        # Heads that lost blocks hold fewer tokens than others: each is chosen from by itself.
        columns = [
            memory.compressor_of_head(h).select(
                [heads[h] for heads in whole], int(share * max(heads[h].tokens for heads in whole))
            )
            for h in range(len(whole[0]))
        ]
        kept = [[column[number][0] for column in columns] for number in range(len(whole))]
    for number, h, head in memory.iter_heads():
        before = head.tokens
        if not memory.keep_tokens(number, h, kept[number][h].cpu(), loaded[number][h]):
            return False
        memory.counts.compressed_away += before - len(kept[number][h])
    return memory.publish() and memory.make_durable()


def _bytes_of(memory: StreamMemory, frames: Sequence[LayerKV]) -> float:
    """What more frames will take, going by what is held: tiers round blocks up, small ones most."""
    tokens = sum(layer.heads * layer.tokens for layer in frames)
    settled = sum(head.tokens for _, _, head in memory.iter_heads())
    return _FRESH * tokens * max(memory.token_bytes, _token_cost(memory) / settled if settled else 0.0)


def _token_cost(memory: StreamMemory) -> int:
    """Bytes that grow and shrink with the tokens."""
    return max(0, memory.stored.named_bytes - _fixed(memory))


def _fixed(memory: StreamMemory) -> int:
    return len(memory.heads) * len(memory.heads[0]) * NAMES_BYTES


def _load_head(memory: StreamMemory, layer: int, h: int) -> tuple[LayerKV, dict[int, Block]] | None:
    """All tokens of a head in time order, and the blocks by number that they are in; what is gone for good is lost,
    None while some is out of reach."""
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
    kv = LayerKV(key[None], value[None], head.frame[None].to(torch.int64), head.cell[None].to(torch.int64))
    return kv, {int(head.table.block[cluster]): block for cluster, block in blocks.items()}


def _stacked(heads: Sequence[LayerKV]) -> LayerKV:
    return LayerKV(*(torch.cat([getattr(kv, name) for kv in heads]) for name in ("key", "value", "frame", "cell")))
