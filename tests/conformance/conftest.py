"""Every model family, and cameras that prune nothing, much, and nearly everything."""

import functools
import os

import pytest
import torch
from window_driver import FAMILIES, PRUNINGS, Driver, camera_of

from cluster.engine.native import NativeEngine
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model


@functools.cache
def _loaded(family: str) -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model(family, device=os.environ["SIGHTLINE_DEVICE"])


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> VisionLanguageModel:
    return _loaded(request.param)


@pytest.fixture
def driver(model: VisionLanguageModel) -> Driver:
    return Driver(NativeEngine(model))


@pytest.fixture(scope="session", params=PRUNINGS)
def camera(model: VisionLanguageModel, request: pytest.FixtureRequest) -> SyntheticCamera:
    """One frame a second, an anchor every four."""
    kept, empty = PRUNINGS[request.param]
    return camera_of(model, kept=kept, empty=empty)
