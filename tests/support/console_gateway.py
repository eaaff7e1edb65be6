"""The gateway's own HTTP over a made-up city, on a thread: for the console's bench, its browser tests, its screenshots.

Server, routes, events, incidents and memory are the real ones; only controller, replicas and decoders are made up.
``python tests/support/console_gateway.py --port 8080`` serves until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from console_city import HEIGHT, QUESTIONS, STRIDE_S, WIDTH, City, CityMemory
from loop_thread import EventLoopThread
from prometheus_client import CollectorRegistry
from sightline.v1 import memory_pb2, pictures_pb2, pictures_pb2_grpc

from cluster.alerts.grpc_service import IncidentsServicer
from cluster.alerts.health import default_rule
from cluster.alerts.service import AlertService
from cluster.config import SightlineConfig, load_config
from cluster.config.alerts import ClipsConfig
from cluster.control.cameras.managed import settings_of
from cluster.decoder.discovery import NetworkSearch
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.decoder.footage.service import Recorder, RecorderServicer
from cluster.decoder.source_test import SourceTester
from cluster.errors import NotReadyError
from cluster.gateway import directory
from cluster.gateway import pictures_proxy as pictures
from cluster.gateway.ask_all import AskAll
from cluster.gateway.guard import Guard
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.replica import memory_service as memory
from cluster.replica.ask_queue import Conversations
from cluster.security.tokens import TokenFile
from cluster.types import Answer
from cluster.wire.answers import AnswerHub
from cluster.wire.mapping import to_message

PICTURES = "sightline.v1.Pictures"
CLIP_S, CLIP_FPS = 4, 8
CHUNK = 256 * 2**10


class CityPictures(pictures_pb2_grpc.PicturesServicer):  # type: ignore[misc]  # generated, and not annotated
    """Pictures of the city's scenes; an incident's snapshot and clip show its camera's scene."""

    def __init__(self, city: City, alerts: AlertService) -> None:
        self._city = city
        self._alerts = alerts
        self._clips: dict[int, bytes] = {}
        self._tester = SourceTester(load_config(None, {}))
        self.search = NetworkSearch([])
        self.footage: dict[str, CameraFootage] = {}
        self.recorder = Recorder(ClipsConfig(), self.footage_of)

    async def Picture(self, request: pictures_pb2.PictureRequest, context: Any) -> pictures_pb2.PictureReply:
        status = await self._city.get_camera(request.camera)
        if status.state != "running":
            raise NotReadyError(f"camera {request.camera!r} has no picture yet")
        moment, scene = self._city.second // 5, self._city.scene_of(request.camera)
        jpeg = await asyncio.to_thread(
            self._city.album.jpeg, scene, moment, kept=request.kept, width=min(request.width, WIDTH)
        )
        tag = f"{scene}-{moment % 4}-{request.kept:d}-{request.width}"
        return pictures_pb2.PictureReply(jpeg=jpeg, etag=tag, pts=self._city.second, age_s=0.4)

    async def Test(self, request: pictures_pb2.TestRequest, context: Any) -> pictures_pb2.TestReply:
        """The decoder's own test, of this process."""
        entry = self._city.table.check_test(pictures.tested_entry(request))
        found = await self._tester.test(entry.name, entry.source.reveal(), settings_of(entry))
        return to_message(pictures_pb2.TestReply, found)

    async def Live(self, request: pictures_pb2.LiveRequest, context: Any) -> None:
        """Of the cameras in ``footage``, by the decoder's own servicer."""
        await RecorderServicer(self.recorder, self._tester, self.search).Live(request, context)

    async def Discover(self, request: pictures_pb2.DiscoverRequest, context: Any) -> None:
        """The decoder's own search, of this process."""
        await RecorderServicer(self.recorder, self._tester, self.search).Discover(request, context)

    def footage_of(self, camera: str) -> CameraFootage:
        return self.footage.setdefault(camera, CameraFootage(PacketRing(10.0, 1 << 24, RingBudget(1 << 26))))

    async def Footage(self, request: pictures_pb2.FootageRequest, context: Any) -> None:
        incident = (await self._alerts.incident(request.incident)).incident
        scene = self._city.scene_of(incident.camera)
        if request.kind == "snapshot":
            data, kind = await asyncio.to_thread(self._city.album.jpeg, scene, 2, kept=False, width=0), "image/jpeg"
        elif request.kind == "clip":
            data, kind = await asyncio.to_thread(self._clip, scene), "video/mp4"
        else:
            raise NotReadyError("no clip of its end is kept; clips.end is off")
        tag = f"{scene}-{request.kind}"
        about = pictures_pb2.FootageAbout(camera=incident.camera, media_type=kind, size=len(data), etag=tag)
        await context.write(pictures_pb2.FootagePart(about=about))
        if request.only_about:
            return
        end = request.offset + request.length if request.length else len(data)
        for at in range(request.offset, min(end, len(data)), CHUNK):
            await context.write(pictures_pb2.FootagePart(data=data[at : min(at + CHUNK, end)]))

    def _clip(self, scene: int) -> bytes:
        if scene not in self._clips:
            renderer = self._city.album.renderer(scene)
            file = io.BytesIO()
            with av.open(file, "w", format="mp4", options={"movflags": "frag_keyframe+empty_moov"}) as container:
                stream: Any = container.add_stream("libx264", rate=CLIP_FPS, options={"preset": "ultrafast"})
                stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
                for number in range(CLIP_S * CLIP_FPS):
                    picture = renderer.picture(13.0 + number / CLIP_FPS, number)
                    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
                    frame.pts, frame.time_base = number, Fraction(1, CLIP_FPS)
                    container.mux(stream.encode(frame))
                container.mux(stream.encode(None))
            self._clips[scene] = file.getvalue()
        return self._clips[scene]


