"""The shape of a model without its weights: geometry of frames, and tokens of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from cluster.errors import ModelError
from cluster.models.base import VisionLanguageModel
from cluster.models.catalog import locate
from cluster.models.checkpoint import Checkpoint
from cluster.models.loading import load_shape
from cluster.models.presets import PRESETS, SHAPES
from cluster.models.settings import ModelSettings
from cluster.registry import families

META = torch.device("meta")

PUBLISHED = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl-7b",
    "OpenGVLab/InternVL3-8B-hf": "internvl3-8b",
    "OpenGVLab/InternVL3-14B-hf": "internvl3-14b",
}
"""Hub id -> the shape of that checkpoint, which nothing has to be fetched for."""


def shape_of(name: str) -> VisionLanguageModel:
    """A model on the meta device, which counts and computes nothing.

    ``name``: a published model (``qwen2_5_vl-7b``, or its hub id), a preset, a bundled model, or a checkpoint's folder;
    the latter needs its ``config.json`` and tokenizer, no weights.

    Raises:
        ModelError: there is no such thing, or it is of no supported family.
    """
    name = PUBLISHED.get(name, name)
    if name in SHAPES:
        return load_shape(name)
    if name in PRESETS:
        preset = PRESETS[name]
        family: Any = families.get(preset.family)
        with META:
            model, tokenizer = family.untrained(preset.text, preset.vision)
        return _shape(family, model, tokenizer, preset.max_pixels, ModelSettings())
    folder = Path(locate(name)).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"there is no model {name!r} to stand in for; name a shape ({', '.join(sorted(SHAPES))}), a preset "
            f"({', '.join(sorted(PRESETS))}), or the folder of a checkpoint"
        )
    return _checkpoint(str(folder))


def _checkpoint(folder: str) -> VisionLanguageModel:
    settings = ModelSettings.load(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        with META:
            model = AutoModelForImageTextToText.from_config(config)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"the shape of model {folder!r} cannot be read: {first}") from error
    if config.model_type not in families:
        raise ModelError(
            f"model {folder!r} is of family {config.model_type!r}; supported families: {', '.join(families.names())}"
        )
    return _shape(families.get(config.model_type), model, tokenizer, settings.max_pixels or 448 * 448, settings)


def _shape(family: Any, model: Any, tokenizer: Any, max_pixels: int, settings: ModelSettings) -> VisionLanguageModel:
    checkpoint = Checkpoint(
        model=model,
        tokenizer=tokenizer,
        device=META,
        dtype=torch.bfloat16,
        random_weights=True,
        max_pixels=max_pixels,
        settings=settings,
    )
    shape: VisionLanguageModel = family(checkpoint)
    return shape
