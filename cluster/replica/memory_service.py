"""gRPC ``Memory`` servicer of a replica: free questions about a camera's past, replays, and deletion of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio
from sightline.v1 import memory_pb2, memory_pb2_grpc

from cluster import metrics
from cluster.errors import ConfigError, NotReadyError
from cluster.replica.ask_queue import Conversations
from cluster.security.limits import ConcurrencyLimit
from cluster.types import MICROSECONDS, AskResult, AskSpec
from cluster.wire.memory_wire import (
    AskOutcome,
    ask_from_proto,
    check_camera,
    check_question,
    check_seconds,
    forgotten_to_proto,
    outcome_to_proto,
    status_to_proto,
    turns_from_proto,
)

if TYPE_CHECKING:
    from cluster.replica.memory import WorkerMemory

SERVICE = "sightline.v1.Memory"
USUAL_REPLAYED, MOST_REPLAYED = 240, 480
"""Default and maximum number of windows of a replay."""

Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """``oldest``, ``newest``: bounds, in microseconds on the memory's clock, of what window and memory hold;
    ``length_s``, ``stride_s``: of its windows; ``newest_age_s``: seconds since ``newest`` was seen."""

    oldest: int
    newest: int
    length_s: float
    stride_s: float
    newest_age_s: float = 0.0

    def spans(self, since_s: float | None, most: int) -> list[tuple[int, int]]:
        """Windows to replay, ``(start, end)`` on the memory's clock, oldest first, ending whole strides before the
        newest frame.

        Args:
            since_s: only windows that end within this many seconds of the newest frame; None: all that is held.
            most: maximum number of windows; if there are more, only every second, third, … is replayed.
        """
        length, stride = round(self.length_s * MICROSECONDS), round(self.stride_s * MICROSECONDS)
        held = self.newest - self.oldest
        wanted = held if since_s is None else min(held, round(since_s * MICROSECONDS))
        count = max(1, wanted // stride)
        step = -(-count // most)
        ends = [self.newest - number * stride for number in reversed(range(0, count, step))]
        return [(max(self.oldest, end - length), end + 1) for end in ends]


class MemoryServicer(memory_pb2_grpc.MemoryServicer):
    """Serves ``Memory``, with at most ``max_asks`` running and waiting questions.

    Args:
        handler: the replica.
        conversations: for follow-up questions; by default at most 64.
        max_asks: concurrent questions; one more is refused with ``CapacityError``.
        max_new_tokens: limit and default of an answer's tokens.
        ask_s, call_s: timeout of an answer, and of any other call, whatever deadline the client sets.
    """

    def __init__(
        self,
        handler: WorkerMemory,
        *,
        conversations: Conversations | None = None,
        max_asks: int = 32,
        max_new_tokens: int = 48,
        ask_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        self._handler = handler
        self._conversations = Conversations() if conversations is None else conversations
        self._places = ConcurrencyLimit(max_asks, "questions are being answered or wait already; ask again later")
        self._longest = max_new_tokens
        self._ask_s, self._call_s = ask_s, call_s

    async def Ask(self, request: memory_pb2.AskRequest, context: Context) -> None:
        async with self._asking():
            # Validate the question before it waits in the queue.
            ask_from_proto(request, self._longest)
            history = turns_from_proto(request)
            if history is not None:
                result = await self._relay(ask_from_proto(request, self._longest, history), context)
                await self._write_result(request, context, result)
                return
            async with self._conversations.begin_turn(request.camera, request.conversation) as conversation:
                ask = ask_from_proto(request, self._longest, list(conversation.turns))
                result = await self._relay(ask, context)
                self._conversations.add_turn(conversation, ask.text, result.text)
                await self._write_result(request, context, result, conversation.id)

    async def Replay(self, request: memory_pb2.ReplayRequest, context: Context) -> None:
        async with self._asking():
            camera, text = check_camera(request.camera), check_question(request.text)
            since_s = check_seconds(request.since_s, "since_s")
            if request.windows > MOST_REPLAYED:
                raise ConfigError(f"windows is {request.windows}; at most {MOST_REPLAYED} are replayed at once")
            there = await self._handler.replay_range(camera)
            spans = there.spans(since_s, request.windows or USUAL_REPLAYED)
            for number, span in enumerate(spans, 1):
                ask = AskSpec(camera, text, max_new_tokens=1, span=span, standing=True)
                try:
                    score = (await self._relay(ask, context)).yes
                except NotReadyError:
                    # Nothing of this window is left; it still counts as progress.
                    score = None
                replayed = memory_pb2.ReplayedWindow(
                    start=span[0],
                    end=span[1],
                    ago_s=there.newest_age_s + (there.newest - span[1]) / MICROSECONDS,
                    score=score,
                    done=number,
                    total=len(spans),
                )
                await context.write(replayed)

    async def Forget(self, request: memory_pb2.ForgetRequest, _context: Context) -> memory_pb2.ForgetResponse:
        async with self._answering(self._call_s):
            ago_s = check_seconds(request.before_s, "before_s")
            # Before and after: an answer that ended in between uses what is being deleted.
            self._conversations.end_camera(check_camera(request.camera))
            try:
                deleted = await self._handler.delete_memory(request.camera, ago_s, only_here=request.only_here)
                return forgotten_to_proto(deleted)
            finally:
                self._conversations.end_camera(request.camera)

    async def Describe(self, request: memory_pb2.DescribeRequest, _context: Context) -> memory_pb2.MemoryStatus:
        async with self._answering(self._call_s):
            return status_to_proto(await self._handler.describe(check_camera(request.camera)))

    async def _write_result(
        self, request: memory_pb2.AskRequest, context: Context, result: AskResult, conversation: str = ""
    ) -> None:
        pictures = await self._handler.pictures(result.stream, result.moments) if request.with_pictures else ()
        told = outcome_to_proto(AskOutcome(result, conversation, tuple(pictures)))
        await context.write(memory_pb2.AskEvent(result=told))

    async def _relay(self, ask: AskSpec, context: Context) -> AskResult:
        """Write an answer's pieces and return its result; always closes the handler's iterator, which ends its work."""
        async with aclosing(self._handler.ask(ask)) as events:
            async for event in events:
                if isinstance(event, AskResult):
                    return event
                if event:
                    await context.write(memory_pb2.AskEvent(piece=event))
        raise RuntimeError(f"the answer about camera {ask.stream!r} ended without a result")

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Hold a place, for a question that takes at most ``ask_s``."""
        if self._places.refusal():
            metrics.asks.labels("refused").inc()
        async with self._answering(self._ask_s):
            with self._places.taken():
                yield

    @asynccontextmanager
    async def _answering(self, limit_s: float) -> AsyncIterator[None]:
        """Limit a call to ``limit_s``; the ``TimeoutError`` states the limit."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError as error:
            late = TimeoutError(f"the replica did not answer within {limit_s:g} s")
            raise (late if limit.expired() else error) from None
