"""Remote tiers for benches: one in another process, and one with delayed loads.

``python -m cluster.lab.bench.node BYTES`` runs the other process, a node that stores and serves blocks.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from cluster.lab.bench.processes import Process, serve
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import BlockKey, Loaded
from cluster.memory.tiers.kv_wire import MAX_KV_MESSAGE_BYTES
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.server import KVServicer
from cluster.wire.server import RpcServer

FINGERPRINT = "bench"
_DEADLINE_S = 30.0


class DelayedArena(Arena):
    """Host memory with every load delayed by ``seconds``; concurrent loads wait in parallel."""

    at_hand = False
    seconds = 0.0

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        time.sleep(self.seconds)
        return super().load(keys)


@contextmanager
def far_tier(total_bytes: int, kind: type[RemoteTier] = RemoteTier) -> Iterator[RemoteTier]:
    """A tier whose blocks are stored by another process on this machine."""
    with Process("cluster.lab.bench.node", str(total_bytes)) as process:
        tier = kind(process.address, fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="node")
        with closing(tier):
            yield tier


async def _serve(total_bytes: int) -> None:
    servicer = KVServicer(Arena(total_bytes, name="node", evicts=False), fingerprint=FINGERPRINT)
    server = RpcServer(max_message_bytes=MAX_KV_MESSAGE_BYTES)
    server.add(servicer)
    await serve(server, {})
    servicer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
