"""Lazy against full decoding, both through a decoder process's pipeline, on synthetic footage of mostly quiet cameras
in typical camera encodings.

* ``decode_spared_quiet``: share of quiet footage's frames never decoded, averaged over strata and encodings, including
  the learning phase; by rate control: ``_crf`` (constant quality), ``_cbr`` (constant bit rate)
* ``decode_spared_busy``: the same for all other footage, including clips given on the command line
* ``change_missed``: share of the cells that full decoding kept of quiet footage in frames other than anchors, and that
  lazy decoding kept in no later frame sent within a stride; ``_busy``: for all other footage
* ``change_missed_strict``: the same, with anchors, which keep every cell anyway, not counting as found
* ``change_late``: like ``change_missed`` for quiet footage, within one second instead of a stride
* ``sent_late_s``, ``_most``: delay of sending frames of quiet footage compared with full decoding
* ``cpu_full_ms``, ``cpu_lazy_ms``: process CPU time per second of quiet video, median over the clips
"""

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from cluster.codec.file import FileSource
from cluster.config.camera import WindowConfig
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.scenes.actors import Actor, Conditions, Keyframe, Scene
from cluster.lab.scenes.encode import VideoEncoding, write_video
from cluster.lab.scenes.events import SceneBuilder, passer_by, traffic
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import make_scene
from cluster.types import MICROSECONDS, EncodedPacket, FrameSample, PatchGeometry
from cluster.vision.sampler import Cut

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
STRIDE_S = WindowConfig().stride_s
LATE_S = 1.0
WAIT_S = STRIDE_S / 2
_LONGEST_S = 3600.0


# -- measurement -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LazyRun:
    """One clip's run through a pipeline. ``frames``: as sent; ``sent_at``: time of the newest packet when each was
    sent, in microseconds; ``cpu_s``: of the process."""

    frames: list[FrameSample]
    sent_at: list[int]
    decoded: int
    spared: int
    state: str
    cpu_s: float
    seconds: float


def run_lazy(clips: Sequence[Path], fps: float, pruner: str, seconds: float) -> BenchResult:
    """Measure synthetic footage of the test split, ``seconds`` long each, and ``clips``. Raises ``ConfigError`` if a
    clip cannot be decoded."""
    settings = PipelineSettings(fps=fps, pruner=pruner, lazy_wait_s=WAIT_S)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for stratum, encoding, path in _encode_footage(Path(folder), seconds):
            group = ("cbr" if "cbr" in encoding else "crf") if stratum.quiet else "busy"
            rows.append(_compare(path, f"{stratum.name} {encoding}", group, settings))
            path.unlink()
    rows += [_compare(path, path.stem, "busy", settings) for path in clips]
    quiet = [row for row in rows if row["group"] != "busy"]
    busy = [row for row in rows if row["group"] == "busy"]
    figures = {
        "decode_spared_quiet": _mean(quiet, "spared"),
        "decode_spared_quiet_crf": _mean([row for row in quiet if row["group"] == "crf"], "spared"),
        "decode_spared_quiet_cbr": _mean([row for row in quiet if row["group"] == "cbr"], "spared"),
        "decode_spared_busy": _mean(busy, "spared"),
        "change_missed": share_of_kept(quiet, "missed"),
        "change_missed_busy": share_of_kept(busy, "missed"),
        "change_missed_strict": share_of_kept(quiet, "missed_strict"),
        "change_late": share_of_kept(quiet, "late"),
        "sent_late_s": _mean(quiet, "delay_s"),
        "sent_late_s_most": max(row["delay_most_s"] for row in quiet),
        "cpu_full_ms": statistics.median(row["full_ms"] for row in quiet),
        "cpu_lazy_ms": statistics.median(row["lazy_ms"] for row in quiet),
    }
    return BenchResult(figures, rows, ["missed and late count cells of the model's patch grid, out of kept"])


