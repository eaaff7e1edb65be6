"""Clips for benches: sampled once by the real front end, then pruned by any policy, with timed decisions."""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.codec.file import FileSource
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.codec.stream_state import ChangeAccumulator, CodecStats
from cluster.lab.bench.harness import add_model_arguments, timed_calls
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry, SampledPicture
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler


def add_clip_arguments(parser: argparse.ArgumentParser, *, model: str, window: float, stride: float) -> None:
    """Add the options shared by benches that answer windows of clips; ``model``, ``window``, ``stride``: defaults."""
    parser.add_argument("--clips", nargs="+", type=Path, metavar="FILE", help="video files (default: two generated)")
    add_model_arguments(parser, model)
    parser.add_argument("--window", type=float, default=window, metavar="S", help="window in seconds")
    parser.add_argument("--stride", type=float, default=stride, metavar="S", help="stride in seconds")
    parser.add_argument("--fps", type=float, default=2.0, help="sampled frames per second")
    parser.add_argument("--pruner", default="replenish", help="pruning policy")


def made_clips(directory: Path) -> list[Path]:
    """Generate two clips: a street, and the same with a noisy sensor."""
    from cluster.lab.scenes.street_clips import make_clip

    made = [directory / "street.mp4", directory / "noisy.mp4"]
    for path in made:
        make_clip(path.stem, path, seconds=88)
    return made


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """A sampled clip. ``change_s``: seconds spent on change grids; ``stats``: the codec processor's."""

    path: Path
    frames: list[SampledPicture]
    fps: float
    change_s: float
    stats: CodecStats

    @property
    def seconds(self) -> float:
        return len(self.frames) / self.fps


def read_clip(
    path: Path,
    geometry: PatchGeometry,
    *,
    fps: float = 2.0,
    at_least: float,
    at_most: float | None = None,
    options: CodecOptions | None = None,
) -> ClipFrames:
    """Sample a clip with the real codec processor: once in full or up to ``at_most`` seconds, and looped until
    ``at_least`` seconds. Raises ``SourceError`` if the file cannot be read."""
    source = FileSource(path, loop=True)
    options = options or CodecOptions(fps=fps)
    fps = options.fps
    processor = CodecProcessor(geometry, options)
    frames: list[SampledPicture] = []
    change = [("change", ChangeAccumulator, method) for method in ("add_picture", "pop_change")]
    with timed_calls(change, time.perf_counter) as spent:
        processor.open(source.open())
        packets = source.packets()
        for packet in packets:
            frames += processor.feed(packet)
            seconds = len(frames) / fps
            if seconds >= at_least and (source.rounds or (at_most is not None and seconds >= at_most)):
                break
        packets.close()  # type: ignore[attr-defined]
    limit = round(max(at_least, at_most) * fps) if at_most is not None else len(frames)
    return ClipFrames(path, frames[:limit], fps, spent["change"], processor.stats)


@dataclass(frozen=True, slots=True)
class PrunedClip:
    """The samples that a decoder would send, the last picture of each, and the seconds spent on masks."""

    samples: list[FrameSample]
    pictures: list[SampledPicture]
    mask_s: float


def prune_clip(clip: ClipFrames, stream: str, policy: str, options: Mapping[str, Any] | None = None) -> PrunedClip:
    """Run a clip's frames through a pruning policy and the patch sampler, which merges temporal patches."""
    pruner = make_pruner(policy, dict(options or {}))
    with timed_calls([("mask", type(pruner), "prune")], time.perf_counter) as spent:
        sampler = PatchSampler(stream, pruner, clip.fps)
        sent = [(sample, frame) for frame in clip.frames if (sample := sampler.feed(frame)) is not None]
    return PrunedClip([sample for sample, _ in sent], [frame for _, frame in sent], spent["mask"])


def span_seconds(samples: list[FrameSample]) -> float:
    """Seconds from the start of the first frame to the end of the last."""
    return (samples[-1].end - samples[0].pts) / MICROSECONDS if samples else 0.0


def clip_names(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Pair every path with a unique name usable in figure names; duplicates get a number."""
    seen: set[str] = set()
    for path in paths:
        name = path.stem.replace("-", "_")
        unique = next(n for n in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))) if n not in seen)
        seen.add(unique)
        yield unique, path
