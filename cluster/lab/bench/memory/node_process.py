"""The other process of part retrieval: a node that holds blocks and serves them.

``python -m cluster.lab.bench.memory.node_process BYTES`` prints the port once it serves, and ends when its standard
input is closed: it cannot outlive the bench.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sightline.v1 import kv_pb2_grpc

from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.kv_wire import MAX_KV_MESSAGE_BYTES, SERVICE
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.server import KVServicer
from cluster.wire.server import RpcServer

FINGERPRINT = "bench"

_DEADLINE_S = 30.0
_END_S = 10.0


@contextmanager
def far_tier(total_bytes: int) -> Iterator[RemoteTier]:
    """A tier whose blocks lie in another process on this machine."""
    started = subprocess.Popen(
        [sys.executable, "-m", "cluster.lab.bench.memory.node_process", str(total_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        port = started.stdout.readline().strip()
        tier = RemoteTier(f"127.0.0.1:{port}", fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="node")
        try:
            yield tier
        finally:
            tier.close()
    finally:
        started.terminate()
        started.wait(_END_S)
        for pipe in (started.stdin, started.stdout):
            if pipe is not None:
                pipe.close()


async def _serve(total_bytes: int) -> None:
    arena = Arena(total_bytes, name="node", evicts=False)
    servicer = KVServicer(arena, fingerprint=FINGERPRINT)
    server = RpcServer(max_message_bytes=MAX_KV_MESSAGE_BYTES)
    server.add(SERVICE, kv_pb2_grpc.add_KVServicer_to_server, servicer)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)
    servicer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
