"""Small real clips, encoded for the tests by the encoders that PyAV carries."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from cluster.codec import FileSource, StreamHeader
from cluster.codec.privacy import Polygon
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.types import MICROSECONDS, EncodedPacket, PatchGeometry, SampledPicture

GEOMETRY = PatchGeometry(patch=8, merge=2, temporal=2)
WIDTH, HEIGHT, FPS = 192, 128, 20
QUIET = {
    "libx264": {"preset": "veryfast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=error"},
    "libsvtav1": {"preset": "12", "svtav1-params": "lp=1"},
}


H264_CLIPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "b_frames": {"b_frames": 3, "options": {"preset": "medium"}},
    "open_gop": {"b_frames": 3, "options": {"preset": "medium", "x264-params": "open-gop=1"}},
    "gradual": {"options": {"x264-params": "intra-refresh=1"}},
    "slices": {"options": {"x264-params": "slices=4"}},
}


def texture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth random grey levels 40..200, different everywhere, so that motion search has one right answer."""
    random = np.random.default_rng(seed)
    coarse = random.uniform(40, 200, (height // 4 + 3, width // 4 + 3))
    ys, xs = np.linspace(0, coarse.shape[0] - 2, height), np.linspace(0, coarse.shape[1] - 2, width)
    y, x = ys.astype(int), xs.astype(int)
    fy, fx = (ys - y)[:, None], (xs - x)[None, :]
    top = coarse[y][:, x] * (1 - fx) + coarse[y][:, x + 1] * fx
    bottom = coarse[y + 1][:, x] * (1 - fx) + coarse[y + 1][:, x + 1] * fx
    return (top * (1 - fy) + bottom * fy).astype(np.uint8)


def walk(frames: int, width: int = WIDTH, height: int = HEIGHT, seed: int = 0) -> list[np.ndarray]:
    """A still scene with noise, and a 48-pixel square crossing it at 3 pixels a frame."""
    random = np.random.default_rng(seed)
    scene, square = texture(width, height, seed), texture(48, 48, seed + 1)
    pictures = []
    for index in range(frames):
        picture = scene.astype(np.int16)
        x = 3 * index % (width - 48)
        picture[32:80, x : x + 48] = square
        picture += random.integers(-2, 3, picture.shape).astype(np.int16)
        pictures.append(picture.clip(0, 255).astype(np.uint8))
    return pictures


def visit(frames: int, arrives: float, leaves: float) -> list[np.ndarray]:
    """A still scene with light noise; a 48-pixel square walks through it between two frames."""
    random = np.random.default_rng(3)
    scene, square = texture(WIDTH, HEIGHT, 0), texture(48, 48, 1)
    pictures = []
    for index in range(frames):
        picture = scene.astype(np.int16)
        if arrives <= index < leaves:
            x = round(3 * (index - arrives))
            picture[32:80, x : x + 48] = square
        pictures.append((picture + random.integers(-1, 2, picture.shape)).clip(0, 255).astype(np.uint8))
    return pictures


def encode(
    path: Path,
    pictures: Iterable[np.ndarray],
    codec: str = "libx264",
    *,
    gop: int = 20,
    b_frames: int = 0,
    fps: int = FPS,
    times: Iterable[int] | None = None,
    options: dict[str, str] | None = None,
    format: str = "yuv420p",
) -> Path:
    """Encode grey pictures ``[height, width]`` uint8; ``times`` in milliseconds for variable frame rates."""
    # SVT-AV1, run by root, makes the thread that calls it one of real time for good, and so do the children it starts:
    # two busy ones leave nobody else a core. Hence a thread that ends with the clip.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_encode, path, pictures, codec, gop, b_frames, fps, times, options or {}, format).result()


def _encode(
    path: Path,
    pictures: Iterable[np.ndarray],
    codec: str,
    gop: int,
    b_frames: int,
    fps: int,
    times: Iterable[int] | None,
    options: dict[str, str],
    format: str,
) -> Path:
    ticks = iter(times) if times is not None else None
    stream = None
    with av.open(str(path), "w") as container:
        for index, luma in enumerate(pictures):
            if stream is None:
                stream = container.add_stream(codec, rate=fps, options=QUIET.get(codec, {}) | options)
                stream.height, stream.width = luma.shape
                stream.pix_fmt = format
                stream.codec_context.gop_size = gop
                stream.codec_context.thread_count = 1
                if codec not in ("mjpeg", "libsvtav1"):
                    stream.codec_context.max_b_frames = b_frames
                if ticks is not None:
                    stream.codec_context.time_base = Fraction(1, 1000)
            picture = np.full((luma.shape[0] * 3 // 2, luma.shape[1]), 128, np.uint8)
            picture[: luma.shape[0]] = luma
            frame = av.VideoFrame.from_ndarray(picture, "yuv420p")
            if format != "yuv420p":
                frame = frame.reformat(format=format)
            frame.pts, frame.time_base = (
                (index, Fraction(1, fps)) if ticks is None else (next(ticks), Fraction(1, 1000))
            )
            container.mux(stream.encode(frame))
        assert stream is not None
        container.mux(stream.encode())
    return path


def read(path: Path) -> tuple[StreamHeader, list[EncodedPacket]]:
    source = FileSource(path)
    header = source.open()
    return header, list(source.packets())


def renumber(packets: Iterable[EncodedPacket]) -> list[EncodedPacket]:
    """The same packets as a transport that notices no loss would number them."""
    return [replace(packet, sequence=index) for index, packet in enumerate(packets)]


def process(
    header: StreamHeader,
    packets: Iterable[EncodedPacket],
    *,
    fps: float = FPS,
    anchor_interval_s: float = 8.0,
    geometry: PatchGeometry = GEOMETRY,
    zones: tuple[Polygon, ...] = (),
) -> tuple[CodecProcessor, list[SampledPicture]]:
    """Everything sampled from ``packets``, the end included."""
    processor = CodecProcessor(geometry, CodecOptions(fps=fps, anchor_interval_s=anchor_interval_s, zones=zones))
    processor.open(header)
    samples = [sample for packet in packets for sample in processor.feed(packet)]
    return processor, samples + processor.drain()


def seconds(sample: SampledPicture) -> float:
    return sample.pts / MICROSECONDS
