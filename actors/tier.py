"""The tier actor: one per node, host memory for its replicas' cameras that outlives a replica.

Ray imports this module in every process that looks up a tier, so only the actor itself imports what needs torch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import ray

from actors.remote import TIER, get_actor, short_tier
from actors.startup import InnerProcess, import_uncollected
from cluster import metrics
from cluster.config import SightlineConfig
from cluster.config.secrets import memory_secret
from cluster.errors import UnavailableError
from cluster.memory.tiers.metrics import NodeTierCollector
from cluster.wire.server import RpcServer

if TYPE_CHECKING:
    from cluster.memory.tiers.arena import Arena
    from cluster.memory.tiers.server import KVServicer

log = logging.getLogger(__name__)


def tier_name(node: str) -> str:
    """Name of a Ray node's tier actor."""
    return f"{TIER}{node}"


def tier_of_this_node() -> Any:
    """Handle of this node's tier. Raises ``UnavailableError`` without one."""
    name = tier_name(ray.get_runtime_context().get_node_id())
    return get_actor(name, "this node has no tier process; tiers.node needs one started with the cluster")


class TierNode(InnerProcess):
    """Ray actor. Serves ``KV`` once a replica has given the model's fingerprint."""

    def __init__(self, config: SightlineConfig, name: str, host: str | None) -> None:
        super().__init__(config, short_tier(name), "tier", host, numbered="tier")
        # Import torch now: a replica that opens the tier waits only seconds.
        import_uncollected("cluster.memory.tiers.server")
        self._secret = memory_secret(config.security)
        self._opened: tuple[Arena, KVServicer, RpcServer] | None = None
        self._fingerprint = ""
        self._address = ""
        self._opening = asyncio.Lock()
        self._collector = NodeTierCollector(config.tiers.node_bytes, self._look)
        metrics.REGISTRY.register(self._collector)

    async def open(self, fingerprint: str, *, replace: bool = True) -> str:
        """Address of ``KV`` for blocks of one model; blocks of another model are deleted. Without ``replace``, for a
        replica that lost the address, a newer model's blocks stay, and ``UnavailableError`` is raised."""
        async with self._opening:
            if fingerprint != self._fingerprint:
                if self._opened is not None and not replace:
                    raise UnavailableError("this node's tier now holds blocks of another model")
                await self._close()
                from cluster.memory.tiers.arena import Arena
                from cluster.memory.tiers.kv_wire import MAX_KV_MESSAGE_BYTES
                from cluster.memory.tiers.server import KVServicer

                tiers = self._config.tiers
                arena = Arena(tiers.node_bytes, name="node", stream_bytes=tiers.camera_bytes)
                servicer = KVServicer(arena, fingerprint=fingerprint, secret=self._secret)
                server = RpcServer(max_message_bytes=MAX_KV_MESSAGE_BYTES, tls=self._tls)
                self._opened = arena, servicer, server
                server.add(servicer)
                port = server.bind(self._host, 0)
                await server.start()
                self._fingerprint, self._address = fingerprint, f"{self._host}:{port}"
        return self._address

    async def stop(self) -> None:
        await asyncio.to_thread(self._page.close)
        metrics.REGISTRY.unregister(self._collector)
        await self._close()

    def _look(self) -> tuple[Arena, KVServicer] | None:
        return None if self._opened is None else self._opened[:2]

    async def _close(self) -> None:
        if self._opened is not None:
            arena, servicer, server = self._opened
            await server.stop(grace_s=0.5)
            servicer.close()
            await asyncio.to_thread(arena.close)
            self._opened = None
        self._fingerprint = ""
