"""Retrieval for one question: per layer, the clusters its query selects, prefetched by predicted queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType

import torch
from torch import Tensor

from cluster.memory.prefetch import Prefetcher
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class RetrievedKV:
    """KV that a layer attends to, heads padded to the longest.

    * ``key``, ``value`` ``[H, m, D]``; keys before rotary
    * ``frame``, ``cell`` ``[H, m]`` int64; ``valid`` ``[H, m]`` bool: False for padding
    * ``count``: tokens of all heads without padding
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor
    valid: Tensor
    count: int

    @property
    def tokens(self) -> int:
        return int(self.valid.shape[1])


@dataclass(slots=True)
class RetrievalStats:
    """Tokens summed over layers and heads: ``held_tokens`` in memory, ``fetched_tokens``. Clusters fetched
    (``clusters``), not loadable now (``unavailable``) and lost for good (``lost``). ``frames``: of the fetched tokens,
    per layer and head."""

    held_tokens: int = 0
    fetched_tokens: int = 0
    clusters: int = 0
    unavailable: int = 0
    lost: int = 0
    bytes: int = 0
    frames: list[Tensor] = field(default_factory=list)

    @property
    def fetched_share(self) -> float:
        """Share of the held tokens that was fetched."""
        return self.fetched_tokens / self.held_tokens if self.held_tokens else 0.0

    def tokens_by_frame(self) -> dict[int, int]:
        """Fetched tokens by frame number."""
        if not self.frames:
            return {}
        number, count = torch.unique(torch.cat(self.frames), return_counts=True)
        return dict(zip(number.tolist(), count.tolist(), strict=True))


