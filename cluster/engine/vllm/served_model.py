"""Model folder for vLLM: configuration and weights of the language model. Does not import vLLM.

vLLM gets a ``config.json`` of ours: the language model alone, under our registered class, with three-axis rotary
positions for every family (one-axis families have three equal axes). Weights stay in the checkpoint's folder, except
random weights, which are written here, and weights whose head size the attention kernels do not support: their heads
are padded with zeros, which changes no result (:func:`pad_weights`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.engine.vllm.plugin import ARCHITECTURE
from cluster.errors import ModelError
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import head_size
from cluster.models.loading import load_model

LANGUAGE_MODELS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3": "qwen3",
    "qwen3_vl_text": "qwen3",
}
"""Language models that vLLM can serve: transformers' ``model_type`` -> the one in vLLM's configuration, by which
:mod:`cluster.engine.vllm.model` chooses layers. A family is served if its checkpoint's language model is."""

ROTARY = ("default", "dynamic", "yarn")
"""Rotary types that vLLM supports with three axes. InternVL3's is dynamic, which equals the default up to the model's
maximum position; no window exceeds that."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``weights``: folder or hub id; ``config``: folder of the configuration; ``width``: of embeddings, at least the
    model's; ``kv_bytes``: KV of one token, all layers and heads; ``stages``: maximum pipeline stages."""

    weights: str
    config: Path
    width: int
    kv_bytes: int
    stages: int


def why_not_served(model: VisionLanguageModel) -> str:
    """One sentence on why vLLM cannot serve a model; empty if it can."""
    kind = model.text_config.model_type
    if kind not in LANGUAGE_MODELS:
        served = ", ".join(LANGUAGE_MODELS)
        return f"engine vllm serves language models of type {served}, but this model's is {kind!r}; use engine native"
    rotary = model.text_config.rope_parameters["rope_type"]
    if rotary not in ROTARY:
        return (
            f"engine vllm serves rotary embeddings of type {', '.join(ROTARY)}, but this model's are {rotary!r}; use "
            "engine native"
        )
    return ""


def write_model_folder(model: VisionLanguageModel, folder: Path, head_sizes: Sequence[int] | None) -> ServedModel:
    """Write the files that vLLM needs to serve ``model``, in addition to its checkpoint.

    Args:
        model: loaded.
        folder: empty.
        head_sizes: head sizes supported by the attention kernels, ascending; ``None``: all.

    Raises:
        ModelError: the language model is not supported, or no head size is large enough.
    """
    if reason := why_not_served(model):
        raise ModelError(reason)
    config = model.text_config
    head = head_size(config)
    wide = padded_head_size(config, head_sizes)
    checkpoint = str(getattr(model.model, "name_or_path", "") or "")
    body = text_config(model)
    if wide != head:
        body |= pad_config(body, wide)
    if wide != head or model.random_weights or not checkpoint:
        absent = any(parameter.is_meta for parameter in model.model.parameters())
        dtype = str(model.dtype).removeprefix("torch.")
        tensors = language_weights(load_model(checkpoint, dtype=dtype) if absent else model)
        if wide != head:
            tensors = pad_weights(tensors, config, wide)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        checkpoint = str(folder)
    (folder / "config.json").write_text(json.dumps(body, indent=2), encoding="utf-8")
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * wide * model.dtype.itemsize
    # The first stage must hold all layers that add embeddings.
    stages = config.num_hidden_layers // max(1, model.deepstack)
    return ServedModel(checkpoint, folder, body["projection_size"], kv_bytes, stages)


def padded_head_size(config: Any, sizes: Sequence[int] | None) -> int:
    """Smallest of ``sizes`` (ascending; ``None``: any) that holds a language model's heads. Raises ``ModelError``: none
    is large enough."""
    head = head_size(config)
    fitting = [size for size in sizes or () if size >= head and config.hidden_size * size % head == 0]
    wide = head if sizes is None else next(iter(fitting), None)
    if wide is None:
        raise ModelError(
            f"vLLM's attention on this device supports head sizes up to {sizes[-1] if sizes else 0}, "
            f"but this model's is {head}; use engine native"
        )
    return wide


