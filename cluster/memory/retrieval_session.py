"""Retrieval for one question: per layer, the clusters its query selects, prefetched by predicted queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor
    valid: Tensor

    @property
    def tokens(self) -> int:
        return int(self.valid.shape[1])


@dataclass(slots=True)
class RetrievalStats:
    """Tokens summed over layers and heads: ``held_tokens`` in memory, ``fetched_tokens``. Clusters fetched
    (``clusters``), not loadable now (``unavailable``) and lost for good (``lost``). ``tokens_by_frame``: fetched, by
    frame number."""

    held_tokens: int = 0
    fetched_tokens: int = 0
    clusters: int = 0
    unavailable: int = 0
    lost: int = 0
    bytes: int = 0
    tokens_by_frame: dict[int, int] = field(default_factory=dict)

    @property
    def fetched_share(self) -> float:
        """Share of the held tokens that was fetched."""
        return self.fetched_tokens / self.held_tokens if self.held_tokens else 0.0


class RetrievalSession:
    """Reads a snapshot of a memory for one question; a context manager.

    Args:
        memory: of the camera that is asked about.
        retriever: selects the clusters for a query.
        first_frame: older frames are left out.
        prefetch: whether :meth:`prefetch` loads anything.
        device, dtype: of the returned tensors.
    """

    def __init__(
        self,
        memory: StreamMemory,
        retriever: Retriever,
        *,
        first_frame: int = 0,
        prefetch: bool = True,
        deadline_s: float = 2.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory, self.retriever, self._predictor = memory, retriever, retriever.for_prediction()
        self.view = memory.open_view()
        self.first_frame = max(first_frame, self.view.first_frame)
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

    def close(self) -> None:
        """End the loads and report lost clusters to the memory."""
        self._prefetcher.close()
        if not self._closed:
            self._closed = True
            self.memory.close_view(self.view, self._gone)

    @property
    def prefetches(self) -> bool:
        """Whether predictions are of use."""
        return self._prefetch and bool(self.view.heads)

    def prefetch(self, layer: int, query: Tensor) -> None:
        """Start loading what the predicted raw query rows ``[H, r, D]`` of a layer select; returns at once."""
        if self.prefetches:
            wanted = self._wanted(layer, query, self._predictor)
            self._prefetcher.prefetch([key for per_head in wanted for key in per_head])

    def fetch(self, layer: int, query: Tensor) -> RetrievedKV:
        """KV for the raw query rows ``[H, r, D]`` of a layer, in time order; frames not clustered yet are always
        included."""
        keys = self._wanted(layer, query, self.retriever)
        flat = [key for per_head in keys for key in per_head]
        blocks = dict(zip(flat, self._prefetcher.fetch(flat), strict=True)) if flat else {}
        parts = [self._blocks(layer, h, blocks, keys[h]) for h in range(len(keys))] if keys else []
        if not parts:
            heads, _, width = query.shape
            parts = [self._waiting(layer, h, width) for h in range(heads)]
        else:
            parts = [
                _one([part, self._waiting(layer, h, query.shape[2])], query.shape[2], self.dtype)
                for h, part in enumerate(parts)
            ]
        return self._side_by_side(parts)

    def _wanted(self, layer: int, query: Tensor, retriever: Retriever) -> list[list[BlockKey]]:
        """Per head, the blocks that its query rows select."""
        if not self.view.heads:
            return []
        tables = [head.table for head in self.view.heads[layer]]
        found = retriever.select_layer(query.to(tables[0].device), tables)
        wanted = []
        for h, (table, retrieved) in enumerate(zip(tables, found, strict=True)):
            chosen = retrieved.clusters[table.latest[retrieved.clusters] >= self.first_frame]
            wanted.append([BlockKey(self.view.stream, layer, h, number) for number in table.block[chosen].tolist()])
        return wanted

    def _blocks(self, layer: int, h: int, blocks: dict[BlockKey, Loaded], keys: Sequence[BlockKey]) -> Block:
        """The loaded blocks of one head, concatenated, without frames before ``first_frame``."""
        head = self.view.heads[layer][h]
        self.stats.held_tokens += head.tokens
        clusters = {number: cluster for cluster, number in enumerate(head.table.block.tolist())}
        found = []
        for key in keys:
            loaded, cluster = blocks[key], clusters[key.block]
            if loaded.block is not None and head.matches_cluster(cluster, loaded.block):
                found.append(loaded.block)
                self.stats.bytes += loaded.block.nbytes
            elif loaded.block is not None or loaded.outcome is Outcome.MISS:
                self.stats.lost += 1
                self._gone.append((layer, h, int(head.table.uid[cluster])))
            else:
                self.stats.unavailable += 1
        self.stats.clusters += len(found)
        whole = _one(found, head.table.mean.shape[1], self.dtype)
        if self.first_frame:
            recent = (whole.frame >= self.first_frame).nonzero()[:, 0]
            whole = Block(whole.key[recent], whole.value[recent], whole.frame[recent], whole.cell[recent])
        self.stats.fetched_tokens += len(whole)
        for number, count in zip(*(t.tolist() for t in torch.unique(whole.frame, return_counts=True)), strict=True):
            self.stats.tokens_by_frame[number] = self.stats.tokens_by_frame.get(number, 0) + count
        return whole

    def _waiting(self, layer: int, h: int, width: int) -> Block:
        """Tokens of frames that are not clustered in this head yet."""
        first = max(self.first_frame, self.view.heads[layer][h].settled if self.view.heads else 0)
        parts = [
            Block(
                chunk.key[layer, h],
                chunk.value[layer, h],
                torch.full((chunk.tokens,), chunk.index, dtype=torch.int32),
                chunk.cell.to(torch.int32),
            )
            for chunk in self._recent
            if chunk.index >= first
        ]
        return _one(parts, width, self.dtype)

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
        return RetrievedKV(*(tensor.to(self.device) for tensor in (key, value, frame, cell, there)))


def _one(parts: Sequence[Block], width: int, dtype: torch.dtype) -> Block:
    """Concatenate blocks; an empty block for none."""
    none = Block(
        torch.zeros(0, width, dtype=dtype), torch.zeros(0, width, dtype=dtype), *[torch.zeros(0, dtype=torch.int32)] * 2
    )
    parts = [none, *parts]
    return Block(
        torch.cat([part.key.to(dtype) for part in parts]),
        torch.cat([part.value.to(dtype) for part in parts]),
        torch.cat([part.frame for part in parts]),
        torch.cat([part.cell for part in parts]),
    )
