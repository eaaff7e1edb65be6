"""The decoder's work as batched torch operations against numpy and libswscale: whether both keep the same cells.

A decoder that decodes on the CPU and hands out NV12 stands for NVDEC, so that this needs no GPU; all clips go through
one front end at once.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from cluster.decoder.gpu.frontend import DeviceCamera, DeviceFrontend
from cluster.errors import ConfigError
from cluster.lab.scenes.street_clips import CLIP_KINDS, make_clip
from cluster.types import FrameSample, PatchGeometry, SampledPicture
from cluster.vision.pruners.base import make_pruner
from cluster.vision.sampler import PatchSampler

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
CLIP_S = 12.0
"""Of each made clip."""


class HostNvdecDecoder(NvdecDecoder):
    """Decodes on the CPU, and hands out pictures as NVDEC does, but for the memory that they lie in."""

    def _create(self, codec: str) -> CodecContext:
        return Decoder._create(self, codec)

    def _run(self, packet: av.Packet | None) -> list[VideoFrame]:  # type: ignore[type-arg]
        return [frame.reformat(format="nv12", threads=1) for frame in super()._run(packet)]


def host_nvdec() -> Nvdec:
    """NVDEC in host memory."""
    return Nvdec(lambda: None, HostNvdecDecoder)


@dataclass(slots=True)
class _Compared:
    """``frames`` pairs of one clip, anchors aside: ``cells`` in all and those decided alike; ``levels``: the largest
    difference of a pixel of an anchor, ``off``: the share of those that differ."""

    clip: str
    frames: int = 0
    cells: int = 0
    equal: int = 0
    kept: float = 0.0
    kept_on_device: float = 0.0
    levels: int = 0
    off: float = 0.0

    def add(self, host: FrameSample, device: FrameSample) -> None:
        assert (host.index, host.pts, host.anchor) == (device.index, device.pts, device.anchor)
        if host.anchor:
            difference = np.abs(host.patches.astype(np.int16) - device.patches)
            self.levels = max(self.levels, int(difference.max()))
            self.off = max(self.off, float(np.count_nonzero(difference) / difference.size))
            return
        self.frames += 1
        self.cells += host.mask.size
        self.equal += int(np.count_nonzero(host.mask == device.mask))
        self.kept += float(host.mask.mean())
        self.kept_on_device += float(device.mask.mean())

    @property
    def row(self) -> dict[str, Any]:
        frames = max(1, self.frames)
        return {
            "clip": self.clip,
            "frames": self.frames,
            "equal": self.equal / max(1, self.cells),
            "kept": self.kept / frames,
            "kept_on_device": self.kept_on_device / frames,
            "levels": self.levels,
            "pixels_off": self.off,
        }


def compare_clips(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """One row for each of the demo's clips and the ``files``: how many cells both ways decide alike, and how far
    pictures differ.

    Raises:
        ConfigError: a file does not exist.
    """
    for file in files:
        if not file.is_file():
            raise ConfigError(f"clip {file} does not exist")
    frontend, nvdec = DeviceFrontend(), host_nvdec()
    with tempfile.TemporaryDirectory() as folder:
        clips = [*made_clips(Path(folder)).values(), *files]
        with ThreadPoolExecutor(len(clips)) as threads:
            return list(threads.map(lambda clip: _compare(clip, frontend, nvdec), clips))


def made_clips(folder: Path) -> dict[str, Path]:
    """A street clip of each kind, made in ``folder``."""
    paths = {kind: folder / f"{kind}.mp4" for kind in CLIP_KINDS}
    for number, (kind, path) in enumerate(paths.items()):
        make_clip(kind, path, seconds=CLIP_S, seed=number)
    return paths


def summary(row: dict[str, Any]) -> str:
    """A clip's row as a sentence."""
    return (
        "gpu_frontend {clip}: {equal:.4%} of the cells equal, {kept:.2%} kept ({kept_on_device:.2%} on the device), "
        "pixels at most {levels} levels off, {pixels_off:.2%} of them".format(**row)
    )


def _compare(clip: Path, frontend: DeviceFrontend, nvdec: Nvdec) -> dict[str, Any]:
    camera = DeviceCamera(PatchSampler(clip.stem, make_pruner("replenish"), CodecOptions().fps))
    host = _host_frames(clip)
    compared = _Compared(clip.stem)
    for processor in _processors(clip, CodecProcessor(GEOMETRY, CodecOptions(decode="cuda"), nvdec)):
        for picture in processor.pop_device_pictures():
            frame = frontend.process(camera, picture).frame
            if frame is not None:
                compared.add(next(host), frame)
    return compared.row


def _host_frames(clip: Path) -> Iterator[FrameSample]:
    sampler = PatchSampler(clip.stem, make_pruner("replenish"), CodecOptions().fps)
    source, processor = FileSource(clip), CodecProcessor(GEOMETRY)
    processor.open(source.open())
    for packet in source.packets():
        for picture in processor.feed(packet):
            sample = sampler.feed(_luma_alone(picture))
            if sample is not None:
                yield sample
    for picture in processor.drain():
        sample = sampler.feed(_luma_alone(picture))
        if sample is not None:
            yield sample


def _processors(clip: Path, processor: CodecProcessor) -> Iterator[CodecProcessor]:
    """The processor after each packet, and once more at the end."""
    source = FileSource(clip)
    processor.open(source.open())
    for packet in source.packets():
        processor.feed(packet)
        yield processor
    processor.drain()
    yield processor


def _luma_alone(picture: SampledPicture) -> SampledPicture:
    """Without motion vectors, which NVDEC does not export."""
    still = np.zeros_like(picture.change.luma)
    return replace(picture, change=replace(picture.change, max_motion=still, net_motion=still, intra=still, cue="luma"))
