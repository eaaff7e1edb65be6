"""The decoder's GPU front end (batched torch operations): whether it keeps the same cells as numpy and libswscale, and
its throughput of 1080p pictures with NVDEC.

Every session is a production camera with its own processor; all share one front end. Without a GPU, :func:`host_nvdec`,
which decodes to NV12 on the CPU, stands in for NVDEC.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import CodecContext
from av.video.frame import VideoFrame

from cluster.codec.decoder import Decoder
from cluster.codec.file import FileSource
from cluster.codec.nvdec import Nvdec, NvdecDecoder
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.decoder.gpu.frontend import DeviceCamera, DeviceFrontend, shared_frontend
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.report.compare import video_samples
from cluster.lab.scenes.street_clips import CLIP_KINDS, make_clip
from cluster.types import FrameSample, PatchGeometry, SampledPicture
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import PatchSampler

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
CLIP_S = 12.0
"""Seconds of each generated clip."""
CODECS = {"h264": "street", "hevc": "hevc"}
"""Codec -> kind of street clip to decode."""
GAIN = 1.05
"""Sessions are doubled while that multiplies the throughput by at least this factor."""


class HostNvdecDecoder(NvdecDecoder):
    """Decodes on the CPU and returns pictures like NVDEC's, but in host memory."""

    def _create(self, codec: str) -> CodecContext:
        return Decoder._create(self, codec)

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        return [frame.reformat(format="nv12", threads=1) for frame in super()._run(packet)]


def host_nvdec() -> Nvdec:
    """A CPU stand-in for NVDEC."""
    return Nvdec(lambda: None, HostNvdecDecoder)


def compare_clips(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """One row per generated clip and per file: share of cells that both front ends decide alike, and picture
    differences. Raises ``ConfigError`` if a file does not exist."""
    for file in files:
        if not file.is_file():
            raise ConfigError(f"clip {file} does not exist")
    frontend, nvdec = shared_frontend(), host_nvdec()
    with tempfile.TemporaryDirectory() as folder:
        clips = [*made_clips(Path(folder)).values(), *files]
        with ThreadPoolExecutor(len(clips)) as threads:
            return list(threads.map(lambda clip: _compare(clip, frontend, nvdec), clips))


def made_clips(folder: Path) -> dict[str, Path]:
    """Generate a street clip of each kind in ``folder``."""
    paths = {kind: folder / f"{kind}.mp4" for kind in CLIP_KINDS}
    for number, (kind, path) in enumerate(paths.items()):
        make_clip(kind, path, seconds=CLIP_S, seed=number)
    return paths


def summary(row: dict[str, Any]) -> str:
    """A clip's row as text."""
    return (
        "gpu_frontend {clip}: {equal:.4%} of the cells equal, {kept:.2%} kept ({kept_on_device:.2%} on the device), "
        "pixels at most {levels} levels off, {pixels_off:.2%} of them".format(**row)
    )


def _compare(clip: Path, frontend: DeviceFrontend, nvdec: Nvdec) -> dict[str, Any]:
    """Compare both front ends. ``kept``, ``equal``: shares of cells kept and decided alike, except in anchors;
    ``levels``: largest pixel difference in anchors; ``pixels_off``: largest share of differing pixels."""
    camera = DeviceCamera(_sampler(clip.stem))
    host = _host_frames(clip)
    masks: list[tuple[float, float, float]] = []
    levels, off = 0, 0.0
    for processor in _processors(clip, CodecProcessor(GEOMETRY, CodecOptions(decode="cuda"), nvdec)):
        for picture in processor.pop_device_pictures():
            frame = frontend.process(camera, picture).frame
            if frame is None:
                continue
            sample = next(host)
            assert (sample.index, sample.pts, sample.anchor) == (frame.index, frame.pts, frame.anchor)
            if sample.anchor:
                difference = np.abs(sample.patches.astype(np.int16) - frame.patches)
                levels = max(levels, int(difference.max()))
                off = max(off, float((difference > 0).mean()))
            else:
                masks.append((float((sample.mask == frame.mask).mean()), sample.mask.mean(), frame.mask.mean()))
    equal, kept, kept_on_device = map(statistics.fmean, zip(*masks, strict=True)) if masks else (0.0, 0.0, 0.0)
    return {
        "clip": clip.stem,
        "frames": len(masks),
        "equal": equal,
        "kept": kept,
        "kept_on_device": kept_on_device,
        "levels": levels,
        "pixels_off": off,
    }


def _sampler(stream: str) -> PatchSampler:
    return PatchSampler(stream, make_pruner("replenish"), CodecOptions().fps)


def _host_frames(clip: Path) -> Iterator[FrameSample]:
    sampler = _sampler(clip.stem)
    for picture in video_samples(clip, CodecProcessor(GEOMETRY)):
        sample = sampler.feed(_luma_only(picture))
        if sample is not None:
            yield sample


def _processors(clip: Path, processor: CodecProcessor) -> Iterator[CodecProcessor]:
    """Feed a clip; yields the processor after each packet, and once more after draining it."""
    source = FileSource(clip)
    processor.open(source.open())
    for packet in source.packets():
        processor.feed(packet)
        yield processor
    processor.drain()
    yield processor


def _luma_only(picture: SampledPicture) -> SampledPicture:
    """The picture without motion vectors, which NVDEC does not export."""
    still = np.zeros_like(picture.change.luma)
    return replace(picture, change=replace(picture.change, max_motion=still, net_motion=still, intra=still, cue="luma"))


# -- pictures a second -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Load of a decode measurement. ``size``: picture size in pixels; ``clip_s``: clip length, looped; ``run_s``:
    measuring time per number of sessions; ``most``: maximum sessions; ``open_s``: limit for their first pictures."""

    size: tuple[int, int] = (1920, 1080)
    clip_s: float = 6.0
    run_s: float = 4.0
    most: int = 64
    open_s: float = 30.0


def decode_rates(nvdec: Nvdec, load: DecodeLoad) -> BenchResult:
    """Figures ``nvdec_1080p_fps`` and ``nvdec_1080p_hevc_fps``: total pictures per second at the best number of
    sessions; one row per codec and number."""
    rows: list[dict[str, Any]] = []
    frontend = shared_frontend()
    with tempfile.TemporaryDirectory() as folder:
        for codec, kind in CODECS.items():
            clip = Path(folder) / f"{kind}.mp4"
            make_clip(kind, clip, seconds=load.clip_s, fps=25.0, size=load.size)
            rows += _search(codec, partial(_decode, clip, nvdec, frontend, load), load.most)
    best = {codec: max(row["pictures_s"] for row in rows if row["codec"] == codec) for codec in CODECS}
    return BenchResult({"nvdec_1080p_fps": best["h264"], "nvdec_1080p_hevc_fps": best["hevc"]}, rows)


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
    """Run ``sessions`` sessions for ``run_s`` after each has its first picture or was refused."""
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
    """Decodes a looped clip at full speed until its source is closed or the GPU refuses it.

    ``pictures``: decoded; ``cells``, ``kept``: of frames other than anchors; ``refused``: reason, empty if accepted.
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
        camera = DeviceCamera(_sampler("camera"))
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
