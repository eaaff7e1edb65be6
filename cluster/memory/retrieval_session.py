"""Retrieval for one question: per layer, the clusters its query selects, prefetched by predicted queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from types import TracebackType

import torch
from torch import Tensor

from cluster.memory.head_memory import HeadMemory, whole_blocks
from cluster.memory.prefetch import Prefetcher
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome

# Above every frame's number, which is an int32.
_FRAMES = 2**32


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
        # Where it leaves nothing out, tokens need not be looked through.
        self.before = before if before is not None and len(numbers) and numbers[-1] >= before else None
        self.device, self.dtype = device, dtype
        # Blocks come to the host and are put together there; so are frames that wait.
        self._recent = [
            replace(chunk, key=chunk.key.cpu(), value=chunk.value.cpu(), cell=chunk.cell.cpu())
            for chunk in self.view.recent
        ]
        self.stats = RetrievalStats()
        tiers = memory.tiers
        at_hand = tiers.upper if tiers.upper.at_hand else None
        self._prefetcher = Prefetcher(tiers.load, at_hand=at_hand, deadline_s=deadline_s)
        # Nothing can be further away than the only tier.
        self._ahead = prefetch and at_hand is not tiers.lowest
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
        return self._ahead and bool(self.view.heads)

    def prefetch(self, layer: int, query: Tensor) -> None:
        """Start loading what the predicted raw query rows ``[H, r, D]`` of a layer select; returns at once."""
        if self.prefetches:
            chosen = self._select(layer, query, self._predictor)
            self._prefetcher.prefetch(self._keys(layer, chosen))

    def fetch(self, layer: int, query: Tensor) -> RetrievedKV:
        """KV for the raw query rows ``[H, r, D]`` of a layer, in time order; frames not clustered yet are always
        included."""
        return self.fetch_each(layer, [query])[0]

    def fetch_each(self, layer: int, queries: Sequence[Tensor], deadline_s: float | None = None) -> list[RetrievedKV]:
        """:meth:`fetch` for several groups of rows, each of which selects for itself; a block is loaded once for all.
        ``deadline_s``: longest wait, instead of the session's."""
        chosen = [self._select(layer, query, self.retriever) for query in queries]
        keys = [self._keys(layer, each) for each in chosen]
        flat = list(chain(*keys))
        loaded = iter(self._prefetcher.fetch(flat, deadline_s) if flat else ())
        return [
            self._assembled(layer, query, each, list(islice(loaded, len(of_group))))
            for query, each, of_group in zip(queries, chosen, keys, strict=True)
        ]

    def _assembled(self, layer: int, query: Tensor, chosen: list[Tensor], loaded: Sequence[Loaded]) -> RetrievedKV:
        """One group's KV, of the blocks of its clusters."""
        parts = self._read(layer, chosen, loaded) if loaded else []
        if chosen and self.retriever.representatives:
            parts += [self._representatives(layer, h, clusters) for h, clusters in enumerate(chosen)]
        self.stats.held_tokens += sum(head.tokens for head in self.view.heads[layer]) if chosen else 0
        return self._side_by_side([*parts, *self._waiting(layer)], *query.shape[::2])

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

    def _keys(self, layer: int, chosen: Sequence[Tensor]) -> list[BlockKey]:
        """Blocks of all heads' clusters, head by head."""
        numbers = [head.table.block[clusters] for head, clusters in zip(self._heads(layer), chosen, strict=True)]
        heads = (h for h, clusters in enumerate(chosen) for _ in range(len(clusters)))
        of_head = zip(repeat(self.view.stream), repeat(layer), heads, torch.cat(numbers).tolist() if numbers else ())
        return list(map(BlockKey._make, of_head))

    def _heads(self, layer: int) -> Sequence[HeadMemory]:
        return self.view.heads[layer] if self.view.heads else ()

    def _read(self, layer: int, chosen: Sequence[Tensor], loaded: Sequence[Loaded]) -> list[_Tokens]:
        """Of the blocks of all heads, those that hold what their clusters do; of the frames that are asked about."""
        heads, stats = self.view.heads[layer], self.stats
        places, counts = zip(*map(HeadMemory.members, heads, chosen), strict=True)
        found = whole_blocks(torch.cat(places, dim=1), list(chain(*counts)), [one.block for one in loaded])
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found):
            self._note_missing(layer, chosen, loaded, found)
        if not blocks:
            return []
        size = torch.tensor([0 if block is None else len(block) for block in found])
        of_cluster = torch.arange(len(heads)).repeat_interleave(torch.tensor(list(map(len, chosen))))
        key, value, frame, cell = (
            torch.cat([getattr(block, part) for block in blocks]) for part in ("key", "value", "frame", "cell")
        )
        stats.clusters += len(blocks)
        stats.bytes += key.nbytes + value.nbytes + frame.nbytes + cell.nbytes
        tokens = self._wanted(_Tokens(of_cluster.repeat_interleave(size), key, value, frame, cell))
        stats.fetched_tokens += len(tokens)
        stats.frames.append(tokens.frame)
        return [tokens]

    def _note_missing(
        self, layer: int, chosen: Sequence[Tensor], loaded: Sequence[Loaded], found: Sequence[Block | None]
    ) -> None:
        uids = [
            (h, uid)
            for h, clusters in enumerate(chosen)
            for uid in self.view.heads[layer][h].table.uid[clusters].tolist()
        ]
        for (h, uid), one, block in zip(uids, loaded, found, strict=True):
            if block is None and (one.block is not None or one.outcome is Outcome.MISS):
                self.stats.lost += 1
                self._gone.append((layer, h, uid))
            elif block is None:
                self.stats.unavailable += 1

    def _representatives(self, layer: int, h: int, chosen: Tensor) -> _Tokens:
        """The other clusters of a head as one token each, if their organiser keeps what that takes."""
        head = self.view.heads[layer][h]
        other = torch.ones(len(head.table), dtype=torch.bool, device=chosen.device)
        other[chosen] = False
        if head.table.value_mean.shape != head.table.mean.shape:
            other[:] = False
        block = head.representatives(other.nonzero()[:, 0])
        return self._wanted(_Tokens(torch.full((len(block),), h), block.key, block.value, block.frame, block.cell))

    def _wanted(self, tokens: _Tokens) -> _Tokens:
        """Those of the frames that are asked about."""
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

    def _waiting(self, layer: int) -> list[_Tokens]:
        """Tokens of frames that are not clustered yet; a head may be ahead of others."""
        found = []
        settled = [head.settled for head in self._heads(layer)]
        for chunk in self._recent:
            if not self._is_wanted(chunk.index):
                continue
            heads, count, width = chunk.key[layer].shape
            head = torch.arange(heads).repeat_interleave(count)
            tokens = _Tokens(
                head,
                chunk.key[layer].reshape(-1, width),
                chunk.value[layer].reshape(-1, width),
                torch.full((len(head),), chunk.index, dtype=torch.int32),
                chunk.cell.to(torch.int32).repeat(heads),
            )
            open_heads = torch.tensor([chunk.index >= of_head for of_head in settled] or [True] * heads)
            found.append(tokens if bool(open_heads.all()) else tokens.select(open_heads[head].nonzero()[:, 0]))
        return found

    def _side_by_side(self, parts: Sequence[_Tokens], heads: int, width: int) -> RetrievedKV:
        """Heads ``[H, m]`` in time order, of tokens in any."""
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

        return RetrievedKV(
            padded(width, of=[part.key for part in parts], dtype=self.dtype),
            padded(width, of=[part.value for part in parts], dtype=self.dtype),
            padded(of=[part.frame for part in parts], dtype=torch.int64),
            padded(of=[part.cell for part in parts], dtype=torch.int64),
            (torch.arange(longest) < count[:, None]).to(self.device),
            len(head),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Tokens of a layer's heads: ``head [n]`` int64; the rest as in :class:`Block`."""

    head: Tensor
    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor

    def __len__(self) -> int:
        return len(self.head)

    def select(self, rows: Tensor) -> _Tokens:
        """Tokens by number."""
        there = rows.to(self.key.device)
        return _Tokens(self.head[rows], self.key[there], self.value[there], self.frame[rows], self.cell[rows])
