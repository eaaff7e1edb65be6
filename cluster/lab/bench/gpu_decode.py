"""How many pictures of 1080p the decoder's way on a GPU takes a second: sessions, front end and kept patches.

Every session is a camera of production: its processor, and one front end for all. A machine whose NVDEC is in host
memory (``gpu_frontend.host_nvdec``) runs the same code, for tests.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.codec.file import FileSource
from cluster.codec.nvdec import Nvdec
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.decoder.gpu.frontend import DeviceFrontend
from cluster.lab.bench.harness import Part, print_progress
from cluster.lab.scenes.street_clips import make_clip
from cluster.types import PatchGeometry
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import PatchSampler

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
CLIPS = {"h264": "street", "hevc": "hevc"}
"""Codec -> kind of street clip."""

GAIN = 1.05
"""More sessions are tried while twice as many bring at least so many times the pictures."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """``size`` of the pictures in pixels; ``clip_s`` of each clip, which is repeated; ``run_s``: of one number of
    sessions; ``most``: sessions that are tried; ``open_s``: until which all have their first picture."""

    size: tuple[int, int] = (1920, 1080)
    clip_s: float = 6.0
    run_s: float = 4.0
    most: int = 64
    open_s: float = 30.0


def decode_rates(nvdec: Nvdec, load: DecodeLoad) -> Part:
    """Figures ``nvdec_1080p_fps`` and ``nvdec_1080p_hevc_fps``: pictures a second of all sessions at the best number of
    them; a row for every codec and number.

    Args:
        nvdec: of this machine.
        load: what is decoded.
    """
    rows: list[dict[str, Any]] = []
    frontend = DeviceFrontend()
    with tempfile.TemporaryDirectory() as folder:
        for codec, kind in CLIPS.items():
            clip = Path(folder) / f"{kind}.mp4"
            make_clip(kind, clip, seconds=load.clip_s, fps=25.0, size=load.size)
            rows += _search(codec, partial(_decode, clip, nvdec, frontend, load), load.most)
    best = {codec: max(row["pictures_s"] for row in rows if row["codec"] == codec) for codec in CLIPS}
    return Part({"nvdec_1080p_fps": best["h264"], "nvdec_1080p_hevc_fps": best["hevc"]}, rows)


def _search(codec: str, decode: Callable[[int], dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    before, sessions = 0.0, 1
    while sessions <= most:
        row = {"codec": codec, **decode(sessions)}
        print_progress(f"gpu: {codec}, {row['sessions']} sessions: {row['pictures_s']:.0f} pictures/s {row['refused']}")
        yield row
        if row["refused"] or row["pictures_s"] < GAIN * before:
            return
        before, sessions = row["pictures_s"], 2 * sessions


def _decode(clip: Path, nvdec: Nvdec, frontend: DeviceFrontend, load: DecodeLoad, sessions: int) -> dict[str, Any]:
    """So many sessions at once for ``run_s``, once each has its first picture or is refused."""
    cameras = [_Camera(clip, nvdec, frontend) for _ in range(sessions)]
    with ThreadPoolExecutor(sessions) as threads:
        running = [threads.submit(camera.run) for camera in cameras]
        try:
            deadline = time.monotonic() + load.open_s
            for camera in cameras:
                camera.begun.wait(max(0.0, deadline - time.monotonic()))
            first, began = sum(camera.pictures for camera in cameras), time.monotonic()
            time.sleep(load.run_s)
            pictures, seconds = sum(camera.pictures for camera in cameras) - first, time.monotonic() - began
        finally:
            for camera in cameras:
                camera.source.close()
        for each in running:
            each.result()
    taken = [camera for camera in cameras if not camera.refused]
    return {
        "sessions": len(taken),
        "pictures_s": pictures / seconds,
        "per_session": pictures / seconds / max(1, len(taken)),
        "kept": sum(camera.kept for camera in cameras) / max(1, sum(camera.cells for camera in cameras)),
        "refused": next((camera.refused for camera in cameras if camera.refused), ""),
    }


class _Camera:
    """A clip over and over, as fast as it goes, until its source is closed or the GPU refuses it.

    ``pictures``: decoded; ``cells``, ``kept``: of frames that are no anchors; ``refused``: why, empty while it runs.
    """

    def __init__(self, clip: Path, nvdec: Nvdec, frontend: DeviceFrontend) -> None:
        self.source = FileSource(clip, loop=True)
        self.begun = threading.Event()
        self.pictures = self.cells = self.kept = 0
        self.refused = ""
        self._processor = CodecProcessor(GEOMETRY, CodecOptions(decode="cuda"), nvdec)
        self._frontend = frontend

    def run(self) -> None:
        processor, frontend = self._processor, self._frontend
        camera = frontend.add_camera(PatchSampler("camera", make_pruner("replenish"), CodecOptions().fps))
        try:
            processor.open(self.source.open())
            for packet in self.source.packets():
                processor.feed(packet)
                if processor.device.name != "cuda":
                    self.refused = processor.device.fallback
                    return
                for picture in processor.pop_device_pictures():
                    frame = frontend.process(camera, picture).frame
                    if frame is not None and not frame.anchor:
                        self.cells += frame.mask.size
                        self.kept += int(frame.mask.sum())
                self.pictures = processor.stats.frames_decoded
                if self.pictures:
                    self.begun.set()
        finally:
            self.begun.set()