class CityAnswers(memory.MemoryServicer):
    """One replica that answers for the city; questions to all go through the gateway's own fan-out."""

    def __init__(self, city: City, alerts: AlertService, conversations: Conversations) -> None:
        super().__init__(CityMemory(city), conversations=conversations)
        servicer = IncidentsServicer(alerts)
        self._all = AskAll(self._ask_one, city.list_cameras, lambda request: servicer.List(request, None))

    async def AskAll(self, request: memory_pb2.AskAllRequest, context: Any) -> None:
        async with contextlib.aclosing(self._all.answers(request)) as events:
            async for event in events:
                await context.write(event)

    async def _ask_one(self, request: memory_pb2.AskRequest, limit_s: float) -> memory_pb2.AskResult:
        calls = InProcessCalls({memory.SERVICE: self})
        async with contextlib.aclosing(calls.inner_stream(f"/{memory.SERVICE}/Ask", request)) as events:
            return [event async for event in events][-1].result


class ConsoleGateway:
    """A context manager; ``url`` while it serves. ``live``: the city goes on, a step every ``every_s`` seconds.

    Args:
        city: what there is.
        folder: of the incidents' file.
        port: where to serve, 0 for any free one; :meth:`restart` comes back on the same.
        tokens: file of tokens; none: nobody is asked for one.
        poll_s: between looks at the cameras while a browser follows.
    """

    def __init__(
        self,
        city: City,
        folder: Path,
        *,
        port: int = 0,
        tokens: Path | None = None,
        live: bool = True,
        every_s: float = 1.0,
        poll_s: float = 1.0,
        ping_s: float = 15.0,
    ) -> None:
        self.city = city
        self.config = _configuration(city)
        self.alerts = AlertService(self.config, folder)
        self.url = ""
        self._pictures = CityPictures(city, self.alerts)
        self.conversations = Conversations(limit=64)
        self.footage, self.footage_of = self._pictures.footage, self._pictures.footage_of
        self._port = port
        self._guard = None if tokens is None else Guard(TokenFile(tokens, check_s=0.0).verify)
        self._every_s, self._poll_s, self._ping_s = every_s if live else 0.0, poll_s, ping_s
        self._thread = EventLoopThread("console gateway")

    def __enter__(self) -> ConsoleGateway:
        self._thread.__enter__()
        self._thread.run(self._begin(), 60.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.run(self._finish(), 30.0)
        self._thread.__exit__(*error)

    def step(self, seconds: int = 1) -> None:
        """So many seconds of the city, at once; browsers are told."""
        self._thread.run(self._steps(seconds), 60.0)

    def remember(self, windows: int) -> None:
        """Scores of so many windows before now, and two windows of alerts, so that there is something to see."""
        self._thread.run(self._remember(windows), 60.0)

    def publish(self, answers: list[Answer]) -> None:
        """Answers, to browsers and to alerting; then a look at the cameras."""
        self._thread.run(self._tell(answers), 30.0)

    def stop(self) -> None:
        """Stop serving HTTP; the city goes on."""
        self._thread.run(self._unserve(), 30.0)

    def restart(self) -> None:
        """Serve again, on the port as before."""
        self._thread.run(self._serve(), 30.0)

    async def _begin(self) -> None:
        await self.alerts.start()
        await self._serve()
        self._task = asyncio.create_task(self._go_on()) if self._every_s else None

    async def _finish(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._unserve()
        await self.alerts.stop()

    async def _serve(self) -> None:
        services = {
            "sightline.v1.Cameras": directory.CamerasServicer(self.city),
            "sightline.v1.Replicas": directory.ReplicasServicer(self.city),
            "sightline.v1.Incidents": IncidentsServicer(self.alerts),
            memory.SERVICE: CityAnswers(self.city, self.alerts, self.conversations),
            PICTURES: self._pictures,
        }
        self._hub = AnswerHub(limit=10_000)
        self._live = Live(self.city, self._hub, InProcessCalls(services), poll_s=self._poll_s)
        application = make_application(
            services,
            self._live,
            CollectorRegistry(),
            guard=self._guard,
            rule=default_rule(self.config.alerts),
            ping_s=self._ping_s,
        )
        self._server = HttpServer(application)
        address = await self._server.start("127.0.0.1", self._port)
        self._port = int(address.rpartition(":")[2])
        self._live.start()
        self.url = f"http://{address}"

    async def _unserve(self) -> None:
        self._hub.close()
        await self._live.stop()
        await self._server.stop()

    async def _go_on(self) -> None:
        while True:
            began_s = time.monotonic()
            await self._steps(1)
            await asyncio.sleep(max(0.05, self._every_s - (time.monotonic() - began_s)))

    async def _steps(self, seconds: int) -> None:
        for _ in range(seconds):
            await self._tell(self.city.step(), look=False)
        await self._settle()
        self._live.look()

    async def _settle(self) -> None:
        for incident in self.alerts.open_incidents():
            if incident.clip == "waiting":
                await self.alerts.set_clip_state(incident.id, "whole", "")

    async def _remember(self, windows: int) -> None:
        now_s = time.time()
        for ago_s, answer in self.city.past(windows):
            self._live.history.answer(answer, now_s - ago_s + answer.timing.latency_s)
            if ago_s <= 2 * STRIDE_S and answer.stream in self.city.hot:
                self.alerts.accept_answer(answer)
        await self._settle()

    async def _tell(self, answers: list[Answer], *, look: bool = True) -> None:
        self._hub.publish(answers)
        for answer in answers:
            self.alerts.accept_answer(answer)
        # Readers of the hub get their turn: without it a long jump would look to them like a flood.
        await asyncio.sleep(0)
        if look:
            self._live.look()


def _configuration(city: City) -> SightlineConfig:
    questions = [
        {"id": name, "text": f"Is there {name}?", "severity": severity} for name, severity in QUESTIONS.items()
    ]
    watched = [{"name": name, "questions": questions} for name in sorted(city.hot)]
    return load_config(None, {"cameras": watched, "alerts": {"consecutive": 2, "cooldown_s": 0}})


def serve_forever(port: int, count: int, every_s: float) -> None:
    """Until Ctrl-C, or until standard input ends where it is a pipe; prints the address."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ConsoleGateway(City(count), Path(folder), port=port, every_s=every_s) as gateway,
        contextlib.suppress(KeyboardInterrupt),
    ):
        gateway.remember(100)
        print(f"{gateway.url}", flush=True)
        if sys.stdin.isatty():
            threading.Event().wait()
        else:
            sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--cameras", type=int, default=500)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two steps")
    options = parser.parse_args()
    serve_forever(options.port, options.cameras, options.every)
