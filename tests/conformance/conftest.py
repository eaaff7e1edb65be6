"""Every model family, and cameras that prune nothing, much, and nearly everything."""

import os

import pytest
import torch
from window_driver import Driver, camera_of

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.models.presets import PRESETS

FAMILIES = [name for name in PRESETS if name.startswith("tiny-")]
# Share of groups kept, share of frames that keep nothing.
PRUNINGS = {"whole": (1.0, 0.0), "pruned": (0.3, 0.0), "sparse": (0.2, 0.5)}


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model(request.param, device=os.environ["SIGHTLINE_DEVICE"])


@pytest.fixture
def driver(model: VisionLanguageModel) -> Driver:
    return Driver(NativeEngine(model))


@pytest.fixture(params=PRUNINGS)
def camera(model: VisionLanguageModel, request: pytest.FixtureRequest) -> SyntheticCamera:
    """One frame a second, an anchor every four."""
    kept, empty = PRUNINGS[request.param]
    return camera_of(model, kept=kept, empty=empty)
