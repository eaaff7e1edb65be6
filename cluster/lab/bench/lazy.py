"""Lazy decoding against full decoding, both through the pipeline of a decoder process.

* ``decode_spared_quiet``: share of the frames of quiet footage that are never decoded, over all its strata and
  encodings alike, the camera's learning included; by rate control: ``_crf`` (constant quality), ``_cbr`` (constant
  rate)
* ``decode_spared_busy``: of the rest, clips given on the command line included
* ``change_missed``: of the cells that full decoding kept of quiet footage in frames that are no anchors, the share that
  lazy decoding kept in no frame from then on until a stride later; ``_busy``: of the rest
* ``change_late``: of quiet footage, with one second in place of the stride
* ``cpu_full_ms``, ``cpu_lazy_ms``: CPU time of the process for a second of quiet video, median over the clips
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.codec.file import FileSource
from cluster.config.camera import WindowConfig
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.lazy_footage import ENCODINGS, STRATA, encode_footage
from cluster.types import MICROSECONDS, FrameSample, PatchGeometry

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
STRIDE_S = WindowConfig().stride_s
LATE_S = 1.0
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class LazyRun:
    """One clip through a pipeline. ``frames``: as sent. ``cpu_s``: of the process."""

    frames: list[FrameSample]
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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for stratum, encoding, path in encode_footage(Path(folder), STRATA, ENCODINGS, "test", seconds):
            group = ("cbr" if encoding.crf is None else "crf") if stratum.quiet else "busy"
            rows.append(_compare(path, f"{stratum.name} {encoding.name}", group, fps, pruner))
            path.unlink()
    rows += [_compare(path, path.stem, "busy", fps, pruner) for path in clips]
    quiet = [row for row in rows if row["group"] != "busy"]
    busy = [row for row in rows if row["group"] == "busy"]
    figures = {
        "decode_spared_quiet": _mean(quiet, "spared"),
        "decode_spared_quiet_crf": _mean([row for row in quiet if row["group"] == "crf"], "spared"),
        "decode_spared_quiet_cbr": _mean([row for row in quiet if row["group"] == "cbr"], "spared"),
        "decode_spared_busy": _mean(busy, "spared"),
        "change_missed": _share_of_kept(quiet, "missed"),
        "change_missed_busy": _share_of_kept(busy, "missed"),
        "change_late": _share_of_kept(quiet, "late"),
        "cpu_full_ms": statistics.median(row["full_ms"] for row in quiet),
        "cpu_lazy_ms": statistics.median(row["lazy_ms"] for row in quiet),
    }
    return BenchResult("codec", figures, rows, ["missed and late are cells of the model's patch grid, out of kept"])


def _compare(path: Path, name: str, group: str, fps: float, pruner: str) -> dict[str, Any]:
    full, lazily = (_run(path, PipelineSettings(fps=fps, pruner=pruner, lazy=lazy)) for lazy in (False, True))
    missed, kept = missed_cells(full.frames, lazily.frames, STRIDE_S)
    late, _ = missed_cells(full.frames, lazily.frames, LATE_S)
    return {
        "clip": name,
        "group": group,
        "frames": full.decoded,
        "spared": lazily.spared / full.decoded,
        "state": lazily.state,
        "kept": kept,
        "missed": missed,
        "late": late,
        "full_ms": 1e3 * full.cpu_s / full.seconds,
        "lazy_ms": 1e3 * lazily.cpu_s / lazily.seconds,
    }


def _run(path: Path, settings: PipelineSettings) -> LazyRun:
    frames: list[FrameSample] = []
    pipeline = CameraPipeline(path.stem, FileSource(path), GEOMETRY, settings, frames.append)
    start = time.process_time()
    pipeline.start()
    if not pipeline.join(_LONGEST_S):
        raise ConfigError(f"{path} was not decoded within {_LONGEST_S:g} s")
    cpu_s = time.process_time() - start
    status = pipeline.status()
    if not frames or status.state != "ended":
        raise ConfigError(f"{path}: {status.reason or 'it has no pictures'}")
    seconds = (frames[-1].pts + frames[-1].duration - frames[0].pts) / MICROSECONDS
    return LazyRun(frames, status.frames_decoded, status.frames_spared, status.lazy, cpu_s, seconds)


def missed_cells(full: Sequence[FrameSample], lazily: Sequence[FrameSample], within_s: float) -> tuple[int, int]:
    """Cells that ``full`` kept in frames that are no anchors: those that ``lazily`` kept in no frame that ends after
    them and begins within ``within_s``, and all of them."""
    missed = kept = 0
    for frame in full:
        if frame.anchor or not frame.mask.any():
            continue
        found = np.zeros_like(frame.mask)
        for other in lazily:
            if other.pts + other.duration > frame.pts and other.pts <= frame.pts + within_s * MICROSECONDS:
                found |= other.mask
        kept += int(frame.mask.sum())
        missed += int((frame.mask & ~found).sum())
    return missed, kept


def _share_of_kept(rows: Sequence[dict[str, Any]], key: str) -> float:
    kept = sum(row["kept"] for row in rows)
    return sum(row[key] for row in rows) / kept if kept else 0.0


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows) if rows else 0.0
