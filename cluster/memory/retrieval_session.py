"""Retrieval for one question: fetches the clusters each layer's query selects, prefetched by predicted queries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor

from cluster.memory.head_memory import HeadMemory
from cluster.memory.prefetch import Prefetcher
from cluster.memory.quantise import dequantise_kv
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import BlockKey, Loaded, Outcome

# Exceeds every frame number, which is an int32: head * _FRAMES + frame sorts by head, then time.
_FRAMES = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class RetrievedKV:
    """KV that a layer attends to, heads padded to the longest.

    * ``key``, ``value`` ``[H, m, D]``; keys before rotary
    * ``frame``, ``cell`` ``[H, m]`` int64; ``valid`` ``[H, m]`` bool: False for padding
    * ``count``: tokens over all heads without padding; ``read``: those read by each group of query rows
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor
    valid: Tensor
    count: int
    read: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return int(self.valid.shape[1])


@dataclass(slots=True)
class RetrievalStats:
    """Tokens summed over layers and heads: ``held_tokens`` in memory, ``fetched_tokens``. ``clusters`` fetched, not
    loadable now (``unavailable``) and permanently ``lost``. ``frames``: of the fetched tokens, per layer and head."""

    held_tokens: int = 0
    fetched_tokens: int = 0
    clusters: int = 0
    unavailable: int = 0
    lost: int = 0
    bytes: int = 0
    frames: list[Tensor] = field(default_factory=list)

    def tokens_by_frame(self) -> dict[int, int]:
        if not self.frames:
            return {}
        number, count = torch.unique(torch.cat(self.frames), return_counts=True)
        return dict(zip(number.tolist(), count.tolist(), strict=True))


