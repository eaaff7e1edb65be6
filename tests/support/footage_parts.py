"""Small real videos as packets, a way to read a clip again, and a site of decoder, alerting and gateway."""

import asyncio
import contextlib
import io
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import av
import numpy as np
from rpc_serving import collect_servers

from cluster.alerts.clips.footage_collector import FootageCollector
from cluster.alerts.clips.footage_store import FootageStore
from cluster.alerts.incident import Incident
from cluster.alerts.service import AlertService
from cluster.codec.source import StreamHeader
from cluster.config import SightlineConfig, load_config
from cluster.decoder.discovery import NetworkSearch
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.decoder.footage.service import DecoderRecorder, Recorder, RecorderServicer
from cluster.decoder.source_test import SourceTester
from cluster.errors import NotPlacedError, UnavailableError
from cluster.gateway.guard import Guard
from cluster.gateway.pictures_proxy import FootageServicer, PicturesProxy
from cluster.types import MICROSECONDS, Answer, ChangeGrid, EncodedPacket, PatchGrid, SampledPicture, TokenCount
from cluster.wire.channel import ChannelPool
from cluster.wire.server import RpcServer

FPS = 20
STEP = MICROSECONDS // FPS
WIDTH, HEIGHT = 96, 64


def level(index: int) -> int:
    """Luma of picture ``index``: tells one picture from its neighbours."""
    return 40 + index % 80 * 2


def grey(index: int) -> float:
    """The same as a screen shows it: video's black is 16 and its white 235."""
    return (level(index) - 16) * 255 / 219


