"""After an outage: blocks that the lowest tier lost are written to it again, as far as copies of them lie above."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.base import BlockKey, Outcome
from cluster.memory.tiers.stack import TierStack

LOOKED_UP = 2048
"""Blocks that one :meth:`Repair.work` looks for, about: it holds up the engine."""


class Repair:
    """A server that was restarted is empty, and copies above it are given up without a thought that they are the last.

    Every time the lowest tier is back after it failed, each block of each memory is looked for there.
    """

    def __init__(self, tiers: TierStack) -> None:
        self._tiers = tiers
        self._failures = self._failed()
        self._todo: deque[str] = deque()
        # Of the first of them: layers and heads that were looked through.
        self._heads_done = 0
        self.written = 0

    def __len__(self) -> int:
        """Streams that are still to be looked through."""
        return len(self._todo)

    def work(self, memories: Mapping[str, StreamMemory]) -> list[str]:
        """Go on for a while, on the engine's thread; costs nothing while nothing failed. Returns the streams whose
        manifest is to be written again."""
        if len(self._tiers.tiers) < 2 or not self._tiers.lowest.state().up:
            return []
        failures = self._failed()
        if failures != self._failures:
            self._failures, self._todo, self._heads_done = failures, deque(memories), 0
        looked, whole = 0, []
        while self._todo and looked < LOOKED_UP:
            memory = memories.get(self._todo[0])
            heads = [] if memory is None else list(memory.every_head())
            if memory is None or self._heads_done >= len(heads):
                stream = self._todo.popleft()
                whole += [stream] if memory is not None and memory.frames else []
                self._heads_done = 0
                continue
            number, h, head = heads[self._heads_done]
            keys = [BlockKey(memory.stream, number, h, uid) for uid in head.organiser.table.uid.tolist()]
            outcomes = self._tiers.lowest.lookup(keys)
            if Outcome.RETRY in outcomes:
                break
            self._write([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISS], memory)
            looked += max(1, len(keys))
            self._heads_done += 1
        return whole

    def _write(self, missing: list[BlockKey], memory: StreamMemory) -> None:
        for tier in self._tiers.tiers[:-1]:
            found = []
            for key, loaded in zip(missing, tier.load(missing) if missing else (), strict=True):
                # What was left there by another memory of this name is not ours.
                if loaded.block is not None and memory.heads[key.layer][key.head].complete(key.block, loaded.block):
                    found.append((key, loaded.block))
            if found:
                self._tiers.store(found)
                self.written += len(found)
            there = {key for key, _ in found}
            missing = [key for key in missing if key not in there]

    def _failed(self) -> int:
        return self._tiers.lowest.state().counts.get("failures", 0)
