"""The replica: a Ray Serve deployment around one engine.

Serve starts it, restarts it when it dies, and replaces it when ``check_health`` reports a stuck engine. Frames and
answers bypass Serve: they go through the replica's own gRPC server. The controller assigns its cameras.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from actors.remote import REMOTE_CONTROLLER, await_reply, await_reply_blocking
from actors.startup import InnerProcess, import_uncollected, run_task, show_replica
from actors.tier import tier_of_this_node
from cluster import metrics
from cluster.config import SightlineConfig
from cluster.control.fleet_settings import fleet_settings
from cluster.engine.vllm.settings import engine_gpus
from cluster.errors import SightlineError, UnavailableError
from cluster.replica import frames_service as frames
from cluster.replica import memory_service as memory
from cluster.replica.ask_queue import Conversations
from cluster.replica.engine import SIMULATED, load_configured, make_engine, make_simulated, model_fingerprint
from cluster.replica.events import ReplicaEvents, WorkerFrames
from cluster.replica.memory import MemoryCollector, MemoryDeletions, WorkerMemory, tier_stack
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.tracing import make_spans
from cluster.tracing.spans import ReplicaTraces
from cluster.types.reports import ReplicaInfo, ReplicaReport, StreamReport
from cluster.wire import answers as results
from cluster.wire.server import RpcServer

if TYPE_CHECKING:
    from cluster.engine.base import Engine
    from cluster.memory.bank import MemoryBank
    from cluster.memory.memory_counts import MemoryReport
    from cluster.memory.tiers.stack import TierStack

log = logging.getLogger(__name__)


class Replica(InnerProcess):
    """Loads the model, serves ``Frames`` and ``Results``, and registers with the controller."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, load: Callable[[], SightlineConfig], host: str | None
    ) -> None:
        self._instance = uuid.uuid4().hex[:12]
        try:
            super().__init__(load(), f"replica-{self._instance}", "replica", host, numbered="replica")
            if host is not None:
                _bind_serve(host)
            engine, bank = await self._load(self._config)
            # Garbage collection would scan the model's objects for a tenth of a second.
            gc.freeze()
            await self._start(engine, bank)
        except SightlineError as error:
            await REMOTE_CONTROLLER.report_failure(error)
            raise

    async def _load(self, config: SightlineConfig) -> tuple[Engine, MemoryBank]:
        """Create the engine, and its memory over tiers keyed by the model's fingerprint."""
        if config.engine == "simulated":
            tiers = await self._tiers(config, SIMULATED)
            return await asyncio.to_thread(make_simulated, config, tiers, self._instance)
        await asyncio.to_thread(import_uncollected, "cluster.models.loading")
        model = await asyncio.to_thread(load_configured, config, await asyncio.to_thread(neighbours, config))
        fingerprint = await asyncio.to_thread(model_fingerprint, config, model)
        return await asyncio.to_thread(make_engine, config, model, await self._tiers(config, fingerprint))

    async def _tiers(self, config: SightlineConfig, fingerprint: str) -> TierStack:
        address = await self._open_tier(fingerprint) if config.tiers.node else None

        def find_node() -> str:
            asked = tier_of_this_node().open.remote(fingerprint, replace=False)
            return str(await_reply_blocking(asked, timeout_s=config.tiers.deadline_s))

        return tier_stack(config, fingerprint, address, find_node=find_node, tls=self._tls)

    async def _open_tier(self, fingerprint: str) -> str:
        """Open the node's tier, retrying: on a new node it may start after the replica."""
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while True:
            try:
                return str(await await_reply(tier_of_this_node().open.remote(fingerprint)))
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(self._config.cluster.heartbeat_s)

    async def _start(self, engine: Engine, bank: MemoryBank) -> None:
        cluster = self._config.cluster
        self._joined_as: str | None = None
        self._loop = asyncio.get_running_loop()
        self._busy_s = 0.0
        # When the controller last knew this replica, monotonic seconds.
        self._answered_s = -math.inf
        kernel = type(getattr(engine, "kernel", engine)).__name__
        metrics.attention_kernel.labels(kernel, self._config.model.device).set(1)
        self._answered = metrics.AnsweredCameras()
        spans = make_spans(self._config.tracing, f"replica-{self._instance}")
        traces = ReplicaTraces(spans) if spans is not None else None
        self._tier_metrics = MemoryCollector(bank.tiers)
        metrics.REGISTRY.register(self._tier_metrics)
        if (gpus := metrics.gpu_collector()) is not None:
            metrics.REGISTRY.register(gpus)
        self._hub = results.AnswerHub(limit=cluster.answer_queue, recent=results.RECENT_ANSWERS)
        self._worker = EngineWorker(
            engine,
            ReplicaEvents(self._hub, self._answered, traces, self._window_settled),
            max_batch=cluster.max_batch,
            step_budget_s=self._config.scheduling.step_budget_s,
            costs=fleet_settings(self._config).costs,
            per_stream=cluster.window_queue,
            order=self._config.scheduling.order,
            stall_s=cluster.stall_timeout_s,
            absent_s=cluster.heartbeat_timeout_s,
            ask_share=self._config.asking.share,
        )
        self._worker.start()
        self._bank = bank
        bank.tiers.confirmed = lambda: time.monotonic() - self._answered_s <= cluster.heartbeat_timeout_s
        asking = self._config.asking
        self._memory = WorkerMemory(self._worker, ThumbnailStore(), bank, timeout_s=asking.timeout_s, answers=self._hub)
        conversations = Conversations(limit=max(64, 2 * asking.queue))
        self._deletions = MemoryDeletions(self._memory, conversations, bank)
        self._handler = WorkerFrames(self._worker, self._memory, self._answered, traces, self._deletions)
        self._server = RpcServer(tls=self._tls)
        self._frames = frames.FramesServicer(self._handler, credit=cluster.frame_queue)
        self._server.add(self._frames)
        self._server.add(results.ResultsServicer(self._hub))
        servicer = memory.MemoryServicer(
            self._memory,
            conversations=conversations,
            max_asks=asking.queue,
            max_new_tokens=asking.max_new_tokens,
            # The engine's own deadline gives the better error.
            ask_s=asking.timeout_s + 5.0,
        )
        self._server.add(servicer)
        port = self._server.bind(self._host, 0)
        await self._server.start()
        self._info = ReplicaInfo(
            instance=self._instance,
            address=f"{self._host}:{port}",
            metrics_address=self._page.address,
            pid=os.getpid(),
            geometry=engine.geometry,
            window_tokens=engine.window_tokens,
            waiting_bytes=engine.waiting_bytes,
        )
        await self._register()
        self._shown = show_replica(self._instance)
        self._beating = asyncio.Lock()
        self._tasks = [run_task(work) for work in (self._heartbeat(), self._confirm(), self._run_maintenance())]

    def _window_settled(self, camera: str) -> None:
        """Called on the engine thread, which may outlive the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._frames.acknowledge, camera)

    async def check_health(self) -> None:
        """Called by Serve every second; three consecutive exceptions get the replica replaced."""
        self._worker.check()

    async def __call__(self) -> str | None:
        """The replica's name; Serve routes no other request."""
        return self._joined_as

    async def _register(self) -> None:
        """Register with the controller, retrying while it restarts."""
        while True:
            try:
                if await REMOTE_CONTROLLER.was_expired(self._instance):
                    await self._deletions.surrender_all(self._worker)
                # First: a new camera of the same name must not find the removed one's memory.
                self._deletions.schedule(await REMOTE_CONTROLLER.pending_deletions(self._instance))
                await self._deletions.wait_until_done()
                streams = self._worker.open_streams()
                self._answered_s = time.monotonic()
                self._joined_as = await REMOTE_CONTROLLER.register_replica(self._info, self._joined_as, streams)
                self._name = self._joined_as
                return
            except UnavailableError as error:
                log.warning("cannot register: %s", error)
                await asyncio.sleep(self._config.cluster.heartbeat_s)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._config.cluster.heartbeat_s)
            self._handler.close_orphans(time.monotonic())
            async with self._beating:
                await self._send_heartbeat()

    async def _send_heartbeat(self) -> None:
        load = replace(self._worker.load(), memory=self._bank.tiers.trouble)
        self._update_metrics(load)
        try:
            forgotten = sorted(self._deletions.done)
            sent_s = time.monotonic()
            orders = await REMOTE_CONTROLLER.heartbeat_replica(self._instance, self._reports(), forgotten, load)
            if orders is None:
                await self._register()
            else:
                self._answered_s = sent_s
                self._deletions.acknowledge(forgotten)
                self._deletions.schedule(orders)
        except UnavailableError as error:
            log.warning("cannot send a heartbeat: %s", error)

    async def _confirm(self) -> None:
        """Confirm ownership to the engine. If this process was stalled for long enough to have been expired, ask the
        controller first; while the controller does not answer, it has not given any camera away either."""
        cluster, seen_s = self._config.cluster, time.monotonic()
        while True:
            await asyncio.sleep(cluster.heartbeat_s)
            if (stalled_s := time.monotonic() - seen_s) > cluster.heartbeat_timeout_s:
                log.warning("this process was stalled for %.0f s", stalled_s)
                async with self._beating:
                    await self._send_heartbeat()
            seen_s = time.monotonic()
            self._worker.confirm_ownership()

    def _update_metrics(self, load: ReplicaReport) -> None:
        for queue, depth in self._worker.depths().items():
            metrics.queue_depth.labels(queue).set(depth)
        metrics.replica_busy_seconds.inc(max(0.0, load.busy_s - self._busy_s))
        self._busy_s = load.busy_s
        metrics.replica_backlog_seconds.set(load.backlog_s)
        metrics.replica_cameras.set(load.held)
        self._answered.retain_cameras(self._worker.open_streams())
        self._answered.set_memory_bytes({camera: held.nbytes for camera, held in self._bank.memory_reports().items()})

    async def _run_maintenance(self) -> None:
        """Run the memory's deferred work, also without frames. A task of its own: a slow tier must not delay heartbeats
        or windows."""
        while True:
            await asyncio.sleep(self._config.cluster.heartbeat_s)
            try:
                self._memory.expire_pictures()
                await asyncio.wrap_future(self._worker.call_on_engine_thread(lambda _: self._bank.run_maintenance()))
                await asyncio.to_thread(self._bank.tiers.finish_deletions)
                await asyncio.to_thread(self._tier_metrics.refresh)
            except Exception:
                log.exception("maintenance of the memory failed")

    def _reports(self) -> list[StreamReport]:
        held = self._bank.memory_reports()
        return [_with_memory(report, held.get(report.camera)) for report in self._worker.reports()]


