"""Model loading: presets by name, checkpoints by local path or hub id."""

import contextlib
import copy
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from cluster.errors import ConfigError, ModelError, first_line
from cluster.models.base import VisionLanguageModel
from cluster.models.catalog import (
    BUNDLED,
    cached_checkpoint,
    cached_config,
    check_model,
    check_unquantised,
    is_hub_id,
    locate,
)
from cluster.models.checkpoint import Checkpoint, untrained
from cluster.models.float8 import check_float8
from cluster.models.presets import PRESETS, PUBLISHED, SHAPES, Preset
from cluster.models.settings import FILE, ModelSettings
from cluster.registry import families

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
META = torch.device("meta")
if not sys.stderr.isatty():
    # transformers' progress bars would fill a log.
    disable_progress_bar()
MAX_PIXELS = 448 * 448
# Weight names of decoder layers and tower blocks.
_OF_LAYER = re.compile(r"\.(layers?|blocks)\.\d")
# Those that an engine loads itself.
_LEFT_TO_ENGINE = re.compile(r"model\.language_model\.layers\.|lm_head\.")


def load_model(
    path_or_preset: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    max_pixels: int | None = None,
    without_layers: bool = False,
) -> VisionLanguageModel:
    """Load a model in evaluation mode.

    ``path_or_preset``: name of a preset or bundled model, a directory, or a hub id. ``seed``: of a preset's weights.
    ``max_pixels``: maximum frame size for families of native resolution (default: the preset's, the one in the
    checkpoint's ``sightline.json``, or 448*448). ``without_layers``: a checkpoint's decoder layers stay on the meta
    device, for an engine that loads them itself, perhaps quantised or onto several devices. Raises ``ModelError``: not
    found, an unsupported family, a broken checkpoint, or a missing device; ``ConfigError``: a dtype that is unknown or
    that the device lacks, or ``max_pixels`` for a family of square frames.
    """
    target = find_device(device)
    torch_dtype = loaded_dtype(dtype, target)
    if dtype == "float8":
        wide = "float32" if torch_dtype == torch.float32 else "bfloat16"
        model = load_model(
            path_or_preset, device=device, dtype=wide, seed=seed, max_pixels=max_pixels, without_layers=without_layers
        )
        model.use_float8()
        return model
    if path_or_preset in PRESETS:
        preset = PRESETS[path_or_preset]
        model, tokenizer = _untrained(preset, torch.device("cpu"))
        initialise(model, seed)
        model = model.to(device=target, dtype=torch_dtype)
        return _wrapped(preset.family, model, tokenizer, target, torch_dtype, preset.max_pixels, max_pixels)
    if path_or_preset in BUNDLED:
        check_model(path_or_preset)
    folder = Path(locate(path_or_preset)).expanduser()
    # For each file of a hub id, transformers asks the hub first, which takes minutes if it is unreachable.
    found = folder if folder.is_dir() else cached_checkpoint(path_or_preset)
    return _checkpoint(str(found or path_or_preset), target, torch_dtype, max_pixels, without_layers=without_layers)


def load_shape(name: str, max_pixels: int | None = None) -> VisionLanguageModel:
    """Load a model on the meta device, without weights, to count tokens and FLOPs.

    ``name``: a published model (``qwen2_5_vl-7b``, or its hub id), a preset, a bundled model, a checkpoint's folder
    with ``config.json`` and tokenizer, or a hub id for which the local hub cache has these. Nothing is downloaded.
    ``max_pixels``: see :func:`load_model`. Raises ``ModelError``: not found, or an unsupported family;
    ``ConfigError``: ``max_pixels`` for a family of square frames.
    """
    name = PUBLISHED.get(name, name)
    shape = SHAPES.get(name) or PRESETS.get(name)
    if shape is not None:
        return _wrapped(shape.family, *_untrained(shape, META), META, torch.bfloat16, shape.max_pixels, max_pixels)
    folder = str(Path(locate(name)).expanduser())
    if not (Path(folder) / "config.json").is_file():
        if is_hub_id(name) and (cached := cached_config(name)):
            folder = str(cached.parent)
        else:
            fetch = f"; fetch its settings first (hf download {name} --include '*.json' '*.txt')"
            raise ModelError(
                f"unknown model shape {name!r}{fetch if is_hub_id(name) else ''}; name a shape "
                f"({', '.join(sorted(SHAPES))}), a preset ({', '.join(sorted(PRESETS))}), or the folder of a checkpoint"
            )
    config = _config(folder)
    tokenizer = _read(folder, AutoTokenizer.from_pretrained, folder)
    return _checkpoint_shape(folder, config, tokenizer, ModelSettings.load(folder), max_pixels)


