"""``gate_missed``: objects that first appear in an anchor frame and do not reopen the static gate; ``quiet_gated``:
gated share of windows in which nothing appears, the smallest over the pruners.

Samples of a quiet camera (texture with sensor noise) go through every pruner, the sampler, and the static gate of a
simulated engine. I-frames have no motion vectors, so that an anchor's change is in its luma only.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.codec.picture import LumaDifference
from cluster.engine.simulated import SimulatedEngine
from cluster.lab.bench.harness import BenchResult
from cluster.models.loading import load_shape
from cluster.registry import pruners
from cluster.types import MICROSECONDS, Answer, ChangeGrid, PatchGrid, Question, SampledPicture, StreamSpec, UInt8Array
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

OBJECTS = 200
SAMPLES_PER_S = 2
ANCHOR_S, STRIDE_S, WINDOW_S = 8, 4, 16
# The second window ends at 8 s; answers of any camera stand for at least 40 s.
QUIET_S, AFTER_S = 48, STRIDE_S + 1
NOISE = 1.2
"""Standard deviation of the sensor noise in grey levels."""


@dataclass(frozen=True, slots=True)
class AppearingObject:
    """A square object: ``top``, ``left``, ``side`` in pixels of the grid, ``contrast`` in grey levels."""

    top: int
    left: int
    side: int
    contrast: int

    def draw(self, luma: UInt8Array) -> None:
        place = luma[self.top : self.top + self.side, self.left : self.left + self.side]
        place[:] = np.clip(place.astype(np.int16) + self.contrast, 0, 255)


def measure(seed: int) -> BenchResult:
    """Figures ``gate_missed``, summed over the pruners, and ``quiet_gated``."""
    shape = load_shape("demo")
    grid = PatchGrid(16, 16, shape.geometry.patch, shape.geometry.merge, shape.geometry.temporal)
    random = np.random.default_rng(seed)
    objects = [_random_object(random, grid) for _ in range(OBJECTS)]
    scene = _scene(random, grid)
    rows: list[dict[str, Any]] = []
    for name in pruners.names():
        quiet = _Camera(name, grid, scene)
        quiet.run(random, QUIET_S)
        answers = quiet.answers[2:]
        missed = sum(_is_missed(quiet, appearing, random) for appearing in objects)
        gated = sum(answer.gated for answer in answers)
        rows.append({"pruner": name, "objects": OBJECTS, "missed": missed, "quiet": len(answers), "quiet_gated": gated})
    note = (
        f"objects with sides of 2 to 12 patches, 25 to 110 grey levels off the background, over noise of {NOISE:g}; "
        f"quiet: windows of a camera in which nothing appears"
    )
    figures = {
        "gate_missed": float(sum(row["missed"] for row in rows)),
        "quiet_gated": min(row["quiet_gated"] / row["quiet"] for row in rows),
    }
    return BenchResult(figures, rows, [note])


def _random_object(random: np.random.Generator, grid: PatchGrid) -> AppearingObject:
    side = int(random.integers(2 * grid.patch, 12 * grid.patch))
    top, left = random.integers(0, (grid.height - side, grid.width - side))
    return AppearingObject(int(top), int(left), side, int(random.integers(25, 110)) * int(random.choice([-1, 1])))


def _scene(random: np.random.Generator, grid: PatchGrid) -> UInt8Array:
    """Background of grey levels 120..136, against which objects of any contrast are visible."""
    return random.integers(120, 137, (grid.height, grid.width)).astype(np.uint8)


def _is_missed(quiet: _Camera, appearing: AppearingObject, random: np.random.Generator) -> bool:
    """Whether every window within a stride of its appearance is gated."""
    camera = quiet.copy()
    camera.appearing = appearing
    camera.run(random, AFTER_S)
    return all(answer.gated for answer in camera.answers)


class _Camera:
    """A camera's pipeline from sampled pictures to answers."""

    def __init__(self, pruner: str, grid: PatchGrid, scene: UInt8Array) -> None:
        self.answers: list[Answer] = []
        self.appearing: AppearingObject | None = None
        self._grid, self._scene = grid, scene
        self._spec = StreamSpec("gate", (Question("q", "Is anyone on the ground?"),), WINDOW_S, STRIDE_S)
        self._engine = SimulatedEngine(load_shape("demo"))
        self._engine.admit(self._spec)
        self._sampler = PatchSampler("gate", make_pruner(pruner), SAMPLES_PER_S)
        self._difference = LumaDifference(grid)
        self._index = 0

    def copy(self) -> _Camera:
        """An independent copy in the same state, without answers."""
        other = object.__new__(_Camera)
        other.__dict__ |= self.__dict__
        other.answers = []
        other._sampler, other._difference = deepcopy((self._sampler, self._difference))
        other._engine = SimulatedEngine(self._engine.model)
        other._engine.import_stream(self._spec, self._engine.export_stream("gate"))
        return other

    def run(self, random: np.random.Generator, seconds: int) -> None:
        for _ in range(seconds * SAMPLES_PER_S):
            sample = self._sampler.feed(self._frame(random))
            for request in self._engine.push(sample) if sample is not None else ():
                self.answers += self._engine.step([request])

    def _frame(self, random: np.random.Generator) -> SampledPicture:
        grid, index = self._grid, self._index
        self._index += 1
        luma = self._scene.copy()
        if self.appearing is not None:
            self.appearing.draw(luma)
        luma = np.clip(luma + random.normal(0, NOISE, luma.shape), 0, 255).astype(np.uint8)
        zero = np.zeros((grid.rows, grid.cols), np.float32)
        change = ChangeGrid(zero, zero, zero, luma=self._difference(luma), cue="vectors+luma", frames=1)
        anchor = index % (ANCHOR_S * SAMPLES_PER_S) == 0
        rgb = np.broadcast_to(luma[..., None], (*luma.shape, 3))
        pts = index * MICROSECONDS // SAMPLES_PER_S
        return SampledPicture(index, pts, anchor, index == 0, grid, rgb, luma, change)
