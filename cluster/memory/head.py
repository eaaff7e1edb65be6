"""One layer's and head's share of a memory: which cluster each token is in, and everything of it but its KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.memory.organise.base import ClusterTable, NewTokens, Organiser
from cluster.memory.tiers.base import Block, Loaded, Outcome

Load = Callable[[list[int]], dict[int, Loaded]]
"""Uids -> what the tiers say of the blocks of those clusters."""

Place = Callable[[Tensor, Tensor], Tensor]
"""``frame, cell [n]`` -> ``[n, 3]``: seconds, row and column of each token."""


@dataclass(slots=True)
class Change:
    """What a call did to the blocks: ``store`` uid -> block as it is now; ``drop`` uids that are no more; ``lost``
    tokens whose block is gone for good."""

    store: dict[int, Block] = field(default_factory=dict)
    drop: list[int] = field(default_factory=list)
    lost: int = 0


class Head:
    """Tokens in time order, in clusters. ``frame``, ``cell`` ``[n]`` int32; the KV lies in blocks, one per cluster.

    ``tails`` holds, by uid, members whose cluster's block was out of reach when they came; it is a block's end until
    the rest can be had and both are written as one.
    """

    def __init__(self, organiser: Organiser, place: Place) -> None:
        self.organiser = organiser
        self.frame = torch.zeros(0, dtype=torch.int32)
        self.cell = torch.zeros(0, dtype=torch.int32)
        self.tails: dict[int, Block] = {}
        self._place = place

    @property
    def tokens(self) -> int:
        return len(self.frame)

    def uids(self) -> Tensor:
        """Uid of each token's cluster ``[n]``."""
        table = self.organiser.table
        return table.uid[table.of_token]

    def _members(self, uid: int) -> Tensor:
        """Numbers of a cluster's tokens in time order, on the host; none where there is no such cluster."""
        table = self.organiser.table
        # Its number first: uids of all tokens cost several times as much, and questions ask for cluster after cluster.
        number = int(torch.searchsorted(table.uid, uid))
        if number == len(table) or int(table.uid[number]) != uid:
            return torch.zeros(0, dtype=torch.int64)
        return table.members(number).cpu()

    # -- blocks -----------------------------------------------------------------------------------
    def complete(self, uid: int, block: Block, tokens: int | None = None) -> Block | None:
        """A cluster's block as the tiers have it, with its tail and without members that the head does not know of.

        None where it is not this cluster's: its process died before what it knew was written, or wrote more.
        ``tokens``: only so many of the head's tokens count.
        """
        at = self._members(uid)
        if tokens is not None:
            at = at[at < tokens]
        tail = self.tails.get(uid)
        old = len(at) - (len(tail) if tail is not None else 0)
        if len(block) < old:
            return None
        if not torch.equal(block.frame[:old].cpu(), self.frame[at[:old]]):
            return None
        if not torch.equal(block.cell[:old].cpu(), self.cell[at[:old]]):
            return None
        part = block if len(block) == old else take(block, torch.arange(old))
        return part if tail is None else joined([part, tail])

    def _fetch(self, uids: Sequence[int], load: Load, tokens: int | None = None) -> tuple[dict[int, Block], list[int]]:
        """Complete blocks, and the uids of those that are out of reach for now; of the rest nothing is left."""
        blocks: dict[int, Block] = {}
        later: list[int] = []
        for uid, loaded in (load(list(uids)) if uids else {}).items():
            if loaded.block is None:
                if loaded.outcome is not Outcome.MISS:
                    later.append(uid)
                continue
            whole = self.complete(uid, loaded.block, tokens)
            if whole is not None:
                blocks[uid] = whole
        return blocks, later

    def blocks(self, load: Load) -> tuple[dict[int, Block], list[int]]:
        """All blocks by uid, and those that are out of reach for now."""
        return self._fetch(self.organiser.table.uid.tolist(), load)

    # -- tokens in --------------------------------------------------------------------------------
    def add(self, tokens: NewTokens, cell: Tensor, load: Load, resident: Load) -> Change:
        """Take in new tokens (``cell`` ``[t]``). ``resident`` gives only blocks that are at hand at once."""
        known, table = self.tokens, self.organiser.table
        there = set(table.uid.tolist())

        def members(cluster: int) -> Tensor | None:
            uid = int(table.uid[cluster])
            block = self._fetch([uid], resident, known)[0].get(uid) if uid in there else None
            # A cluster may have grown within this call, by tokens no block holds yet.
            return block.key if block is not None and len(block) == int(table.count[cluster]) else None

        numbers = self.organiser.add(tokens, members)
        frame, cell = tokens.frame.to(torch.int32), cell.to(torch.int32)
        self.frame, self.cell = torch.cat([self.frame, frame]), torch.cat([self.cell, cell])
        new = Block(tokens.key, tokens.value, frame, cell)
        uids = table.uid[numbers]
        grown = [uid for uid in torch.unique(uids).tolist() if uid in there]
        blocks, later = self._fetch(grown, load, known)
        change = Change()
        gone = [uid for uid in grown if uid not in blocks and uid not in later]
        order = uids.argsort(stable=True)
        found, counts = torch.unique_consecutive(uids[order], return_counts=True)
        for uid, rows in zip(found.tolist(), torch.split(order, counts.tolist()), strict=True):
            part = take(new, rows)
            if uid in later:
                self.tails[uid] = joined([self.tails[uid], part]) if uid in self.tails else part
                continue
            self.tails.pop(uid, None)
            change.store[uid] = joined([blocks[uid], part]) if uid in blocks else part
        if gone:
            change.lost = self._lose_old(gone, known, new)
        return change

    def join_tails(self, load: Load, limit: int) -> Change:
        """Write tails and the blocks they belong to as one, up to ``limit`` of them, where those can be had again."""
        change = Change()
        wanted = list(self.tails)[:limit]
        blocks, later = self._fetch(wanted, load)
        for uid in wanted:
            if uid in blocks:
                change.store[uid] = blocks[uid]
                del self.tails[uid]
            elif uid not in later:
                change.lost += self.lose(uid)
                change.drop.append(uid)
        return change

    def split(self, cluster: int, block: Block) -> Change:
        """A cluster that waited for being loaded is split; ``block`` is its own, complete."""
        table = self.organiser.table
        uid, at = int(table.uid[cluster]), table.members(cluster)
        new = self.organiser.split(
            cluster, block.key, block.value, self._place(block.frame, block.cell), block.frame.to(torch.int64)
        )
        if new is None:
            return Change()
        leaves = table.of_token[at] == new
        self.tails.pop(uid, None)
        parts = {uid: ~leaves, int(table.uid[new]): leaves}
        return Change(store={each: take(block, rows.nonzero()[:, 0]) for each, rows in parts.items()})

    # -- tokens out -------------------------------------------------------------------------------
    def keep(self, kept: Tensor, load: Load) -> Change:
        """Only the tokens ``kept`` (ascending numbers) stay; a cluster that loses some and is out of reach goes."""
        uids = self.uids()
        stays = torch.zeros(self.tokens, dtype=torch.bool)
        stays[kept] = True
        thinned, remaining = torch.unique(uids[~stays]), torch.unique(uids[stays])
        partly = thinned[torch.isin(thinned, remaining)].tolist()
        blocks, _ = self._fetch(partly, load)
        missing = [uid for uid in partly if uid not in blocks]
        stays &= ~torch.isin(uids, torch.tensor(missing, dtype=torch.int64))
        # Members of a cluster and of its block stand in the same order.
        store = {}
        for uid, block in blocks.items():
            among = (uids == uid).nonzero()[:, 0]
            store[uid] = take(block, stays[among].nonzero()[:, 0])
            self.tails.pop(uid, None)
        gone = [*thinned[~torch.isin(thinned, remaining)].tolist(), *missing]
        kept_now = stays.nonzero()[:, 0]
        self._narrow(kept_now, {uid: (uids[kept_now] == uid, block) for uid, block in store.items()})
        for uid in gone:
            self.tails.pop(uid, None)
        return Change(store, gone, len(kept) - len(kept_now))

    def lose(self, uid: int) -> int:
        """A cluster's block is gone for good: forget its tokens; returns how many."""
        kept = (self.uids() != uid).nonzero()[:, 0]
        lost = self.tokens - len(kept)
        self.tails.pop(uid, None)
        if lost:
            self._narrow(kept, {})
        return lost

    def _lose_old(self, gone: Sequence[int], known: int, new: Block) -> int:
        """Of the clusters ``gone``, the tokens before ``known`` leave; what came now stays where it was put."""
        uids = self.uids()
        old = torch.isin(uids, torch.tensor(gone))
        old[known:] = False
        kept = (~old).nonzero()[:, 0]
        parts = {}
        for uid in gone:
            here = (uids[known:] == uid).nonzero()[:, 0]
            rows = torch.zeros(self.tokens, dtype=torch.bool)
            rows[known + here] = True
            parts[uid] = rows[kept], take(new, here)
        self._narrow(kept, parts)
        return int(old.sum())

    def _narrow(self, kept: Tensor, thinned: Mapping[int, tuple[Tensor, Block]]) -> None:
        """Leave only ``kept``; ``thinned``: of each cluster that loses some, its rows ``[m]`` bool among them and its
        block of those. Nobody else's statistics are computed anew, so that nobody else's KV is needed."""
        table = self.organiser.table
        key = torch.zeros(len(kept), table.mean.shape[1])
        value = torch.zeros_like(key)
        for rows, block in thinned.values():
            key[rows], value[rows] = block.key.float().cpu(), block.value.float().cpu()
        frame, cell = self.frame[kept], self.cell[kept]
        table.keep(kept, key, value, self._place(frame, cell), frame.to(torch.int64))
        self.frame, self.cell = frame, cell

    # -- restoring --------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """Everything, by name."""
        parts: dict[str, Mapping[str, Tensor]] = {"own": self.organiser.state(), "table": self.organiser.table.state()}
        for uid, tail in self.tails.items():
            parts[f"tail.{uid}"] = {name: getattr(tail, name) for name in _BLOCK}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return {"frame": self.frame, "cell": self.cell, **named}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave."""
        self.frame, self.cell = state["frame"], state["cell"]
        self.organiser.table = ClusterTable.restore(_under("table.", state))
        self.organiser.load_state(_under("own.", state))
        tails = _under("tail.", state)
        for uid in sorted({int(name.split(".")[0]) for name in tails}):
            self.tails[uid] = Block(*(tails[f"{uid}.{name}"] for name in _BLOCK))


_BLOCK = ("key", "value", "frame", "cell")


def take(block: Block, rows: Tensor) -> Block:
    """Some members of a block, by number, as a block of their own."""
    there, host = rows.to(block.key.device), rows.cpu()
    return Block(block.key[there], block.value[there], block.frame[host], block.cell[host])


def joined(parts: Sequence[Block]) -> Block:
    """Several blocks one after the other, on the device of the last."""
    device = parts[-1].key.device
    return Block(
        torch.cat([part.key.to(device) for part in parts]),
        torch.cat([part.value.to(device) for part in parts]),
        torch.cat([part.frame for part in parts]),
        torch.cat([part.cell for part in parts]),
    )


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
