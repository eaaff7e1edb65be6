"""Saved random checkpoints, and the bundled clip, drawn once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.lab.check.clip import draw_clip
from cluster.models.loading import load_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """``saved(preset, **options)``: folder of its checkpoint; ``options``: of ``save_pretrained``."""

    def save(preset: str = "tiny-qwen2_5_vl", **options: object) -> Path:
        model, folder = load_model(preset), tmp_path / preset
        model.model.save_pretrained(folder, **options)
        model.tokenizer.save_pretrained(folder)
        return folder

    return save
