"""Memory growth over thousands of windows of one camera.

The camera's kept tokens vary at random, so that windows of every size occur. Resident memory is read after a tenth of
the windows, when every buffer has seen its largest window, and at the end.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, add_model_arguments, positive, print_progress
from cluster.models.loading import load_model
from cluster.types import (
    MICROSECONDS,
    BoolGrid,
    FrameSample,
    PatchGeometry,
    PatchGrid,
    Question,
    StreamSpec,
)


@dataclass(frozen=True, slots=True)
class SyntheticCamera:
    """Endless reproducible samples of a synthetic camera.

    * ``kept``: share of token groups a frame between anchors keeps; every ``anchor_every``-th frame is an anchor
    * ``empty``: share of frames between anchors that keep nothing at all
    * ``still``: frames between anchors keep nothing and report no activity, as a night camera's would
    """

    stream: str
    geometry: PatchGeometry
    width: int = 112
    height: int = 112
    fps: float = 2.0
    kept: float = 0.25
    empty: float = 0.0
    anchor_every: int = 8
    still: bool = False
    seed: int = 0
    start: int = 0

    @property
    def grid(self) -> PatchGrid:
        return self.geometry.grid(self.width, self.height)

    @property
    def duration(self) -> int:
        """Duration of a frame in microseconds."""
        return round(self.geometry.temporal / self.fps * MICROSECONDS)

    def __iter__(self) -> Iterator[FrameSample]:
        return map(self.sample, itertools.count())

    def sample(self, index: int) -> FrameSample:
        """The frame at ``index``; deterministic."""
        random = np.random.default_rng([self.seed, index])
        anchor = index % self.anchor_every == 0
        mask = self._mask(random, anchor)
        pts = self.start + index * self.duration
        grid = self.grid
        shape = (int(mask.sum()), grid.temporal, 3, grid.patch, grid.patch)
        return FrameSample(
            stream=self.stream,
            index=index,
            pts=pts,
            duration=self.duration,
            anchor=anchor,
            fresh=index == 0,
            grid=grid,
            mask=mask,
            patches=random.integers(0, 256, shape, dtype=np.uint8),
            activity=0.0 if self.still else float(mask.mean()),
        )

    def _mask(self, random: np.random.Generator, anchor: bool) -> BoolGrid:
        grid = self.grid
        groups = random.random((grid.group_rows, grid.group_cols)) < self.kept
        if anchor:
            groups[:] = True
        elif self.still or random.random() < self.empty:
            groups[:] = False
        return groups.repeat(grid.merge, axis=0).repeat(grid.merge, axis=1)


WARM_UP = 0.1
ROWS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's options to the parser."""
    parser.add_argument("--windows", type=positive, default=2000, metavar="N", help="windows")
    add_model_arguments(parser, "tiny-qwen2_5_vl")


def run(args: argparse.Namespace) -> BenchResult:
    """Figure ``rss_growth``: relative growth of resident memory from warm-up to the end."""
    if args.windows < ROWS / WARM_UP:
        raise ConfigError(f"--windows must be at least {round(ROWS / WARM_UP)}, to leave room for a warm-up")
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    engine = NativeEngine(model)
    camera = SyntheticCamera("cam", model.geometry, kept=0.3, empty=0.3, anchor_every=16)
    questions = (
        Question("q", "Is a person or a car moving in this picture?"),
        Question("e", "Is anyone climbing the fence?", explain=True),
    )
    engine.admit(StreamSpec("cam", questions, static_gate=False))
    process = psutil.Process()
    warm = max(1, round(args.windows * WARM_UP))
    warm_rss = 0
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    windows = 0
    for sample in camera:
        for request in engine.push(sample):
            engine.step([request])
            windows += 1
            if windows == warm:
                warm_rss = process.memory_info().rss
            if windows % max(1, args.windows // ROWS) == 0:
                rows.append(
                    {
                        "windows": windows,
                        "rss_mib": round(process.memory_info().rss / 2**20, 1),
                        "stream_kib": round(engine.memory_bytes("cam") / 2**10),
                        "seconds": round(time.perf_counter() - began, 1),
                    }
                )
                print_progress(f"soak: {windows}/{args.windows} windows, {rows[-1]['rss_mib']} MiB")
        if windows >= args.windows:
            break
    rss = process.memory_info().rss
    figures = {"rss_growth": (rss - warm_rss) / warm_rss, "windows_per_s": windows / (time.perf_counter() - began)}
    notes = [f"{args.windows} windows of model {args.model}; warm after {warm}"]
    return BenchResult(figures, rows, notes)