def load_truncated(name: str, layers: int, device: torch.device) -> VisionLanguageModel:
    """Load a published model's shape at its true width, with ``layers`` layers in tower and language model, in bfloat16
    and with uninitialised weights. Raises ``ModelError``: unknown shape."""
    shape = _published_shape(name)
    tower: dict[str, Any] = {key: layers for key in ("depth", "num_hidden_layers") if key in shape.vision}
    if "fullatt_block_indexes" in shape.vision:
        tower |= {"fullatt_block_indexes": [layers - 1]}
    if "deepstack_visual_indexes" in shape.vision:
        tower |= {"deepstack_visual_indexes": list(range(layers))[-3:]}
    shape = replace(shape, text={**shape.text, "num_hidden_layers": layers}, vision={**shape.vision, **tower})
    return _empty(shape, device)


def load_random_shape(name: str, device: torch.device, layers: int | None = None) -> VisionLanguageModel:
    """Load a published model's shape in bfloat16, with random weights generated on the device; ``layers``: see
    :func:`load_truncated`. Raises ``ModelError``: unknown shape."""
    model = _empty(_published_shape(name), device) if layers is None else load_truncated(name, layers, device)
    for parameter, weight in model.model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0.0, 0.02)
        else:
            # Norms are 1, biases 0.
            weight.fill_(float(parameter.endswith("weight")))
    for module in model.model.modules():
        if hasattr(module, "inv_freq"):
            # Rotary frequencies are buffers, not parameters, and uninitialised as well.
            for name, frequency in type(module)(module.config).named_buffers():
                setattr(module, name, frequency.to(device))
        if hasattr(module, "position_ids"):
            module.position_ids.copy_(torch.arange(module.position_ids.shape[1]))
    return model


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Initialise weights so that activations are near unit scale at any width, and answers depend on the image.

    With transformers' standard deviation of 0.02, a narrow model has uniform attention and flat logits. Here, linear
    layers have variance 1/fan_in, query and key projections somewhat more (for peaked attention), embeddings 1/width
    (for unit logits).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        leaf = name.rsplit(".", 2)[-2]
        if parameter.ndim < 2:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.1, generator=generator)
        else:
            fan_in = parameter[0].numel()
            gain = 1.5 if leaf in ("q_proj", "k_proj", "qkv") else 1.0
            parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)


def _published_shape(name: str) -> Preset:
    if name not in SHAPES:
        raise ModelError(f"unknown model shape {name!r}; there are: {', '.join(sorted(SHAPES))}")
    return SHAPES[name]


def _empty(shape: Preset, device: torch.device) -> VisionLanguageModel:
    model, tokenizer = _untrained(shape, META)
    model = model.to(torch.bfloat16).to_empty(device=device)
    return _wrapped(shape.family, model, tokenizer, device, torch.bfloat16, shape.max_pixels)


def _untrained(preset: Preset, device: torch.device) -> tuple[Any, Any]:
    with device:
        return untrained(families.get(preset.family), preset.text, preset.vision, tied=preset.tied)


def _wrapped(
    family: str,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    max_pixels: int,
    wanted_pixels: int | None = None,
    **options: Any,
) -> VisionLanguageModel:
    """Wrap a transformers model in its family's class, in evaluation mode. ``max_pixels``: the model's own, overridden
    by ``wanted_pixels``; ``options``: of :class:`Checkpoint`, with ``random_weights`` true by default."""
    model = model.eval().requires_grad_(False)
    options = {"random_weights": True, "max_pixels": wanted_pixels or max_pixels, **options}
    loaded: VisionLanguageModel = families.get(family)(Checkpoint(model, tokenizer, device, dtype, **options))
    if wanted_pixels is not None and (side := loaded.geometry.square):
        raise ConfigError(f"model.max_pixels: frames of family {family} are always {side}x{side} pixels; leave it out")
    return loaded


