"""One question to many cameras: through the gateway's gRPC, its HTTP and the command line; bounded, ranked, stopped."""

import asyncio
import contextlib
import itertools
import json
import time

import aiohttp
import pytest
from gateway_parts import make_answer, served_in_thread, serving
from sightline.v1 import incidents_pb2, memory_pb2

from cluster.client import GatewayClient
from cluster.errors import CapacityError, ConfigError, NotReadyError
from cluster.gateway.ask_all import AskAll
from cluster.types import CameraStatus
from cluster.wire.memory_wire import AskAllProgress, CameraOutcome, all_from_proto, ranked

CAMERAS = [CameraStatus(f"cam-{number:03d}", replica=f"r{number % 2}", memory_frames=9) for number in range(12)]


class Cameras:
    """Cameras that take ``pause_s``; how many of them at once."""

    def __init__(self, pause_s=0.0):
        self.pause_s = pause_s
        self.asked, self.at_once, self.most = [], 0, 0
        self.errors = {}

    async def ask(self, request, limit_s):
        self.asked.append(request)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.pause_s)
            if errors := self.errors.get(request.camera):
                raise errors.pop()
            number = int(request.camera[-3:])
            moment = memory_pb2.Moment(start=10 * number, end=10 * number + 5, weight=0.5)
            return memory_pb2.AskResult(
                text="yes", yes=number / 100, moments=[moment], prompt_tokens=3, answer_tokens=1
            )
        finally:
            self.at_once -= 1

    async def list(self):
        return CAMERAS


async def told(cameras, incidents=None, **request):
    events = AskAll(cameras.ask, cameras.list, incidents).answers(memory_pb2.AskAllRequest(text="Van?", **request))
    found = [all_from_proto(each) async for each in events]
    return [each for each in found if isinstance(each, CameraOutcome)], found[-1]


async def test_all_are_asked_so_many_at_once_and_moments_are_ranked_by_p_yes_times_weight():
    cameras = Cameras(0.01)
    answers, end = await told(cameras, at_once=3, since_s=60.0)
    assert cameras.most == 3
    assert end == AskAllProgress(12, 12, 0, 0, 48, True)
    best = ranked(answers)
    assert [each.camera for each in best] == [f"cam-{number:03d}" for number in range(11, -1, -1)]
    assert best[0].rank == pytest.approx(0.11 * 0.5)
    assert {(each.text, each.since_s, each.max_new_tokens) for each in cameras.asked} == {("Van?", 60.0, 16)}
    assert all(each.HasField("history") for each in cameras.asked), "no conversation is remembered"
    # Replicas in turn, so that none has all of it.
    assert [int(each.camera[-3:]) % 2 for each in cameras.asked[:6]] == [0, 1, 0, 1, 0, 1]


async def test_the_first_answer_does_not_wait_for_the_last():
    cameras = Cameras()
    slow = asyncio.Event()

    async def ask(request, limit_s):
        if request.camera == "cam-000":
            await slow.wait()
        return await cameras.ask(request, limit_s)

    events = AskAll(ask, cameras.list).answers(memory_pb2.AskAllRequest(text="Van?", at_once=2))
    got = []
    async for event in events:
        told = all_from_proto(event)
        got += [told.camera] if isinstance(told, CameraOutcome) else []
        if len(got) == 11:
            slow.set()
    assert got[-1] == "cam-000"


async def test_one_that_fails_says_why_and_one_that_is_full_is_asked_again():
    cameras = Cameras()
    cameras.errors = {
        "cam-003": [NotReadyError("camera 'cam-003' has seen nothing yet")],
        "cam-004": [CapacityError("9 questions wait")],
        "cam-005": [ValueError("a bug")],
    }
    answers, end = await told(cameras)
    assert {each.camera: each.error for each in answers if each.error} == {
        "cam-003": "camera 'cam-003' has seen nothing yet",
        "cam-005": "internal error of the gateway; see its log",
    }
    assert (end.answered, end.failed, end.empty) == (10, 1, 1)
    assert [each.camera for each in answers if each.empty] == ["cam-003"]


async def test_its_time_is_bounded():
    cameras = Cameras(30.0)
    began_s = time.monotonic()
    answers, end = await told(cameras, at_once=2, deadline_s=0.3)
    assert time.monotonic() - began_s < 10
    assert [each.error for each in answers] == ["no answer before the question's deadline"] * 2
    assert (end.cameras, end.answered, end.failed) == (12, 0, 2)


