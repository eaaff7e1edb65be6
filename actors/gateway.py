"""The gateway actor: the public gRPC and HTTP endpoints. All its state can be rebuilt, so several may run."""

import asyncio
import logging
import math
import time
from collections.abc import Collection
from typing import Any

from prometheus_client import CollectorRegistry
from sightline.v1 import pictures_pb2

from actors.controller_directory import ANSWER_S, ControllerDirectory
from actors.remote import GATEWAY, await_reply
from actors.startup import ActorProcess, Addresses, run_task
from cluster import metrics
from cluster.alerts.health import default_rule
from cluster.config import SightlineConfig
from cluster.config.secrets import tls_files
from cluster.errors import NotReadyError, SightlineError, UnavailableError
from cluster.gateway import incidents_proxy as incidents
from cluster.gateway import pictures_proxy as pictures
from cluster.gateway.directory import CamerasServicer, ReplicasServicer
from cluster.gateway.guard import make_guard
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.gateway.ingest_proxy import IngestProxy
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.gateway.merger import ResultsMerger
from cluster.hosts import limit_malloc_retention, raise_file_limit
from cluster.security.roles import PUSH, current_principal
from cluster.wire import answers as results
from cluster.wire.channel import ChannelPool
from cluster.wire.metrics_server import FederatedCollector
from cluster.wire.server import RpcServer, push_message_bytes

log = logging.getLogger(__name__)

POLL_S = 2.0
FILES = 1024
"""File descriptors needed besides client connections."""


