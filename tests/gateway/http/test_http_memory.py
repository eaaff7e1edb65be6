"""Questions over HTTP as a client sees them: answers line by line, every status, and room beside them."""

import asyncio
import base64
import contextlib
import json

import pytest
from gateway_parts import Replica
from http_parts import answering
from waiting import until_async

from cluster.errors import CapacityError, ConfigError, NotReadyError, UnknownCameraError
from cluster.gateway.http.routes import MAX_BODY_BYTES

JSON = {"Content-Type": "application/json"}
ASK = {"camera": "gate", "text": "Who?"}


class Gate(Replica):
    """Knows one camera, ``gate``; stops before word ``stuck_at`` until ``go``."""

    def __init__(self):
        super().__init__()
        self.words = ["two ", "", "words"]
        self.stuck_at = None
        self.go = asyncio.Event()
        self.ended = 0

    async def ask(self, ask):
        events = super().ask(ask)
        number = 0
        try:
            async for event in events:
                if isinstance(event, str):
                    if number == self.stuck_at:
                        await self.go.wait()
                    number += 1
                yield event
        finally:
            await events.aclose()
            self.ended += 1

    def _check(self, camera):
        super()._check(camera)
        if camera != "gate":
            raise UnknownCameraError(f"there is no camera {camera!r}")


@contextlib.asynccontextmanager
async def gate(**options):
    """``(client, server, replica)``."""
    replica = Gate()
    async with answering(replica, **options) as (client, server):
        yield client, server, replica


async def test_an_answer_line_by_line():
    async with gate() as (client, _, replica):
        replica.words = ["çé ", "words"]
        status, lines = await client.ask(since_s=90, max_new_tokens=5, with_pictures=True)
        assert status == 200
        assert lines[:-1] == [{"text": "çé "}, {"text": "words"}]
        told = lines[-1]["result"]
        assert (told["text"], told["camera"], told["tokens_read"]) == ("çé words", "gate", 900)
        picture = base64.b64encode(b"\xff\xd8\xff\xd9").decode()
        assert told["moments"][0] == {"start": 0, "end": 8_000_000, "weight": 0.6, "ago_s": 60.0, "picture": picture}
        await client.ask("Sure?", conversation=told["conversation"])
        assert [(spec.since_s, spec.max_new_tokens, spec.turns) for spec in replica.asked] == [
            (90.0, 5, ()),
            (None, 48, (("Who?", "çé words"),)),
        ]


@pytest.mark.parametrize(("text", "told"), [("What happened?", True), ("Did a car come?", False)])
async def test_an_answer_of_one_word_to_more_than_that_is_said(text, told):
    async with gate() as (client, _, replica):
        replica.words = ["Yes"]
        _, lines = await client.ask(text)
        assert ("answered no more than that" in lines[-1]["result"]["remark"]) == told


async def test_a_piece_is_there_before_the_next_one():
    async with gate() as (client, _, replica):
        replica.stuck_at = 1
        async with client.open("POST", "/v1/ask", json=ASK) as reply:
            assert reply.headers["Content-Type"] == "application/x-ndjson"
            assert json.loads(await reply.content.readline()) == {"text": "two "}
            assert replica.under_way == 1
            replica.go.set()
            assert json.loads(await reply.content.readline()) == {"text": "words"}


@pytest.mark.parametrize("stuck_at", [0, 1])
async def test_a_client_that_leaves_ends_the_answer(stuck_at):
    """Before the first piece as well as in the middle."""
    async with gate() as (client, _, replica):
        replica.words, replica.stuck_at = ["x"] * 1000, stuck_at

        async def ask():
            async with client.open("POST", "/v1/ask", json=ASK) as reply:
                await reply.content.readline()
                await asyncio.sleep(60)

        leaving = asyncio.create_task(ask())
        await until_async(lambda: replica.under_way == 1)
        await asyncio.sleep(0.05)
        leaving.cancel()
        await until_async(lambda: replica.ended == 1)
        assert replica.under_way == 0


async def test_forget_and_memory():
    async with gate() as (client, _, replica):
        assert await client("POST", "/v1/forget", {"camera": "gate", "before_s": 7200}) == (
            200,
            {"frames": 7, "bytes": 2**20, "files": 0, "file_bytes": 0, "incidents": 0, "alerts": 0},
        )
        assert (await client("POST", "/v1/forget", {"camera": "gate", "before_s": 0}))[0] == 200
        assert replica.forgotten == [("gate", 7200.0), ("gate", None)]
        status, body = await client("GET", "/v1/memory/gate")
        assert (status, body["tier_bytes"]) == (200, {"recent": 2**10, "zone": 2**20})