def video(
    frames: int,
    codec: str = "libx264",
    *,
    gop: int = 20,
    b_frames: int = 0,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    x264: str = "",
) -> tuple[StreamHeader, list[EncodedPacket]]:
    """A bright half whose level counts pictures, over a texture; Annex-B, parameter sets in band."""
    preset = "medium" if b_frames else "ultrafast"
    options = {
        "libx264": {"preset": preset, "x264-params": f"scenecut=0:repeat-headers=1{x264}"},
        "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:scenecut=0:repeat-headers=1:bframes=0"},
        "mjpeg": {},
    }[codec]
    context = av.CodecContext.create(codec, "w")
    context.width, context.height = size
    context.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    context.time_base, context.framerate = Fraction(1, FPS), Fraction(FPS, 1)
    context.gop_size, context.thread_count = gop, 1
    if codec != "mjpeg":
        context.max_b_frames = b_frames
    context.options = options
    packets = []
    for index in range(frames):
        picture = np.full((size[1] * 3 // 2, size[0]), 128, np.uint8)
        picture[: size[1]] = level(index)
        frame = av.VideoFrame.from_ndarray(picture, "yuv420p")
        if codec == "mjpeg":
            frame = frame.reformat(format="yuvj420p")
        frame.pts, frame.time_base = index, Fraction(1, FPS)
        packets += context.encode(frame)
    packets += context.encode(None)
    name = {"libx264": "h264", "libx265": "hevc", "mjpeg": "mjpeg"}[codec]
    numbered = [
        EncodedPacket(name, bytes(p), p.pts * STEP, p.dts * STEP, p.is_keyframe, sequence)
        for sequence, p in enumerate(packets)
    ]
    return StreamHeader(name, *size, b""), numbered


def shifted(packets: Iterable[EncodedPacket], by_us: int, first: int) -> list[EncodedPacket]:
    """The same pictures at another time of the clock, numbered from ``first``."""
    number = count(first)
    return [
        replace(
            p,
            pts=None if p.pts is None else p.pts + by_us,
            dts=None if p.dts is None else p.dts + by_us,
            sequence=next(number),
        )
        for p in packets
    ]


def luma(frame: av.VideoFrame) -> np.ndarray:
    """The picture's luma plane."""
    return frame.to_ndarray()[: frame.height]


def played(data: bytes) -> list[tuple[float, int]]:
    """(seconds, mean luma) of every picture that a player shows."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        return [
            (float(frame.pts * stream.time_base), int(luma(frame).mean().round())) for frame in container.decode(stream)
        ]


GRID = PatchGrid(rows=4, cols=6, patch=16, merge=2, temporal=2)


def sample(index: int, grey: int = 200) -> SampledPicture:
    """Two a second, 96 x 64 pixels in patches of 16, one grey all over."""
    zeros = np.zeros((4, 6), np.float32)
    rgb = np.full((64, 96, 3), grey, np.uint8)
    change = ChangeGrid(zeros, zeros, zeros, zeros, "luma", 1)
    return SampledPicture(index, index * 500_000, False, False, GRID, rgb, rgb[..., 0], change)


class Alarm:
    """Answers of windows of one second; a high score opens an incident at once."""

    def __init__(self) -> None:
        self._window = count()

    def __call__(self, end_s: float, score: float = 0.9, *, camera: str = "gate", question: str = "person") -> Answer:
        end = round(end_s * MICROSECONDS)
        tokens = TokenCount(full=100, kept=40, reused=20, refreshed=5, new=15, query=12, encoded=15)
        return Answer(
            camera, next(self._window), end - MICROSECONDS, end, question, score, score >= 0.5, "", False, tokens
        )


def configuration(**clips: object) -> SightlineConfig:
    """Cameras ``gate`` and ``yard``; one positive window opens an incident, one negative ends it."""
    return load_config(
        None,
        {
            "alerts": {"consecutive": 1, "release": 1, "cooldown_s": 0, "hysteresis": 0},
            "cameras": [{"name": "gate"}, {"name": "yard"}],
            "questions": [{"id": "person", "text": "?"}, {"id": "car", "text": "?"}],
            "clips": {"before_s": 1, "after_s": 1, "keep_free": 0, **clips},
        },
    )


class Site:
    """Decoder, alerting and gateway of one site in this process, over real gRPC; cameras are fed by hand."""

    def __init__(self, folder: Path, config: SightlineConfig, guard: Guard | None = None) -> None:
        self.config, self._folder, self._guard = config, folder, guard
        self.cameras: dict[str, CameraFootage] = {}
        self.budget = RingBudget(config.clips.ring_bytes)
        self.channels = ChannelPool()
        self.decoder_address = ""
        self.routes = 0
        self._fed: dict[str, int] = {}
        self.alarm = Alarm()
        self.probe_port = 3702

    async def tested_source(self, entry):
        return self.decoder_address, entry

    async def any_decoder(self) -> str:
        return self.decoder_address

    async def start(self) -> None:
        await self.start_decoder()
        await self.start_alerting()
        self.gateway = RpcServer(guard=self._guard)
        self.proxy = PicturesProxy(
            self.decoder_of,
            self.alerting_at,
            ChannelPool(),
            tested=self.tested_source,
            any_decoder=self.any_decoder,
        )
        self.gateway.add(self.proxy)
        self.address = f"127.0.0.1:{self.gateway.bind('127.0.0.1', 0)}"
        await self.gateway.start()

    async def start_decoder(self) -> None:
        """With empty rings, as after a restart."""
        self.cameras = {name: CameraFootage(PacketRing(10.0, 1 << 24, self.budget)) for name in ("gate", "yard")}
        self._fed = dict.fromkeys(self.cameras, 0)
        self.recorder = Recorder(self.config.clips, self._footage)
        self.decoder = RpcServer()
        self.decoder.add(
            RecorderServicer(
                self.recorder,
                SourceTester(self.config),
                NetworkSearch(self.config.security.discovery_networks, probe_port=self.probe_port),
            )
        )
        self.decoder_address = f"127.0.0.1:{self.decoder.bind('127.0.0.1', 0)}"
        await self.decoder.start()

    async def stop_decoder(self) -> None:
        self.decoder_address = ""
        await self.decoder.stop(0.0)
        self.recorder.close()

    async def start_alerting(self, before_sweeps: Callable[[], Awaitable[None]] | None = None) -> None:
        clips = self.config.clips
        self.store = FootageStore(
            self._folder / "clips",
            max_bytes=clips.max_bytes,
            retention_s=clips.retention,
            keep_free=clips.keep_free,
            clip_lookback_s=clips.longest_s,
        )
        self.collector = FootageCollector(
            clips,
            self.store,
            DecoderRecorder(self.decoder_of, self.channels),
            lambda *news: self.service.set_clip_state(*news),
            known=self._folder / "known.json",
            run="run",
            erase=lambda *removed: self.service.erase_removed_camera(*removed),
        )
        self.service = AlertService(self.config, self._folder, on_event=self.collector.handle_event)
        await self.service.start()
        if before_sweeps is not None:
            await before_sweeps()
        self.collector.start(lambda: self.service.pending_clips(0.0))
        self.alerting = RpcServer()
        servicer = FootageServicer(self.collector, self.about, self.service.erase_camera)
        self.alerting.add(servicer)
        self.alerting_address = f"127.0.0.1:{self.alerting.bind('127.0.0.1', 0)}"
        await self.alerting.start()

    async def stop_alerting(self) -> None:
        await self.alerting.stop(0.0)
        await self.collector.stop()
        await self.service.stop()

    async def stop(self) -> None:
        await self.gateway.stop(0.0)
        await self.stop_alerting()
        if self.decoder_address:
            await self.stop_decoder()

    # -- routes ---------------------------------------------------------------------------------
    async def decoder_of(self, camera: str) -> str:
        self.routes += 1
        if not self.decoder_address:
            raise NotPlacedError("no decoder is ready")
        return self.decoder_address

    async def alerting_at(self) -> str:
        return self.alerting_address

    async def about(self, incident: str) -> tuple[str, str]:
        found = (await self.service.incident(incident)).incident
        return found.camera, found.footage_note

    def _footage(self, camera: str) -> CameraFootage:
        if camera not in self.cameras:
            raise UnavailableError(f"it does not run camera {camera!r} (yet)")
        return self.cameras[camera]

    # -- what happens ---------------------------------------------------------------------------
    def feed(self, video: tuple[StreamHeader, list[EncodedPacket]], upto: int, camera: str = "gate") -> None:
        """The camera's packets up to picture ``upto``."""
        header, packets = video
        ring = self.cameras[camera].ring
        assert ring is not None
        if not self._fed[camera]:
            ring.open(header)
        for packet in packets[self._fed[camera] : upto]:
            ring.add_packet(packet)
        self._fed[camera] = upto

    async def incident(self, incident_id: str) -> Incident:
        return (await self.service.incident(incident_id)).incident

    async def settled(self, incident_id: str, timeout_s: float = 20.0) -> Incident:
        """The incident once its clip is there, or is known never to be."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (found := await self.incident(incident_id)).clip == "waiting":
            assert asyncio.get_running_loop().time() < deadline, "its clip never came"
            await asyncio.sleep(0.02)
        return found

    async def alert(self, end_s: float, **options: Any) -> Incident:
        """A positive window opens an incident."""
        answer = self.alarm(end_s, **options)
        self.service.accept_answer(answer)
        await self.service._flush()
        wanted = (answer.stream, answer.question)
        return next(each for each in self.service.open_incidents() if (each.camera, each.subject) == wanted)


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Files of this process end at so many bytes: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.asynccontextmanager
async def site(folder: Path, guard: Guard | None = None, **clips: object) -> AsyncIterator[Site]:
    """A running :class:`Site`; keywords are keys of ``clips``."""
    running = Site(folder, configuration(**clips), guard)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
        vars(running).clear()
        await collect_servers()
