"""Model sizes without a download: random-weight presets of every family, and shapes of published models.

``tiny`` is for tests, ``demo`` for a laptop, ``bench`` is dominated by arithmetic rather than Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Preset:
    """Entries of a family's text and vision configuration; ``max_pixels`` bounds a frame at native resolution."""

    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    max_pixels: int = 448 * 448


def _text(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **rope: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, **rope},
    }


def _qwen_tower(hidden: int, intermediate: int, depth: int, heads: int, full: list[int]) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "depth": depth,
        "num_heads": heads,
        "fullatt_block_indexes": full,
    }


def _deepstack_tower(
    hidden: int, intermediate: int, depth: int, heads: int, added: list[int], places: int = 48
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "depth": depth,
        "num_heads": heads,
        "deepstack_visual_indexes": added,
        "num_position_embeddings": places**2,
    }


def _full_tower(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    return {"embed_dim": hidden, "depth": depth, "num_heads": heads}


def _square_tower(hidden: int, intermediate: int, layers: int, heads: int, image: int) -> dict[str, Any]:
    return {**_intern_tower(hidden, intermediate, layers, heads, image), "patch_size": 14}


def _intern_tower(hidden: int, intermediate: int, layers: int, heads: int, image: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
    }


PRESETS: dict[str, Preset] = {
    "tiny-qwen2_5_vl": Preset(
        "qwen2_5_vl",
        text=_text(64, 128, 3, 4, 2, mrope_section=[2, 3, 3]),
        # Windows of 2x2 groups: even a tiny frame has several.
        vision={**_qwen_tower(32, 64, 4, 2, [1, 3]), "window_size": 56},
        max_pixels=112 * 112,
    ),
    "tiny-qwen2_vl": Preset(
        "qwen2_vl",
        text=_text(64, 128, 3, 4, 2, mrope_section=[2, 3, 3]),
        vision=_full_tower(32, 3, 2),
        max_pixels=112 * 112,
    ),
    "tiny-qwen3_vl": Preset(
        "qwen3_vl",
        text={**_text(64, 128, 3, 4, 2, mrope_section=[4, 2, 2]), "head_dim": 16},
        vision=_deepstack_tower(32, 64, 3, 2, [0, 1], places=6),
        max_pixels=128 * 128,
    ),
    "tiny-internvl3": Preset(
        "internvl",
        text=_text(64, 128, 3, 4, 2),
        vision={**_intern_tower(32, 64, 3, 2, 112), "use_qk_norm": True},
    ),
    "tiny-llava_next_video": Preset(
        "llava_next_video",
        text=_text(64, 128, 3, 4, 2),
        vision=_square_tower(32, 64, 3, 2, 112),
    ),
    "tiny-llava_onevision": Preset(
        "llava_onevision",
        text=_text(64, 128, 3, 4, 2),
        # 7x7 patches and a rest, as the published 27x27 have one.
        vision={**_square_tower(32, 64, 3, 2, 100), "vision_use_head": False},
    ),
    # As many layers, key heads and channels as the published 7B, so that its KV is as large, and narrow otherwise.
    "kv7b-qwen2_5_vl": Preset(
        "qwen2_5_vl",
        text=_text(512, 512, 28, 4, 4, mrope_section=[16, 24, 24]),
        vision={**_qwen_tower(32, 64, 2, 2, [1]), "window_size": 112},
        max_pixels=112 * 112,
    ),
    "demo-qwen2_5_vl": Preset(
        "qwen2_5_vl",
        text=_text(256, 640, 5, 4, 2, mrope_section=[8, 12, 12]),
        vision=_qwen_tower(128, 320, 4, 4, [1, 3]),
        max_pixels=336 * 190,
    ),
    "demo-internvl3": Preset(
        "internvl",
        text=_text(256, 640, 5, 4, 2),
        vision=_intern_tower(128, 512, 4, 4, 224),
    ),
    "bench-qwen2_5_vl": Preset(
        "qwen2_5_vl",
        text=_text(512, 1536, 12, 8, 2, mrope_section=[8, 12, 12]),
        vision=_qwen_tower(384, 1152, 8, 6, [3, 7]),
    ),
    "bench-internvl3": Preset(
        "internvl",
        text=_text(512, 1536, 12, 8, 2),
        vision=_intern_tower(384, 1536, 8, 6, 448),
    ),
    "bench-qwen2_vl": Preset(
        "qwen2_vl",
        text=_text(512, 1536, 12, 8, 2, mrope_section=[8, 12, 12]),
        vision=_full_tower(384, 8, 6),
    ),
    "bench-qwen3_vl": Preset(
        "qwen3_vl",
        text={**_text(512, 1536, 12, 8, 2, mrope_section=[12, 10, 10]), "head_dim": 64},
        vision=_deepstack_tower(384, 1152, 8, 6, [2, 4, 6], places=24),
    ),
    "bench-llava_next_video": Preset(
        "llava_next_video",
        text=_text(512, 1536, 12, 8, 2),
        vision=_square_tower(384, 1536, 9, 6, 336),
    ),
    "bench-llava_onevision": Preset(
        "llava_onevision",
        text=_text(512, 1536, 12, 8, 2),
        vision={**_square_tower(384, 1536, 9, 6, 384), "vision_use_head": False},
    ),
}

# From the config.json of the published checkpoints.
SHAPES: dict[str, Preset] = {
    "qwen2_5_vl-7b": Preset(
        "qwen2_5_vl",
        text={**_text(3584, 18944, 28, 28, 4, mrope_section=[16, 24, 24]), "vocab_size": 152064},
        vision=_qwen_tower(1280, 3420, 32, 16, [7, 15, 23, 31]),
    ),
    "qwen2_vl-7b": Preset(
        "qwen2_vl",
        text={**_text(3584, 18944, 28, 28, 4, mrope_section=[16, 24, 24]), "vocab_size": 152064},
        vision=_full_tower(1280, 32, 16),
    ),
    "qwen3_vl-8b": Preset(
        "qwen3_vl",
        text={
            **_text(4096, 12288, 36, 32, 8, rope_theta=5_000_000.0, mrope_section=[24, 20, 20]),
            "head_dim": 128,
            "vocab_size": 151936,
        },
        vision=_deepstack_tower(1152, 4304, 27, 16, [8, 16, 24]),
    ),
    "llava_next_video-7b": Preset(
        "llava_next_video",
        text={**_text(4096, 11008, 32, 32, 32, rope_theta=10_000.0), "vocab_size": 32064},
        vision=_square_tower(1024, 4096, 24, 16, 336),
    ),
    "llava_onevision-7b": Preset(
        "llava_onevision",
        text={**_text(3584, 18944, 28, 28, 4), "vocab_size": 152000},
        vision={**_square_tower(1152, 4304, 26, 16, 384), "vision_use_head": False},
    ),
    "internvl3-8b": Preset(
        "internvl",
        text={**_text(3584, 18944, 28, 28, 4), "vocab_size": 151674},
        vision=_intern_tower(1024, 4096, 24, 16, 448),
    ),
    "internvl3-14b": Preset(
        "internvl",
        text={**_text(5120, 13824, 48, 40, 8), "vocab_size": 151674},
        vision=_intern_tower(1024, 4096, 24, 16, 448),
    ),
}


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Random weights with activations near unit scale at any width, so that answers depend on the picture.

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
