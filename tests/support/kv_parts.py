"""A tier in plain memory that can be made to stall, and nodes that serve it, in this process or in one to kill."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loop_thread import EventLoopThread

from cluster.codec.supervisor import Backoff
from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.server import KVServicer
from cluster.memory.tiers.stack import TierStack
from cluster.wire.server import RpcServer

if TYPE_CHECKING:
    from cluster.memory.stream import StreamMemory

OURS = "tiny/fp32"
QUICK = Backoff(first_s=0.05, longest_s=0.2)


def key(cluster: int, layer: int = 0, stream: str = "gate") -> BlockKey:
    return BlockKey(stream, layer, 1, cluster)


def key_of(memory: "StreamMemory", layer: int, h: int, cluster: int) -> BlockKey:
    """Of a cluster's block."""
    return BlockKey(memory.stream, layer, h, int(memory.heads[layer][h].table.block[cluster]))


def block(cluster: int, tokens: int = 3, width: int = 8) -> Block:
    rng = torch.Generator().manual_seed(cluster)
    place = torch.arange(tokens, dtype=torch.int32)
    return Block(*torch.randn(2, tokens, width, generator=rng), place + cluster, place * 2)


def same(one: Block | None, other: Block) -> bool:
    return one is not None and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("key", "value", "frame", "cell")
    )


def outcomes(tier: Tier, keys: Sequence[BlockKey]) -> list[Outcome]:
    """Of loading them."""
    return [one.outcome for one in tier.load(keys)]


def drop_everywhere(stack: TierStack, stream: str, keys: Sequence[BlockKey]) -> int | None:
    """Delete blocks in every tier; the largest count of one, None if one is uncertain."""
    gone = [stack.drop_blocks(level, stream, keys) for level in range(len(stack.tiers))]
    certain = [number for number in gone if number is not None]
    return max(certain) if len(certain) == len(gone) else None


class MemoryTier(Tier):
    """While ``gate`` is closed no call ends; one that loads layer ``stuck`` never does before it is opened."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.blocks: dict[BlockKey, Block] = {}
        self.manifests: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.stuck: int | None = None
        self.free = threading.Event()
        self.waiting = 0
        self.loads: list[list[BlockKey]] = []

    def _pass(self) -> None:
        self.waiting += 1
        assert self.gate.wait(30.0)
        self.waiting -= 1

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        self._pass()
        self.blocks.update(items)
        return [Outcome.HIT] * len(items)

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        self._pass()
        self.loads.append(list(keys))
        if any(one.layer == self.stuck for one in keys):
            assert self.free.wait(30.0)
        found = [self.blocks.get(one) for one in keys]
        return [Loaded(Outcome.MISS) if one is None else Loaded(Outcome.HIT, one) for one in found]

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        self._pass()
        return Outcome.HIT, [one for one in self.blocks if one.stream == stream]

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        self._pass()
        if keys is None:
            self.manifests.pop(stream, None)
        gone = [one for one in self.blocks if one.stream == stream and (keys is None or one in keys)]
        for one in gone:
            del self.blocks[one]
        return len(gone)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        self._pass()
        self.manifests[stream] = manifest
        return Outcome.HIT

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        self._pass()
        found = self.manifests.get(stream)
        return (Outcome.MISS if found is None else Outcome.HIT), found

    def nbytes(self, stream: str | None = None) -> int:
        self._pass()
        return sum(one.nbytes for name, one in self.blocks.items() if stream in (None, name.stream))

    def state(self) -> TierState:
        return TierState()

    def close(self) -> None:
        self.gate.set()
        self.free.set()


class Node:
    """A server on a loop of its own."""

    def __init__(self, tier: Tier, port: int = 0, **options: object) -> None:
        self.thread = EventLoopThread("node")
        self.servicer = KVServicer(tier, **{"fingerprint": OURS, **options})
        self.address = self.thread.run(self._start(port), 10.0)

    async def _start(self, port: int) -> str:
        self.server = RpcServer()
        self.server.add(self.servicer)
        bound = self.server.bind("127.0.0.1", port)
        await self.server.start()
        return f"127.0.0.1:{bound}"

    def stop(self) -> None:
        self.thread.run(self.server.stop(0.0), 10.0)
        self.servicer.close()
        self.thread.stop()


@contextmanager
def serving(tier: Tier, **options: object) -> Iterator[Node]:
    node = Node(tier, **options)
    try:
        yield node
    finally:
        tier.close()
        node.stop()


@contextmanager
def remote(address: str, **options: object) -> Iterator[RemoteTier]:
    tier = RemoteTier(address, **{"fingerprint": OURS, "backoff": QUICK, **options})
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A node of its own process: it holds clusters 0 to 7 of layers 0 and 1, and loads of layer 1 never end."""
    started = subprocess.Popen(
        [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        yield started, int(started.stdout.readline())
    finally:
        started.kill()
        started.wait(10.0)
        for pipe in (started.stdin, started.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    tier = MemoryTier()
    tier.stuck = 1
    tier.store([(key(cluster, layer), block(cluster)) for layer in (0, 1) for cluster in range(8)])
    with serving(tier) as node:
        print(node.address.rpartition(":")[2], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