class RetrievalSession:
    """Reads a snapshot of a memory for one question; a context manager.

    Args:
        memory: of the camera that is asked about.
        retriever: selects the clusters for a query.
        first_frame: older frames are left out; last_frame: and those after it, if given. Between the two all tokens
            are read, whatever a query selects.
        before: frames from this number on are left out, if given.
        prefetch: whether :meth:`prefetch` loads anything.
        device, dtype: of the returned tensors.
    """

    def __init__(
        self,
        memory: StreamMemory,
        retriever: Retriever,
        *,
        first_frame: int = 0,
        last_frame: int | None = None,
        before: int | None = None,
        prefetch: bool = True,
        deadline_s: float = 2.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory, self.retriever, self._predictor = memory, retriever, retriever.for_prediction()
        self.view = memory.open_view()
        self.first_frame, self.last_frame = max(first_frame, self.view.first_frame), last_frame
        numbers = self.view.log.numbers
        # Where it leaves nothing out, blocks need not be looked through.
        self.before = before if before is not None and numbers and numbers[-1] >= before else None
        self.device, self.dtype = device, dtype
        # Blocks come to the host and are put together there; so are frames that wait.
        self._recent = [
            replace(chunk, key=chunk.key.cpu(), value=chunk.value.cpu(), cell=chunk.cell.cpu())
            for chunk in self.view.recent
        ]
        self.stats = RetrievalStats()
        self._prefetcher = Prefetcher(memory.tiers.load, deadline_s=deadline_s)
        self._prefetch = prefetch
        # Layer, head and cluster uid of lost blocks.
        self._gone: list[tuple[int, int, int]] = []
        self._closed = False

    def __enter__(self) -> RetrievalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def prefetcher(self) -> Prefetcher:
        return self._prefetcher

    def close(self, *, wait: bool = True) -> None:
        """End the loads and report lost clusters to the memory. ``wait``: for loads in flight."""
        self._prefetcher.close(wait=wait)
        if not self._closed:
            self._closed = True
            self.memory.close_view(self.view, self._gone)

    @property
    def index_device(self) -> torch.device:
        """Where clusters are selected."""
        return self.view.heads[0][0].table.device if self.view.heads else torch.device("cpu")

    @property
    def prefetches(self) -> bool:
        """Whether predictions are of use."""
        return self._prefetch and bool(self.view.heads)

    def prefetch(self, layer: int, query: Tensor) -> None:
        """Start loading what the predicted raw query rows ``[H, r, D]`` of a layer select; returns at once."""
        if self.prefetches:
            chosen = self._select(layer, query, self._predictor)
            self._prefetcher.prefetch([key for keys in self._keys(layer, chosen) for key in keys])

    def fetch(self, layer: int, query: Tensor) -> RetrievedKV:
        """KV for the raw query rows ``[H, r, D]`` of a layer, in time order; frames not clustered yet are always
        included."""
        return self.fetch_each(layer, [query])[0]

    def fetch_each(self, layer: int, queries: Sequence[Tensor], deadline_s: float | None = None) -> list[RetrievedKV]:
        """:meth:`fetch` for several groups of rows, each of which selects for itself; a block is loaded once for all.
        ``deadline_s``: longest wait, instead of the session's."""
        chosen = [self._select(layer, query, self.retriever) for query in queries]
        keys = [self._keys(layer, each) for each in chosen]
        flat = [key for group in keys for per_head in group for key in per_head]
        loaded = iter(self._prefetcher.fetch(flat, deadline_s) if flat else ())
        return [
            self._assembled(layer, query, each, of_group, loaded)
            for query, each, of_group in zip(queries, chosen, keys, strict=True)
        ]

    def _assembled(
        self, layer: int, query: Tensor, chosen: list[Tensor], keys: list[list[BlockKey]], loaded: Iterator[Loaded]
    ) -> RetrievedKV:
        """One group's KV; its blocks are the next of ``loaded``."""
        heads, _, width = query.shape
        parts = []
        for h in range(heads):
            found = self._usable(layer, h, chosen[h], list(islice(loaded, len(keys[h])))) if chosen else []
            if chosen and self.retriever.representatives:
                found += self._representatives(layer, h, chosen[h])
            parts.append(_one([*found, *self._waiting(layer, h)], width, self.dtype))
        return self._side_by_side(parts)

    def _select(self, layer: int, query: Tensor, retriever: Retriever) -> list[Tensor]:
        """Per head, the clusters that its query rows select, ascending; no heads where nothing is clustered."""
        if not self.view.heads:
            return []
        if self.last_frame is not None:
            return [head.clusters_between(self.first_frame, self.last_frame) for head in self.view.heads[layer]]
        tables = [head.table for head in self.view.heads[layer]]
        found = retriever.select_layer(query.to(tables[0].device), tables)
        return [
            retrieved.clusters[table.latest[retrieved.clusters] >= self.first_frame]
            for table, retrieved in zip(tables, found, strict=True)
        ]

    def _keys(self, layer: int, chosen: Sequence[Tensor]) -> list[list[BlockKey]]:
        return (
            [
                [BlockKey(self.view.stream, layer, h, number) for number in head.table.block[clusters].tolist()]
                for h, (head, clusters) in enumerate(zip(self.view.heads[layer], chosen, strict=True))
            ]
            if chosen
            else []
        )

    def _usable(self, layer: int, h: int, clusters: Tensor, loaded: Sequence[Loaded]) -> list[Block]:
        """The blocks of one head that hold what its clusters do, without frames before ``first_frame``."""
        head, stats = self.view.heads[layer][h], self.stats
        stats.held_tokens += head.tokens
        found = head.matching_blocks(clusters, [one.block for one in loaded])
        for uid, one, block in zip(head.table.uid[clusters].tolist(), loaded, found, strict=True):
            if block is None and (one.block is not None or one.outcome is Outcome.MISS):
                stats.lost += 1
                self._gone.append((layer, h, uid))
            stats.unavailable += block is None and one.block is None and one.outcome is not Outcome.MISS
        blocks = [block for block in found if block is not None]
        stats.clusters += len(blocks)
        stats.bytes += sum(block.nbytes for block in blocks)
        if self.first_frame or self.last_frame is not None or self.before is not None:
            blocks = [block.select(self._wanted(block)) for block in blocks]
        stats.fetched_tokens += sum(map(len, blocks))
        stats.frames += [block.frame for block in blocks]
        return blocks

    def _representatives(self, layer: int, h: int, chosen: Tensor) -> list[Block]:
        """The other clusters of a head as one token each, if their organiser keeps what that takes."""
        head = self.view.heads[layer][h]
        if head.table.value_mean.shape != head.table.mean.shape:
            return []
        other = torch.ones(len(head.table), dtype=torch.bool, device=chosen.device)
        other[chosen] = False
        block = head.representatives(other.nonzero()[:, 0])
        return [block.select(self._wanted(block))]

    def _wanted(self, block: Block) -> Tensor:
        """Places of a block's tokens of the frames that are asked about."""
        wanted = block.frame >= self.first_frame
        if self.last_frame is not None:
            wanted &= block.frame <= self.last_frame
        if self.before is not None:
            wanted &= block.frame < self.before
        return wanted.nonzero()[:, 0]

    def _waiting(self, layer: int, h: int) -> list[Block]:
        """Tokens of frames that are not clustered in this head yet."""
        first = max(self.first_frame, self.view.heads[layer][h].settled if self.view.heads else 0)
        return [
            Block(
                chunk.key[layer, h],
                chunk.value[layer, h],
                torch.full((chunk.tokens,), chunk.index, dtype=torch.int32),
                chunk.cell.to(torch.int32),
            )
            for chunk in self._recent
            if chunk.index >= first
            and (self.last_frame is None or chunk.index <= self.last_frame)
            and (self.before is None or chunk.index < self.before)
        ]

    def _side_by_side(self, parts: Sequence[Block]) -> RetrievedKV:
        longest = max(len(part) for part in parts)
        width = parts[0].key.shape[1]
        key = torch.zeros(len(parts), longest, width, dtype=self.dtype)
        value = torch.zeros_like(key)
        frame = torch.zeros(len(parts), longest, dtype=torch.int64)
        cell = torch.zeros_like(frame)
        there = torch.zeros(len(parts), longest, dtype=torch.bool)
        for h, part in enumerate(parts):
            order = part.frame.argsort(stable=True)
            count = len(part)
            key[h, :count], value[h, :count] = part.key[order].cpu(), part.value[order].cpu()
            frame[h, :count], cell[h, :count] = part.frame[order].long(), part.cell[order].long()
            there[h, :count] = True
        key, value, frame, cell, there = (each.to(self.device) for each in (key, value, frame, cell, there))
        return RetrievedKV(key, value, frame, cell, there, sum(map(len, parts)))


def _one(parts: Sequence[Block], width: int, dtype: torch.dtype) -> Block:
    """Concatenate blocks; an empty block for none."""
    if not parts:
        none = torch.zeros(0, width, dtype=dtype)
        return Block(none, none, *[torch.zeros(0, dtype=torch.int32)] * 2)
    return Block(
        torch.cat([part.key for part in parts]).to(dtype),
        torch.cat([part.value for part in parts]).to(dtype),
        torch.cat([part.frame for part in parts]),
        torch.cat([part.cell for part in parts]),
    )