class Gateway(ActorProcess):
    """Ray actor. Starts by itself, so that after a restart it is back on the same ports.

    The first gateway, named ``gateway``, exports the metrics of all processes, but of other gateways only whether they
    answer: they export the rest themselves, so that scraping all gateways yields nothing twice.
    """

    def __init__(self, config: SightlineConfig, name: str = GATEWAY) -> None:
        super().__init__(config, name, "gateway")
        limit_malloc_retention()
        raise_file_limit(FILES + 2 * config.gateway.max_connections)
        self._directory = ControllerDirectory()
        self._controller = self._directory.controller
        self._channels = ChannelPool(tls=self._tls)
        self._hub = results.AnswerHub(limit=config.cluster.answer_queue, recent=results.RECENT_ANSWERS)
        self._merger = ResultsMerger(self._hub, tls=self._tls)
        self._pictures = pictures.PicturesProxy(
            self._decoder_of,
            self._alerting if config.alerts.enabled else None,
            self._channels,
            tested=self._controller.tested_source,
            any_decoder=self._controller.any_decoder,
        )
        self._missed = 0
        self._guard = make_guard(config.security, audit_suffix="" if name == GATEWAY else f"-{name}")
        # TLS of the public ports.
        self._public = tls_files(config.security)
        self._server = RpcServer(
            max_message_bytes=push_message_bytes(config.gateway.max_packet_bytes),
            guard=self._guard,
            tls=self._public,
            max_connections=config.gateway.max_connections,
        )
        self._scraped: dict[str, str] = {}
        self._others: dict[str, bool] = {}
        self._http: HttpServer | None = None
        self._live: Live | None = None
        self._started = run_task(self._start(), told=SightlineError)
        self._tasks = [
            run_task(self._merger.follow_replicas(self._controller.replicas)),
            run_task(self._follow_metrics()),
        ]

    async def ready(self) -> Addresses:
        """Addresses, once everything listens. Raises ``ConfigError``: a port is taken."""
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Stop listening; calls in progress get a second to finish."""
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
        if self._guard is not None:
            await asyncio.to_thread(self._guard.close)

    async def _start(self) -> Addresses:
        host, port = self._config.gateway.host, self._config.gateway.port
        registry = CollectorRegistry()
        scraped = FederatedCollector(
            lambda: self._scraped, lambda: {self._name: metrics.REGISTRY}, lambda: self._others, tls=self._tls
        )
        registry.register(scraped)
        pushes = IngestProxy(self._decoder_for_push, self._channels)
        listed = incidents.IncidentsProxy(self._alerting, self._channels)
        memories = MemoryProxy(
            self._replica_of,
            self._channels,
            on_forget=self._delete_footage,
            replicas=self._replicas,
            cameras=self._controller.list_cameras,
            incidents=listed.list_incidents if self._config.alerts.enabled else None,
        )
        listing = CamerasServicer(self._controller), ReplicasServicer(self._controller)
        self._server.add(pushes, *listing, results.ResultsServicer(self._hub), memories, listed, self._pictures)
        bound = self._server.bind(host, port)
        services = self._server.services
        self._live = Live(self._controller, self._hub, InProcessCalls(services))
        application = make_application(
            services,
            self._live,
            registry,
            guard=self._guard,
            sessions=self._directory.sessions,
            host=host,
            longest_answer=self._config.asking.max_new_tokens,
            rule=default_rule(self._config.alerts),
        )
        self._http = HttpServer(application, max_connections=self._config.gateway.max_connections, tls=self._public)
        pages = await self._http.start(host, self._config.gateway.http_port)
        self._live.start()
        self._tasks.append(run_task(self._http.run()))
        await self._server.start()
        if self._guard is not None and self._guard.provider is not None:
            self._guard.provider.refresh()
        return Addresses(f"{host}:{bound}", pages)

    async def _decoder_for_push(self, camera: str) -> str:
        if self._guard is not None:
            self._guard.check(current_principal(), PUSH, [camera])
        return await self._decoder_of(camera)

    async def _decoder_of(self, camera: str) -> str:
        return (await self._controller.where(camera)).to_decoder(camera)

    async def _replica_of(self, camera: str) -> str:
        return (await self._controller.where(camera)).to_replica(camera)

    async def _replicas(self) -> Collection[str]:
        return (await self._controller.replicas({}, 0.0)).values()

    async def forget_scores(self, camera: str, ago_s: float) -> None:
        """Delete the scores of a camera's windows that ended more than ``ago_s`` seconds ago, 0: all. Called by other
        gateways too, whose clocks may differ."""
        self._hub.forget(lambda name: name == camera, ago_s)
        if self._live is not None:
            self._live.history.forget(camera, time.time() - ago_s if ago_s else math.inf)

    async def _delete_footage(self, camera: str, before_s: float) -> pictures_pb2.ForgetFootageReply:
        await self.forget_scores(camera, before_s)
        reply = await self._pictures.forget(camera, before_s)
        # Last: a silent gateway must not keep the rest from being deleted.
        others = await self._ask_others("forget_scores", camera, before_s)
        if silent := sorted(name for name, answered in others.items() if not answered):
            names = ", ".join(silent)
            log.warning("scores of camera %s may still be shown by %s, which did not answer", camera, names)
            raise UnavailableError(
                f"everything of camera {camera!r} is deleted except its last scores at {names}, which did not answer; "
                "repeat the deletion in a moment"
            )
        return reply

    async def _ask_others(self, method: str, *arguments: Any) -> dict[str, bool]:
        """Call a method of every other gateway; returns which of them answered. Raises ``UnavailableError``."""
        others = await self._directory.gateways(but=self._name)
        answered = await asyncio.gather(*(_answers(getattr(each, method), arguments) for each in others.values()))
        return dict(zip(others, answered, strict=True))

    async def _alerting(self) -> str:
        if not self._config.alerts.enabled:
            raise NotReadyError("this cluster makes no incidents; alerts.enabled is off")
        return await self._directory.alerting()

    async def _follow_metrics(self) -> None:
        while True:
            try:
                if self._name == GATEWAY:
                    self._others = await self._ask_others("ready")
                    self._scraped = await self._directory.metrics_addresses()
            except UnavailableError as error:
                log.warning("%s", error)
            metrics.answers_missed.inc(self._hub.missed - self._missed)
            self._missed = self._hub.missed
            await asyncio.sleep(POLL_S)


async def _answers(method: Any, arguments: tuple[Any, ...]) -> bool:
    try:
        await await_reply(method.remote(*arguments), timeout_s=ANSWER_S)
    except Exception as error:
        # A gateway that does not start logs the reason itself.
        log.debug("another gateway does not answer: %s", error)
        return False
    return True
