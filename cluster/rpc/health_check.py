"""Exit code 0 when the gateway of this machine serves: for a container's HEALTHCHECK, ``python -m``."""

from __future__ import annotations

import asyncio
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import ConfigError
from cluster.rpc.channel import open_channel, split_address
from cluster.rpc.credentials import ClientCredentials

TIMEOUT_S = 3.0


async def check(address: str) -> str:
    """The gateway's status by the gRPC health protocol, ``SERVING`` when it is well; TLS as clients have it.

    Raises:
        ConfigError: the address is none, or a file of TLS cannot be read.
    """
    split_address(address)
    tls = ClientCredentials.from_environment().channel_credentials()
    async with open_channel(address, tls=tls) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=""), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main() -> int:
    """Asks ``SIGHTLINE_GATEWAY``, or port 50051 of this machine."""
    try:
        status = asyncio.run(check(os.environ.get("SIGHTLINE_GATEWAY", "127.0.0.1:50051")))
    except ConfigError as error:
        status = str(error)
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
