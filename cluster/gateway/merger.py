"""``ResultsMerger``: the gateway follows every replica's answers into one hub of its own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.errors import UnavailableError
from cluster.types import Answer
from cluster.wire.answers import AnswerHub
from cluster.wire.channel import open_channel
from cluster.wire.convert import answer_from_proto
from cluster.wire.tls import PeerTls

REMEMBER, MOST_QUESTIONS = 256, 256
"""Windows of a question in which an answer that came before is known, and questions of a camera, each incarnation's."""
CHANGE_S, RETRY_S = 10.0, 1.0
"""Longest wait for a change of the replicas, and between two tries to hear of one."""
AwaitReplicas = Callable[[dict[str, str], float], Awaitable[dict[str, str]]]
"""Known replicas, name -> ``host:port``, and seconds -> all of them, once they differ or after that time; raises
``UnavailableError``."""
_Key = tuple[str, str]
"""Incarnation, question."""

log = logging.getLogger(__name__)


class ResultsMerger:
    """Watches a changing set of replicas, reconnecting with backoff; an answer seen already is not published again.

    Two answers of a camera are the same when incarnation, window and question are: windows are numbered from 0 in each
    incarnation, and the camera's own clock may begin anew in another. One that is :data:`REMEMBER` windows late counts
    as a repeat. ``recent``: begin, also after a break, with the answers of the last minute.
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
        # By camera: the newest window, and which of those up to it were answered, one bit each.
        self._seen: dict[str, dict[_Key, tuple[int, int]]] = {}
        self.duplicates = 0

    def follow(self, addresses: Collection[str]) -> None:
        """Follow exactly these replicas (``host:port``) from now on; call on the event loop."""
        for gone in set(self._tasks) - set(addresses):
            self._tasks.pop(gone).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._follow(address), name=f"results of {address}")

    async def follow_replicas(self, replicas: AwaitReplicas) -> None:
        """Follow the replicas there are, for as long as this runs."""
        known: dict[str, str] = {}
        while True:
            try:
                known = await replicas(known, CHANGE_S)
                self.follow(sorted(known.values()))
            except UnavailableError:
                await asyncio.sleep(RETRY_S)

    def retain(self, cameras: Collection[str]) -> None:
        """These are all the cameras there are: forget the others."""
        for gone in self._seen.keys() - set(cameras):
            del self._seen[gone]

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
                call = stub.Watch(results_pb2.WatchRequest(recent=self._recent))
                connected, reason = False, "the replica ended the stream"
                try:
                    await call.initial_metadata()
                    # Metadata also arrives with a failure: only a call that goes on is a connection.
                    connected = not call.done()
                    async for message in call:
                        connected = True
                        wait_s = self._retry_s
                        self._take(answer_from_proto(message), message.missed)
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                finally:
                    call.cancel()
                if connected:
                    log.warning("no answers of the replica at %s: %s", address, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._max_retry_s)

    def _take(self, answer: Answer, missed: int) -> None:
        known = self._is_known(answer)
        self.duplicates += known
        self._hub.publish(() if known else (answer,), missed)

    def _is_known(self, answer: Answer) -> bool:
        questions = self._seen.setdefault(answer.stream, {})
        newest, seen = questions.pop((answer.incarnation, answer.question), (answer.window, 0))
        if (ahead := answer.window - newest) > 0:
            newest, seen = answer.window, seen << ahead if ahead < REMEMBER else 0
        behind = newest - answer.window
        known = behind >= REMEMBER or bool(seen >> behind & 1)
        if not known:
            seen |= 1 << behind
        questions[answer.incarnation, answer.question] = newest, seen % (1 << REMEMBER)
        if len(questions) > MOST_QUESTIONS:
            del questions[next(iter(questions))]
        return known
