"""Lazy decoding against full decoding, both through the pipeline of a decoder process.

* ``decode_spared_quiet``: share of the frames of quiet footage that are never decoded, over all its strata and
  encodings alike, the camera's learning included; by rate control: ``_crf`` (constant quality), ``_cbr`` (constant
  rate)
* ``decode_spared_busy``: of the rest, clips given on the command line included
* ``change_missed``: of the cells that full decoding kept of quiet footage in frames that are no anchors, the share that
  lazy decoding kept in no frame from then on that was sent within a stride; ``_busy``: of the rest
* ``change_missed_strict``: the same where a later anchor, which keeps every cell anyway, finds nothing
* ``change_late``: of quiet footage, with one second in place of the stride
* ``sent_late_s``, ``_most``: seconds by which frames of quiet footage were sent later than by full decoding
* ``cpu_full_ms``, ``cpu_lazy_ms``: CPU time of the process for a second of quiet video, median over the clips
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.codec.file import FileSource
from cluster.config.camera import WindowConfig
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.lazy_footage import ENCODINGS, STRATA, encode_footage
from cluster.types import MICROSECONDS, EncodedPacket, FrameSample, PatchGeometry

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
STRIDE_S = WindowConfig().stride_s
LATE_S = 1.0
WAIT_S = STRIDE_S / 2
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class LazyRun:
    """One clip through a pipeline. ``frames``: as sent; ``sent_at``: the newest packet's time then, microseconds.
    ``cpu_s``: of the process."""

    frames: list[FrameSample]
    sent_at: list[int]
    decoded: int
    spared: int
    state: str
    cpu_s: float
    seconds: float


def run_lazy(clips: Sequence[Path], fps: float, pruner: str, seconds: float) -> BenchResult:
    """Drawn footage of the test split, ``seconds`` long each, and ``clips``.

    Raises:
        ConfigError: a clip cannot be decoded.
    """
    settings = PipelineSettings(fps=fps, pruner=pruner, lazy_wait_s=WAIT_S)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for stratum, encoding, path in encode_footage(Path(folder), STRATA, ENCODINGS, "test", seconds):
            group = ("cbr" if encoding.crf is None else "crf") if stratum.quiet else "busy"
            rows.append(_compare(path, f"{stratum.name} {encoding.name}", group, settings))
            path.unlink()
    rows += [_compare(path, path.stem, "busy", settings) for path in clips]
    quiet = [row for row in rows if row["group"] != "busy"]
    busy = [row for row in rows if row["group"] == "busy"]
    figures = {
        "decode_spared_quiet": _mean(quiet, "spared"),
        "decode_spared_quiet_crf": _mean([row for row in quiet if row["group"] == "crf"], "spared"),
        "decode_spared_quiet_cbr": _mean([row for row in quiet if row["group"] == "cbr"], "spared"),
        "decode_spared_busy": _mean(busy, "spared"),
        "change_missed": _share_of_kept(quiet, "missed"),
        "change_missed_busy": _share_of_kept(busy, "missed"),
        "change_missed_strict": _share_of_kept(quiet, "missed_strict"),
        "change_late": _share_of_kept(quiet, "late"),
        "sent_late_s": _mean(quiet, "delay_s"),
        "sent_late_s_most": max(row["delay_most_s"] for row in quiet),
        "cpu_full_ms": statistics.median(row["full_ms"] for row in quiet),
        "cpu_lazy_ms": statistics.median(row["lazy_ms"] for row in quiet),
    }
    return BenchResult("codec", figures, rows, ["missed and late are cells of the model's patch grid, out of kept"])


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

    def sink(frame: FrameSample) -> None:
        frames.append(frame)
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
    return LazyRun(frames, sent_at, status.frames_decoded, status.frames_spared, status.lazy, cpu_s, seconds)


class _TimedSource(FileSource):
    """A file and the time of the packet read last, microseconds."""

    now = 0

    def packets(self) -> Iterator[EncodedPacket]:
        for packet in super().packets():
            self.now = packet.dts if packet.dts is not None else packet.pts or self.now
            yield packet


def missed_cells(full: LazyRun, lazily: LazyRun, within_s: float, *, anchors: bool = True) -> tuple[int, int]:
    """Cells that ``full`` kept in frames that are no anchors: those that ``lazily`` kept in no frame that ends after
    them and was sent at most ``within_s`` after theirs, and all of them. Without ``anchors`` those find nothing."""
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


def _share_of_kept(rows: Sequence[dict[str, Any]], key: str) -> float:
    kept = sum(row["kept"] for row in rows)
    return sum(row[key] for row in rows) / kept if kept else 0.0


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows) if rows else 0.0
