"""Eviction: compress a stream's memory until new frames fit below its byte cap; delete frames by age or on request."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.errors import NotReadyError, UnavailableError
from cluster.memory.head_memory import NAMES_BYTES, BlocksLostError, BlocksUnavailableError, KVChunk, LayerKV
from cluster.memory.manifest import EXPIRY_STEP
from cluster.memory.memory_counts import MemoryReport
from cluster.memory.tiers.base import Block, Loaded, Outcome
from cluster.types import MICROSECONDS, DeletedMemory

if TYPE_CHECKING:
    from cluster.memory.compress import Compressor
    from cluster.memory.manifest import ReleasedMemory
    from cluster.memory.organise import ClusterTable
    from cluster.memory.stream import StreamMemory

# Cost of new tokens relative to stored ones, or to their raw bytes while none is stored: tiers round small clusters up
# most.
_FRESH, _FIRST = 1.2, 2.0
# Maximum number of consecutive compressions: thinned clusters do not always take less space.
_TRIES = 6
# Share of the capacity to fill after a compression.
_FULL = 0.95

READ_S = 30.0
"""Maximum time a deletion waits for answers that still read the deleted blocks."""


Heads = list[list[LayerKV]]
"""``[layer][key head]``: tokens, each of a single head."""


def evict(memory: StreamMemory, new: Heads) -> Heads | None:
    """Compress a memory together with the tokens of ``new`` frames until both fit below its cap.

    Returns the part of ``new`` to store, or None while blocks to be compressed are unavailable.
    """
    if memory.spec.keep < 1:
        new = _thinned(memory, new, memory.spec.keep)
    if memory.cap_bytes > memory.settings_cap_bytes:
        memory.drop_states()
    capacity = memory.max_settled_bytes - _fixed(memory)
    for _ in range(_TRIES):
        held, wanted = _token_cost(memory), _bytes_of(memory, new)
        if held + wanted <= capacity or not held:
            break
        kept = compress(memory, _share(memory, new, _FULL * capacity / (held + wanted)), new)
        if kept is None:
            return None
        new = kept
    middles = [int(head.frame[head.tokens // 2]) for _, _, head in memory.iter_heads() if head.tokens]
    if _token_cost(memory) + _bytes_of(memory, new) > capacity and middles:
        # Rounding can prevent a fit under a small cap: delete the oldest frames, with half of some head's tokens.
        memory.delete_frames(before_frame=min(middles))
    left, wanted = max(0.0, capacity - _token_cost(memory)), _bytes_of(memory, new)
    return new if wanted <= left else _thinned(memory, new, left / wanted)


def compress(memory: StreamMemory, share: float, new: Heads | None = None) -> Heads | None:
    """Compress stored and ``new`` tokens together to ``share`` of them with the stream's compressor.

    Returns the new tokens to keep; None if blocks are unavailable or cannot be written.
    """
    whole: Heads = []
    loaded: list[list[dict[int, Block]]] = []
    for number in range(len(memory.heads)):
        found = [_load_head(memory, number, h) for h in range(len(memory.heads[number]))]
        layer = [kv for kv in found if kv is not None]
        if len(layer) < len(found):
            return None
        # Joined layer by layer, to limit copies of the whole memory, which is float32 here if it is stored quantised.
        whole.append([kv if new is None else _joined(kv, new[number][h], dim=1) for h, (kv, _) in enumerate(layer)])
        loaded.append([blocks for _, blocks in layer])
    memory.counts.compressions += 1
    stays = _choose(memory, whole, share)
    kept: Heads = []
    for number, h, head in memory.iter_heads():
        chosen, weight = stays[number][h]
        old = chosen < head.tokens
        blocks = loaded[number][h]
        stay, stay_weight = chosen[old], None if weight is None else weight[old]
        if head.organiser.written_once:
            # Old weights stay: compressors that use weights set them when tokens first compete.
            stay, stay_weight = whole_clusters(head.table, stay), None
        if not memory.keep_tokens(number, h, stay, functools.partial(_at_hand, blocks), stay_weight):
            return None
        memory.counts.compressed_away += whole[number][h].tokens - len(stay) - int((~old).sum())
        if h == 0:
            kept.append([])
        kept[-1].append(_weighed(whole[number][h], chosen[~old], None if weight is None else weight[~old]))
    return kept if memory.publish() and memory.make_durable() else None


def delete_expired(memory: StreamMemory) -> None:
    """Delete frames beyond the retention, in steps of :data:`EXPIRY_STEP`, as deletion rewrites blocks."""
    retention_s, oldest = memory.spec.retention_s, memory.oldest
    if retention_s is None or oldest is None:
        return
    # Memories of silent cameras age as well.
    age_s = retention_s - (time.monotonic() - memory.newest_s)
    limit = memory.log.latest - round(age_s * MICROSECONDS)
    if oldest < limit - round(EXPIRY_STEP * retention_s * MICROSECONDS):
        memory.delete_frames(before_frame=memory.frames_since(limit))


def delete_before(memory: StreamMemory, before: int, settle: Callable[[], Future[None]]) -> Future[DeletedMemory]:
    """Hide frames before a time (microseconds) at once and delete them in the job that ``settle`` schedules, as blocks
    must be loaded and rewritten. The future is done when no tier holds them; ``UnavailableError`` if one is down or
    another process owns the stream."""
    deleted: Future[DeletedMemory] = Future()
    deleted.set_running_or_notify_cancel()
    frames, held = memory.frames, memory.held_bytes
    number = memory.hide_before(before)
    frames -= memory.frames

    def finish(job: Future[None]) -> None:
        try:
            job.result()
            if memory.deleted < number:
                raise not_deleted(memory.stream)
            memory.delete_read_blocks()
            deleted.set_result(DeletedMemory(frames, max(0, held - memory.held_bytes)))
        except Exception as error:
            deleted.set_exception(error)

    def start(job: Future[None]) -> None:
        # A thread of its own: it may wait for answers, and the writer's threads serve other streams.
        threading.Thread(target=finish, args=(job,), name="memory deletion", daemon=True).start()

    settle().add_done_callback(start)
    return deleted


def unreadable(stream: str) -> UnavailableError:
    """Error of a call that needs a memory whose tier does not answer."""
    return UnavailableError(f"the memory of camera {stream!r} cannot be read now; try again in a moment")


def check_nothing_left(stream: str, manifest: Outcome) -> None:
    """Raise if a closed camera has a memory that could not be opened for a partial deletion: deleting all of it would
    be more than was asked for. ``manifest``: outcome of reading its manifest."""
    if manifest is Outcome.RETRY:
        raise unreadable(stream)
    if manifest is Outcome.HIT:
        raise NotReadyError(
            f"camera {stream!r} has a memory of other settings, part of which can be forgotten only while the camera "
            "runs; start it, or forget everything"
        )


def not_deleted(stream: str) -> UnavailableError:
    """Error of a deletion that some tier has not completed."""
    return UnavailableError(
        f"what camera {stream!r} forgets is not deleted in every tier: one is down, or the camera moved to another "
        "replica; forget it again in a moment"
    )


def expire(memory: StreamMemory, released: ReleasedMemory) -> ReleasedMemory | None:
    """Delete expired frames of a ``released`` memory, not yet restored here, unless another process has written it.

    Returns its updated record, unchanged if its tier is unavailable; None if nothing is left.
    """
    assert released.manifest is not None
    found = released.manifest.compare()
    if found == "later":
        return replace(released, manifest=None)
    memory.newest_s = released.newest_s
    # Blocks that no manifest names may be those of a process that is opening it.
    outcome = Outcome.RETRY if found == "unreadable" else memory.restore(sweep=False)
    if outcome is Outcome.RETRY:
        return released
    # This manifest recognises what the attempt wrote, should it fail.
    released = replace(released, manifest=memory.manifest)
    if outcome is Outcome.HIT and not (memory.settle() and (not memory.frames or memory.save(None) is Outcome.HIT)):
        return released
    if not memory.frames and outcome is Outcome.HIT:
        memory.delete_frames()
    left = MemoryReport.of(memory)
    return replace(released, report=left) if left.frames else None


def whole_clusters(table: ClusterTable, chosen: Tensor) -> Tensor:
    """Indices ``[m]``, ascending, of all tokens of whole clusters: those with the largest shares of ``chosen [n]``
    tokens (of equals the older) that together hold at most ``n``; at least one cluster."""
    of_token, count = table.of_token, table.count
    share = torch.bincount(of_token[chosen], minlength=len(count)) / count
    order = share.argsort(descending=True, stable=True)
    taken = torch.zeros(len(count), dtype=torch.bool)
    taken[order] = count[order].cumsum(0) <= len(chosen)
    taken[order[: int(len(chosen) > 0)]] = True
    return taken[of_token].nonzero()[:, 0]


def _share(memory: StreamMemory, new: Heads, fits: float) -> float:
    """Share of the stored and new tokens to keep, given the share that ``fits``."""
    held = sum(head.tokens for _, _, head in memory.iter_heads())
    target = memory.spec.target
    # New frames that fill the room freed down to the target make every block compress anyway: then only what must go.
    fills = held <= target * (held + sum(head.tokens for row in new for head in row))
    return max(0.1, fits if fills else min(fits, target))


def _thinned(memory: StreamMemory, new: Heads, share: float) -> Heads:
    """The compressor's choice of ``share`` of new tokens."""
    stays = _choose(memory, new, share)
    memory.counts.compressed_away += sum(
        head.tokens - len(kept) for row in zip(new, stays, strict=True) for head, (kept, _) in zip(*row, strict=True)
    )
    return [[_weighed(head, *kept) for head, kept in zip(*row, strict=True)] for row in zip(new, stays, strict=True)]


