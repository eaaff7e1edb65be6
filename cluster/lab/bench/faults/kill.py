"""kill -9 of a process that writes a memory, at every point at which it writes: what of it comes back?

A process of its own writes a memory into the node's process or a Redis, and says before each write of blocks or a
manifest and each deletion, and after it, that it is there: at ``block-``, ``block+``, ``manifest-``, ``manifest+``,
``sweep-`` and ``sweep+``. It sends the point and the tokens in clusters, and goes on when it is told to. It is killed
at one of these points; then the memory is restored and every block that the last acknowledged manifest names is
read.
"""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.memory.footage import add_written, made_chunks
from cluster.lab.bench.node import FINGERPRINT, far_tier
from cluster.lab.bench.processes import RedisServer
from cluster.memory.bank import MemoryBank
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome, Tier
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

KILLS = 50
_NODE_BYTES = 2**28
CAMERA = "cam"
FRAMES = 96
SPEC = MemorySpec(cap_bytes=2**19)
SHAPE = {"layers": 2, "heads": 2, "rows": 3, "columns": 4, "width": 64}

_DEADLINE_S = 30.0
_HOST = 2**24
_SLAB = 2**16

# Real processes, forked from one that has imported everything: a start takes no seconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def measure(seed: int) -> BenchResult:
    """Figure ``restored_after_kill``: the least share of tokens over all kills."""
    draw = random.Random(seed)
    # Tokens named, and the share of them that came back, by tier and point.
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name, kills in (("node", KILLS // 2), ("redis", KILLS - KILLS // 2)):
        with _tier(name) as address:
            points = _run(address, None)[0]
            for kill in range(kills):
                # Spread over all points, so that each kind is met; which exactly is drawn.
                at = min(points - 1, int((kill + draw.random()) * points / kills))
                _, point, named = _run(address, at)
                restored, of = _restored(address)
                share = 0.0 if of < named else restored / named if named else 1.0
                found.setdefault((name, point), []).append((named, share))
    rows: list[dict[str, Any]] = []
    for (tier, point), each in sorted(found.items()):
        most_named, least_share = max(named for named, _ in each), min(share for _, share in each)
        rows.append({"tier": tier, "point": point, "kills": len(each), "named": most_named, "share": least_share})
    note = (
        "a row is all kills -9 of a tier at a point, the worst of them; named: tokens that the last manifest the tier "
        "acknowledged names; restored: tokens whose blocks another process read whole; share is 0 where "
        "its manifest names fewer, and 1 where none was acknowledged yet"
    )
    return BenchResult({"restored_after_kill": min(row["share"] for row in rows)}, rows, [note])


@contextmanager
def _tier(name: str) -> Iterator[str]:
    if name == "redis":
        with RedisServer() as server:
            yield server.url
    else:
        with far_tier(_NODE_BYTES) as node:
            yield node.peer.address


def _run(address: str, at: int | None) -> tuple[int, str, int]:
    """Have the memory written, up to the write numbered ``at``; returns how many points were passed, the last one, and
    the tokens that the last acknowledged manifest names."""
    with closing(_open(address)) as tier:
        tier.drop(CAMERA)
    mine, its = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=write, args=(address, its), daemon=True)
    process.start()
    its.close()
    passed, point, named = 0, "", 0
    try:
        # It ends once it has written everything.
        with suppress(EOFError):
            while True:
                point, tokens = mine.recv()
                # After a manifest was acknowledged.
                named = tokens if point == "manifest+" else named
                if passed == at:
                    break
                passed += 1
                mine.send(None)
    finally:
        process.kill()
        process.join()
        mine.close()
    return passed, point, named


def _restored(address: str) -> tuple[int, int]:
    """Tokens that another process reads of the camera, and those that the manifest it finds names."""
    with closing(_open(address)) as tier:
        memory = StreamMemory(CAMERA, SPEC, TierStack([Arena(_HOST, slab_bytes=_SLAB), tier]))
        memory.restore(sweep=False)
        blocks = readable_blocks(memory)
        return sum(map(len, blocks)), held_tokens(memory) + memory.counts.lost


def _open(address: str) -> Tier:
    """The tier at an address: a Redis server's, or a node's."""
    if "://" in address:
        return RedisTier(
            address, fingerprint=FINGERPRINT, cap_bytes=SPEC.cap_bytes, ttl_s=600, deadline_s=_DEADLINE_S, name="low"
        )
    return RemoteTier(address, fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="low")


def held_tokens(memory: StreamMemory) -> int:
    """Tokens in clusters."""
    return sum(head.tokens for _, _, head in memory.iter_heads())


def readable_blocks(memory: StreamMemory) -> list[Block]:
    """Blocks of a memory's clusters that its tiers have, with the very tokens that the index names."""
    whole: list[Block] = []
    for layer, h, head in memory.iter_heads():
        loaded = memory.block_loader(layer, h)(head.table.block.tolist())
        members = torch.split(head.table.order(), head.table.count.tolist())
        for block, rows in zip((one.block for one in loaded), members, strict=True):
            if block and torch.equal(block.frame, head.frame[rows]) and torch.equal(block.cell, head.cell[rows]):
                whole.append(block)
    return whole


# -- the process that is killed ------------------------------------------------------------------
class Halting(TierStack):
    """Halts before and after each write to the lowest tier."""

    def __init__(self, tiers: Sequence[Tier], told: Connection) -> None:
        super().__init__(tiers)
        self.memory: StreamMemory | None = None
        self._told = told

    def _halt(self, point: str) -> None:
        self._told.send((point, 0 if self.memory is None else held_tokens(self.memory)))
        self._told.recv()

    def store(self, items: Sequence[tuple[BlockKey, Block]], *, copies: bool = True) -> list[Outcome]:
        self._halt("block-")
        outcomes = super().store(items, copies=copies)
        self._halt("block+")
        return outcomes

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        self._halt("manifest-")
        outcome = super().put_manifest(stream, manifest)
        self._halt("manifest+" if outcome is Outcome.HIT else "refused")
        return outcome

    def drop_blocks(self, level: int, stream: str, keys: Sequence[BlockKey]) -> int | None:
        if level < len(self.tiers) - 1:
            return super().drop_blocks(level, stream, keys)
        self._halt("sweep-")
        gone = super().drop_blocks(level, stream, keys)
        self._halt("sweep+")
        return gone


def write(address: str, told: Connection) -> None:
    """Write a memory from its first frame to well beyond its cap."""
    torch.set_num_threads(1)
    tiers = Halting([Arena(_HOST, slab_bytes=_SLAB), _open(address)], told)
    bank = MemoryBank(tiers)
    bank.open_stream(CAMERA, SPEC)
    tiers.memory, _ = bank.get_memory(CAMERA)
    for chunk in made_chunks(CAMERA, FRAMES, **SHAPE):
        add_written(bank, chunk)
