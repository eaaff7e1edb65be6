"""Target of a load test: a cluster of its own (optionally with a Redis), or a running one; and the answer listener."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.client import GatewayClient
from cluster.config import SightlineConfig
from cluster.errors import ConfigError, SightlineError, UnavailableError
from cluster.hosts import is_loopback
from cluster.lab.bench.processes import RedisServer
from cluster.types import Answer
from cluster.wire.channel import open_channel, split_address
from cluster.wire.convert import answer_from_proto
from cluster.wire.tls import ClientCredentials
from loadtest.machine import read_page

if TYPE_CHECKING:
    from actors.runtime import Cluster


RETRY_S = 0.1


class Listener:
    """Subscribes to the gateway's answers. ``missed``: answers that the gateway reports as dropped on the way here;
    ``breaks``: times the stream broke, each of which may have lost answers."""

    def __init__(
        self,
        gateway: str,
        on_answer: Callable[[Answer, float], None],
        *,
        credentials: ClientCredentials | None = None,
    ) -> None:
        credentials = credentials or ClientCredentials()
        self._gateway = gateway
        self._metadata = credentials.metadata(loopback=is_loopback(split_address(gateway)[0]))
        self._tls = credentials.channel_credentials()
        self._on_answer = on_answer
        self._ready = asyncio.Event()
        self.missed = 0
        self.breaks = 0

    @property
    def complete(self) -> bool:
        """Whether no answer can have been lost so far."""
        return not self.missed and not self.breaks

    async def ready(self, timeout_s: float) -> None:
        """Wait for the subscription. Raises ``UnavailableError``: timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise UnavailableError(
                f"no Sightline gateway answers at {self._gateway}; start one with `sightline serve`"
            ) from None

    async def run(self) -> None:
        """Listen until cancelled, resubscribing after errors."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._listen()
            if self._ready.is_set():
                self.breaks += 1
            await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        async with open_channel(self._gateway, internal=False, tls=self._tls) as channel:
            call = results_pb2_grpc.ResultsStub(channel).Watch(
                results_pb2.WatchRequest(), metadata=self._metadata, wait_for_ready=True
            )
            # The gateway sends it once the subscription is active.
            await call.initial_metadata()
            self._ready.set()
            async for message in call:
                self.missed += message.missed
                self._on_answer(answer_from_proto(message), time.monotonic())


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster under test. ``processes()``: process ids by the cluster's names (``replica-0``, ``gateway``, ``tier``),
    empty for a cluster elsewhere; blocks for up to a second, so call it in a thread.

    ``own``: whether the load test started it; ``config``: source of the cameras' settings."""

    gateway: str
    metrics: str | None
    config: SightlineConfig
    processes: Callable[[], dict[str, int]] = dict
    own: bool = False
    credentials: ClientCredentials | None = None

    def replicas(self) -> int:
        """Number of replicas; for a running cluster as listed by its gateway. Blocks. Raises ``SightlineError``: the
        gateway does not answer."""
        if self.own:
            return self.config.cluster.replicas
        with GatewayClient(self.gateway, credentials=self.credentials) as client:
            return len(client.replicas_and_decoders()[0])

    def metrics_trouble(self) -> str:
        """Reason why the metrics page cannot be read; empty if it can, or if there is none. Blocks."""
        if self.metrics is None:
            return ""
        try:
            read_page(self.metrics, self.credentials)
        except (SightlineError, OSError, ValueError) as error:
            return str(getattr(error, "reason", "") or error)
        return ""


@contextlib.contextmanager
def own_cluster(
    config: SightlineConfig,
    on_phase: Callable[[str], None],
    credentials: ClientCredentials | None = None,
    *,
    redis: bool = False,
) -> Iterator[Target]:
    """Context that runs a cluster from ``config``; ``redis``: with a Redis of its own. Raises ``ConfigError``: see
    ``actors.runtime.Cluster.start``; or, with ``redis``, the configuration already names one, or ``redis-server`` is
    not installed; ``SightlineError``: the cluster did not start."""
    on_phase("loading the libraries")
    from actors.runtime import Cluster

    beside: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        if redis:
            if config.tiers.redis_url is not None:
                raise ConfigError("kill-redis only kills a Redis that the load test starts; remove tiers.redis_url")
            server = stack.enter_context(RedisServer())
            beside["redis"] = server.pid
            tiers = config.tiers.model_copy(update={"redis_url": server.url})
            config = config.model_copy(update={"tiers": tiers})
        cluster = stack.enter_context(Cluster(config, on_phase=on_phase))
        yield Target(
            gateway=cluster.gateway_address,
            metrics=cluster.metrics_address,
            config=config,
            processes=lambda: _processes(cluster) | beside,
            own=True,
            credentials=credentials,
        )


def _processes(cluster: Cluster) -> dict[str, int]:
    import ray
    from ray.exceptions import RayError

    from actors.remote import CONTROLLER, NAMESPACE, await_reply_blocking, is_gateway

    found: dict[str, int] = {}
    # Some may be restarting; the next call finds them.
    with contextlib.suppress(SightlineError, RayError):
        readiness = cluster.readiness()
        found |= {name: info.pid for name, info in readiness.decoders.items()}
        found |= {name: info.pid for name, info in readiness.replicas.items()}
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    for name in names:
        role = name.split("-")[0]
        if role in (CONTROLLER, "tier") or is_gateway(name):
            with contextlib.suppress(SightlineError, RayError, ValueError):
                found[name if is_gateway(name) else role] = await_reply_blocking(
                    ray.get_actor(name, namespace=NAMESPACE).process_id.remote(), timeout_s=2.0
                )
    return found
