"""Recovery of a memory whose writing process gets kill -9 at any of its write points.

A child process writes a memory into a node process or Redis. Before and after each write of blocks or a manifest and
each deletion (points ``block-``, ``block+``, ``manifest-``, ``manifest+``, ``sweep-``, ``sweep+``) it reports the point
and the tokens in clusters, and waits for permission to continue. It is killed at one of these points; then the memory
is restored, and every block that the last acknowledged manifest references is read.
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

# Real processes, forked from a server that has imported everything, so that a start is fast.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def measure(seed: int) -> BenchResult:
    """Figure ``restored_after_kill``: smallest share of restored tokens over all kills."""
    draw = random.Random(seed)
    # By tier and point: tokens named by the manifest, and the restored share of them.
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name, kills in (("node", KILLS // 2), ("redis", KILLS - KILLS // 2)):
        with _tier(name) as address:
            points = _run(address, None)[0]
            for kill in range(kills):
                # Spread over all points to cover each kind, with random jitter.
                at = min(points - 1, int((kill + draw.random()) * points / kills))
                _, point, named = _run(address, at)
                restored, of = _restore(address)
                share = 0.0 if of < named else restored / named if named else 1.0
                found.setdefault((name, point), []).append((named, share))
    rows: list[dict[str, Any]] = []
    for (tier, point), each in sorted(found.items()):
        most_named, least_share = max(named for named, _ in each), min(share for _, share in each)
        rows.append({"tier": tier, "point": point, "kills": len(each), "named": most_named, "share": least_share})
    note = (
        "a row is the worst of all kills of a tier at a point; named: tokens named by the last manifest that the tier "
        "acknowledged; share: of these, tokens whose blocks another process read intact; 0 if its manifest names "
        "fewer, 1 if none was acknowledged yet"
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
    """Write the memory in a child process and kill it at point ``at``; returns the number of points passed, the last
    point, and the tokens named by the last acknowledged manifest."""
    with closing(_open(address)) as tier:
        tier.drop(CAMERA)
    parent, child = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=write, args=(address, child), daemon=True)
    process.start()
    child.close()
    passed, point, named = 0, "", 0
    try:
        # The child exits after writing everything.
        with suppress(EOFError):
            while True:
                point, tokens = parent.recv()
                # The manifest was acknowledged.
                named = tokens if point == "manifest+" else named
                if passed == at:
                    break
                passed += 1
                parent.send(None)
    finally:
        process.kill()
        process.join()
        parent.close()
    return passed, point, named


def _restore(address: str) -> tuple[int, int]:
    """Restore the camera in this process; returns the tokens read and those that its manifest names."""
    with closing(_open(address)) as tier:
        memory = StreamMemory(CAMERA, SPEC, TierStack([Arena(_HOST, slab_bytes=_SLAB), tier]))
        memory.restore(sweep=False)
        blocks = readable_blocks(memory)
        return sum(map(len, blocks)), held_tokens(memory) + memory.counts.lost


def _open(address: str) -> Tier:
    """The tier at an address, of a Redis server or a node."""
    if "://" in address:
        return RedisTier(
            address, fingerprint=FINGERPRINT, cap_bytes=SPEC.cap_bytes, ttl_s=600, deadline_s=_DEADLINE_S, name="low"
        )
    return RemoteTier(address, fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="low")


def held_tokens(memory: StreamMemory) -> int:
    """Number of tokens in clusters."""
    return sum(head.tokens for _, _, head in memory.iter_heads())


def readable_blocks(memory: StreamMemory) -> list[Block]:
    """Blocks of a memory's clusters that its tiers still hold with exactly the tokens in the index."""
    whole: list[Block] = []
    for layer, h, head in memory.iter_heads():
        loaded = memory.block_loader(layer, h)(head.table.block.tolist())
        members = torch.split(head.table.order(), head.table.count.tolist())
        for block, rows in zip((one.block for one in loaded), members, strict=True):
            if block and torch.equal(block.frame, head.frame[rows]) and torch.equal(block.cell, head.cell[rows]):
                whole.append(block)
    return whole


# -- killed process --------------------------------------------------------------------------------
class Halting(TierStack):
    """Reports and waits before and after each write to the lowest tier."""

    def __init__(self, tiers: Sequence[Tier], reports: Connection) -> None:
        super().__init__(tiers)
        self.memory: StreamMemory | None = None
        self._reports = reports

    def _halt(self, point: str) -> None:
        self._reports.send((point, 0 if self.memory is None else held_tokens(self.memory)))
        self._reports.recv()

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


def write(address: str, reports: Connection) -> None:
    """Child process: write a memory until well beyond its cap."""
    torch.set_num_threads(1)
    tiers = Halting([Arena(_HOST, slab_bytes=_SLAB), _open(address)], reports)
    bank = MemoryBank(tiers)
    bank.open_stream(CAMERA, SPEC)
    tiers.memory, _ = bank.get_memory(CAMERA)
    for chunk in made_chunks(CAMERA, FRAMES, **SHAPE):
        add_written(bank, chunk)
