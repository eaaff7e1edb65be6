"""Cameras that push to a cluster at their own pace, and somebody who watches what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc

from cluster.client import GatewayClient
from cluster.codec import FileSource
from cluster.errors import SightlineError
from cluster.lab.bench.window_accounting import CameraWindows
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import MICROSECONDS, Answer, EncodedPacket, Question
from cluster.wire.push import PushAgent, PushStatus

STRIDE_S = 4.0
CLIP_S = 24.0

# Any score is enough: every camera has an incident, which says whether answers reach alerting.
QUESTION = Question("person", "Is anyone there?", threshold=0.01)


class TimedSource(FileSource):
    """A clip in a loop at its own pace, which notes when its clock was at 0 (``began_s``, monotonic)."""

    began_s: float | None = None

    def packets(self) -> Iterator[EncodedPacket]:
        for packet in super().packets():
            if self.began_s is None and packet.pts is not None:
                self.began_s = time.monotonic() - packet.pts / MICROSECONDS
            yield packet


class Camera:
    """One pushed camera from when it is added until it is removed."""

    def __init__(self, name: str, gateway: str, clip: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.source = TimedSource(clip, loop=True, realtime=True)
        self.agent = PushAgent(self.source, gateway, name)
        self.done: Future[PushStatus] = asyncio.run_coroutine_threadsafe(self.agent.run(), loop)
        # Its clock begins with its first packet; the thread that reads it is on its way.
        while (began_s := self.source.began_s) is None:
            if self.done.done():
                self.done.result()
            time.sleep(0.01)
        self.ledger = CameraWindows(name, began_s, STRIDE_S)

    def saw(self, answer: Answer) -> None:
        """An answer came. One far from the future belongs to a camera of this name that was removed; but the last frame
        of a window may come before its end."""
        now_s = time.monotonic()
        if self.ledger.began_s + answer.end / MICROSECONDS <= now_s + STRIDE_S:
            self.ledger.saw(answer, now_s)

    def stop(self) -> None:
        self.done.cancel()
        self.source.close()


class WatchedCameras:
    """Use it from one thread.

    Args:
        folder: of the clip that all cameras show.
    """

    gateway: str
    client: GatewayClient

    def __init__(self, folder: Path) -> None:
        self.cameras: dict[str, Camera] = {}
        self._loop = asyncio.new_event_loop()
        self._ended = threading.Event()
        self.clip = folder / "street.mp4"
        make_clip("street", self.clip, seconds=CLIP_S, fps=10, size=(160, 96))

    def begin(self, gateway: str, cameras: tuple[str, ...]) -> None:
        """Add cameras to the cluster behind this gateway, and watch."""
        self.gateway = gateway
        self.client = GatewayClient(gateway, deadline_s=5.0)
        threading.Thread(target=self._loop.run_forever, daemon=True, name="cameras").start()
        for name in cameras:
            self.add(name)
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def add(self, name: str) -> None:
        """Add a camera, which begins to push."""
        self.client.camera_add(name, "", [QUESTION])
        self.cameras[name] = Camera(name, self.gateway, self.clip, self._loop)

    def remove(self, name: str) -> None:
        """The camera stops, and the cluster is told to forget it."""
        self.cameras.pop(name).stop()
        self.client.camera_remove(name)

    def stop_pushing(self) -> None:
        """The cluster is about to end."""
        self._ended.set()
        for camera in self.cameras.values():
            camera.stop()
        self.cameras.clear()

    def end(self) -> None:
        """The cluster has ended."""
        if self._loop.is_running():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_ended(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _watch(self) -> None:
        while not self._ended.is_set():
            with (
                contextlib.suppress(SightlineError, grpc.RpcError, ValueError),
                GatewayClient(self.gateway, deadline_s=2.0) as client,
            ):
                for answer, _ in client.watch():
                    if (camera := self.cameras.get(answer.stream)) is not None:
                        camera.saw(answer)
            time.sleep(0.1)


async def _ended() -> None:
    """The cameras' tasks on this loop have ended; they were cancelled."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
