"""Model cards: properties and memory needs of a model from its shape, without loading weights."""

from dataclasses import dataclass

from cluster.config.memory import MemoryConfig, TiersConfig
from cluster.config.model import ModelConfig
from cluster.engine.vllm.served_model import why_not_served
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import head_size
from cluster.models.loading import load_shape
from cluster.models.presets import PRESETS, PUBLISHED, SHAPES
from cluster.registry import families

HALF = 2
"""Bytes per weight and KV element in half precision."""
FPS = 2.0
WINDOW_S = 40.0
PICTURE = (1920, 1080)
GPUS = {"NVIDIA L4": 24e9, "NVIDIA L40S": 48e9, "NVIDIA A100": 80e9, "NVIDIA H100": 80e9, "NVIDIA H200": 141e9}
"""Memory in bytes, from data sheets."""
USABLE = 0.85
"""Share of GPU memory for weights and KV; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class FamilyCard:
    """A model family and the ``engines`` it runs on. ``presets``, ``shapes``: names; ``published``: hub ids."""

    family: str
    presets: tuple[str, ...]
    shapes: tuple[str, ...]
    published: tuple[str, ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model in half precision, for a 1080p camera at 2 FPS with nothing pruned.

    * ``tokens_per_frame``: visual tokens and text around them; ``frame_s``: seconds per frame
    * ``kv_token_bytes``, ``kv_second_bytes``: KV of one token, and of a second of video
    * ``memory_cap``, ``memory_token_bytes``: default memory of a camera, and bytes per token in it
    * ``windows``: GPU -> windows of 40 s that fit beside the weights; 0 if the weights do not fit
    """

    model: str
    family: str
    parameters: int
    weight_bytes: int
    layers: int
    positions: str
    patch: int
    picture: tuple[int, int]
    tokens_per_frame: int
    frame_s: float
    kv_token_bytes: int
    kv_second_bytes: int
    memory_cap: int
    memory_token_bytes: int
    windows: dict[str, int]


def family_cards() -> list[FamilyCard]:
    """Cards of all families."""
    return [_family_card(name) for name in families]


def _family_card(family: str) -> FamilyCard:
    presets = tuple(name for name, preset in PRESETS.items() if preset.family == family)
    shapes = tuple(name for name, shape in SHAPES.items() if shape.family == family)
    unserved = why_not_served(load_shape(presets[0]))
    return FamilyCard(
        family=family,
        presets=presets,
        shapes=shapes,
        published=tuple(hub for hub, shape in PUBLISHED.items() if shape in shapes),
        # The native engine runs every family.
        engines=("native",) if unserved else ("native", "vllm"),
    )


def model_card(name: str) -> ModelCard:
    """The card of a shape, preset, bundled model, or checkpoint folder. Raises ``ModelError`` if not found or of an
    unsupported family."""
    model = load_shape(name)
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    grid = model.geometry.grid(*PICTURE)
    frame_s = model.geometry.temporal / FPS
    tokens = grid.tokens + model.frame_text_tokens(grid)
    token_bytes = kv_token_bytes(model)
    memory, settings = MemoryConfig(), ModelConfig(name=name, dtype="bfloat16")
    second = round(tokens / frame_s * token_bytes)
    return ModelCard(
        model=name,
        family=model.family,
        parameters=parameters,
        weight_bytes=parameters * HALF,
        layers=len(model.layers),
        positions=model.position_rule,
        patch=grid.patch,
        picture=(grid.scaled[1], grid.scaled[0]),
        tokens_per_frame=tokens,
        frame_s=frame_s,
        kv_token_bytes=token_bytes,
        kv_second_bytes=second,
        memory_cap=memory.with_cap(settings, TiersConfig()).cap or 0,
        memory_token_bytes=memory.token_bytes(settings) or 0,
        windows={
            gpu: max(0, int((memory * USABLE - parameters * HALF) / (WINDOW_S * second)))
            for gpu, memory in GPUS.items()
        },
    )


def kv_token_bytes(model: VisionLanguageModel) -> int:
    """Bytes of one token's keys and values in half precision."""
    config = model.text_config
    return int(2 * len(model.layers) * config.num_key_value_heads * head_size(config) * HALF)