def _bind_serve(host: str) -> None:
    """Have Serve's own server, which nobody calls, listen on this address instead of all."""
    from ray.serve._private import replica as serves

    bind = serves.add_port_to_grpc_server
    serves.add_port_to_grpc_server = lambda server, _: bind(server, f"{host}:0")


def neighbours(config: SightlineConfig) -> int:
    """Replicas that share this node's cores: as many as it offers of their Ray resource, or all if none is named."""
    place = config.cluster.placement.replica
    if place is None:
        return config.cluster.replicas
    here = ray.get_runtime_context().get_node_id()
    return max([1, *(int(node["Resources"].get(place, 1)) for node in ray.nodes() if node["NodeID"] == here)])


def _with_memory(report: StreamReport, memory: MemoryReport | None) -> StreamReport:
    if memory is None:
        return report
    return replace(
        report,
        memory_bytes=memory.nbytes,
        memory_frames=memory.frames,
        memory_oldest_s=memory.span_s,
        memory_state=memory.state,
    )


def replica_application(
    config: SightlineConfig, host: str | None, load: Callable[[], SightlineConfig] | None = None
) -> Any:
    """The Serve application of all replicas. Each starts with the configuration that ``load`` returns in its process,
    by default ``config``. Imports Serve, which then reads its flags from the environment."""
    from ray import serve

    # "cuda": each replica has its own GPUs; "cuda:0": one GPU shared by all.
    own = config.model.device == "cuda" and config.engine != "simulated"
    gpus = engine_gpus(config.vllm.arguments, config.engine) if own else 0
    place = config.cluster.placement.replica
    resources = {} if place is None else {place: 1.0}
    deployment = serve.deployment(
        name="replica",
        num_replicas=config.cluster.replicas,
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus, "resources": resources},
        max_ongoing_requests=100,
        health_check_period_s=1.0,
        health_check_timeout_s=max(10.0, config.cluster.heartbeat_timeout_s),
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )(Replica)
    return deployment.bind(load or (lambda: config), host)
