"""Live events: what comes when, for whom, and what a browser that does not read costs."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest
from gateway_parts import World, make_answer, serving
from http_parts import Client, bare_application, document, listening
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from sightline.v1 import incidents_pb2
from waiting import until_async

from cluster.errors import CapacityError, UnavailableError
from cluster.gateway.guard import Guard
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import KEPT, MOST_QUESTIONS, Event, Feed, History, Live, Ring
from cluster.security.roles import Role
from cluster.security.tokens import TokenFile, make_token, write_tokens
from cluster.types import CameraStatus
from cluster.wire.answers import AT_ONCE, AnswerHub


@contextlib.asynccontextmanager
async def following(client, query=""):
    """A function that waits for the next event: ``(kind, body)``; the stream has begun."""
    async with client.open("GET", f"/v1/events{query}") as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["Content-Type"] == "text/event-stream"

        async def following_event(*kinds):
            kind = ""
            async for line in reply.content:
                text = line.decode().rstrip("\n")
                if text.startswith("event: "):
                    kind = text.removeprefix("event: ")
                elif text.startswith("data: ") and (not kinds or kind in kinds):
                    return kind, json.loads(text.removeprefix("data: "))
            return None

        assert await following_event() == ("hello", {})
        yield following_event


async def test_answers_incidents_changes_and_removals(tmp_path):
    async with serving(tmp_path, cameras=2) as served, Client(served.url) as client, following(client) as event:
        served.publish([make_answer("cam-000", "person", 0.9, 1)])
        _, answer = await event("answer")
        assert (answer["camera"], answer["question"], answer["score"]) == ("cam-000", "person", 0.9)
        _, history = await client("GET", "/v1/cameras/cam-000/history")
        assert answer["end_unix_s"] == history["scores"]["person"][-1][0]
        # The gateway's own way to alerting may not be open yet: what happens until then is in the list.
        await until_async(lambda: served.alerts._feed._subscriptions)
        served.publish([make_answer("cam-000", "person", 0.9, 2)])
        _, told = await event("incident")
        assert (told["event"], told["incident"]["camera"]) == ("new", "cam-000")
        served.world.cameras["cam-001"] = replace(served.world.cameras["cam-001"], state="error", reason="gone")
        while True:
            _, camera = await event("camera")
            if camera["name"] == "cam-001" and camera["state"] == "error":
                break
        schema = {"$ref": "#/components/schemas/CameraStatus", "components": document()["components"]}
        Draft202012Validator(schema).validate(camera)
        del served.world.cameras["cam-001"]
        assert await event("removed") == ("removed", {"name": "cam-001"})


async def test_a_camera_that_is_added_again_has_no_history():
    live = Live(World(0), AnswerHub(), InProcessCalls({}))
    await live._publish_changes([CameraStatus("gate", life="one"), CameraStatus("yard", life="one")])
    for name in ("gate", "yard"):
        live.history.answer(make_answer(name, "q", 0.5, 1), 100.0)
    await live._publish_changes([CameraStatus("gate", life="two"), CameraStatus("yard", life="one")])
    assert [live.history.body(name)["scores"].keys() for name in ("gate", "yard")] == [set(), {"q"}]


async def test_pages_that_ask_at_once_get_one_list_which_began_after_they_asked():
    world, ask = World(1000), asyncio.Event()
    live = Live(world, AnswerHub(), InProcessCalls({}))
    listed = world.list_cameras

    async def slow_list():
        found = await listed()
        await ask.wait()
        return found

    world.list_cameras = slow_list
    early = asyncio.create_task(live.list())
    await until_async(lambda: world.looks == 1)
    del world.cameras["cam-000"]
    late = [asyncio.create_task(live.list()) for _ in range(20)]
    ask.set()
    turns = 0
    while not early.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1000 // AT_ONCE, "others had their turn"
    assert {len(await each) for each in late} == {999}
    assert json.loads((await early)["cam-000"])["name"] == "cam-000"
    assert world.looks == 2
    world.trouble = "the controller is gone"
    with pytest.raises(UnavailableError):
        await live.list()
    world.trouble = ""
    assert len(await live.list()) == 999


async def test_a_look_that_is_asked_for_during_another_is_had(monkeypatch):
    monkeypatch.setattr("cluster.gateway.http.live.QUIET_POLL_S", 3600.0)
    world = World(1)
    live = Live(world, AnswerHub(), InProcessCalls({}), poll_s=0.01)
    listed = world.list_cameras

    async def list_and_change():
        found = await listed()
        if world.looks == 1:
            live.look()
        return found

    world.list_cameras = list_and_change
    looking = asyncio.create_task(live._poll())
    await until_async(lambda: world.looks == 2)
    looking.cancel()


async def test_an_answer_of_a_removed_camera_is_not_shown_of_another_of_its_name():
    live = Live(World(0), AnswerHub(), InProcessCalls({}))
    await live._publish_changes([CameraStatus("gate", life="one")])
    await live._publish_changes([])
    live.history.answer(make_answer("gate", "q", 0.5, 1), 100.0)
    await live._publish_changes([])
    await live._publish_changes([CameraStatus("gate", life="two")])
    assert live.history.body("gate")["scores"] == {}


async def test_lost_answers_are_told_to_browsers_that_look_at_other_cameras():
    hub = AnswerHub()
    live = Live(World(0), hub, InProcessCalls({}))
    answers = asyncio.create_task(live._answers())
    await until_async(lambda: hub._subscriptions)
    with live.feed.read(lambda camera: camera in ("", "yard")) as reader:
        hub.publish([make_answer("gate", "q", 0.5, 1)], missed=3)
        assert await reader.take(5.0) == b'event: missed\ndata: {"events":3}\n\n'
    answers.cancel()


async def test_the_last_counters_are_told_though_nothing_changes_after_them():
    live = Live(World(0), AnswerHub(), InProcessCalls({}))
    await live._publish_changes([CameraStatus("gate", frames_decoded=1)])
    with live.feed.read(bool) as reader:
        told_at = []
        for second, frames in enumerate([1, 2, 3, 3, 3, 3, 3, 3, 3]):
            live.seen_s = 100.0 + second
            await live._publish_changes([CameraStatus("gate", frames_decoded=frames)])
            piece = await reader.take(0.01)
            if piece:
                told_at.append((second, json.loads(piece.decode().split("data: ")[1])["frames_decoded"]))
        assert told_at == [(1, 2), (6, 3)], "at once, and five seconds later"


async def test_only_what_is_asked_for_and_may_be_seen(tmp_path):
    async with (
        serving(tmp_path, cameras=3, tokens=True, scopes=["cam-000", "cam-001"]) as served,
        Client(served.url, served.secrets["view"]) as client,
        following(client) as mine,
        following(client, "?cameras=cam-001") as one,
    ):
        for name in ("cam-002", "cam-000", "cam-001"):
            served.publish([make_answer(name, "person", 0.5, 1)])
        assert [(await mine("answer"))[1]["camera"] for _ in range(2)] == ["cam-000", "cam-001"]
        assert (await one("answer"))[1]["camera"] == "cam-001"
        status, _ = await client("GET", "/v1/events?cameras=cam-002")
        assert status == 403


async def test_a_token_that_is_revoked_sees_no_more(tmp_path):
    secret, token = make_token("somebody", [Role.VIEW], ["*"])
    write_tokens(tmp_path / "tokens.json", [token])
    tokens, asked = TokenFile(tmp_path / "tokens.json"), []

    def verify(secret):
        asked.append(secret)
        if 2 <= len(asked) <= 4:
            raise UnavailableError("the controller, which has the sessions, does not answer")
        return tokens.verify(secret)

    application = bare_application(guard=Guard(verify), ping_s=0.2)
    async with listening(application) as (url, _), Client(url, secret) as client, following(client) as event:
        await until_async(lambda: len(asked) > 4, "a look after those when nobody could say", 20.0)
        write_tokens(tmp_path / "tokens.json", [])
        assert await event("nothing of this kind") is None, "the stream ended"


class Follow:
    """Alerting that ends the stream, at once or after an event before which some were lost."""

    def __init__(self):
        self.begun = 0

    async def Follow(self, request, context):
        assert request.open
        self.begun += 1
        await context.send_initial_metadata(())
        if self.begun == 2:
            incident = incidents_pb2.Incident(id="i", camera="gate")
            await context.write(incidents_pb2.IncidentEvent(key="i-1", event="new", incident=incident, missed=3))
        if self.begun == 3:
            await asyncio.Event().wait()


async def test_browsers_are_told_when_incidents_were_lost_on_the_way(monkeypatch):
    monkeypatch.setattr("cluster.gateway.http.live.RETRY_S", 0.01)
    service = Follow()
    live = Live(World(0), AnswerHub(), InProcessCalls({"sightline.v1.Incidents": service}))
    with live.feed.read(lambda camera: camera in ("", "gate")) as reader:
        live.start()
        pieces = []
        async with asyncio.timeout(30):
            while service.begun < 3:
                pieces.append(await reader.take(0.05))
        pieces.append(await reader.take(0.1))
        events = [event for event in told(pieces) if event[0] != "event: trouble"]
        kinds = [event[0] for event in events]
        assert kinds == ["event: missed", "event: missed", "event: incident", "event: missed"]
        assert events[1] == ("event: missed", 'data: {"events":3}')
    await live.stop()


async def test_a_gateway_that_stops_ends_its_streams(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client, following(client) as event:
        stopping = asyncio.create_task(served.gateway._live.stop())
        assert await event("nothing of this kind") is None
        await stopping


async def test_a_browser_that_leaves_is_forgotten(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        async with following(client):
            assert len(served.gateway._live.feed) == 1
        async with asyncio.timeout(30):
            while len(served.gateway._live.feed):
                served.publish([make_answer("cam-000", "person", 0.5, 1)])
                await asyncio.sleep(0.01)


async def test_cameras_are_looked_at_once_for_all_browsers(tmp_path):
    async with (
        serving(tmp_path, cameras=1) as served,
        Client(served.url) as client,
        contextlib.AsyncExitStack() as all_of,
    ):
        before = served.world.looks
        for _ in range(20):
            await all_of.enter_async_context(following(client))
        await asyncio.sleep(1.5)
        assert served.world.looks - before <= 8


# -- one browser's queue ---------------------------------------------------------------------------
def told(pieces):
    lines = b"".join(pieces).decode().split("\n\n")
    return [tuple(line.split("\n")) for line in lines if line]


async def test_a_reader_that_does_not_read_has_the_newest_and_is_told_of_the_rest():
    feed = Feed(limit=3)
    with feed.read(lambda camera: camera != "secret") as reader:
        for number in range(5):
            feed.put(Event.of("answer", "gate", number))
            feed.put(Event.of("camera", "gate", f"status {number}"))
            feed.put(Event.of("answer", "secret", number))
        piece = await reader.take(1.0)
        assert told([piece]) == [
            ("event: missed", 'data: {"events":2}'),
            ("event: answer", "data: 2"),
            ("event: answer", "data: 3"),
            ("event: answer", "data: 4"),
            ("event: camera", 'data: "status 4"'),
        ]
        assert await reader.take(0.01) == b""
        for number in range(5):
            feed.put(Event.of("trouble", "", "gone" if number else "before"))
            feed.put(Event.of("answer", "gate", number))
        assert told([await reader.take(1.0)])[-1] == ("event: trouble", 'data: "gone"'), "never pushed out"
        feed.put(Event.of("camera", "gate", 1))
        feed.put(Event.of("removed", "gate", 2))
        assert told([await reader.take(1.0)]) == [("event: removed", "data: 2")], "what is gone has no status"
        feed.close()
        assert await reader.take(1.0) is None
    assert len(feed) == 0


async def test_there_are_only_so_many_readers():
    feed = Feed(most=1)
    with feed.read(bool), pytest.raises(CapacityError, match="1 pages follow this gateway already"), feed.read(bool):
        pass
    with feed.read(bool) as reader:
        feed.close()
        assert await reader.take(1.0) is None


def test_an_event_is_one_line_whatever_is_in_it():
    event = Event.of("camera", "x", {"reason": "a\nb\r\n\ndata: c \u2028 \ud800"})
    assert event.data.count(b"\n") == 3
    assert event.data.endswith(b"\n\n")
    body = event.data.decode().split("data: ", 1)[1]
    assert json.loads(body)["reason"].startswith("a\nb\r\n\ndata: c \u2028 ")


# -- history -------------------------------------------------------------------------------------------
rows = st.lists(
    st.tuples(st.floats(0, 2e9), st.floats(0, 1), st.booleans(), st.booleans(), st.floats(0, 3600)), max_size=20
)


@settings(max_examples=40)
@given(rows, st.integers(1, 9))
def test_a_ring_holds_the_newest_in_their_order(given_rows, kept):
    ring = Ring(kept)
    for row in given_rows:
        ring.add(*row)
    wanted = [
        [round(at, 3), round(score, 4), positive, gated, round(length, 3)]
        for at, score, positive, gated, length in given_rows[-kept:]
    ]
    assert ring.rows() == wanted


def test_a_history_is_bounded_whatever_comes(monkeypatch):
    monkeypatch.setattr("cluster.gateway.http.live.MOST_CAMERAS", 10)
    history = History()
    for number in range(MOST_QUESTIONS + 5):
        history.answer(make_answer("gate", f"q{number}", 0.5, 1), 100.0)
    assert len(history.body("gate")["scores"]) == MOST_QUESTIONS
    for number in range(2 * KEPT):
        history.status(CameraStatus("gate", rung=f"rung-{number % 2}", rung_reason=str(number)), float(number))
    assert len(history.body("gate")["rungs"]) == KEPT
    for number in range(15):
        history.status(CameraStatus(f"c{number}"))
    assert len(history._cameras) == 10
    history.keep(["gate"])
    assert len(history._cameras) == 1
    assert history.body("none") == {"scores": {}, "rungs": []}


def test_a_score_is_noted_when_its_window_ended():
    history = History()
    assert history.answer(replace(make_answer("gate", "q", 0.5, 1), age_s=30.0), 130.0) == 99.6
    assert history.body("gate")["scores"] == {"q": [[99.6, 0.5, True, False, 40.0]]}


def test_scores_of_before_are_forgotten():
    history = History()
    for number in range(KEPT + 10):
        history.answer(make_answer("gate", "q", 0.5, number), 100.4 + number)
        history.answer(make_answer("yard", "q", 0.5, number), 100.4 + number)
    history.forget("gate", 220.0)
    assert [row[0] for row in history.body("gate")["scores"]["q"]] == [float(at) for at in range(220, 230)]
    assert len(history.body("yard")["scores"]["q"]) == KEPT
    history.forget("nobody", 0.0)
    assert len(history._cameras) == 2
