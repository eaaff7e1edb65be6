"""Sizes of the model that is trained, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to train and the pictures it is trained on.

    ``width x height``: pixels of a picture, whole merge groups; ``fps``: samples per second.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    width: int
    height: int
    fps: float = 2.0

    @property
    def max_pixels(self) -> int:
        """Bound that makes a camera of this shape exactly this large, with room for one that is a little wider."""
        return self.width * self.height + self.width * 6


def _text(hidden: int, intermediate: int, layers: int, heads: int, section: list[int]) -> dict[str, Any]:
    """A narrow head has few frequencies, and needs them for two things. A token finds what stood in its place before: a
    row must turn by some tenths of a radian and a column by a tenth, which the usual base of a million would not do.
    And a question, up to 25 columns further on, finds tokens by what they show: some components must hardly turn over
    that distance. At base 200 rows turn by 0.21 to 0.52 and columns by 0.17 to 0.006."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "mrope_section": section},
    }


def _tower(hidden: int, intermediate: int, depth: int, heads: int, full: list[int], window: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "depth": depth,
        "num_heads": heads,
        "fullatt_block_indexes": full,
        "window_size": window,
        # One position per frame of two samples at 2 per second.
        "tokens_per_second": 1,
    }


SHAPES: dict[str, Shape] = {
    "demo": Shape(
        text=_text(192, 512, 4, 4, [3, 5, 16]),
        vision=_tower(128, 320, 4, 4, [1, 3], 112),
        width=308,
        height=168,
    ),
    "tiny": Shape(
        text=_text(64, 128, 2, 2, [2, 4, 10]),
        vision=_tower(32, 64, 2, 2, [1], 56),
        width=196,
        height=112,
    ),
}


@dataclass(frozen=True, slots=True)
class StageSettings:
    """One stage: ``steps`` or ``minutes`` bound it (what comes first), ``batch`` examples make a step.

    ``rate``: highest learning rate, reached after the share ``warm_up``; ``train_tower``: the tower learns too;
    ``replays``: how often, on average, an example is shown again later.
    """

    name: str
    rate: float
    batch: int
    steps: int | None = None
    minutes: float | None = None
    warm_up: float = 0.03
    decay: float = 0.05
    train_tower: bool = True
    optimizer: str = "muon"
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """A training run.

    * ``save_minutes``, ``validate_minutes``: how often a checkpoint is written and the validation set is asked
    * ``average``: decay of the moving average of weights that is validated and exported
    """

    shape: str = "demo"
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    save_minutes: float = 3.0
    validate_minutes: float = 8.0
    validation_scenes: int = 48
    average: float = 0.995
    stages: tuple[StageSettings, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"unknown size {self.shape!r}; there are: {', '.join(SHAPES)}")
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {self.threads}")
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 (in this process) or more, not {self.workers}")

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]
