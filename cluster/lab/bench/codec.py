"""The codec front end (reading, decoding with vectors, change grids, sampling, scaling, pruning) against bare decoding.

``front_end_ratio`` is the frame rate of the whole front end over that of a plain PyAV demux/decode loop on the same
clip: medians of alternating runs with one decoder thread, pinned to one core. Time is the thread's CPU time, since all
work happens in one thread and other load on the machine must not affect the ratio.

``--large``: speed of one 4K HEVC and one 4K AV1 camera through the front end relative to real time at 25 FPS
(``realtime_hevc``, ``realtime_av1``), on all cores and on one, in wall time: these codecs use several threads.
"""

import argparse
import contextlib
import itertools
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.stream import VideoStream

from cluster.codec.decoder import Decoder
from cluster.codec.file import FileSource
from cluster.codec.motion import MotionField
from cluster.codec.picture import LumaDifference, PictureScaler
from cluster.codec.privacy import PrivacyMasks
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.config.polygon import parse_polygon
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, positive, run_alternating, timed_calls
from cluster.lab.bench.lazy import run_lazy
from cluster.types import PatchGeometry
from cluster.vision import Pruner, make_pruner

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)

LARGE = {"hevc": "libx265", "av1": "libsvtav1"}
LARGE_FPS = 25
LARGE_BIT_RATE = 16_000_000

ENCODER_OPTIONS = {
    "libx264": {"preset": "veryfast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=error:wpp=0"},
    # Frames reference only the past, as in camera streams.
    "libsvtav1": {"preset": "12", "svtav1-params": "pred-struct=1:rc=2"},
}