def _compare(path: Path, name: str, group: str, settings: PipelineSettings) -> dict[str, Any]:
    full, lazily = (_run(path, settings) for settings in (settings, replace(settings, lazy=True)))
    missed, kept = missed_cells(full, lazily, STRIDE_S)
    strict, _ = missed_cells(full, lazily, STRIDE_S, anchors=False)
    late, _ = missed_cells(full, lazily, LATE_S)
    before = {frame.pts: at for frame, at in zip(full.frames, full.sent_at, strict=True)}
    delays = [
        (at - before[frame.pts]) / MICROSECONDS
        for frame, at in zip(lazily.frames, lazily.sent_at, strict=True)
        if frame.pts in before
    ]
    return {
        "clip": name,
        "group": group,
        "frames": full.decoded,
        "spared": lazily.spared / full.decoded,
        "state": lazily.state,
        "kept": kept,
        "missed": missed,
        "missed_strict": strict,
        "late": late,
        "delay_s": statistics.fmean(delays),
        "delay_most_s": max(delays),
        "full_ms": 1e3 * full.cpu_s / full.seconds,
        "lazy_ms": 1e3 * lazily.cpu_s / lazily.seconds,
    }


def _run(path: Path, settings: PipelineSettings) -> LazyRun:
    frames: list[FrameSample] = []
    sent_at: list[int] = []
    source = _TimedSource(path)

    def sink(frame: FrameSample, cut: Cut) -> None:
        frames.append(replace(frame, patches=cut()))
        sent_at.append(source.now)

    pipeline = CameraPipeline(path.stem, source, GEOMETRY, settings, sink)
    start = time.process_time()
    pipeline.start()
    if not pipeline.join(_LONGEST_S):
        raise ConfigError(f"{path} was not decoded within {_LONGEST_S:g} s")
    cpu_s = time.process_time() - start
    status = pipeline.status()
    if not frames or status.state != "ended":
        raise ConfigError(f"{path}: {status.reason or 'it has no pictures'}")
    seconds = (frames[-1].pts + frames[-1].duration - frames[0].pts) / MICROSECONDS
    stats = status.stats
    return LazyRun(frames, sent_at, stats.frames_decoded, stats.frames_spared, status.lazy, cpu_s, seconds)


class _TimedSource(FileSource):
    """A file source with the time of the last packet read, in microseconds."""

    now = 0

    def packets(self) -> Iterator[EncodedPacket]:
        for packet in super().packets():
            self.now = packet.dts if packet.dts is not None else packet.pts or self.now
            yield packet


def missed_cells(full: LazyRun, lazily: LazyRun, within_s: float, *, anchors: bool = True) -> tuple[int, int]:
    """Cells that ``full`` kept in frames other than anchors: the missed ones, and all. A cell is missed if ``lazily``
    kept it in no frame that ends after its frame's start and was sent at most ``within_s`` later. Without ``anchors``,
    anchors of ``lazily`` do not count."""
    missed = kept = 0
    others = list(zip(lazily.frames, lazily.sent_at, strict=True))
    for frame, sent_at in zip(full.frames, full.sent_at, strict=True):
        if frame.anchor or not frame.mask.any():
            continue
        found = np.zeros_like(frame.mask)
        for other, at in others:
            in_time = other.pts + other.duration > frame.pts and at <= sent_at + within_s * MICROSECONDS
            if in_time and (anchors or not other.anchor):
                found |= other.mask
        kept += int(frame.mask.sum())
        missed += int((frame.mask & ~found).sum())
    return missed, kept


def share_of_kept(rows: Sequence[dict[str, Any]], key: str) -> float:
    """``key`` as a share of the kept cells; NaN if none was kept, which meets no goal."""
    kept = sum(row["kept"] for row in rows)
    return sum(row[key] for row in rows) / kept if kept else math.nan


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows) if rows else math.nan


# -- footage ---------------------------------------------------------------------------------------
WIDTH, HEIGHT, FPS = 640, 360, 10
_DAY = Conditions((1.0, 1.0, 0.98), level=1.0, noise=1.2)
_NIGHT = replace(_DAY, level=0.45, noise=2.5, monochrome=True)


@dataclass(frozen=True, slots=True)
class Stratum:
    """A kind of footage. ``quiet``: counts as quiet footage in the figures; ``people``: passers-by per minute;
    ``edge``: twice a minute, a person steps into the picture's edge and back; ``contrast``, ``pace``: of its people;
    ``tree``: swaying branches in the foreground."""

    name: str
    conditions: Conditions
    quiet: bool = True
    people: int = 1
    edge: bool = False
    contrast: float = 1.0
    pace: float = 1.0
    cars: int = 0
    tree: bool = False


