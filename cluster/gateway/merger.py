"""Merges the answers of all replicas into one hub, for the gateway and alerting (``ResultsMerger``)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.errors import UnavailableError
from cluster.wire.answers import NUMBER, AnswerHub
from cluster.wire.channel import open_channel
from cluster.wire.convert import answer_from_proto
from cluster.wire.tls import PeerTls

MOST_GONE = 1000
"""Limit of replicas no longer followed whose last answer number is kept."""
CONNECT_S = 5.0
"""Seconds that a request may wait for its connection, during which a replica may start."""
CHANGE_S, RETRY_S = 10.0, 1.0
"""Longest wait for a change of the replicas, and the pause after a failed wait, in seconds."""
AwaitReplicas = Callable[[dict[str, str], float], Awaitable[dict[str, str]]]
"""(known replicas, name -> ``host:port``; timeout in seconds) -> all replicas, once they differ from those known or the
timeout is reached; raises ``UnavailableError``."""

log = logging.getLogger(__name__)


class ResultsMerger:
    """Watches a changing set of replicas, reconnecting with backoff.

    A reconnect resumes after the last answer received; a replica that started later is read from its first answer.
    Answers that it no longer has count as missed. Older ones are read from the last minute's answers, since a process
    that follows them may have been restarted.
    """

    def __init__(
        self,
        hub: AnswerHub,
        *,
        retry_s: float = 0.2,
        max_retry_s: float = 5.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._hub = hub
        self._tls = tls
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Newest answer number by address.
        self._began_s, self._numbers = time.monotonic(), dict[str, int]()

    def follow(self, addresses: Collection[str]) -> None:
        """Follow exactly these replicas (``host:port``) from now on. Call on the event loop."""
        # A finished task has failed unexpectedly (broken connections are handled inside) and is restarted.
        for address in [each for each, task in self._tasks.items() if each not in addresses or task.done()]:
            self._tasks.pop(address).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._follow(address), name=f"results of {address}")
        for address in [each for each in self._numbers if each not in self._tasks][:-MOST_GONE]:
            del self._numbers[address]

    async def follow_replicas(self, replicas: AwaitReplicas) -> None:
        """Keep following all current replicas until cancelled."""
        known: dict[str, str] = {}
        while True:
            try:
                known = await replicas(known, CHANGE_S)
                self.follow(sorted(known.values()))
            except UnavailableError:
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        self.follow(())
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    async def _follow(self, address: str) -> None:
        wait_s = self._retry_s
        while True:
            # A new channel per attempt, since the certificate may have been renewed.
            async with open_channel(address, tls=self._tls) as channel:
                stub = results_pb2_grpc.ResultsStub(channel)
                after = self._numbers.get(address, 0)
                watching_s = time.monotonic() - self._began_s + CONNECT_S
                request = results_pb2.WatchRequest(recent=True, after=after, watching_s=watching_s)
                call = stub.Watch(request)
                connected, reason = False, "the replica ended the stream"
                try:
                    metadata = await call.initial_metadata()
                    # Metadata also arrives with a failure: only a call that is still running is a connection.
                    connected = not call.done()
                    self._numbers[address] = int(metadata.get(NUMBER, after))
                    async for message in call:
                        connected = True
                        wait_s = self._retry_s
                        self._numbers[address] = message.number
                        self._hub.publish((answer_from_proto(message),), message.missed)
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                finally:
                    call.cancel()
                if connected:
                    log.warning("the answer stream of the replica at %s ended: %s", address, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._max_retry_s)
