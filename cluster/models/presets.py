"""Model sizes that need no download: random-weight presets of every family, and shapes of published models.

``tiny`` is for tests, ``demo`` for a laptop; in ``bench``, arithmetic dominates Python overhead. Does not import torch.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """Entries of a family's text and vision configuration. ``max_pixels``: maximum frame size at native resolution;
    ``tied``: input and output embeddings are the same weights."""

    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    max_pixels: int = 448 * 448
    tied: bool = True


_TEXT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_QWEN = ("hidden_size", "intermediate_size", "depth", "num_heads")
_SQUARE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size")
_VISION: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "qwen2_vl": (("embed_dim", "depth", "num_heads"), {}),
    "qwen2_5_vl": (_QWEN, {"tokens_per_second": 2}),
    "qwen3_vl": (_QWEN, {}),
    "internvl": (_SQUARE, {"attention_bias": True}),
    "llava_next_video": (_SQUARE, {"patch_size": 14}),
    "llava_onevision": (_SQUARE, {"patch_size": 14, "vision_use_head": False}),
}
"""Family -> names of its tower's sizes, in the order of presets, and the configuration all its towers share."""


def _preset(
    family: str,
    text: tuple[int, ...],
    vision: tuple[int, ...],
    tower: dict[str, Any] | None = None,
    *,
    mrope: list[int] | None = None,
    theta: float = 1_000_000.0,
    max_pixels: int = 448 * 448,
    tied: bool = True,
    **more: int,
) -> Preset:
    """``text``, ``vision``: sizes, in the order of :data:`_TEXT` and :data:`_VISION`; ``tower``, ``more``: other
    entries of the vision and the text configuration."""
    rope = {"rope_type": "default", "rope_theta": theta} | ({} if mrope is None else {"mrope_section": mrope})
    names, common = _VISION[family]
    sizes = dict(zip(_TEXT, text, strict=True)) | {"max_position_embeddings": 32768, "rope_parameters": rope} | more
    return Preset(family, sizes, dict(zip(names, vision, strict=True)) | common | (tower or {}), max_pixels, tied)


_TINY, _DEMO, _BENCH = (64, 128, 3, 4, 2), (256, 640, 5, 4, 2), (512, 1536, 12, 8, 2)
_SMALL = 112 * 112

PRESETS: dict[str, Preset] = {
    # Windows of 2x2 groups, so that even a tiny frame has several.
    "tiny-qwen2_5_vl": _preset(
        "qwen2_5_vl",
        _TINY,
        (32, 64, 4, 2),
        {"fullatt_block_indexes": [1, 3], "window_size": 56},
        mrope=[2, 3, 3],
        max_pixels=_SMALL,
    ),
    "tiny-qwen2_vl": _preset("qwen2_vl", _TINY, (32, 3, 2), mrope=[2, 3, 3], max_pixels=_SMALL),
    "tiny-qwen3_vl": _preset(
        "qwen3_vl",
        _TINY,
        (32, 64, 3, 2),
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 6**2},
        mrope=[4, 2, 2],
        max_pixels=128 * 128,
        head_dim=16,
    ),
    "tiny-internvl3": _preset("internvl", _TINY, (32, 64, 3, 2, 112), {"use_qk_norm": True}),
    "tiny-llava_next_video": _preset("llava_next_video", _TINY, (32, 64, 3, 2, 112)),
    # 7x7 patches and a remainder of pixels, as in the published 27x27.
    "tiny-llava_onevision": _preset("llava_onevision", _TINY, (32, 64, 3, 2, 100)),
    # Layers, key heads and head size of the published 7B, for KV of the same size; narrow otherwise.
    "kv7b-qwen2_5_vl": _preset(
        "qwen2_5_vl",
        (512, 512, 28, 4, 4),
        (32, 64, 2, 2),
        {"fullatt_block_indexes": [1], "window_size": 112},
        mrope=[16, 24, 24],
        max_pixels=_SMALL,
    ),
    "demo-qwen2_5_vl": _preset(
        "qwen2_5_vl",
        _DEMO,
        (128, 320, 4, 4),
        {"fullatt_block_indexes": [1, 3]},
        mrope=[8, 12, 12],
        max_pixels=336 * 190,
    ),
    "demo-internvl3": _preset("internvl", _DEMO, (128, 512, 4, 4, 224)),
    "bench-qwen2_5_vl": _preset(
        "qwen2_5_vl", _BENCH, (384, 1152, 8, 6), {"fullatt_block_indexes": [3, 7]}, mrope=[8, 12, 12]
    ),
    "bench-internvl3": _preset("internvl", _BENCH, (384, 1536, 8, 6, 448)),
    "bench-qwen2_vl": _preset("qwen2_vl", _BENCH, (384, 8, 6), mrope=[8, 12, 12]),
    "bench-qwen3_vl": _preset(
        "qwen3_vl",
        _BENCH,
        (384, 1152, 8, 6),
        {"deepstack_visual_indexes": [2, 4, 6], "num_position_embeddings": 24**2},
        mrope=[12, 10, 10],
        head_dim=64,
    ),
    "bench-llava_next_video": _preset("llava_next_video", _BENCH, (384, 1536, 9, 6, 336)),
    "bench-llava_onevision": _preset("llava_onevision", _BENCH, (384, 1536, 9, 6, 384)),
}