def _checkpoint_shape(
    path: str, config: Any, tokenizer: Any, settings: ModelSettings, max_pixels: int | None
) -> VisionLanguageModel:
    with META:
        model = _read(path, AutoModelForImageTextToText.from_config, config)
    own = settings.max_pixels or MAX_PIXELS
    return _wrapped(config.model_type, model, tokenizer, META, torch.bfloat16, own, max_pixels, settings=settings)


def _checkpoint(
    path: str, device: torch.device, dtype: torch.dtype, max_pixels: int | None, *, without_layers: bool
) -> VisionLanguageModel:
    config = _config(path)
    if not without_layers:
        check_unquantised(path, config.to_dict())
    found = _find_file(path, FILE)
    settings = ModelSettings() if found is None else ModelSettings.load(Path(found).parent)
    tokenizer = _read(path, AutoTokenizer.from_pretrained, path)
    family: Any = families.get(config.model_type)
    _check_template(path, family, tokenizer)
    mean, std = _pixel_statistics(path, family)
    read = copy.deepcopy(config)
    # Refuse unsupported models before reading gigabytes.
    shape = _checkpoint_shape(path, config, tokenizer, settings, max_pixels)
    # transformers needs extra packages to load quantised layers, if it can load them at all.
    quantisation = [vars(each).pop("quantization_config", None) for each in (read, read.text_config)]
    if without_layers:
        read.text_config.num_hidden_layers = 0
    model, report = _read(
        path, AutoModelForImageTextToText.from_pretrained, path, config=read, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"checkpoint {path!r} lacks {len(missing)} weights, the first being {missing[0]}; download it again"
        )
    model = model.to(device)
    if without_layers:
        model.model.language_model.layers = shape.model.model.language_model.layers
        model.config.text_config.num_hidden_layers = len(shape.layers)
    if any(quantisation):
        model.config.quantization_config = next(filter(None, quantisation))
    # Old versions of transformers saved rotary frequencies; current ones compute them.
    unread = sorted(name for name in report["unexpected_keys"] if not name.endswith("inv_freq"))
    if without_layers:
        extra = [name for name in unread if not _LEFT_TO_ENGINE.match(name)]
    else:
        extra = [name for name in unread if _OF_LAYER.search(name)]
    if extra:
        raise ModelError(
            f"checkpoint {path!r} has {len(extra)} layer weights that its config.json does not account for, the first "
            f"being {extra[0]}; correct config.json, merge its adapters, or quantise nothing but the language model"
        )
    return _wrapped(
        config.model_type,
        model,
        tokenizer,
        device,
        dtype,
        settings.max_pixels or MAX_PIXELS,
        max_pixels,
        random_weights=False,
        mean=mean,
        std=std,
        settings=settings,
    )


def _config(path: str) -> Any:
    # Checked before AutoConfig, which offers to run remote code for a family it does not know.
    body = _read(path, PreTrainedConfig.get_config_dict, path)[0]
    if (family := body.get("model_type")) not in families:
        raise ModelError(f"model {path!r} is of family {family!r}; supported families: {', '.join(families.names())}")
    config = _read(path, AutoConfig.from_pretrained, path)
    if "tie_word_embeddings" not in body:
        # Transformers 4, which wrote the published InternVL3, asked the language model; InternVL's own default is true.
        config.tie_word_embeddings = getattr(config.text_config, "tie_word_embeddings", config.tie_word_embeddings)
    return config


