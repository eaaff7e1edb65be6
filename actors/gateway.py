"""The gateway actor: the public gRPC and HTTP endpoints. Stateless."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray.exceptions import RayError
from sightline.v1 import (
    ingest_pb2,
    pictures_pb2,
)

from actors.remote import ALERTING, NAMESPACE, RECONCILER, TIER, alerting, ask_controller, await_reply, short_tier
from actors.startup import configure_logging, describe_process
from cluster import metrics
from cluster.alerts.health import default_rule
from cluster.config import CameraEntry, SightlineConfig, parse_camera
from cluster.config.secrets import peer_tls, tls_files
from cluster.control.cameras.managed import ManagedCamera, manager_from_outside
from cluster.errors import UnavailableError
from cluster.gateway import cameras, replicas
from cluster.gateway import incidents_proxy as incidents
from cluster.gateway import pictures_proxy as pictures
from cluster.gateway.federation import FederatedCollector
from cluster.gateway.guard import make_guard
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.gateway.ingest_proxy import ProxySink
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.gateway.merger import ResultsMerger
from cluster.hosts import limit_malloc_retention, raise_file_limit
from cluster.redaction import SourceAddress
from cluster.security.roles import PUSH, current_principal
from cluster.types import CameraStatus, Question
from cluster.types.reports import ReplicaStatus
from cluster.wire import answers as results
from cluster.wire import ingest
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer, push_message_bytes

ANSWER_S = 2.0
"""Timeout of asking one process for its metrics address."""


def named() -> dict[str, Any]:
    """Handles by name of this cluster's processes that are asked directly. Blocks up to Ray's own deadline; raises
    ``RayError``."""
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [str(each["name"]) for each in listed if each["namespace"] == NAMESPACE]
    found = {}
    for name in names:
        if name in (ALERTING, RECONCILER) or name.startswith(TIER):
            # It may have ended since.
            with contextlib.suppress(ValueError):
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


class MetricsPages:
    """Metrics addresses of all processes: the controller knows decoders and replicas; alerting, the reconciler and the
    nodes' tiers are asked directly, while Ray knows their names. One that does not answer keeps its last address, so
    that scraping it shows that it is down.

    Args:
        look: :func:`named`.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]] = named) -> None:
        self._look = look
        self._known: dict[str, str] = {}

    async def addresses(self) -> dict[str, str]:
        """Process name -> ``host:port``.

        Raises:
            UnavailableError: the controller does not answer.
        """
        members: dict[str, str] = await ask_controller("metrics_addresses")
        try:
            handles = await asyncio.to_thread(self._look)
        except RayError as error:
            log.warning("cannot list the cluster's processes: %s", error)
            return members | self._known
        found = await asyncio.gather(*(_page(name, handle) for name, handle in handles.items()))
        shown = [short_tier(name) if name.startswith(TIER) else name for name in handles]
        places = {name: place or self._known.get(name) for name, place in zip(shown, found, strict=True)}
        self._known = {name: place for name, place in places.items() if place is not None}
        return members | self._known


async def _page(name: str, handle: Any) -> str | None:
    """Metrics address of a process; ``None`` if it does not answer."""
    try:
        if name == ALERTING:
            return str((await await_reply(handle.ready.remote(), timeout_s=ANSWER_S)).metrics)
        return str(await await_reply(handle.metrics_address.remote(), timeout_s=ANSWER_S))
    except Exception as error:
        # A process that does not start logs the reason itself, and must not hide the others.
        log.debug("cannot get the metrics address of %s: %s", name, error)
        return None


log = logging.getLogger(__name__)

POLL_S = 2.0
FILES = 1024
"""File descriptors besides those of clients' connections."""
IDLE_REPLY_S = 2.0
"""Seconds between replies to a pushing agent that does not need them."""


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """Listening addresses of the gateway, ``host:port`` each."""

    rpc: str
    metrics: str


