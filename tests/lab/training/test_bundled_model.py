"""The model that is shipped was trained, on this architecture, with this tokenizer, to answer these questions."""

from pathlib import Path

import numpy as np
import torch

import cluster
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.lab.training.config import SHAPES
from cluster.lab.training.examples import ValidationExamples
from cluster.lab.training.loss import margins
from cluster.lab.training.pruning import picture_grid
from cluster.lab.training.run import auc, load_mean_weights
from cluster.lab.training.trainable_model import TrainableModel
from cluster.models.settings import ModelSettings

FOLDER = Path(cluster.__path__[0]) / "models" / "demo"


def test_its_yes_means_something() -> None:
    torch.set_num_threads(1)
    shape = SHAPES["demo"]
    model = TrainableModel.fresh(shape, seed=0)
    load_mean_weights([FOLDER], model)
    make = ValidationExamples("demo")
    found = [margins(model, [make(number)], picture_grid(shape)) for number in range(2)]
    values, truth = torch.cat([margin for margin, _ in found]), torch.cat([asked.truth for _, asked in found])
    assert auc(values.numpy().astype(np.float64), truth.numpy()) > 0.85


def test_it_says_how_it_wants_to_be_asked() -> None:
    settings = ModelSettings.load(FOLDER)
    assert dict(settings.questions) == {kind: standing_question(kind) for kind in EVENT_KINDS}
    assert all(0 < (settings.threshold_of(kind) or 0) < 1 for kind in EVENT_KINDS)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 60e6
