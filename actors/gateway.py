"""The gateway actor: what the outside talks to. gRPC for all of it; HTTP for metrics and for questions about the past.

It has no state.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from sightline.v1 import (
    cameras_pb2_grpc,
    incidents_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    memory_pb2_grpc,
    replicas_pb2_grpc,
    results_pb2_grpc,
)

from actors.logs import configure_logging
from actors.remote import alerting, ask, controller
from actors.security import make_guard, tls_files
from cluster import metrics
from cluster.config import SightlineConfig, camera_settings, parse_camera
from cluster.errors import UnavailableError
from cluster.rpc import cameras, incidents, ingest, memory, replicas, results
from cluster.rpc.channel import ChannelPool
from cluster.rpc.guard import guarded
from cluster.rpc.http_server import HttpServer
from cluster.rpc.memory_client import MemoryClient, own_address
from cluster.rpc.memory_http import MemoryApi
from cluster.rpc.memory_proxy import MemoryProxy
from cluster.rpc.merger import ResultsMerger
from cluster.rpc.proxy import ProxySink
from cluster.rpc.server import RpcServer, push_message_bytes
from cluster.scheduling.reports import ReplicaStatus
from cluster.security.access import current
from cluster.security.roles import METRICS, PUSH
from cluster.types import CameraStatus, Question

log = logging.getLogger(__name__)

POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """Where the gateway listens, ``host:port`` each."""

    rpc: str
    metrics: str


class Gateway:
    """Ray actor. Starts by itself, so that a restarted one is back on the same ports without being told."""

    def __init__(self, config: SightlineConfig) -> None:
        configure_logging("gateway", config.cluster.log_dir)
        self._config = config
        self._controller = ControllerDirectory(config)
        self._channels = ChannelPool()
        self._hub = results.AnswerHub(limit=config.cluster.answer_queue)
        self._merger = ResultsMerger(self._hub)
        self._missed = 0
        self._guard = make_guard(config.security)
        self._tls = tls_files(config.security)
        self._server = RpcServer(
            max_message_bytes=push_message_bytes(config.gateway.max_packet_bytes), guard=self._guard, tls=self._tls
        )
        self._scraped: dict[str, str] = {}
        self._http: HttpServer | None = None
        self._own: MemoryClient | None = None
        self._started = asyncio.create_task(self._start())
        self._tasks = [asyncio.create_task(self._follow_replicas()), asyncio.create_task(self._follow_metrics())]

    async def ready(self) -> GatewayAddresses:
        """Addresses as soon as everything listens; raises ``ConfigError`` when a port is taken."""
        return await asyncio.shield(self._started)

    async def process_id(self) -> int:
        """Of this process, for operators and tests."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop listening; running calls get a second."""
        for task in self._tasks:
            task.cancel()
        self._hub.close()
        await self._merger.stop()
        await self._server.stop(grace_s=1.0)
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        if self._own is not None:
            self._own.close()

    async def _start(self) -> GatewayAddresses:
        host, port = self._config.gateway.host, self._config.gateway.port
        registry = CollectorRegistry()
        registry.register(metrics.FederatedCollector(lambda: self._scraped, own={"gateway": metrics.REGISTRY}))
        servicer = ingest.IngestServicer(self._sink, max_packet_bytes=self._config.gateway.max_packet_bytes)
        self._server.add(ingest.SERVICE, ingest_pb2_grpc.add_IngestServicer_to_server, servicer)
        self._server.add(
            cameras.SERVICE, cameras_pb2_grpc.add_CamerasServicer_to_server, cameras.CamerasServicer(self._controller)
        )
        self._server.add(
            replicas.SERVICE,
            replicas_pb2_grpc.add_ReplicasServicer_to_server,
            replicas.ReplicasServicer(self._controller),
        )
        self._server.add(
            results.SERVICE, results_pb2_grpc.add_ResultsServicer_to_server, results.ResultsServicer(self._hub)
        )
        self._server.add(
            memory.SERVICE,
            memory_pb2_grpc.add_MemoryServicer_to_server,
            MemoryProxy(self._replica_of, self._channels),
        )
        self._server.add(
            incidents.SERVICE,
            incidents_pb2_grpc.add_IncidentsServicer_to_server,
            incidents.IncidentsProxy(self._alerting, self._channels),
        )
        bound = self._server.bind(host, port)
        own = own_address(host, bound)
        if self._tls is not None:
            # A way in for itself: a certificate is for the names that others use. The same tokens are asked for.
            own = f"127.0.0.1:{self._server.bind('127.0.0.1', 0, plain=True)}"
        self._own = MemoryClient(own, internal=True)
        pages = MemoryApi(self._own, beside=guarded(self._guard, METRICS, make_wsgi_app(registry)))
        self._http = HttpServer(host, self._config.gateway.metrics_port, pages, tls=self._tls)
        await self._server.start()
        return GatewayAddresses(f"{host}:{bound}", self._http.address)

    async def _sink(self, camera: str) -> ProxySink:
        if self._guard is not None:
            self._guard.check(current(), PUSH, [camera])
        await self._controller.where(camera)
        return CountingProxySink(camera, self._decoder_of, self._channels)

    async def _decoder_of(self, camera: str) -> str:
        route = await self._controller.where(camera)
        if route.decoder_address is None:
            raise UnavailableError(f"no decoder is ready for camera {camera!r} yet")
        return str(route.decoder_address)

    async def _replica_of(self, camera: str) -> str:
        route = await self._controller.where(camera)
        if route.replica_address is None:
            raise UnavailableError(f"no replica is ready for camera {camera!r} yet")
        return str(route.replica_address)

    async def _alerting(self) -> str:
        return await self._controller.alerting()

    async def _follow_replicas(self) -> None:
        known: dict[str, str] = {}
        while True:
            try:
                known = await self._controller.replicas(known, timeout_s=10.0)
                self._merger.follow(sorted(known.values()))
            except UnavailableError:
                await asyncio.sleep(POLL_S)

    async def _follow_metrics(self) -> None:
        while True:
            try:
                self._scraped = await self._controller.metrics_addresses()
            except UnavailableError as error:
                log.warning("%s", error)
            metrics.answers_missed.inc(self._hub.missed - self._missed)
            self._missed = self._hub.missed
            await asyncio.sleep(POLL_S)


