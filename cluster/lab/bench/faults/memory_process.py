"""The process that writes a memory and is killed at it; see :mod:`cluster.lab.bench.faults.kill`.

At each point, ``block-``, ``block+``, ``manifest-``, ``manifest+``, ``sweep-`` and ``sweep+`` (before and after), it
sends the point and the tokens in clusters, and goes on when it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from cluster.lab.bench.memory.footage import made_chunks
from cluster.lab.bench.memory.node import FINGERPRINT
from cluster.memory.bank import MemoryBank
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome, Tier
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

CAMERA = "cam"
FRAMES = 96
SPEC = MemorySpec(cap_bytes=2**19)
SHAPE = {"layers": 2, "heads": 2, "rows": 3, "columns": 4, "width": 64}

_DEADLINE_S = 30.0
_HOST = 2**24
_SLAB = 2**16


def opened(address: str) -> Tier:
    """The tier at an address: a Redis server's, or a node's."""
    if "://" in address:
        return RedisTier(
            address, fingerprint=FINGERPRINT, cap_bytes=SPEC.cap_bytes, ttl_s=600, deadline_s=_DEADLINE_S, name="low"
        )
    return RemoteTier(address, fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="low")


def readable(tier: Tier) -> tuple[int, int]:
    """Tokens that a new process reads of the camera, and those that the manifest names."""
    memory = StreamMemory(CAMERA, SPEC, TierStack([Arena(_HOST, slab_bytes=_SLAB), tier]))
    memory.restore(sweep=False)
    whole = read = 0
    for layer, h, head in memory.every_head():
        loaded = memory.loader(layer, h)(head.table.block.tolist())
        whole += head.tokens
        read += sum(
            len(one.block)
            for cluster, one in enumerate(loaded)
            if one.block is not None and head.is_of(cluster, one.block)
        )
    return read, whole + memory.counts.lost


class Halting(TierStack):
    """Halts before and after each write to the lowest tier."""

    def __init__(self, tiers: Sequence[Tier], told: Connection) -> None:
        super().__init__(tiers)
        self.memory: StreamMemory | None = None
        self._told = told

    def _halt(self, point: str) -> None:
        held = 0 if self.memory is None else sum(head.tokens for _, _, head in self.memory.every_head())
        self._told.send((point, held))
        self._told.recv()

    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> list[Outcome]:
        """See :class:`TierStack`."""
        self._halt("block-")
        outcomes = super().store(items, copies=copies)
        self._halt("block+")
        return outcomes

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See :class:`TierStack`."""
        self._halt("manifest-")
        outcome = super().put_manifest(stream, manifest)
        self._halt("manifest+" if outcome is Outcome.HIT else "refused")
        return outcome

    def drop_blocks(self, level: int, stream: str, keys: Sequence[BlockKey]) -> int | None:
        """See :class:`TierStack`."""
        if level < len(self.tiers) - 1:
            return super().drop_blocks(level, stream, keys)
        self._halt("sweep-")
        gone = super().drop_blocks(level, stream, keys)
        self._halt("sweep+")
        return gone


def write(address: str, told: Connection) -> None:
    """Write a memory from its first frame to well beyond its cap."""
    torch.set_num_threads(1)
    tiers = Halting([Arena(_HOST, slab_bytes=_SLAB), opened(address)], told)
    bank = MemoryBank(tiers)
    bank.open(CAMERA, SPEC)
    tiers.memory, _ = bank.get(CAMERA)
    for chunk in made_chunks(CAMERA, FRAMES, **SHAPE):
        bank.take(chunk)
        bank.save_due()
        bank.drain()