async def test_whoever_stops_it_stops_all_of_it():
    cameras = Cameras(30.0)
    everyone = AskAll(cameras.ask, cameras.list, most=1)
    events = everyone.answers(memory_pb2.AskAllRequest(text="Van?"))
    await anext(events)
    with pytest.raises(CapacityError, match="1 questions to all cameras"):
        await anext(everyone.answers(memory_pb2.AskAllRequest(text="Van?")))
    await anext(events)
    assert cameras.at_once == 8
    await events.aclose()
    assert cameras.at_once == 0
    assert (await anext(everyone.answers(memory_pb2.AskAllRequest(text="Van?")))).progress.cameras == 12


async def test_it_can_be_stopped_at_any_moment():
    everyone = AskAll((cameras := Cameras()).ask, cameras.list, most=1)

    async def read_all():
        async with contextlib.aclosing(everyone.answers(memory_pb2.AskAllRequest(text="Van?"))) as events:
            async for _ in events:
                pass

    for steps in itertools.count():
        reading = asyncio.create_task(read_all())
        for _ in range(steps):
            await asyncio.sleep(0)
        if reading.done():
            break
        reading.cancel()
        await asyncio.wait([reading], timeout=5.0)
        assert reading.cancelled(), f"after {steps} steps of the event loop"
    assert steps > 2


async def test_a_moment_has_the_incident_whose_clip_shows_it():
    def incident(name, number, start, end, clip):
        return incidents_pb2.Incident(id=name, camera=f"cam-{number:03d}", start=start, end=end, clip=clip)

    async def incidents(request):
        assert (list(request.scope), request.limit) == (["*"], 1000)
        return incidents_pb2.ListIncidentsResponse(
            incidents=[
                incident("shows", 5, 54, 80, "whole"),
                incident("before", 6, 0, 60, "whole"),
                incident("no-clip", 7, 0, 1000, "none"),
            ]
        )

    answers, _ = await told(Cameras(), incidents)
    clips = {each.camera: each.incidents for each in answers if any(each.incidents)}
    assert clips == {"cam-005": ("shows",)}


async def test_after_a_restart_of_its_clock_a_moment_has_the_incident_of_its_own_time():
    """The camera counts from 0 again: by its clock, other incidents are at the moment's time."""

    def incident(name, start, end, shift):
        return incidents_pb2.Incident(id=name, camera="cam-005", start=start, end=end, clip="whole", memory_shift=shift)

    async def incidents(request):
        return incidents_pb2.ListIncidentsResponse(
            incidents=[incident("later", 48, 60, 48), incident("shows", 3, 9, 48), incident("earlier", 20, 38, 0)]
        )

    answers, _ = await told(Cameras(), incidents)
    assert [each.incidents for each in answers if each.camera == "cam-005"] == [("shows",)]


async def test_alerting_that_does_not_answer_costs_the_cameras_no_time():
    async def hangs(_):
        await asyncio.Event().wait()

    answers, end = await told(Cameras(), hangs, deadline_s=0.5)
    assert (len(answers), end.answered) == (12, 12)
    assert not any(any(each.incidents) for each in answers)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"text": " "}, "the question is empty"),
        ({"text": "Van?", "at_once": 33}, "at most 32 cameras at once"),
        ({"text": "Van?", "deadline_s": 301.0}, "at most 32 cameras at once, 300 s"),
        ({"text": "Van?", "deadline_s": -1.0}, "deadline_s is -1"),
        ({"text": "Van?", "cameras": ["x"] * 101}, "100 camera patterns"),
    ],
)
async def test_more_than_may_be_asked_for(request_, said):
    cameras = Cameras()
    with pytest.raises(ConfigError, match=said):
        await anext(AskAll(cameras.ask, cameras.list).answers(memory_pb2.AskAllRequest(**request_)))


async def test_cameras_that_remember_nothing_come_last():
    frames = {"cam-001": ("x", 0), "cam-002": ("x", 5), "cam-003": ("y", 0), "cam-004": ("y", 1)}
    listed = [CameraStatus(name, replica=replica, memory_frames=seen) for name, (replica, seen) in frames.items()]
    cameras = Cameras()
    cameras.list = lambda: asyncio.sleep(0, listed)
    await told(cameras, at_once=1)
    assert [each.camera for each in cameras.asked] == ["cam-002", "cam-004", "cam-001", "cam-003"]