WRONG = {
    "no such path": ("GET", "/v1/asc", None, JSON, 404, "there is no /v1/asc; see /v1/openapi.json"),
    "no camera": ("GET", "/v1/memory/", None, JSON, 404, "there is no /v1/memory/"),
    "a get": ("GET", "/v1/ask", None, JSON, 405, "GET is not allowed here; use POST"),
    "a put": ("PUT", "/v1/memory/gate", "", JSON, 405, "use GET"),
    "not json": ("POST", "/v1/ask", "{", JSON, 400, "the request is not JSON"),
    "not UTF-8": ("POST", "/v1/ask", b'{"camera": "\xff"}', JSON, 400, "the request is not JSON"),
    "deep json": ("POST", "/v1/ask", "[" * 60_000, JSON, 400, "the request is not JSON"),
    "a list": ("POST", "/v1/ask", "[]", JSON, 400, "must be a JSON object, not list"),
    "a form": (
        "POST",
        "/v1/ask",
        json.dumps(ASK),
        {"Content-Type": "text/plain"},
        415,
        "Content-Type: application/json",
    ),
    "too large": ("POST", "/v1/ask", "x" * (MAX_BODY_BYTES + 1), JSON, 413, "larger than 65536 bytes"),
    "no text": ("POST", "/v1/ask", {"camera": "gate"}, JSON, 400, "text is missing"),
    "unknown key": ("POST", "/v1/ask", {**ASK, "txt": ""}, JSON, 400, "unknown key 'txt'; there are: camera, text"),
    "wrong type": ("POST", "/v1/ask", {**ASK, "since_s": "1h"}, JSON, 400, 'since_s is "1h", which is not a number'),
    "no whole number": ("POST", "/v1/ask", {**ASK, "max_new_tokens": 1.5}, JSON, 400, "which is not a whole number"),
    "a truth": ("POST", "/v1/ask", {**ASK, "since_s": True}, JSON, 400, "since_s is true, which is not a number"),
    "negative": ("POST", "/v1/ask", {**ASK, "since_s": -1}, JSON, 400, "since_s is out of range"),
    "huge": ("POST", "/v1/ask", {**ASK, "max_new_tokens": 10**400}, JSON, 400, "max_new_tokens is out of range"),
    "not a number": ("POST", "/v1/ask", {**ASK, "since_s": float("nan")}, JSON, 400, "since_s is out of range"),
    "half a character": ("POST", "/v1/ask", {**ASK, "text": "\ud800"}, JSON, 400, "character 1 is U+D800"),
    "half a name": ("POST", "/v1/ask", {**ASK, "camera": "\ud800"}, JSON, 400, "the camera's name"),
    "empty": ("POST", "/v1/ask", {**ASK, "text": " "}, JSON, 400, "the question is empty"),
    "unknown": ("POST", "/v1/ask", {**ASK, "camera": "no"}, JSON, 404, "there is no camera 'no'"),
    "unknown too": ("GET", "/v1/memory/%C3%A9", None, JSON, 404, "there is no camera 'é'"),
    "nothing yet": ("POST", "/v1/ask", {**ASK, "camera": "dark"}, JSON, 409, "has seen nothing yet"),
    "everything by chance": ("POST", "/v1/forget", {"camera": "gate"}, JSON, 400, "missing; age in seconds; 0"),
}


async def test_what_is_wrong_has_a_status_and_a_sentence():
    async with gate() as (client, _, replica):
        for what, (method, path, body, headers, status, sentence) in WRONG.items():
            data = json.dumps(body) if isinstance(body, dict) else body
            found, reply = await client(method, path, data=data, headers=headers)
            assert found == status, (what, reply)
            assert sentence in reply["error"], what
        assert replica.forgotten == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("full"), 429), (ConfigError("too long"), 400), (NotReadyError("away"), 409), (KeyError("x"), 500)],
)
async def test_an_error_before_the_first_piece_has_a_status_and_one_after_it_a_line(error, status, caplog):
    async with gate() as (client, _, replica):
        replica.error = error
        found, lines = await client.ask()
        assert found == status
        assert str(error) in lines[0]["error"]
        replica.error_at = 2
        found, lines = await client.ask()
        assert found == 200
        assert lines[0] == {"text": "two "}
        assert str(error) in lines[1]["error"]
        assert len(lines) == 2
    # Once for each of the two, where it is our own mistake.
    assert len([each for each in caplog.records if each.exc_info]) == (2 if status == 500 else 0)


async def test_questions_leave_room_for_metrics():
    async with gate(max_asks=1) as (client, _, replica):
        replica.stuck_at = 0
        waiting = asyncio.create_task(client.ask())
        await until_async(lambda: replica.under_way == 1)
        status, (body,) = await client.ask()
        assert (status, "1 questions are being answered" in body["error"]) == (429, True)
        async with client.open("GET", "/metrics") as reply:
            assert reply.status == 200
            assert b"things_total 3.0" in await reply.read()
        replica.go.set()
        assert (await waiting)[0] == 200
        assert (await client.ask())[0] == 200, "an answered question makes room"
        assert (await client.ask(""))[0] == 400
        assert (await client.ask())[0] == 200, "a refused one too"
        replica.error = ConfigError("no")
        assert (await client.ask())[0] == 400
        replica.error = None
        assert (await client.ask())[0] == 200, "and one that failed"


async def test_a_body_without_its_length_is_bounded_too():
    async def endless():
        for _ in range(100):
            yield b" " * 4096

    async with gate() as (client, _, _), client.open("POST", "/v1/ask", data=endless(), headers=JSON) as reply:
        assert reply.status == 413