class Gateway:
    """Ray actor. Starts by itself, so that a restarted one is back on the same ports."""

    def __init__(self, config: SightlineConfig) -> None:
        configure_logging("gateway", config.cluster)
        limit_malloc_retention()
        raise_file_limit(FILES + 2 * config.gateway.max_connections)
        describe_process(config, "gateway")
        self._config = config
        self._controller = ControllerDirectory()
        self._peers = peer_tls(config.security)
        self._channels = ChannelPool(tls=self._peers)
        self._hub = results.AnswerHub(limit=config.cluster.answer_queue)
        self._merger = ResultsMerger(self._hub, tls=self._peers)
        self._pictures = pictures.PicturesProxy(
            self._decoder_of,
            self._alerting if config.alerts.enabled else None,
            self._channels,
            tested=self._tested_source,
            any_decoder=self._any_decoder,
        )
        self._missed = 0
        self._guard = make_guard(config.security)
        self._tls = tls_files(config.security)
        self._server = RpcServer(
            max_message_bytes=push_message_bytes(config.gateway.max_packet_bytes),
            guard=self._guard,
            tls=self._tls,
            max_connections=config.gateway.max_connections,
        )
        self._scraped: dict[str, str] = {}
        self._http: HttpServer | None = None
        self._live: Live | None = None
        self._started = asyncio.create_task(self._start())
        self._tasks = [asyncio.create_task(self._follow_replicas()), asyncio.create_task(self._follow_metrics())]

    async def ready(self) -> GatewayAddresses:
        """Addresses, once everything listens; raises ``ConfigError`` when a port is taken."""
        return await asyncio.shield(self._started)

    async def process_id(self) -> int:
        """Process id, for operators and tests."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop listening; running calls get a second."""
        for task in self._tasks:
            task.cancel()
        self._hub.close()
        if self._guard is not None and self._guard.provider is not None:
            await self._guard.provider.stop()
        await self._merger.stop()
        if self._live is not None:
            await self._live.stop()
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(grace_s=1.0)

    async def _start(self) -> GatewayAddresses:
        host, port = self._config.gateway.host, self._config.gateway.port
        registry = CollectorRegistry()
        scraped = FederatedCollector(lambda: self._scraped, own={"gateway": metrics.REGISTRY}, tls=self._peers)
        registry.register(scraped)
        servicer = ingest.IngestServicer(
            self._sink, max_packet_bytes=self._config.gateway.max_packet_bytes, idle_reply_s=IDLE_REPLY_S
        )
        listed = incidents.IncidentsProxy(self._alerting, self._channels)
        memories = MemoryProxy(
            self._replica_of,
            self._channels,
            on_forget=self._delete_footage,
            cameras=self._controller.list,
            incidents=listed.list_incidents if self._config.alerts.enabled else None,
        )
        listing = cameras.CamerasServicer(self._controller), replicas.ReplicasServicer(self._controller)
        self._server.add(servicer, *listing, results.ResultsServicer(self._hub), memories, listed, self._pictures)
        bound = self._server.bind(host, port)
        services = self._server.services
        self._live = Live(self._controller, self._hub, Calls(services))
        application = make_application(
            services,
            self._live,
            registry,
            guard=self._guard,
            host=host,
            longest_answer=self._config.asking.max_new_tokens,
            rule=default_rule(self._config.alerts),
        )
        self._http = HttpServer(application, max_connections=self._config.gateway.max_connections, tls=self._tls)
        pages = await self._http.start(host, self._config.gateway.metrics_port)
        self._live.start()
        await self._server.start()
        if self._guard is not None and self._guard.provider is not None:
            self._guard.provider.refresh()
        return GatewayAddresses(f"{host}:{bound}", pages)

    async def _sink(self, camera: str) -> ProxySink:
        if self._guard is not None:
            self._guard.check(current_principal(), PUSH, [camera])
        await self._controller.where(camera)
        return CountingProxySink(camera, self._decoder_of, self._channels)

    async def _decoder_of(self, camera: str) -> str:
        route = await self._controller.where(camera)
        if route.decoder_address is None:
            raise UnavailableError(f"no decoder is ready for camera {camera!r} yet")
        return str(route.decoder_address)

    async def _tested_source(self, entry: CameraEntry) -> tuple[str, CameraEntry]:
        return await self._controller.tested_source(entry)

    async def _any_decoder(self) -> str:
        return await self._controller.any_decoder()

    async def _replica_of(self, camera: str) -> str:
        route = await self._controller.where(camera)
        if route.replica_address is None:
            raise UnavailableError(f"no replica is ready for camera {camera!r} yet")
        return str(route.replica_address)

    async def _delete_footage(self, camera: str, before_s: float) -> pictures_pb2.ForgetFootageReply:
        if self._live is not None:
            self._live.history.forget(camera, time.time() - before_s)
        return await self._pictures.forget(camera, before_s)

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
            if self._live is not None and self._live.cameras:
                self._merger.retain(self._live.cameras)
            await asyncio.sleep(POLL_S)