def language_weights(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The language model's weights under the names of transformers' causal model of its type, on the CPU."""
    whole: Any = model.model
    tensors = {f"model.{name}": value for name, value in whole.model.language_model.state_dict().items()}
    if not _tied(model):
        tensors["lm_head.weight"] = whole.get_output_embeddings().weight
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def pad_weights(tensors: dict[str, Tensor], config: Any, head: int) -> dict[str, Tensor]:
    """Equivalent weights with head size ``head`` instead of ``d``, and a proportionally wider residual stream.

    Padding is zero. Rotary pairs (i, i + d/2) move to (i, i + head/2), where the configuration's larger base rotates
    the first d/2 of them as before. Queries are scaled by sqrt(head / d), which attention's scale undoes; weights of
    norms (of the residual stream and of heads) by sqrt(d / head), because they now average over more elements.
    """
    old = head_size(config)
    hidden = config.hidden_size * head // old
    ratio = math.sqrt(old / head)
    normed = any(name.endswith("q_norm.weight") for name in tensors)
    half = old // 2
    pairs = torch.cat([torch.arange(half), head // 2 + torch.arange(old - half)])
    straight = torch.arange(old)

    def heads(value: Tensor, places: Tensor) -> Tensor:
        """``[n * old, ...]`` -> ``[n * head, ...]``."""
        wide = value.new_zeros(value.shape[0] // old, head, *value.shape[1:])
        wide[:, places] = value.view(-1, old, *value.shape[1:])
        return wide.flatten(0, 1)

    def columns(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, hidden - config.hidden_size))

    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        kind = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        is_bias = name.endswith(".bias")
        if kind in ("q_proj", "k_proj", "v_proj"):
            value = heads(value, straight if kind == "v_proj" else pairs)
            value = value / ratio if kind == "q_proj" and not normed else value
            value = value if is_bias else columns(value)
        elif kind in ("q_norm", "k_norm"):
            # Queries keep their norm's weight, which includes their scale: sqrt(d / head) * sqrt(head / d) = 1.
            value = heads(value * ratio if kind == "k_norm" else value, pairs)
        elif kind == "o_proj":
            value = columns(heads(value.T, straight)).T
        elif kind == "down_proj":
            value = columns(value.T).T
        elif "norm" in kind:
            value = columns(value * ratio)
        else:
            value = columns(value)
        out[name] = value.contiguous()
    return out


def pad_config(body: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Changes to a :func:`text_config` for head size ``head``; see :func:`pad_weights`."""
    old = body["head_dim"]
    rope = dict(body["rope_parameters"])
    rope["rope_theta"] = float(rope["rope_theta"]) ** (head / old)
    # Added pairs come last: interleaved, those belong to the first axis; in sections, to the last one.
    sections = list(rope["mrope_section"])
    sections[0 if rope["mrope_interleaved"] else -1] += (head - old) // 2
    return {
        "head_dim": head,
        "hidden_size": body["hidden_size"] * head // old,
        "projection_size": body["projection_size"] * head // old,
        "rms_norm_eps": body["rms_norm_eps"] * old / head,
        "rope_parameters": {**rope, "mrope_section": sections},
    }


def text_config(model: VisionLanguageModel) -> dict[str, Any]:
    """Configuration of a model's language model alone, as vLLM reads it."""
    config = model.text_config
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    body = {name: getattr(config, name) for name in same}
    # Only Llama and Qwen3 have these.
    body |= {name: getattr(config, name) for name in ("attention_bias", "mlp_bias") if hasattr(config, name)}
    sections, interleaved = _sections(model)
    rope = config.rope_parameters
    if rope["rope_type"] == "dynamic":
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    # Upper bound: any grid shape, with the family's text around a frame.
    largest = model.geometry.largest.tokens * 2 + 64
    quantization = getattr(model.model.config, "quantization_config", None)
    return {
        **body,
        "architectures": [ARCHITECTURE],
        "model_type": LANGUAGE_MODELS[config.model_type],
        "head_dim": head_size(config),
        # vLLM's name for the width of the first layer's input.
        "projection_size": config.hidden_size * (1 + model.deepstack),
        "tie_word_embeddings": _tied(model),
        "use_sliding_window": False,
        "rope_parameters": {
            **rope,
            "mrope_section": sections,
            "mrope_interleaved": interleaved,
        },
        "sightline_largest_item": largest,
        **({} if quantization is None else {"quantization_config": quantization}),
    }


def _tied(model: VisionLanguageModel) -> bool:
    whole: Any = model.model
    return bool(whole.get_input_embeddings().weight is whole.get_output_embeddings().weight)


def _sections(model: VisionLanguageModel) -> tuple[list[int], bool]:
    """Rotary pairs per axis, and whether axes are interleaved; any split will do if all axes are equal."""
    axes = model.rotary_axes.cpu()
    if not axes.any():
        return [len(axes) - 2, 1, 1], False
    return torch.bincount(axes, minlength=3).tolist(), bool((axes.diff() < 0).any())
