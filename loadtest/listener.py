"""Listens to every answer of a cluster on the load generator's event loop, through the gateway's restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.hosts import is_loopback
from cluster.types import Answer
from cluster.wire.channel import open_channel, split_address
from cluster.wire.convert import answer_from_proto
from cluster.wire.credentials import ClientCredentials

AGAIN_S = 0.1


class Listener:
    """``missed``: answers that the gateway says it dropped on the way here; ``breaks``: times it hung up, after which
    answers may have gone by unheard."""

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
    def heard_everything(self) -> bool:
        """Whether no answer can have gone by unheard so far."""
        return not self.missed and not self.breaks

    async def ready(self, timeout_s: float) -> None:
        """Until it listens; raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            await self._ready.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._listen()
            if self._ready.is_set():
                self.breaks += 1
            await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        async with open_channel(self._gateway, internal=False, tls=self._tls) as channel:
            call = results_pb2_grpc.ResultsStub(channel).Watch(
                results_pb2.WatchRequest(), metadata=self._metadata, wait_for_ready=True
            )
            # The gateway sends it when the subscription stands.
            await call.initial_metadata()
            self._ready.set()
            async for message in call:
                self.missed += message.missed
                self._on_answer(answer_from_proto(message), time.monotonic())
