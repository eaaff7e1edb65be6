"""Asking another process's health service."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.rpc.channel import open_channel
from cluster.rpc.tls import PeerTls


async def is_serving(address: str, *, timeout_s: float = 1.0, tls: PeerTls | None = None) -> bool:
    """Whether the server at ``host:port`` says SERVING within ``timeout_s``."""
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s, wait_for_ready=False)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
