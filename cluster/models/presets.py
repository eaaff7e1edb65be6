"""Random-weight models of real families: the same code paths as a checkpoint, nothing to download.

``tiny`` is for tests, ``demo`` for a laptop, ``bench`` large enough that arithmetic and not Python decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from cluster.models import internvl, qwen2_5_vl
from cluster.models.tokenizer import VOCABULARY, preset_tokenizer


@dataclass(frozen=True, slots=True)
class Preset:
    """How to build one: ``build()`` gives an uninitialised model and its tokenizer."""

    family: str
    max_pixels: int
    build: Callable[[], tuple[nn.Module, Any]]


def _qwen2_5_vl(*, text: dict[str, Any], vision: dict[str, Any]) -> tuple[nn.Module, Any]:
    tokenizer = preset_tokenizer(qwen2_5_vl.SPECIAL_TOKENS, eos="<|im_end|>", pad="<|endoftext|>")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in qwen2_5_vl.SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32768,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            **text,
        },
        vision_config={"out_hidden_size": text["hidden_size"], "tokens_per_second": 2, **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config), tokenizer


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": list(sections)}


def _tiny_qwen2_5_vl() -> tuple[nn.Module, Any]:
    return _qwen2_5_vl(
        text={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": _mrope(2, 3, 3),
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 4,
            "num_heads": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
        },
    )


def _demo_qwen2_5_vl() -> tuple[nn.Module, Any]:
    return _qwen2_5_vl(
        text={
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": _mrope(8, 12, 12),
        },
        vision={
            "hidden_size": 128,
            "intermediate_size": 320,
            "depth": 4,
            "num_heads": 4,
            "fullatt_block_indexes": [1, 3],
        },
    )


def _bench_qwen2_5_vl() -> tuple[nn.Module, Any]:
    return _qwen2_5_vl(
        text={
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": _mrope(8, 12, 12),
        },
        vision={
            "hidden_size": 384,
            "intermediate_size": 1152,
            "depth": 8,
            "num_heads": 6,
            "fullatt_block_indexes": [3, 7],
        },
    )


def _internvl(*, text: dict[str, Any], vision: dict[str, Any]) -> tuple[nn.Module, Any]:
    tokenizer = preset_tokenizer(internvl.SPECIAL_TOKENS, eos="<|im_end|>", pad="<|endoftext|>")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in internvl.SPECIAL_TOKENS}
    config = InternVLConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32768,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            **text,
        },
        vision_config={"attention_bias": True, **vision},
        image_token_id=ids["<IMG_CONTEXT>"],
        tie_word_embeddings=True,
    )
    return InternVLForConditionalGeneration(config), tokenizer


def _tiny_internvl3() -> tuple[nn.Module, Any]:
    return _internvl(
        text={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 112,
            "use_qk_norm": True,
        },
    )


def _demo_internvl3() -> tuple[nn.Module, Any]:
    return _internvl(
        text={
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vision={
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 224,
        },
    )


PRESETS: dict[str, Preset] = {
    "tiny-qwen2_5_vl": Preset("qwen2_5_vl", 112 * 112, _tiny_qwen2_5_vl),
    "demo-qwen2_5_vl": Preset("qwen2_5_vl", 336 * 190, _demo_qwen2_5_vl),
    "tiny-internvl3": Preset("internvl", 112 * 112, _tiny_internvl3),
    "demo-internvl3": Preset("internvl", 224 * 224, _demo_internvl3),
    "bench-qwen2_5_vl": Preset("qwen2_5_vl", 448 * 448, _bench_qwen2_5_vl),
}


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations near unit scale at any width, so that answers depend on the picture.

    The library's 0.02 leaves a narrow model's attention uniform and its logits flat. Here linear layers have variance
    1/fan_in, query and key somewhat more (attention that looks somewhere), embeddings 1/width (unit logits).
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