def _find_file(path: str, name: str) -> str | None:
    """Path of a file in a checkpoint's folder, or in its repository on the hub; None if there is none."""
    found: str | None = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _read_json(path: str, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files; empty if there is none."""
    if (found := _find_file(path, name)) is None:
        return {}
    try:
        return dict(json.loads(Path(found).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{found} cannot be read as a JSON object: {first_line(error)}") from None


def _read(path: str, make: Any, *given: Any, **options: Any) -> Any:
    try:
        return make(*given, **options)
    except Exception as error:
        why = f"is neither a preset ({', '.join(sorted(PRESETS))}) nor a directory, and cannot be loaded from the hub"
        if Path(path).is_dir():
            why = "cannot be loaded"
        raise ModelError(f"model {path!r} {why}: {first_line(error)}") from error


def _pixel_statistics(path: str, family: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (RGB) such that ``(pixel / 255 - mean) / std`` is what the checkpoint's video
    processor computes, or its image processor if there is no other; the family's values by default."""
    both = _read_json(path, "processor_config.json")
    processor = (
        both.get("video_processor")
        or _read_json(path, "video_preprocessor_config.json")
        or both.get("image_processor")
        or _read_json(path, "preprocessor_config.json")
    )
    mean, std = processor.get("image_mean") or family.pixel_mean, processor.get("image_std") or family.pixel_std
    if processor.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    factor = 1.0 if processor.get("do_rescale") is False else processor.get("rescale_factor", 1 / 255)
    try:
        # Convert from pixel * factor to pixel / 255.
        means, stds = (tuple(float(each) / (255 * factor) for each in of) for of in (mean, std))
        valid = len(means) == len(stds) == 3 and all(map(math.isfinite, (*means, *stds))) and min(stds) > 0
    except (TypeError, ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        raise ModelError(
            f"the processor of {path!r} must have three numbers as image_mean, three above 0 as image_std and a "
            f"rescale_factor above 0, not {mean!r}, {std!r} and {factor!r}; correct its preprocessor_config.json"
        )
    return means, stds


def _check_template(path: str, family: Any, tokenizer: Any) -> None:
    """Raise ``ModelError`` if the checkpoint's chat template renders a user's turn unlike the family's prompt. System
    prompts may differ, and so may white space, in which published templates differ from the prompts that their models
    were trained with."""
    # Processors of transformers 4 save the second file, and their tokenizers often keep the template of the language
    # model alone: it is enough if one of the two matches.
    templates = [tokenizer.chat_template, _read_json(path, "chat_template.json").get("chat_template")]
    if not any(templates):
        return
    question, written = "Is anyone there?", []
    for template in filter(None, templates):
        for content in (question, [{"type": "text", "text": question}]):
            message = [{"role": "user", "content": content}]
            # A template may support only strings or only lists of parts; for the other it fails or omits the question.
            with contextlib.suppress(Exception):
                options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
                written.append(str(tokenizer.apply_chat_template(message, **options)))
    user_turn = family.chat_user + question + family.chat_answer
    if not any("".join(each.split()).endswith("".join(user_turn.split())) for each in written):
        raise ModelError(
            f"the chat template of {path!r} renders a question as {written[-1:]}, but prompts for family "
            f"{family.family} are {family.chat_system + user_turn!r}; use a checkpoint with the family's own template, "
            "or remove the template if this one was trained with the family's"
        )


def find_device(name: str) -> torch.device:
    """The device of this name. Raises ``ModelError``: this machine lacks it, or it is not the first GPU visible to this
    process (kernels, graphs and events use each thread's current GPU)."""
    if name.startswith("cuda:") and name != "cuda:0":
        raise ModelError(f"device {name!r}: select the GPU with CUDA_VISIBLE_DEVICES, and use cuda (or cpu)")
    try:
        probe = torch.ones(1, device=torch.device(name))
        probe.item()
    except Exception as error:
        raise ModelError(
            f"device {name!r} is not available here ({first_line(error)}); use cpu, or cuda on a GPU machine"
        ) from error
    # With an index, like the device of tensors on it: ``cuda`` and ``cuda:0`` compare unequal.
    return probe.device


def loaded_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that weights are loaded in; for float8, that of everything but linear layers. Raises ``ConfigError``:
    an unknown dtype, or one that the device lacks."""
    if name == "float8":
        check_float8(device)
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; there are: {', '.join([*DTYPES, 'float8'])}")
    return DTYPES[name]