def _choose(memory: StreamMemory, whole: Heads, share: float) -> list[list[tuple[Tensor, Tensor | None]]]:
    """Per layer and head: ascending indices of the tokens to keep, at least one, and their new weights, if any."""
    most = max(head.tokens for row in whole for head in row)
    if all(head.tokens == most for row in whole for head in row):
        return _select(memory.compressor, [functools.reduce(_joined, row) for row in whole], max(1, int(share * most)))
    # Lost blocks or an interrupted attempt leave heads with different tokens: select for each key head separately.
    columns = []
    for h in range(len(whole[0])):
        layers = [row[h] for row in whole]
        budget = max(1, int(share * max(layer.tokens for layer in layers)))
        columns.append(_select(memory.compressor_of_head(h), layers, budget))
    return [[column[number][0] for column in columns] for number in range(len(whole))]


def _select(compressor: Compressor, layers: Sequence[LayerKV], budget: int) -> list[list[tuple[Tensor, Tensor | None]]]:
    chosen = compressor.select(layers, budget)
    weights = compressor.weigh(layers, chosen)
    return [
        [(kept, None if of is None else of[h]) for h, kept in enumerate(stays)]
        for stays, of in zip(chosen, weights, strict=True)
    ]


def _weighed(head: LayerKV, kept: Tensor, weight: Tensor | None) -> LayerKV:
    """The tokens ``kept [m]`` of one head, with their new weights, if any."""
    some = head.select(kept[None].to(head.frame.device))
    return some if weight is None else replace(some, weight=weight[None].to(some.key.device))


