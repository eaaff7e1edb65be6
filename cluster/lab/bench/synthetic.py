"""Frame samples without a camera: random pictures, random masks of a chosen density, exact on every machine.

For benches and tests that need frames and not video: what a decoder would send, made in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cluster.types import MICROSECONDS, BoolGrid, FrameSample, PatchGeometry, PatchGrid, mask_digest


@dataclass(frozen=True, slots=True)
class SyntheticCamera:
    """An endless stream of samples.

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
        """Microseconds a frame stands for."""
        return round(self.geometry.temporal / self.fps * MICROSECONDS)

    def __iter__(self) -> Iterator[FrameSample]:
        index = 0
        while True:
            yield self.sample(index)
            index += 1

    def sample(self, index: int) -> FrameSample:
        """The frame at ``index``; the same one whenever asked."""
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
            digest=mask_digest(mask, index, pts),
        )

    def _mask(self, random: np.random.Generator, anchor: bool) -> BoolGrid:
        grid = self.grid
        groups = random.random((grid.group_rows, grid.group_cols)) < self.kept
        if not anchor and (self.still or random.random() < self.empty):
            groups[:] = False
        if anchor:
            groups[:] = True
        return np.repeat(np.repeat(groups, grid.merge, axis=0), grid.merge, axis=1)