class RetrievalSession:
    """Reads a snapshot of a memory for one question; a context manager.

    Args:
        memory: the camera's memory.
        retriever: selects the clusters for a query.
        first_frame: earlier frames are excluded, and queries select among the rest.
        last_frame: if given, later frames are excluded, and all tokens in between are read, whatever queries select.
        before: if given, frames from this number on are excluded.
        prefetch: whether :meth:`prefetch` loads anything; None lets :class:`LoadAhead` decide.
        deadline_s, budget_s: maximum wait of one fetch, and of all together, as they block the engine's thread. Blocks
            that arrive later count as unavailable.
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
        prefetch: bool | None = None,
        deadline_s: float = 2.0,
        budget_s: float = 4.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory, self.retriever, self._predictor = memory, retriever, retriever.for_prediction()
        self.device, self.dtype = device, dtype
        self.stats = RetrievalStats()
        tiers = memory.tiers
        at_hand = tiers.upper if tiers.upper.at_hand else None
        self.prefetcher = Prefetcher(tiers.load, at_hand=at_hand, deadline_s=deadline_s)
        self._deadline_s, self._budget_s = deadline_s, budget_s
        # With a single tier there is nothing to prefetch.
        further = at_hand is not tiers.lowest
        self._choice = tiers.load_ahead if further and prefetch is None else None
        self._ahead = self._choice.choose() if self._choice else further and bool(prefetch)
        # When each layer's blocks had arrived, to compare with and without prefetch.
        self._fetched_s: list[float] = []
        # Layer, head and cluster uid of lost blocks.
        self._gone: list[tuple[int, int, int]] = []
        self._closed = False
        self.view = memory.open_view()
        try:
            self.first_frame, self.last_frame = max(first_frame, self.view.first_frame), last_frame
            numbers = self.view.log.numbers
            # None if it excludes nothing, which saves filtering tokens.
            self.before = before if before is not None and len(numbers) and numbers[-1] >= before else None
            # Keys and values of waiting frames, copied to the host, where they are joined with blocks.
            waiting = [chunk for chunk in self.view.recent if self._is_wanted(chunk.index)]
            self._recent = [(chunk.key.cpu(), chunk.value.cpu()) for chunk in waiting]
            # Frame and cell of all their tokens.
            self._recent_places = tuple(
                torch.cat([torch.zeros(0, dtype=torch.int32), *parts])
                for parts in (
                    [torch.full((chunk.tokens,), chunk.index, dtype=torch.int32) for chunk in waiting],
                    [chunk.cell.cpu().to(torch.int32) for chunk in waiting],
                )
            )
        except BaseException:
            # An open view delays the deletion of replaced blocks.
            self.close(wait=False)
            raise

    def __enter__(self) -> RetrievalSession:
        return self

    def __exit__(self, *error: object) -> None:
        # The engine's thread must not wait for a hanging tier.
        self.close(wait=False)

    def close(self, *, wait: bool = True) -> None:
        """Stop loading and report lost clusters to the memory. ``wait``: for loads in flight."""
        self.prefetcher.close(wait=wait)
        if not self._closed:
            self._closed = True
            if self._choice is not None and len(self._fetched_s) > 1:
                self._choice.note(self._ahead, (self._fetched_s[-1] - self._fetched_s[0]) / (len(self._fetched_s) - 1))
            self.memory.close_view(self.view, self._gone)

    @property
    def prefetches(self) -> bool:
        """Whether predicted queries are used."""
        return self._ahead and bool(self.view.heads)

    def prefetch(self, layer: int, query: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Start loading the blocks that a layer's predicted raw query rows ``[H, r, D]`` select, in groups of ``sizes``
        as in :meth:`fetch_groups`; returns at once."""
        if self.prefetches:
            chosen = self._select(layer, query, sizes or [query.shape[1]], self._predictor)
            self.prefetcher.prefetch(self._keys(layer, list(map(_of_any, chosen))))

    def fetch(self, layer: int, query: Tensor) -> RetrievedKV:
        """KV for a layer's raw query rows ``[H, r, D]``, in time order; includes all frames not clustered yet."""
        return self.fetch_groups(layer, query, [query.shape[1]])[0]

    def fetch_groups(
        self, layer: int, query: Tensor, sizes: Sequence[int], deadline_s: float | None = None
    ) -> tuple[RetrievedKV, Tensor]:
        """:meth:`fetch` for ``F`` groups of consecutive rows, ``sizes`` per head, that select independently. Returns
        the union of what they read, and which group reads which token, ``[F, H, m]`` bool. ``deadline_s``: overrides
        the session's."""
        chosen = self._select(layer, query, sizes, self.retriever)
        clusters = list(map(_of_any, chosen))
        keys = self._keys(layer, clusters)
        left_s = max(0.0, self._budget_s - self.prefetcher.stats.waited_s)
        deadline_s = min(left_s, self._deadline_s if deadline_s is None else deadline_s)
        loaded = self.prefetcher.fetch(keys, deadline_s) if keys else []
        if self._choice is not None and keys:
            self._fetched_s.append(time.perf_counter())
        parts = self._read(layer, chosen, clusters, loaded) if keys else []
        if self.retriever.representatives:
            parts += [self._representatives(layer, h, of_head) for h, of_head in enumerate(chosen)]
        self.stats.held_tokens += len(sizes) * sum(head.tokens for head in self._heads(layer))
        parts += self._waiting(layer, len(sizes))
        return self._pad_heads(parts, len(query), query.shape[2], len(sizes))

    def _select(self, layer: int, query: Tensor, sizes: Sequence[int], retriever: Retriever) -> list[Tensor]:
        """Per head, which group of its query rows reads which cluster ``[F, c]``; empty if nothing is clustered."""
        heads = self._heads(layer)
        if not heads:
            return []
        tables = [head.table for head in heads]
        if self.last_frame is not None:
            chosen = [torch.zeros(len(sizes), len(table), dtype=torch.bool) for table in tables]
            for of_head, head in zip(chosen, heads, strict=True):
                of_head[:, head.clusters_between(self.first_frame, self.last_frame)] = True
            return chosen
        asked = [table.latest >= self.first_frame for table in tables] if self.first_frame else []
        if all(bool(each.all()) for each in asked):
            return retriever.select_groups(query.cpu(), sizes, tables)
        # Excluded clusters must not count towards the retriever's shares.
        numbers = [each.nonzero()[:, 0] for each in asked]
        narrowed = [table.subset(of_head) for table, of_head in zip(tables, numbers, strict=True)]
        chosen = [torch.zeros(len(sizes), len(table), dtype=torch.bool) for table in tables]
        found = retriever.select_groups(query.cpu(), sizes, narrowed)
        for of_head, number, groups in zip(chosen, numbers, found, strict=True):
            of_head[:, number] = groups
        return chosen

    def _keys(self, layer: int, clusters: Sequence[Tensor]) -> list[BlockKey]:
        """Blocks of all heads' clusters, head by head."""
        numbers = [head.table.block[of_head] for head, of_head in zip(self._heads(layer), clusters, strict=True)]
        heads = (h for h, of_head in enumerate(clusters) for _ in range(len(of_head)))
        of_head = zip(repeat(self.view.stream), repeat(layer), heads, torch.cat(numbers).tolist() if numbers else ())
        return list(map(BlockKey._make, of_head))

    def _heads(self, layer: int) -> Sequence[HeadMemory]:
        return self.view.heads[layer] if self.view.heads else ()

    def _read(
        self, layer: int, chosen: Sequence[Tensor], clusters: Sequence[Tensor], loaded: Sequence[Loaded]
    ) -> list[_Tokens]:
        """Tokens of the loaded blocks of all heads, without excluded frames."""
        heads, stats = self.view.heads[layer], self.stats
        blocks = [one.block for one in loaded if one.block is not None]
        if len(blocks) < len(loaded):
            self._note_missing(layer, clusters, loaded)
        if not blocks:
            return []
        size = torch.tensor([0 if one.block is None else len(one.block) for one in loaded])
        of_cluster = torch.arange(len(heads)).repeat_interleave(torch.tensor(list(map(len, clusters))))
        readers = torch.cat([groups.T[of_head] for groups, of_head in zip(chosen, clusters, strict=True)])
        key, value, frame, cell = (
            torch.cat([getattr(block, part) for block in blocks]) for part in ("key", "value", "frame", "cell")
        )
        stats.clusters += len(blocks)
        stats.bytes += key.nbytes + value.nbytes + frame.nbytes + cell.nbytes
        head, readers = of_cluster.repeat_interleave(size), readers.repeat_interleave(size, dim=0)
        if key.dtype == torch.int8:
            count = torch.bincount(head, minlength=len(heads)).tolist()
            parts = zip(torch.split(key, count), torch.split(value, count), heads, strict=True)
            restored = [dequantise_kv(k, v, of_head.channels) for k, v, of_head in parts if len(k)]
            key, value = (torch.cat(part) for part in zip(*restored, strict=True))
        tokens = self._wanted(_Tokens(head, key, value, frame, cell, readers))
        stats.fetched_tokens += int(tokens.readers.sum())
        stats.frames.append(tokens.frame)
        return [tokens]

    def _note_missing(self, layer: int, clusters: Sequence[Tensor], loaded: Sequence[Loaded]) -> None:
        uids = [
            (layer, h, uid)
            for h, of_head in enumerate(clusters)
            for uid in self.view.heads[layer][h].table.uid[of_head].tolist()
        ]
        gone = [uid for uid, one in zip(uids, loaded, strict=True) if one.outcome is Outcome.MISS]
        self.stats.lost += len(gone)
        self.stats.unavailable += sum(one.outcome is Outcome.RETRY for one in loaded)
        self._gone += gone

    def _representatives(self, layer: int, h: int, chosen: Tensor) -> _Tokens:
        """A head's clusters that some group does not read, as one token each for it, if the organiser has value
        means."""
        head, other = self.view.heads[layer][h], ~chosen
        if head.table.value_mean.shape != head.table.mean.shape:
            other = torch.zeros_like(chosen)
        block = head.representatives(_of_any(other))
        number, readers = torch.full((len(block),), h), other.T[_of_any(other)]
        return self._wanted(_Tokens(number, block.key, block.value, block.frame, block.cell, readers))

    def _wanted(self, tokens: _Tokens) -> _Tokens:
        if not self.first_frame and self.last_frame is None and self.before is None:
            return tokens
        wanted = tokens.frame >= self.first_frame
        if self.last_frame is not None:
            wanted &= tokens.frame <= self.last_frame
        if self.before is not None:
            wanted &= tokens.frame < self.before
        return tokens.select(wanted.nonzero()[:, 0])

    def _is_wanted(self, frame: int) -> bool:
        late = self.last_frame is not None and frame > self.last_frame
        return frame >= self.first_frame and not late and (self.before is None or frame < self.before)

    def _waiting(self, layer: int, groups: int) -> list[_Tokens]:
        """Tokens of waiting frames, which all groups read, without those that a head has already clustered."""
        if not self._recent:
            return []
        key, value = (torch.cat([part[layer] for part in parts], dim=1) for parts in zip(*self._recent, strict=True))
        heads, count, width = key.shape
        frame, cell = (part.repeat(heads) for part in self._recent_places)
        head = torch.arange(heads).repeat_interleave(count)
        readers = torch.ones(len(head), groups, dtype=torch.bool)
        tokens = _Tokens(head, key.view(-1, width), value.view(-1, width), frame, cell, readers)
        settled = torch.tensor([of_head.settled for of_head in self._heads(layer)] or [0] * heads)
        open_tokens = tokens.frame >= settled[head]
        return [tokens if bool(open_tokens.all()) else tokens.select(open_tokens.nonzero()[:, 0])]

    def _pad_heads(self, parts: Sequence[_Tokens], heads: int, width: int, groups: int) -> tuple[RetrievedKV, Tensor]:
        """Sort unordered tokens by head and time, padded to ``[H, m]``; also returns their readers ``[F, H, m]``."""
        # Empty representatives may have values of width 0.
        parts = [part for part in parts if len(part.head)]
        none = torch.zeros(0, dtype=torch.int64)
        head = torch.cat([none, *(part.head for part in parts)])
        frame = torch.cat([none, *(part.frame.long() for part in parts)])
        order = (head * _FRAMES + frame).argsort(stable=True)
        count = torch.bincount(head, minlength=heads)
        longest = int(count.max())
        before = count.cumsum(0) - count
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(order)) + (torch.arange(heads) * longest - before)[head[order]]

        def padded(*shape: int, of: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
            laid = torch.zeros(heads * longest, *shape, dtype=dtype)
            if of:
                laid[slot] = torch.cat([part.cpu().to(dtype) for part in of])
            return laid.view(heads, longest, *shape).to(self.device)

        # Counted on the host, to avoid a device synchronisation.
        readers = torch.cat([torch.zeros(0, groups, dtype=torch.bool), *(part.readers for part in parts)])
        valid = (torch.arange(longest) < count[:, None]).to(self.device)
        found = RetrievedKV(
            padded(width, of=[part.key for part in parts], dtype=self.dtype),
            padded(width, of=[part.value for part in parts], dtype=self.dtype),
            padded(of=[part.frame for part in parts], dtype=torch.int64),
            padded(of=[part.cell for part in parts], dtype=torch.int64),
            valid,
            len(head),
            readers.sum(0).tolist(),
        )
        if groups == 1:
            return found, valid[None]
        return found, padded(groups, of=[readers], dtype=torch.bool).movedim(2, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Tokens of a layer's heads. ``head [n]`` int64; ``readers [n, F]`` bool: which group reads each; the rest as in
    :class:`Block`."""

    head: Tensor
    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor
    readers: Tensor

    def __len__(self) -> int:
        return len(self.head)

    def select(self, rows: Tensor) -> _Tokens:
        parts = (self.head, self.key, self.value, self.frame, self.cell, self.readers)
        return _Tokens(*(part[rows] for part in parts))


def _of_any(chosen: Tensor) -> Tensor:
    """Ascending indices of the clusters that any group reads; ``chosen [F, c]``."""
    return chosen.any(0).nonzero()[:, 0]