STRATA = (
    Stratum("still", _DAY, people=0),
    Stratum("day", _DAY),
    Stratum("night", _NIGHT),
    Stratum("noisy", replace(_NIGHT, level=0.5, noise=5.5, flicker=0.03)),
    Stratum("drift", replace(_DAY, drift=0.25, drift_s=40.0), people=0),
    Stratum("edge", _DAY, people=0, edge=True),
    Stratum("low_contrast", replace(_DAY, level=0.65), contrast=0.5),
    Stratum("slow", _DAY, pace=0.5),
    Stratum("foliage", _DAY, quiet=False, tree=True),
    Stratum("busy", _DAY, quiet=False, people=14, cars=6),
)


_X265 = "log-level=error:pools=none:frame-threads=1:open-gop=0:scenecut=0"


def _encoding(codec: str, gop_s: float, *, crf: int | None = None, bframes: int = 0) -> VideoEncoding:
    """``gop_s``: seconds between I-frames. Without ``crf`` the bit rate is constant, with a buffer of one second."""
    rate = {"b": "400000", "maxrate": "400000", "bufsize": "400000"} if crf is None else {"crf": str(crf)}
    if codec == "hevc":
        encoder, options = "libx265", {"preset": "ultrafast", "x265-params": _X265}
    else:
        encoder, options = "libx264", {"preset": "veryfast", "x264-params": "scenecut=0"}
    return VideoEncoding(encoder, options | rate, WIDTH, HEIGHT, FPS, round(gop_s * FPS), bframes)


ENCODINGS = {
    "h264-crf24": _encoding("h264", 4.0, crf=24),
    "h264-crf32-b": _encoding("h264", 5.0, crf=32, bframes=2),
    "h264-cbr": _encoding("h264", 4.0),
    "hevc-crf28": _encoding("hevc", 4.0, crf=28),
    "hevc-cbr": _encoding("hevc", 10.0),
}


def _encode_footage(folder: Path, seconds: float) -> Iterator[tuple[Stratum, str, Path]]:
    """Render every stratum once; yields it in every encoding, with the encoding's name."""
    for index, stratum in enumerate(STRATA):
        renderer = SceneRenderer(_scene(stratum, index, seconds), WIDTH, HEIGHT)
        frames = [
            VideoFrame.from_ndarray(renderer.picture(number / FPS, number), format="rgb24").reformat(format="yuv420p")
            for number in range(round(seconds * FPS))
        ]
        for name, encoding in ENCODINGS.items():
            path = folder / f"{index}-{stratum.name}-{name}.mp4"
            write_video(path, encoding, frames)
            yield stratum, name, path


def _scene(stratum: Stratum, index: int, seconds: float) -> Scene:
    scene = make_scene("test", index, seconds=max(24.0, seconds), event=None)
    builder = SceneBuilder(scene.layout, seconds, np.random.default_rng([17, index]))
    builder.contrast, builder.pace = stratum.contrast, stratum.pace
    minutes = seconds / 60
    for _ in range(round(stratum.people * minutes)):
        passer_by(builder, builder.uniform(0.35 * seconds if stratum.quiet else 0.0, 0.85 * seconds))
    for _ in range(round(stratum.cars * minutes)):
        traffic(builder, builder.uniform(0.0, 0.9 * seconds))
    if stratum.edge:
        for visit in range(round(2 * minutes)):
            builder.actors.append(_edge_visit(len(builder.actors), (0.4 + 0.3 * visit / minutes) * seconds, builder))
    actors = tuple(_slowed(replace(actor, contrast=stratum.contrast), stratum.pace) for actor in builder.actors)
    return replace(scene, seconds=seconds, conditions=stratum.conditions, actors=actors, events=(), tree=stratum.tree)


def _edge_visit(number: int, at: float, builder: SceneBuilder) -> Actor:
    """A person who steps halfway in at the left edge, stands for three seconds, and leaves."""
    y = builder.pavement_y()
    far = -builder.layout.person_height(y)
    keys = (
        Keyframe(at, far, y, "walking"),
        Keyframe(at + 1.5, 0.0, y, "standing"),
        Keyframe(at + 4.5, 0.0, y, "walking"),
        Keyframe(at + 6.0, far, y, "walking"),
    )
    return Actor(number, "person", keys, "grey", seed=number)


def _slowed(actor: Actor, pace: float) -> Actor:
    first = actor.keys[0].t
    return replace(actor, keys=tuple(replace(key, t=first + (key.t - first) / pace) for key in actor.keys))
