"""Builders of sampled frames, and two clips of a street."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from street_footage import make_all_clips

from cluster.types import ChangeGrid, PatchGrid, SampledPicture, UInt8Array

FrameMaker = Callable[..., SampledPicture]


@pytest.fixture
def grid() -> PatchGrid:
    return PatchGrid(rows=8, cols=12, patch=14, merge=2, temporal=2)


@pytest.fixture
def make_frame(grid: PatchGrid) -> FrameMaker:
    """``make_frame(luma, index=3, anchor=True, net_motion=plane, ...)``: a sample whose planes are zero but for those
    given; ``luma`` may be one number."""

    def make(luma: UInt8Array | int, *, index: int = 0, on: PatchGrid = grid, **given) -> SampledPicture:
        flags = {name: given.pop(name, index == 0) for name in ("anchor", "fresh")}
        cue = given.pop("cue", "vectors+luma")
        planes = {
            name: given.pop(name, np.zeros((on.rows, on.cols), np.float32))
            for name in ("max_motion", "net_motion", "intra")
        }
        difference = given.pop("difference", np.zeros((on.rows, on.cols), np.float32))
        assert not given
        luma = np.broadcast_to(np.asarray(luma, np.uint8), (on.height, on.width)).copy()
        rgb = np.repeat(luma[..., None], 3, axis=2)
        change = ChangeGrid(**planes, luma=difference, cue=cue, frames=6)
        return SampledPicture(index, index * 500_000, flags["anchor"], flags["fresh"], on, rgb, luma, change)

    return make


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_all_clips(tmp_path_factory.mktemp("clips"), ("street", "noisy"))
