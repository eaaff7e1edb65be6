"""``ResultsMerger``: the gateway and alerting follow every replica's answers into one hub of their own."""

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
"""Replicas that are not followed now of which the last answer's number is known."""
CHANGE_S, RETRY_S = 10.0, 1.0
"""Longest wait for a change of the replicas, and between two tries to hear of one."""
AwaitReplicas = Callable[[dict[str, str], float], Awaitable[dict[str, str]]]
"""Known replicas, name -> ``host:port``, and seconds -> all of them, once they differ or after that time; raises
``UnavailableError``."""

log = logging.getLogger(__name__)


class ResultsMerger:
    """Watches a changing set of replicas, reconnecting with backoff.

    After a break answers go on where they ended, and of a replica that began after this with its first; those that it
    no longer has are missed. ``recent``: of replicas that were there before, begin with the answers of the last minute.
    """

    def __init__(
        self,
        hub: AnswerHub,
        *,
        retry_s: float = 0.2,
        max_retry_s: float = 5.0,
        recent: bool = False,
        tls: PeerTls | None = None,
    ) -> None:
        self._hub = hub
        self._recent = recent
        self._tls = tls
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # By address: number of the newest answer that came. Those of replicas that begin after this are above its time.
        self._began, self._numbers = time.time_ns(), dict[str, int]()

    def follow(self, addresses: Collection[str]) -> None:
        """Follow exactly these replicas (``host:port``) from now on; call on the event loop."""
        # One that failed, which no broken connection makes it do, begins anew.
        for gone in [each for each, task in self._tasks.items() if each not in addresses or task.done()]:
            self._tasks.pop(gone).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._follow(address), name=f"results of {address}")
        for gone in [each for each in self._numbers if each not in self._tasks][:-MOST_GONE]:
            del self._numbers[gone]

    async def follow_replicas(self, replicas: AwaitReplicas) -> None:
        """Follow the replicas there are, for as long as this runs."""
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
            # A channel for each attempt: the certificate may have been renewed since.
            async with open_channel(address, tls=self._tls) as channel:
                stub = results_pb2_grpc.ResultsStub(channel)
                after = self._numbers.get(address, self._began)
                call = stub.Watch(results_pb2.WatchRequest(recent=self._recent, after=after))
                connected, reason = False, "the replica ended the stream"
                try:
                    metadata = await call.initial_metadata()
                    # Metadata also arrives with a failure: only a call that goes on is a connection.
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
                    log.warning("no answers of the replica at %s: %s", address, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._max_retry_s)
