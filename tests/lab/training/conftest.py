"""A tiny model in training, and sequences cut from real scenes."""

import pytest
import torch

from cluster.lab.training.config import SHAPES, Shape
from cluster.lab.training.examples import Example, WindowExamples
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.trainable_model import TrainableModel
from cluster.types import PatchGrid

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shape() -> Shape:
    return SHAPES["tiny"]


@pytest.fixture(scope="session")
def grid(shape: Shape) -> PatchGrid:
    return picture_grid(shape)


@pytest.fixture
def trainable(shape: Shape) -> TrainableModel:
    model = TrainableModel.fresh(shape, seed=3)
    model.compute = torch.float32
    return model


@pytest.fixture(scope="session")
def examples() -> list[Example]:
    """Complete and pruned, alone and in a stream."""
    make = WindowExamples("tiny", seed=5)
    return [make(number) for number in range(6)]
