"""Queries that a layer would compute, against those that it computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS


@pytest.fixture(params=[name for name in PRESETS if name.startswith("tiny-")])
def model(request: Any) -> VisionLanguageModel:
    return load_model(request.param)


def test_a_layer_computes_the_queries_that_were_foretold(model: VisionLanguageModel) -> None:
    rows, width = 5, model.text_config.hidden_size
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    embeds = torch.zeros(rows, width * (1 + model.deepstack))
    seen: list[Tensor] = []
    between: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        seen.append(query)
        return torch.zeros_like(query)

    for index in range(len(model.layers)):
        model.run_layer(index, hidden, embeds, None, attend, between.append)
        assert torch.allclose(model.projections(index, hidden)[0], seen[-1], atol=1e-6)
        # Attention that gives nothing leaves the residual stream as it was.
        assert torch.allclose(between[-1], hidden, atol=1e-6)
    assert len(seen) == len(between) == len(model.layers)
