"""The other process of part retrieval: a node that holds blocks and serves them.

``python -m cluster.lab.bench.memory.node_process BYTES`` prints the port once it serves, and ends when its standard
input is closed: it cannot outlive the bench.
"""

from __future__ import annotations

import asyncio
import sys

from sightline.v1 import kv_pb2_grpc

from cluster.lab.bench.memory.node import FINGERPRINT
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.kv_wire import MAX_KV_MESSAGE_BYTES, SERVICE
from cluster.memory.tiers.server import KVServicer
from cluster.wire.server import RpcServer


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