class CountingProxySink(ProxySink):
    """Counts packets accepted from outside."""

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        await super().offer(batch)
        metrics.ingest_packets.inc(len(batch.packets))
        metrics.ingest_bytes.inc(sum(len(packet.data) for packet in batch.packets))


class ControllerDirectory:
    """The controller as ``Cameras`` and ``Replicas`` directory (:class:`cluster.gateway.cameras.CameraDirectory`)."""

    def __init__(self) -> None:
        self._pages = MetricsPages()

    async def add(
        self,
        name: str,
        source: SourceAddress,
        questions: Sequence[Question],
        settings: dict[str, Any],
        force: bool = False,
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus:
        entry = parse_camera(name, source, [asdict(question) for question in questions], settings)
        managed = ManagedCamera(entry=entry, manager=manager_from_outside(manager))
        return await ask_controller("add_camera", managed, force, takeover)

    async def update(
        self,
        name: str,
        source: SourceAddress,
        questions: Sequence[Question],
        settings: dict[str, Any],
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus:
        entry = parse_camera(name, source, [asdict(question) for question in questions], settings)
        managed = ManagedCamera(entry=entry, manager=manager_from_outside(manager))
        return await ask_controller("update_camera", managed, takeover)

    async def remove(self, name: str, manager: str = "", takeover: bool = False) -> None:
        await ask_controller("remove_camera", name, manager_from_outside(manager), takeover)

    async def export(self, names: Sequence[str] = ()) -> Sequence[ManagedCamera]:
        return await ask_controller("managed_cameras", list(names))

    async def list(self) -> Sequence[CameraStatus]:
        return await ask_controller("list_cameras")

    async def get(self, name: str) -> CameraStatus:
        return await ask_controller("get_camera", name)

    async def tested_source(self, entry: CameraEntry) -> tuple[str, CameraEntry]:
        """See the controller."""
        found: tuple[str, CameraEntry] = await ask_controller("tested_source", entry)
        return found

    async def any_decoder(self) -> str:
        """See the controller."""
        return str(await ask_controller("any_decoder"))

    async def where(self, name: str) -> Any:
        """A :class:`~cluster.control.directory.Route`."""
        return await ask_controller("where", name)

    async def replicas(self, known: dict[str, str], timeout_s: float) -> dict[str, str]:
        """See the controller."""
        return await ask_controller("replicas", known, timeout_s, reply_s=timeout_s + 10.0)

    async def list_replicas(self) -> Sequence[ReplicaStatus]:
        """See :class:`cluster.gateway.replicas.ReplicaDirectory`."""
        return await ask_controller("list_replicas")

    async def drain(self, name: str, undo: bool) -> ReplicaStatus:
        """See :class:`cluster.gateway.replicas.ReplicaDirectory`."""
        return await ask_controller("drain_replica", name, undo)

    async def metrics_addresses(self) -> dict[str, str]:
        """See :class:`actors.gateway.MetricsPages`."""
        return await self._pages.addresses()

    async def alerting(self) -> str:
        """Address of ``Incidents`` behind the gateway, ``host:port``."""
        return str((await await_reply(alerting().ready.remote())).rpc)
