"""Tiny random models of every family, and frames to show them."""

from collections.abc import Callable

import pytest
import torch
from overlapping_patches import same_where_shown_twice

from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.types import PatchGrid

FAMILIES = [name for name in PRESETS if name.startswith("tiny-")]

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    return load_model(request.param)


@pytest.fixture(scope="session")
def qwen() -> VisionLanguageModel:
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture(scope="session")
def qwen2() -> VisionLanguageModel:
    return load_model("tiny-qwen2_vl")


@pytest.fixture(scope="session")
def qwen3() -> VisionLanguageModel:
    return load_model("tiny-qwen3_vl")


@pytest.fixture(scope="session")
def internvl() -> VisionLanguageModel:
    return load_model("tiny-internvl3")


@pytest.fixture
def make_frame() -> Callable[..., PatchBatch]:
    """``make_frame(grid, keep=None)``: a random frame of the groups ``keep`` (bool ``[group_rows, group_cols]``)."""
    generator = torch.Generator().manual_seed(7)

    def make(grid: PatchGrid, keep: torch.Tensor | None = None) -> PatchBatch:
        if keep is None:
            keep = torch.ones(grid.group_rows, grid.group_cols, dtype=torch.bool)
        cells = keep.nonzero()
        shape = (len(cells) * grid.merge**2, grid.temporal, 3, grid.patch, grid.patch)
        patches = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if grid.overlap:
            patches = same_where_shown_twice(patches, cells, grid)
        return PatchBatch(patches=patches, cells=cells, grid=grid)

    return make


@pytest.fixture
def random_keep() -> Callable[[PatchGrid, float], torch.Tensor]:
    """``random_keep(grid, share)``: a group mask that keeps about ``share``, at least one group."""
    generator = torch.Generator().manual_seed(11)

    def make(grid: PatchGrid, share: float) -> torch.Tensor:
        keep = torch.rand(grid.group_rows, grid.group_cols, generator=generator) < share
        keep[-1, 0] = True
        return keep

    return make