class CountingProxySink(ProxySink):
    """Counts what is taken over from the outside."""

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        await super().offer(batch)
        metrics.ingest_packets.inc(len(batch.packets))
        metrics.ingest_bytes.inc(sum(len(packet.data) for packet in batch.packets))


class ControllerDirectory:
    """The controller as ``Cameras`` and ``Replicas`` see it (:class:`cluster.rpc.cameras.CameraDirectory`)."""

    def __init__(self, config: SightlineConfig) -> None:
        self._config = config

    async def add(
        self, name: str, source: str, questions: Sequence[Question], settings: dict[str, Any], force: bool = False
    ) -> CameraStatus:
        entry = parse_camera(name, source, [asdict(question) for question in questions], settings)
        status: CameraStatus = await ask(controller().add_camera.remote(camera_settings(self._config, entry), force))
        return status

    async def remove(self, name: str) -> None:
        await ask(controller().remove_camera.remote(name))

    async def list(self) -> Sequence[CameraStatus]:
        statuses: Sequence[CameraStatus] = await ask(controller().list_cameras.remote())
        return statuses

    async def get(self, name: str) -> CameraStatus:
        status: CameraStatus = await ask(controller().get_camera.remote(name))
        return status

    async def where(self, name: str) -> Any:
        """A :class:`~cluster.scheduling.directory.Route`."""
        return await ask(controller().where.remote(name))

    async def replicas(self, known: dict[str, str], timeout_s: float) -> dict[str, str]:
        """See the controller."""
        replicas: dict[str, str] = await ask(controller().replicas.remote(known, timeout_s), timeout_s=timeout_s + 10.0)
        return replicas

    async def list_replicas(self) -> Sequence[ReplicaStatus]:
        """See :class:`cluster.rpc.replicas.ReplicaDirectory`."""
        statuses: Sequence[ReplicaStatus] = await ask(controller().list_replicas.remote())
        return statuses

    async def drain(self, name: str, undo: bool) -> ReplicaStatus:
        """See :class:`cluster.rpc.replicas.ReplicaDirectory`."""
        status: ReplicaStatus = await ask(controller().drain_replica.remote(name, undo))
        return status

    async def metrics_addresses(self) -> dict[str, str]:
        """See the controller."""
        addresses: dict[str, str] = await ask(controller().metrics_addresses.remote())
        if self._config.alerts.enabled:
            addresses["alerting"] = (await ask(alerting().ready.remote())).metrics
        return addresses

    async def alerting(self) -> str:
        """``host:port`` of ``Incidents`` behind the gateway."""
        return str((await ask(alerting().ready.remote())).rpc)
