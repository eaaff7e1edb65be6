"""Builders of sampled frames, and the demo clips with the samples the codec processor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from street_footage import make_all_clips

from cluster.codec import FileSource
from cluster.codec.processor import CodecProcessor
from cluster.types import ChangeGrid, PatchGeometry, PatchGrid, SampledPicture, UInt8Array

QWEN = PatchGeometry(patch=14, merge=2, temporal=2)

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
    return make_all_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def sampled(clips: dict[str, Path]) -> dict[str, list[SampledPicture]]:
    """Each clip's samples at 2 per second, on Qwen's geometry of 448 x 448 pixels."""
    return {kind: sample_file(path) for kind, path in clips.items()}


def sample_file(path: Path) -> list[SampledPicture]:
    source, processor = FileSource(path), CodecProcessor(QWEN)
    processor.open(source.open())
    frames = [frame for packet in source.packets() for frame in processor.feed(packet)]
    return frames + processor.drain()
