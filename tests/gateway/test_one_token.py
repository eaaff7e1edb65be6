"""What one token can hold of what all of them share."""

import asyncio
import contextlib

import pytest
from sightline.v1 import memory_pb2, results_pb2

from cluster.errors import CapacityError, UnauthenticatedError
from cluster.gateway.ask_all import AskAll
from cluster.gateway.forwarding import Forwarding
from cluster.gateway.guard import Guard
from cluster.gateway.http.free_questions import FreeQuestions
from cluster.gateway.http.live import Feed
from cluster.gateway.http.request_guard import COOKIE, RequestGuard
from cluster.security.limits import RateLimit
from cluster.security.roles import ANYBODY, Principal, Role, serve_as
from cluster.security.sessions import CachedSessions, Sessions
from cluster.types import CameraStatus
from cluster.wire.answers import AnswerHub, ResultsServicer

MOST = 8
ANN, BOB = (Principal(name, frozenset({Role.ASK})) for name in ("ann", "bob"))


def feed():
    pages = Feed(most=MOST)

    @contextlib.asynccontextmanager
    async def take():
        with pages.read(lambda _: True):
            yield

    return take


def forwarding():
    class Channels:
        @contextlib.asynccontextmanager
        async def lease(self, address):
            yield None

    async def route():
        return "10.0.0.7:7000"

    calls = Forwarding(Channels(), "calls", max_calls=MOST)
    return lambda: calls.to("the decoder", route, 5.0)


def stepped(begin):
    """A place in a stream that has begun."""

    @contextlib.asynccontextmanager
    async def take():
        async with contextlib.aclosing(begin()) as events:
            await anext(events)
            yield

    return take


def ask_all():
    async def ask(request, limit_s):
        await asyncio.sleep(60)

    async def cameras():
        return [CameraStatus("gate")]

    questions = AskAll(ask, cameras, most=MOST)
    return stepped(lambda: questions.answers(memory_pb2.AskAllRequest(text="Who?")))


def answering():
    class Calls:
        async def stream(self, method, request, timeout_s):
            yield memory_pb2.AskEvent(piece="Somebody")
            await asyncio.sleep(60)

    answers = FreeQuestions(Calls(), MOST)
    return stepped(lambda: answers.ask(memory_pb2.AskRequest(camera="gate", text="Who?"), 60.0))


def watch():
    class Context:
        def __init__(self):
            self.begun = asyncio.get_running_loop().create_future()

        async def send_initial_metadata(self, metadata):
            self.begun.set_result(None)

    results = ResultsServicer(AnswerHub(), most=MOST)

    @contextlib.asynccontextmanager
    async def take():
        context = Context()
        task = asyncio.create_task(results.Watch(results_pb2.WatchRequest(), context))
        try:
            await asyncio.wait([task, context.begun], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    return take


@pytest.mark.parametrize("what", [feed, forwarding, ask_all, answering, watch], ids=lambda what: what.__name__)
async def test_one_token_leaves_room_for_others(what):
    async def taken(principal):
        serve_as(principal)
        for number in range(MOST + 1):
            try:
                await held.enter_async_context(take())
            except CapacityError:
                return number
        return None

    take = what()
    async with contextlib.AsyncExitStack() as held:
        assert await taken(ANN) == MOST // 2
        assert await taken(BOB) == MOST // 2
    async with contextlib.AsyncExitStack() as held:
        assert await taken(ANYBODY) == MOST, "where nobody is asked, all are one"


async def test_signing_in_counts_as_a_call():
    def verify(secret):
        if secret != "sl_ann":
            raise UnauthenticatedError("this token is not known here; ask for a new one")
        return ANN

    request_guard = RequestGuard(Guard(verify, rate=RateLimit(0.001, 3)), "127.0.0.1")
    for _ in range(3):
        await request_guard.begin_session(_request(), "sl_ann")
    with pytest.raises(CapacityError, match="'ann' calls too often"):
        await request_guard.begin_session(_request(), "sl_ann")


async def test_made_up_sessions_are_not_ended():
    """Each end is asked of the controller, and empties what gateways remember of all sessions."""

    class Counting(Sessions):
        ended = 0

        async def end_session(self, session):
            self.ended += 1
            await super().end_session(session)

    store = Counting()
    request_guard = RequestGuard(Guard(lambda _: ANN), "127.0.0.1", CachedSessions(store))
    for number in range(100):
        await request_guard.end_session(_request(f"made-up-{number}"))
    assert store.ended == 0
    _, session = await request_guard.begin_session(_request(), "sl_ann")
    await request_guard.end_session(_request(session))
    assert store.ended == 1


def _request(session=""):
    from fastapi import Request

    headers = [(b"cookie", f"{COOKIE}={session}".encode())] if session else []
    return Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 4711)})