def _bytes_of(memory: StreamMemory, new: Heads) -> float:
    """Estimate the bytes of new tokens from the bytes per stored token, as tiers round small blocks up."""
    tokens = sum(head.tokens for row in new for head in row)
    settled = sum(head.tokens for _, _, head in memory.iter_heads())
    if not settled:
        return _FIRST * tokens * memory.token_bytes
    return _FRESH * tokens * max(memory.token_bytes, _token_cost(memory) / settled)


def _token_cost(memory: StreamMemory) -> int:
    """Stored bytes that grow with the number of tokens."""
    return max(0, memory.stored.named_bytes - _fixed(memory))


def _fixed(memory: StreamMemory) -> int:
    return len(memory.heads) * len(memory.heads[0]) * NAMES_BYTES


def _load_head(memory: StreamMemory, layer: int, h: int) -> tuple[LayerKV, dict[int, Block]] | None:
    """Load all tokens of a head in time order, with their blocks by number. Lost blocks are dropped; None while some
    are unavailable."""
    memory.yield_to_engine()
    while True:
        head = memory.heads[layer][h]
        try:
            blocks = head.load_blocks(range(len(head.table)), memory.block_loader(layer, h))
            break
        except BlocksLostError as error:
            if not memory.drop_lost_clusters(layer, h, error.uids):
                return None
        except BlocksUnavailableError:
            return None
    of_token = head.table.of_token
    # Quantised blocks are loaded as float32.
    dtype = next(iter(blocks.values())).key.dtype if blocks else memory.dtype
    key = torch.empty(head.tokens, head.table.mean.shape[1], dtype=dtype)
    value = torch.empty_like(key)
    order = of_token.argsort(stable=True)
    if blocks:
        key[order] = torch.cat([block.key for block in blocks.values()])
        value[order] = torch.cat([block.value for block in blocks.values()])
    weight = head.weight[None] if len(head.weight) else None
    frame, cell = head.frame.to(torch.int64), head.cell.to(torch.int64)
    kv = LayerKV(key[None], value[None], frame[None], cell[None], weight)
    return kv, {int(head.table.block[cluster]): block for cluster, block in blocks.items()}


def _at_hand(blocks: dict[int, Block], numbers: list[int]) -> list[Loaded]:
    return [Loaded(Outcome.HIT, blocks[number]) for number in numbers]


def _joined(one: LayerKV, other: LayerKV, dim: int = 0) -> LayerKV:
    """Concatenate heads, or with ``dim`` 1 tokens."""
    parts = ("key", "value", "frame", "cell", "weights")
    return LayerKV(
        *(torch.cat([getattr(one, name), getattr(other, name).to(getattr(one, name))], dim) for name in parts)
    )


def join_frames(block: Sequence[KVChunk]) -> list[LayerKV]:
    """Concatenate frames in time, per layer, on the host, where everything that follows is computed. Copied in one go:
    each copy from a GPU waits for all work enqueued before, thousands of times if done by head and block."""
    key, value = _on_host([chunk.key for chunk in block], 2), _on_host([chunk.value for chunk in block], 2)
    cell = _on_host([chunk.cell for chunk in block], 0)
    frame = torch.cat([torch.full((chunk.tokens,), chunk.index) for chunk in block])
    heads = key.shape[1]
    return [
        LayerKV(key[layer], value[layer], frame.expand(heads, -1), cell.expand(heads, -1)) for layer in range(len(key))
    ]


def _on_host(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors on the host, with one transfer per run of neighbours on a device."""
    runs = itertools.groupby(parts, key=lambda part: part.device)
    return torch.cat([torch.cat(list(run), dim).cpu() for _, run in runs], dim)