_7B = (3584, 18944, 28, 28, 4)

# From the config.json of the published checkpoints.
SHAPES: dict[str, Preset] = {
    "qwen2_5_vl-7b": _preset(
        "qwen2_5_vl",
        _7B,
        (1280, 3420, 32, 16),
        {"fullatt_block_indexes": [7, 15, 23, 31]},
        mrope=[16, 24, 24],
        tied=False,
        vocab_size=152064,
    ),
    "qwen2_5_vl-3b": _preset(
        "qwen2_5_vl",
        (2048, 11008, 36, 16, 2),
        (1280, 3420, 32, 16),
        {"fullatt_block_indexes": [7, 15, 23, 31]},
        mrope=[16, 24, 24],
        vocab_size=151936,
    ),
    "qwen2_vl-7b": _preset("qwen2_vl", _7B, (1280, 32, 16), mrope=[16, 24, 24], tied=False, vocab_size=152064),
    "qwen3_vl-8b": _preset(
        "qwen3_vl",
        (4096, 12288, 36, 32, 8),
        (1152, 4304, 27, 16),
        {"deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 48**2},
        mrope=[24, 20, 20],
        tied=False,
        theta=5_000_000.0,
        head_dim=128,
        vocab_size=151936,
    ),
    "qwen3_vl-4b": _preset(
        "qwen3_vl",
        (2560, 9728, 36, 32, 8),
        (1024, 4096, 24, 16),
        {"deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 48**2},
        mrope=[24, 20, 20],
        theta=5_000_000.0,
        head_dim=128,
        vocab_size=151936,
    ),
    "llava_next_video-7b": _preset(
        "llava_next_video",
        (4096, 11008, 32, 32, 32),
        (1024, 4096, 24, 16, 336),
        theta=10_000.0,
        tied=False,
        vocab_size=32064,
    ),
    "llava_onevision-7b": _preset("llava_onevision", _7B, (1152, 4304, 26, 16, 384), tied=False, vocab_size=152000),
    "internvl3-8b": _preset("internvl", _7B, (1024, 4096, 24, 16, 448), tied=False, vocab_size=151674),
    "internvl3-14b": _preset(
        "internvl", (5120, 13824, 48, 40, 8), (1024, 4096, 24, 16, 448), tied=False, vocab_size=151674
    ),
}

PUBLISHED = {
    "Qwen/Qwen2-VL-7B-Instruct": "qwen2_vl-7b",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl-3b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl-7b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl-4b",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl-8b",
    "llava-hf/LLaVA-NeXT-Video-7B-hf": "llava_next_video-7b",
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "llava_onevision-7b",
    "OpenGVLab/InternVL3-8B-hf": "internvl3-8b",
    "OpenGVLab/InternVL3-14B-hf": "internvl3-14b",
}
"""Hub id -> shape of that checkpoint, known without a download."""