async def test_a_replica_that_hangs_holds_up_no_camera_of_another():
    """Half of the cameras, alternating with the rest, are at a replica that answers nothing until the deadline."""
    cameras = Cameras()

    async def ask(request, limit_s):
        if int(request.camera[-3:]) % 2 == 0:
            await asyncio.Event().wait()
        return await cameras.ask(request, limit_s)

    events = AskAll(ask, cameras.list).answers(memory_pb2.AskAllRequest(text="Van?", at_once=4, deadline_s=1.0))
    found = [all_from_proto(event) async for event in events]
    answers = [each for each in found if isinstance(each, CameraOutcome)]
    assert sorted(each.camera for each in answers if not each.error) == [f"cam-{n:03d}" for n in range(1, 12, 2)]
    assert found[-1].answered == 6


async def test_over_grpc_and_http_a_token_asks_its_own_cameras(tmp_path):
    async with serving(tmp_path, cameras=3, tokens=True, scopes=["cam-00[12]"]) as served:
        headers = {"Authorization": f"Bearer {served.secrets['ask']}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            body = {"text": "Who?", "with_pictures": True}
            async with client.post(f"{served.url}/v1/ask/all", json=body) as reply:
                lines = [json.loads(line) async for line in reply.content]
            assert sorted(each["answer"]["camera"] for each in lines if "answer" in each) == ["cam-001", "cam-002"]
            second = next(each["answer"] for each in lines if each.get("answer", {}).get("camera") == "cam-002")
            assert second["moments"][0]["rank"] == pytest.approx(0.002 * 0.6)
            assert second["moments"][0]["picture"]
            assert lines[-1]["progress"] | {"tokens": 0} == {
                "cameras": 2,
                "answered": 2,
                "failed": 0,
                "empty": 0,
                "tokens": 0,
                "finished": True,
            }
        headers = {"Authorization": f"Bearer {served.secrets['view']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{served.url}/v1/ask/all", json=body) as reply,
        ):
            assert reply.status == 403
    written = (tmp_path / "audit.jsonl").read_text()
    assert '"/sightline.v1.Memory/AskAll"' in written


def test_on_the_command_line(cli, tmp_path):
    with served_in_thread(tmp_path, cameras=5, live=False) as served:
        served.replica.yes = lambda camera: 0.9 if camera == "cam-003" else 0.1

        def run(*arguments, code=0):
            done = cli("ask", *arguments, SIGHTLINE_GATEWAY=served.rpc)
            assert done.returncode == code, (done.stdout, done.stderr)
            return done.stdout + done.stderr

        shown = run("--all", "Was there a red van?", "--pictures", "out")
        assert shown.startswith("cam-003: Somebody in a red coat came in. (0.90)")
        assert "5 of 5 cameras answered" in shown
        assert "no memory" not in shown
        best = next(line for line in shown.splitlines() if "0.54" in line)
        assert "cam-003" in best
        assert len(list((cli.folder / "out").glob("*.jpg"))) == 10
        body = json.loads(run("--all", "Van?", "--camera", "cam-00[01]", "--json", "-"))
        assert (body["cameras"], sorted(each["camera"] for each in body["answers"])) == (2, ["cam-000", "cam-001"])
        served.world.cameras["dark"] = CameraStatus("dark")
        shown = run("--all", "Van?", "--camera", "cam-000", "--camera", "dark")
        assert "1 of 2 cameras answered" in shown
        assert "1 with no memory of that time: camera 'dark' has seen nothing yet" in shown
        assert "did not" not in shown
        assert "leave out 'gate'" in run("gate", "Who?", "--all", code=2)
        with GatewayClient(served.rpc) as client, pytest.raises(ConfigError):
            list(client.ask_all("Van?", at_once=99))
        served.alerts.accept_answer(make_answer("cam-000", "person", 0.1, 1))


async def test_a_replica_that_is_full_is_asked_again_and_a_camera_without_a_memory_has_not_failed(tmp_path):
    async with serving(tmp_path, cameras=2) as served:
        served.world.cameras["dark"] = CameraStatus("dark", replica="replica-0")
        ask, full = served.replica.ask, [CapacityError("9 questions wait")] * 2

        async def ask_in_turn(spec):
            if full:
                raise full.pop()
            async for event in ask(spec):
                yield event

        served.replica.ask = ask_in_turn
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{served.url}/v1/ask/all", json={"text": "Who?"}) as reply,
        ):
            lines = [json.loads(line) async for line in reply.content]
    assert not full
    end = lines[-1]["progress"]
    assert (end["cameras"], end["answered"], end["failed"], end["empty"]) == (3, 2, 0, 1)
    said = {"camera": "dark", "error": "camera 'dark' has seen nothing yet", "empty": True}
    assert [each["answer"] for each in lines if "error" in each.get("answer", {})] == [said]
