"""A real engine on the smallest model."""

import pytest
from worker_parts import HeldEngine


@pytest.fixture(scope="session")
def tiny_model():
    import torch

    from cluster.models.loading import load_model

    torch.set_num_threads(1)
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture
def engine(tiny_model):
    from cluster.engine.native.engine import NativeEngine

    return NativeEngine(tiny_model)


@pytest.fixture
def held_engine(engine) -> HeldEngine:
    return HeldEngine(engine)
