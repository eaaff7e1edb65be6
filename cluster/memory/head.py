"""One layer's and head's share of a memory: which cluster each token is in, and everything of it but its KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.memory.organise.base import ClusterTable, NewTokens, Organiser
from cluster.memory.tiers.base import Block

Load = Callable[[list[int]], dict[int, Block]]
"""Uids -> the blocks of those clusters that could be had."""

Place = Callable[[Tensor, Tensor], Tensor]
"""``frame, cell [n]`` -> ``[n, 3]``: seconds, row and column of each token."""


@dataclass(slots=True)
class Change:
    """What a call did to the blocks: ``store`` uid -> block as it is now; ``drop`` uids that are no more; ``lost``
    tokens whose block could not be had where it was needed."""

    store: dict[int, Block] = field(default_factory=dict)
    drop: list[int] = field(default_factory=list)
    lost: int = 0


class Head:
    """Tokens in time order, in clusters. ``frame``, ``cell`` ``[n]`` int32; the KV lies in blocks, one per cluster."""

    def __init__(self, organiser: Organiser, place: Place) -> None:
        self.organiser = organiser
        self._place = place
        self.frame = torch.zeros(0, dtype=torch.int32)
        self.cell = torch.zeros(0, dtype=torch.int32)

    @property
    def tokens(self) -> int:
        return len(self.frame)

    def uids(self) -> Tensor:
        """Uid of each token's cluster ``[n]``."""
        table = self.organiser.table
        return table.uid[table.of_token]

    def state(self) -> dict[str, Tensor]:
        """Everything, by name."""
        own = {f"own.{name}": tensor for name, tensor in self.organiser.state().items()}
        table = {f"table.{name}": tensor for name, tensor in self.organiser.table.state().items()}
        return {"frame": self.frame, "cell": self.cell, **table, **own}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave."""
        self.frame, self.cell = state["frame"], state["cell"]
        self.organiser.table = ClusterTable.restore(_under("table.", state))
        self.organiser.load_state(_under("own.", state))

    def add(self, tokens: NewTokens, cell: Tensor, load: Load, resident: Load) -> Change:
        """Take in new tokens (``cell`` ``[t]``). ``resident`` gives only blocks that are at hand at once."""
        before = self.uids()
        known = len(before)
        table = self.organiser.table

        def members(cluster: int) -> Tensor | None:
            uid = int(table.uid[cluster])
            block = resident([uid]).get(uid)
            # A cluster may have grown within this call, by tokens no block holds yet.
            whole = block is not None and len(block) == int((before == uid).sum()) == int(table.count[cluster])
            return block.key if block is not None and whole else None

        self.organiser.add(tokens, members)
        self.frame = torch.cat([self.frame, tokens.frame.to(torch.int32)])
        self.cell = torch.cat([self.cell, cell.to(torch.int32)])
        new = Block(tokens.key, tokens.value, tokens.frame.to(torch.int32), cell.to(torch.int32))
        return self._write(before, known, new, load)

    def split(self, cluster: int, block: Block) -> Change:
        """A cluster that waited for being loaded is split; ``block`` is its own."""
        before = self.uids()
        uid = int(self.organiser.table.uid[cluster])
        place = self._place(block.frame, block.cell)
        self.organiser.split(cluster, block.key, block.value, place, block.frame.to(torch.int64))
        return self._write(before, len(before), None, lambda uids: {uid: block} if uid in uids else {})

    def keep(self, kept: Tensor, load: Load) -> Change:
        """Only the tokens ``kept`` (ascending numbers) stay."""
        uids = self.uids()
        stays = torch.zeros(self.tokens, dtype=torch.bool)
        stays[kept] = True
        thinned = torch.unique(uids[~stays])
        remains = torch.unique(uids[stays])
        partly = thinned[torch.isin(thinned, remains)]
        gone = [int(uid) for uid in thinned[~torch.isin(thinned, remains)]]
        blocks = _whole(load([int(uid) for uid in partly]), uids)
        missing = [int(uid) for uid in partly if int(uid) not in blocks]
        for uid in missing:
            stays[uids == uid] = False
        lost = sum(int((uids[kept] == uid).sum()) for uid in missing)
        # Members of a cluster and of its block stand in the same order.
        change = Change(drop=[*gone, *missing], lost=lost)
        kept = stays.nonzero()[:, 0]
        table = self.organiser.table
        key = torch.zeros(len(kept), table.mean.shape[1])
        value = torch.zeros_like(key)
        number = torch.full((self.tokens,), -1, dtype=torch.int64)
        number[kept] = torch.arange(len(kept))
        for uid, block in blocks.items():
            among = (uids == uid).nonzero()[:, 0]
            there = stays[among].nonzero()[:, 0].to(block.key.device)
            change.store[uid] = part = take(block, there)
            rows = number[among[there.cpu()]]
            key[rows], value[rows] = part.key.float().cpu(), part.value.float().cpu()
        self._narrow(kept, key, value)
        return change

    def lose(self, uid: int) -> int:
        """A cluster's block is gone for good: forget its tokens; returns how many."""
        uids = self.uids()
        kept = (uids != uid).nonzero()[:, 0]
        lost = self.tokens - len(kept)
        if lost:
            # No cluster loses some of its members only, so that nobody's statistics are computed anew.
            zeros = torch.zeros(len(kept), self.organiser.table.mean.shape[1])
            self._narrow(kept, zeros, zeros)
        return lost

    def _narrow(self, kept: Tensor, key: Tensor, value: Tensor) -> None:
        frame, cell = self.frame[kept], self.cell[kept]
        self.organiser.table.keep(kept, key, value, self._place(frame, cell), frame.to(torch.int64))
        self.frame, self.cell = frame, cell

    def _write(self, before: Tensor, known: int, new: Block | None, load: Load) -> Change:
        """Blocks of all clusters whose members are others than ``before``, put together from the old ones and ``new``."""
        now = self.uids()
        moved = now[:known] != before
        touched = torch.unique(torch.cat([now[known:], now[:known][moved], before[moved]]))
        old_tokens = torch.isin(now[:known], touched) | torch.isin(before, touched)
        wanted = [int(uid) for uid in torch.unique(before[old_tokens])]
        blocks = _whole(load(wanted), before)
        missing = torch.tensor([uid for uid in wanted if uid not in blocks], dtype=torch.int64)
        change = Change()
        if len(missing):
            change.lost = self._lose_old(before, missing, new)
            before = before[~torch.isin(before, missing)]
            known, now = len(before), self.uids()
            moved = now[:known] != before
            touched = torch.unique(torch.cat([now[known:], now[:known][moved], before[moved], missing]))
            wanted = list(blocks)
        whole, row = _joined(before, known, [(uid, blocks[uid]) for uid in wanted], new, len(now))
        if whole is not None:
            changed = set(touched.tolist())
            order = now.argsort(stable=True)
            uids, counts = torch.unique_consecutive(now[order], return_counts=True)
            ends = counts.cumsum(0)
            for uid, end, count in zip(uids.tolist(), ends.tolist(), counts.tolist(), strict=True):
                if uid in changed:
                    change.store[uid] = take(whole, row[order[end - count : end]].to(whole.key.device))
        there = set(now.tolist())
        change.drop = [int(uid) for uid in touched if int(uid) not in there]
        return change

    def _lose_old(self, before: Tensor, missing: Tensor, new: Block | None) -> int:
        """Tokens whose block cannot be had leave; what came now stays, in the clusters it was put into."""
        stays = torch.ones(self.tokens, dtype=torch.bool)
        stays[: len(before)] = ~torch.isin(before, missing)
        kept = stays.nonzero()[:, 0]
        key = torch.zeros(len(kept), self.organiser.table.mean.shape[1])
        value = torch.zeros_like(key)
        if new is not None:
            key[-len(new) :], value[-len(new) :] = new.key.float().cpu(), new.value.float().cpu()
        self._narrow(kept, key, value)
        return int((~stays).sum())


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _whole(blocks: dict[int, Block], uids: Tensor) -> dict[int, Block]:
    """Those blocks that hold as many tokens as the head says: another one is of an earlier time."""
    return {uid: block for uid, block in blocks.items() if len(block) == int((uids == uid).sum())}


def take(block: Block, rows: Tensor) -> Block:
    """Some members of a block, as a block of their own."""
    host = rows.cpu()
    return Block(block.key[rows], block.value[rows], block.frame[host], block.cell[host])


def _joined(
    before: Tensor, known: int, blocks: list[tuple[int, Block]], new: Block | None, total: int
) -> tuple[Block | None, Tensor]:
    """All given blocks' members in one, and for each token of the head its row there (-1: not among them)."""
    row = torch.full((total,), -1, dtype=torch.int64)
    parts: list[Block] = []
    first = 0
    for uid, block in blocks:
        row[:known][before == uid] = torch.arange(first, first + len(block))
        first += len(block)
        parts.append(block)
    if new is not None:
        row[known:] = torch.arange(first, first + len(new))
        parts.append(new)
    if not parts:
        return None, row
    device = parts[-1].key.device
    return (
        Block(
            torch.cat([part.key.to(device) for part in parts]),
            torch.cat([part.value.to(device) for part in parts]),
            torch.cat([part.frame for part in parts]),
            torch.cat([part.cell for part in parts]),
        ),
        row,
    )
