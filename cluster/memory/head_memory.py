"""Memory of one layer and key head: metadata and cluster assignment of its tokens, whose KV is stored in blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from cluster.memory.manifest import FrameLog
from cluster.memory.organise import ClusterTable, NewTokens, Organiser
from cluster.memory.organise.table import narrowed, widened
from cluster.memory.tiers.base import Block, Loaded, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class KVChunk:
    """KV of one frame in all layers.

    * ``key``, ``value`` ``[L, Hkv, t, D]``, keys before rotary; owned memory, not views
    * ``cell`` ``[t]`` int64: row-major cell in a grid of ``rows`` x ``columns``; larger numbers are text tokens around
      the frame
    * ``index``, ``pts`` (microseconds, on the memory's clock) of the frame
    * ``mean_embedding`` ``[W]`` float32 of the frame's visual tokens, for organisers that partition frames
    """

    stream: str
    index: int
    pts: int
    key: Tensor
    value: Tensor
    cell: Tensor
    rows: int
    columns: int
    mean_embedding: Tensor

    @property
    def tokens(self) -> int:
        return self.key.shape[2]

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def to(self, dtype: torch.dtype) -> KVChunk:
        """A copy with keys and values converted to ``dtype``."""
        return replace(self, key=self.key.to(dtype), value=self.value.to(dtype))

    def on_host(self) -> KVChunk:
        """A copy in host memory; waits for the device to compute it."""
        parts = {name: getattr(self, name).cpu() for name in ("key", "value", "cell", "mean_embedding")}
        return replace(self, **parts)

    def on_grid(self, rows: int, columns: int) -> KVChunk:
        """A copy with cells mapped to another grid: a memory has one grid, but a camera may change its picture size."""
        if (rows, columns) == (self.rows, self.columns):
            return self
        text = self.cell - self.rows * self.columns
        row = (self.cell // self.columns * 2 + 1) * rows // (2 * self.rows)
        column = (self.cell % self.columns * 2 + 1) * columns // (2 * self.columns)
        cell = torch.where(text < 0, row * columns + column, rows * columns + text)
        return replace(self, cell=cell, rows=rows, columns=columns)


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Shape of the stored KV: ``layers``, key ``heads`` per layer, ``width`` of a key."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype


KVSink = Callable[[KVChunk], None]
"""Receives KV that leaves a window; called on the engine's thread, in time order per stream."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """``n`` tokens of each of ``H`` key heads, in time order.

    * ``key``, ``value`` ``[H, n, D]``; keys before rotary, so that tokens of one cell are comparable across time
    * ``frame`` ``[H, n]`` int64: frame number, ascending
    * ``cell`` ``[H, n]`` int64: row-major cell in the frame's grid
    * ``weight`` ``[H, n]`` float32: the compressor's state per token (:meth:`Compressor.weigh`); None: all 1

    Raises:
        ValueError: inconsistent shapes, or frames that do not ascend.
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        if self.key.ndim != 3 or self.key.shape != self.value.shape:
            raise ValueError(
                f"keys {tuple(self.key.shape)} and values {tuple(self.value.shape)} must both be [H, n, D]"
            )
        if self.frame.shape != self.key.shape[:2] or self.cell.shape != self.key.shape[:2]:
            raise ValueError(f"every one of the {tuple(self.key.shape[:2])} tokens needs a frame and a cell")
        if self.tokens > 1 and bool((self.frame[:, 1:] < self.frame[:, :-1]).any()):
            raise ValueError("tokens must be in time order")

    @property
    def heads(self) -> int:
        return self.key.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens per head."""
        return self.key.shape[1]

    @property
    def weights(self) -> Tensor:
        return torch.ones(self.frame.shape, device=self.key.device) if self.weight is None else self.weight

    def of_head(self, head: int, first: int) -> LayerKV:
        """The tokens of one head from index ``first`` on, as views."""
        of = slice(head, head + 1), slice(first, None)
        weight = None if self.weight is None else self.weight[of]
        return LayerKV(self.key[of], self.value[of], self.frame[of], self.cell[of], weight)

    def select(self, kept: Tensor) -> LayerKV:
        """Select the tokens ``kept [H, m]`` int64, ascending in each head."""
        wide = kept[..., None].expand(-1, -1, self.key.shape[2])
        frame, cell = self.frame.gather(1, kept), self.cell.gather(1, kept)
        weight = None if self.weight is None else self.weight.gather(1, kept)
        return LayerKV(self.key.gather(1, wide), self.value.gather(1, wide), frame, cell, weight)


Load = Callable[[list[int]], list[Loaded]]
"""Block numbers -> loaded blocks."""

NAMES_BYTES = 1280
"""Overhead of a head's serialised state on top of its tensors."""


class BlocksUnavailableError(Exception):
    """Required blocks cannot be loaded now."""


class BlocksLostError(Exception):
    """Required blocks are permanently lost; ``uids``: of their clusters."""

    def __init__(self, uids: Sequence[int]) -> None:
        super().__init__(f"{len(uids)} blocks are lost")
        self.uids = list(uids)


@dataclass(slots=True)
class HeadChange:
    """Clusters (table indices) whose members changed, and their new blocks."""

    clusters: list[int]
    blocks: list[Block]


class HeadMemory:
    """Tokens of one head in time order, assigned to clusters.

    ``frame``, ``cell`` ``[n]`` int32; the table names one block per cluster. ``settled``: frames below this number are
    stored. ``weight`` ``[n]`` float32: the compressor's, empty while all are 1. ``channels`` ``[2, 2, D]``:
    quantisation parameters, ``[0, 2, D]`` before the first block. Copy-on-write: readers may hold a head, so
    :meth:`copy` it, change the copy and swap it in.
    """

    def __init__(self, organiser: Organiser) -> None:
        self.organiser = organiser
        self.frame = torch.zeros(0, dtype=torch.int32)
        self.cell = torch.zeros(0, dtype=torch.int32)
        self.weight = torch.zeros(0)
        self.channels = torch.zeros(0, 2, organiser.table.mean.shape[1])
        self.settled = 0

    def copy(self) -> Self:
        other = copy.copy(self)
        other.organiser = self.organiser.copy()
        return other

    @property
    def tokens(self) -> int:
        return len(self.frame)

    @property
    def table(self) -> ClusterTable:
        return self.organiser.table

    @property
    def index_bytes(self) -> int:
        tensors = (self.frame, self.cell, self.weight, self.channels, *self.organiser.state().values())
        return sum(each.nbytes for each in tensors) + self.table.nbytes + NAMES_BYTES

    def cluster_numbers(self, uids: Sequence[int]) -> list[int]:
        """Table indices of the clusters ``uids``; missing ones are skipped."""
        table = self.table
        wanted = torch.tensor(list(uids), dtype=torch.int64)
        at = torch.searchsorted(table.uid, wanted)
        return [
            n for n, uid in zip(at.tolist(), wanted.tolist(), strict=True) if n < len(table) and table.uid[n] == uid
        ]

    def representatives(self, clusters: Tensor) -> Block:
        """Mean key and value of each of ``clusters`` ``[m]``, as one token with its middle member's frame and cell."""
        table = self.table
        first = table.count.cumsum(0) - table.count
        middle = table.order()[first[clusters] + table.count[clusters] // 2]
        return Block(table.mean[clusters], table.value_mean[clusters], self.frame[middle], self.cell[middle])

    # -- blocks -----------------------------------------------------------------------------------
    def clusters_between(self, first: int, last: int) -> Tensor:
        """Clusters ``[m]``, ascending, with a token in the frames ``first`` to ``last``, inclusive."""
        there = (self.frame >= first) & (self.frame <= last)
        found: Tensor = torch.unique(self.table.of_token[there])
        return found

    def load_blocks(self, clusters: Sequence[int], load: Load) -> dict[int, Block]:
        """Load the blocks of clusters, by table index. ``BlocksLostError`` if some are permanently lost,
        ``BlocksUnavailableError`` if some cannot be loaded now."""
        if not clusters:
            return {}
        loaded = load(self.table.block[list(clusters)].tolist())
        pairs = list(zip(clusters, loaded, strict=True))
        if gone := [cluster for cluster, one in pairs if one.outcome is Outcome.MISS]:
            raise BlocksLostError(self.table.uid[gone].tolist())
        blocks = {cluster: one.block for cluster, one in pairs if one.block is not None}
        if len(blocks) < len(pairs):
            raise BlocksUnavailableError
        return blocks

    # -- tokens in --------------------------------------------------------------------------------
    def add_tokens(self, tokens: NewTokens, cell: Tensor, weight: Tensor, load: Load, resident: Load) -> HeadChange:
        """Add new tokens (``cell``, ``weight`` ``[t]``). ``resident`` loads only what the uppermost tier holds.

        Raises:
            BlocksLostError, BlocksUnavailableError: see :meth:`load_blocks`; this copy is then unusable.
        """
        before, known = self.copy(), len(self.table)
        old: dict[int, Block] = {}

        def at_hand(clusters: Tensor) -> Tensor:
            found = [one.block for one in resident(before.table.block[clusters].tolist())]
            old.update({n: block for n, block in zip(clusters.tolist(), found, strict=True) if block is not None})
            return torch.tensor([block is not None for block in found], dtype=torch.bool)

        numbers = self.organiser.add(tokens, at_hand)
        frame, cell = tokens.frame.to(torch.int32), cell.to(torch.int32)
        if len(self.weight) or bool((weight != 1).any()):
            held = self.weight if len(self.weight) else torch.ones(len(self.frame))
            self.weight = torch.cat([held, weight])
        self.frame, self.cell = torch.cat([self.frame, frame]), torch.cat([self.cell, cell])
        order = numbers.argsort(stable=True)
        there = order.to(tokens.key.device)
        found, counts = torch.unique_consecutive(numbers[order], return_counts=True)
        clusters, sizes = found.tolist(), counts.tolist()
        old |= before.load_blocks([cluster for cluster in clusters if cluster < known and cluster not in old], load)
        parts = (tokens.key[there], tokens.value[there], frame[order], cell[order])
        new = [Block(*each) for each in zip(*(torch.split(part, sizes) for part in parts), strict=True)]
        return HeadChange(
            clusters,
            [_concatenated([old[n], block]) if n in old else block for n, block in zip(clusters, new, strict=True)],
        )

    def split_cluster(self, cluster: int, resident: Load) -> HeadChange:
        """Merge the resident clusters founded for a cluster into it, and split it if the organiser requires.
        ``BlocksUnavailableError`` if its own members are not resident."""
        numbers = torch.cat([torch.tensor([cluster]), self.organiser.founded_for(cluster)])
        found = [one.block for one in resident(self.table.block[numbers].tolist())]
        if found[0] is None:
            raise BlocksUnavailableError
        parts = [(number, block) for number, block in zip(numbers.tolist(), found, strict=True) if block is not None]
        at, order = torch.cat([self.table.members(number) for number, _ in parts]).sort()
        block = _concatenated([block for _, block in parts]).select(order)
        if len(parts) > 1:
            self.organiser.merge(cluster, torch.tensor([number for number, _ in parts[1:]]))
        new = self.organiser.split(cluster, block.key, block.value, block.frame.to(torch.int64))
        if new is None:
            return HeadChange([cluster], [block]) if len(parts) > 1 else HeadChange([], [])
        leaves = self.table.of_token[at] == new
        return HeadChange([cluster, new], [block.select(rows.nonzero()[:, 0]) for rows in (~leaves, leaves)])

    # -- tokens out -------------------------------------------------------------------------------
    def keep_tokens(self, kept: Tensor, load: Load, weight: Tensor | None = None) -> HeadChange:
        """Keep only the tokens ``kept`` (ascending indices), with new weights ``[m]`` if given.

        Raises:
            BlocksLostError, BlocksUnavailableError: see :meth:`load_blocks`; nothing has changed then.
        """
        of_token, uid = self.table.of_token, self.table.uid
        stays = torch.zeros(self.tokens, dtype=torch.bool)
        stays[kept] = True
        thinned, remaining = torch.unique(of_token[~stays]), torch.unique(of_token[stays])
        partly = thinned[torch.isin(thinned, remaining)].tolist()
        blocks = self.load_blocks(partly, load)
        # A block's rows are in the order of its cluster's members.
        members = torch.split(self.table.order(), self.table.count.tolist())
        left = {n: block.select(stays[members[n]].nonzero()[:, 0]) for n, block in blocks.items()}
        uids = [int(uid[cluster]) for cluster in partly]
        thinned_tokens = torch.cat([kept[:0], *(members[n][stays[members[n]]] for n in left)])
        self._narrow(kept, torch.searchsorted(kept, thinned_tokens), list(left.values()))
        if weight is not None:
            self.weight = weight
        return HeadChange(self.cluster_numbers(uids), list(left.values()))

    def drop_clusters(self, uids: Sequence[int]) -> int:
        """Drop the tokens of clusters whose blocks are lost; returns how many."""
        of_token = self.table.uid[self.table.of_token]
        kept = (~torch.isin(of_token, torch.tensor(list(uids), dtype=torch.int64))).nonzero()[:, 0]
        lost = self.tokens - len(kept)
        if lost:
            self._narrow(kept, kept[:0], [])
        return lost

    def _narrow(self, kept: Tensor, rows: Tensor, blocks: Sequence[Block]) -> None:
        """Keep only ``kept [m]``. ``blocks``: the remaining members of clusters that lose some; ``rows``: their indices
        in ``kept``. Other clusters keep their statistics, so their KV is not needed."""
        key = torch.zeros(len(kept), self.table.mean.shape[1])
        value = torch.zeros_like(key)
        if blocks:
            key[rows] = torch.cat([block.key.float() for block in blocks])
            value[rows] = torch.cat([block.value.float() for block in blocks])
        frame, cell = self.frame[kept], self.cell[kept]
        self.table.keep_tokens(kept, key, value, frame.to(torch.int64))
        self.frame, self.cell = frame, cell
        if len(self.weight):
            self.weight = self.weight[kept]

    # -- restoring --------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        parts = {"own": self.organiser.state(), "table": self.table.state()}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        weight = {"weight": self.weight} if len(self.weight) else {}
        own = {name: narrowed(getattr(self, name)) for name in ("frame", "cell", "channels")}
        return {**own, "settled": torch.tensor(self.settled), **weight, **named}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state` into an empty head; ``ValueError`` if it is inconsistent, or of another organiser or
        width."""
        own, state = {"weight": self.weight, **self.state()}, {"weight": self.weight, **state}
        if own.keys() != state.keys():
            raise ValueError(f"state of another organiser: {', '.join(sorted(own.keys() ^ state.keys()))}")
        for name, mine in own.items():
            if _kind(state[name]) != _kind(mine):
                raise ValueError(f"{name} is {state[name].dtype} {tuple(state[name].shape)}")
        table = ClusterTable.restore(_under("table.", state))
        table.validate()
        if not len(state["frame"]) == len(state["cell"]) == table.tokens:
            raise ValueError("frames, cells and clusters disagree on the number of tokens")
        if len(state["weight"]) not in (0, table.tokens):
            raise ValueError(f"{len(state['weight'])} weights of {table.tokens} tokens")
        if len(state["channels"]) not in (0, 2):
            raise ValueError(f"{len(state['channels'])} channel statistics instead of those of keys and values")
        if bool((state["frame"][1:] < state["frame"][:-1]).any()):
            raise ValueError("tokens are not in time order")
        self.frame, self.cell = state["frame"].to(torch.int32), state["cell"].to(torch.int32)
        self.settled = int(state["settled"])
        self.weight, self.channels = state["weight"], state["channels"]
        self.organiser.table = table
        self.organiser.load_state(_under("own.", state))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """Immutable snapshot of a memory for a reader.

    ``heads``: per layer; ``recent``: frames not clustered yet; ``first_frame``: earlier frames are deleted.
    """

    stream: str
    heads: tuple[tuple[HeadMemory, ...], ...]
    recent: tuple[KVChunk, ...]
    log: FrameLog
    first_frame: int
    generation: int


def _concatenated(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks, on the device of the last."""
    device = blocks[-1].key.device
    return Block(
        torch.cat([block.key.to(device) for block in blocks]),
        torch.cat([block.value.to(device) for block in blocks]),
        torch.cat([block.frame for block in blocks]),
        torch.cat([block.cell for block in blocks]),
    )


def _kind(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Number of dimensions, shape without the first, and widened dtype: equal in compatible states."""
    return tensor.ndim, tensor.shape[1:], widened(tensor.new_empty(0)).dtype


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
