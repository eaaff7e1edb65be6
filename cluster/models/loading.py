"""A name or a path -> a model: presets by name, checkpoints by local path or hub id."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.image_processing_base import ImageProcessingMixin

from cluster.errors import ConfigError, ModelError
from cluster.models.base import VisionLanguageModel
from cluster.models.catalog import BUNDLED, check_model, locate
from cluster.models.checkpoint import Checkpoint
from cluster.models.presets import PRESETS, SHAPES, initialise
from cluster.models.settings import ModelSettings
from cluster.registry import families

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path_or_preset: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    max_pixels: int | None = None,
) -> VisionLanguageModel:
    """Load a model in evaluation mode.

    ``path_or_preset``: a preset's or bundled model's name, a directory, or a hub id. ``seed`` makes a preset's weights.
    ``max_pixels`` bounds a frame for families of native resolution (a preset has its own bound, a checkpoint the one in
    its ``sightline.json``, or 448*448).

    Raises:
        ModelError: nothing there, not a supported family, a broken checkpoint, or a device this machine lacks.
    """
    where = _device(device)
    kind = _dtype(dtype)
    if path_or_preset in PRESETS:
        return _preset(path_or_preset, where, kind, seed, max_pixels)
    if path_or_preset in BUNDLED:
        check_model(path_or_preset)
    folder = Path(locate(path_or_preset)).expanduser()
    return _checkpoint(str(folder) if folder.is_dir() else path_or_preset, where, kind, max_pixels)


def load_shape(name: str) -> VisionLanguageModel:
    """A published model's shape without weights or memory, to count tokens and FLOPs with; it computes nothing.

    Raises:
        ModelError: no such shape.
    """
    if name not in SHAPES:
        raise ModelError(f"unknown model shape {name!r}; there are: {', '.join(sorted(SHAPES))}")
    shape = SHAPES[name]
    family: Any = families.get(shape.family)
    meta = torch.device("meta")
    with meta:
        model, tokenizer = family.untrained(shape.text, shape.vision)
    checkpoint = Checkpoint(
        model=model,
        tokenizer=tokenizer,
        device=meta,
        dtype=torch.bfloat16,
        random_weights=True,
        max_pixels=shape.max_pixels,
    )
    loaded: VisionLanguageModel = family(checkpoint)
    return loaded


def _preset(
    name: str, device: torch.device, dtype: torch.dtype, seed: int, max_pixels: int | None
) -> VisionLanguageModel:
    preset = PRESETS[name]
    family: Any = families.get(preset.family)
    model, tokenizer = family.untrained(preset.text, preset.vision)
    initialise(model, seed)
    checkpoint = Checkpoint(
        model=model.to(device=device, dtype=dtype).eval().requires_grad_(False),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        random_weights=True,
        max_pixels=max_pixels or preset.max_pixels,
    )
    loaded: VisionLanguageModel = family(checkpoint)
    return loaded


def _checkpoint(path: str, device: torch.device, dtype: torch.dtype, max_pixels: int | None) -> VisionLanguageModel:
    settings = ModelSettings.load(path)
    config = _read(path, AutoConfig)
    if config.model_type not in families:
        raise ModelError(
            f"model {path!r} is of family {config.model_type!r}; supported families: {', '.join(families.names())}"
        )
    model, report = _read(path, AutoModelForImageTextToText, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} the first; get it again")
    processor = _image_processor(path)
    checkpoint = Checkpoint(
        model=model.to(device).eval().requires_grad_(False),
        tokenizer=_read(path, AutoTokenizer),
        device=device,
        dtype=dtype,
        random_weights=False,
        mean=_channels(processor.get("image_mean")),
        std=_channels(processor.get("image_std")),
        max_pixels=max_pixels or settings.max_pixels or 448 * 448,
        settings=settings,
    )
    family: Any = families.get(config.model_type)
    loaded: VisionLanguageModel = family(checkpoint)
    return loaded


def _read(path: str, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(path, **options)
    except Exception as error:
        raise ModelError(_reason(path, error)) from error


def _reason(path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(path).is_dir():
        return f"model {path!r} cannot be loaded: {first}"
    return (
        f"model {path!r} is neither a preset ({', '.join(sorted(PRESETS))}) nor a directory, "
        f"and cannot be had from the hub: {first}"
    )


def _image_processor(path: str) -> dict[str, Any]:
    try:
        return dict(ImageProcessingMixin.get_image_processor_dict(path)[0])
    except OSError:
        logging.getLogger(__name__).info("%s has no image processor; the family's mean and deviation are used", path)
        return {}


def _channels(values: Any) -> tuple[float, ...] | None:
    return tuple(float(value) for value in values) if values else None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"device {name!r} is not available here ({reason}); use cpu, or cuda on a GPU machine"
        ) from error
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; there are: {', '.join(DTYPES)}")
    return DTYPES[name]