STAGES: list[tuple[str, type, str]] = [
    ("decode", Decoder, "decode"),
    ("motion", MotionField, "add_vectors"),
    ("motion", MotionField, "pop_planes"),
    ("scale", PictureScaler, "__call__"),
    ("luma", LumaDifference, "__call__"),
    ("mask", PrivacyMasks, "apply"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument(
        "--clips", nargs="+", type=Path, metavar="FILE", help="video files (default: a generated 1080p20 clip)"
    )
    parser.add_argument("--fps", type=float, default=2.0, help="sampled frames per second")
    parser.add_argument("--pruner", default="replenish", help="pruning policy")
    parser.add_argument("--repeats", type=positive, default=7, metavar="N", help="runs per clip")
    parser.add_argument(
        "--mask",
        action="append",
        metavar="'X,Y X,Y X,Y'",
        help="a privacy mask; adds mask_share, its cost relative to decoding",
    )
    parser.add_argument(
        "--large", action="store_true", help="measure 4K HEVC and AV1 against real time, on all cores and on one"
    )
    parser.add_argument(
        "--lazy", action="store_true", help="measure lazy against full decoding on synthetic cameras and the clips"
    )
    parser.add_argument(
        "--seconds", type=float, help="length of a generated clip (default: 8; with --lazy 120, at least 60)"
    )


def run(args: argparse.Namespace) -> BenchResult:
    """Measure every clip; figures of given clips are suffixed with the clip's name."""
    try:
        options = CodecOptions(fps=args.fps, masks=tuple(parse_polygon(mask) for mask in args.mask or ()))
    except ValueError as error:
        raise ConfigError(f"--mask: {error}") from None
    for clip in args.clips or []:
        if not clip.is_file():
            raise ConfigError(f"clip {clip} does not exist")
    if args.lazy:
        if args.seconds is not None and args.seconds < 60:
            raise ConfigError(f"--seconds must be at least 60 with --lazy, not {args.seconds:g}")
        return run_lazy(args.clips or [], args.fps, args.pruner, args.seconds or 120.0)
    seconds = args.seconds or 8.0
    if args.large:
        return run_large(options, args.pruner, args.repeats, seconds)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, one_core():
        made = Path(folder) / "made-1080p20.mp4"
        if not args.clips:
            make_clip(made, seconds)
        for clip in args.clips or [made]:
            row = measure(clip, options, args.pruner, args.repeats)
            rows.append(row)
            suffix = "" if clip == made else f"_{clip.stem}"
            figures[f"front_end_ratio{suffix}"] = row["ratio"]
            if options.masks:
                figures[f"mask_share{suffix}"] = row["mask_ms"] / row["decode_ms"]
    notes = ["ms per frame and stage are CPU time of one instrumented pass; 'other' is time outside the stages"]
    return BenchResult(figures, rows, notes)


def run_large(options: CodecOptions, pruner: str, repeats: int, seconds: float) -> BenchResult:
    """Medians over ``repeats`` passes, alternating between all cores and one."""
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for codec, encoder in LARGE.items():
            clip = Path(folder) / f"{codec}.mp4"
            # As root, SVT-AV1 permanently gives its calling thread real-time scheduling: use a separate thread.
            with ThreadPoolExecutor(1) as apart:
                size: dict[str, Any] = {"width": 3840, "height": 2160, "fps": LARGE_FPS, "bit_rate": LARGE_BIT_RATE}
                apart.submit(make_clip, clip, seconds, encoder=encoder, **size).result()
            rates: dict[str, list[float]] = {"all": [], "one": []}
            for _ in range(repeats):
                for cores, pinned in (("all", contextlib.nullcontext()), ("one", one_core())):
                    with pinned:
                        start = time.perf_counter()
                        frames, _ = run_front_end(clip, options, make_pruner(pruner))
                        rates[cores].append(frames / LARGE_FPS / (time.perf_counter() - start))
            figures[f"realtime_{codec}"] = statistics.median(rates["all"])
            megabits = clip.stat().st_size * 8 / 1e6 / seconds
            rows += [
                {"codec": codec, "mbit_s": megabits, "cores": cores, "realtime": statistics.median(each)}
                for cores, each in rates.items()
            ]
    return BenchResult(figures, rows, ["wall time; other load on the machine slows it"])


def measure(clip: Path, options: CodecOptions, pruner: str, repeats: int) -> dict[str, Any]:
    """Time both loops in alternating order, after one turn to warm up caches; then run one instrumented pass."""
    bare_s: list[float] = []
    front_s: list[float] = []
    halves = [
        partial(_timed, bare_s, lambda: (decode_bare(clip), 0)),
        partial(_timed, front_s, lambda: run_front_end(clip, options, make_pruner(pruner))),
    ]
    for turn in range(repeats + 1):
        (frames, _), (decoded, samples) = run_alternating(turn, halves)
        if decoded != frames:
            raise ConfigError(f"{clip}: the front end decoded {decoded} of {frames} frames; the clip is damaged")
    del bare_s[0], front_s[0]
    policy = make_pruner(pruner)
    with timed_calls([*STAGES, ("prune", type(policy), "prune")]) as seconds:
        start = time.thread_time()
        run_front_end(clip, options, policy)
        total = time.thread_time() - start
    stages_s = seconds | {"other": total - sum(seconds.values())}
    bare, front = statistics.median(bare_s), statistics.median(front_s)
    return {
        "clip": clip.stem,
        "frames": frames,
        "samples": samples,
        "bare_fps": frames / bare,
        "front_fps": frames / front,
        # Paired by turn: both loops of a turn ran under the same load.
        "ratio": statistics.median(itertools.starmap(operator.truediv, zip(bare_s, front_s, strict=True))),
        "bare_ms": 1e3 * bare / frames,
        "front_ms": 1e3 * front / frames,
        **{f"{stage}_ms": 1e3 * spent / frames for stage, spent in stages_s.items()},
    }


def _timed(seconds: list[float], work: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    start = time.thread_time()
    counts = work()
    seconds.append(time.thread_time() - start)
    return counts


def decode_bare(clip: Path) -> int:
    """Decode every picture without using it; returns their number."""
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        return sum(1 for packet in container.demux(stream) for _ in packet.decode())


def run_front_end(clip: Path, options: CodecOptions, pruner: Pruner) -> tuple[int, int]:
    """Run a decoder process's work on one camera up to the mask; returns the frames decoded and sampled."""
    source = FileSource(clip)
    processor = CodecProcessor(GEOMETRY, options)
    processor.open(source.open())
    for packet in source.packets():
        for sample in processor.feed(packet):
            pruner.prune(sample)
    for sample in processor.drain():
        pruner.prune(sample)
    return processor.stats.frames_decoded, processor.stats.frames_sampled


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Pin the calling thread to one of its cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def make_clip(
    path: Path,
    seconds: float,
    *,
    width: int = 1920,
    height: int = 1080,
    fps: int = 20,
    encoder: str = "libx264",
    bit_rate: int = 4_000_000,
) -> None:
    """Encode a synthetic view: textured background, six moving objects, light sensor noise; GOP of 2 s, no B-frames."""
    random = np.random.default_rng(7)
    scene = random.integers(30, 200, (height // 8 + 1, width // 8 + 1)).repeat(8, 0).repeat(8, 1)[:height, :width]
    scene = (scene + np.roll(scene, 3, 0) + np.roll(scene, 5, 1) + np.roll(scene, (7, 2), (0, 1))) // 4
    noise = random.normal(0.0, 2.0, (height + 64, width + 64)).round().astype(np.int16)
    objects = [
        (random.integers(0, width), random.integers(0, height - 260), random.integers(-9, 10), random.integers(60, 240))
        for _ in range(6)
    ]
    textures = [random.integers(20, 235, (260 // 4, size // 4 + 1)).repeat(4, 0).repeat(4, 1) for *_, size in objects]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=fps, options=ENCODER_OPTIONS[encoder])
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = bit_rate
        stream.gop_size = 2 * fps
        if encoder != "libsvtav1":
            stream.codec_context.max_b_frames = 0
        picture = np.full((height * 3 // 2, width), 128, np.uint8)
        for index in range(round(seconds * fps)):
            luma = scene.astype(np.int16)
            for (left, top, speed, size), texture in zip(objects, textures, strict=True):
                x = int(left + speed * index) % (width - size)
                luma[top : top + 260, x : x + size] = texture[:, :size]
            dy, dx = random.integers(0, 64, 2)
            luma += noise[dy : dy + height, dx : dx + width]
            picture[:height] = luma.clip(0, 255)
            frame = av.VideoFrame.from_ndarray(picture, "yuv420p")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
