"""Model sizes and training settings."""

from dataclasses import dataclass, field
from typing import Any

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Architecture of a model and its input format.

    ``width x height``: frame size in pixels, multiples of a merge group; ``fps``: samples per second.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    width: int
    height: int
    fps: float = 2.0

    @property
    def max_pixels(self) -> int:
        """Pixel limit that gives a camera of this shape exactly this size, with slack for a slightly wider one."""
        return self.width * self.height + self.width * 6


def _text(hidden: int, intermediate: int, layers: int, heads: int, section: list[int]) -> dict[str, Any]:
    """RoPE base 200 suits narrow heads, whose few frequencies serve two purposes. Tokens attend to earlier tokens at
    their own position, so one row must rotate by a few tenths of a radian and one column by about a tenth (base 1e6
    would not do). Questions, up to 25 columns away, attend by content, so some components must barely rotate over that
    distance. At base 200 rows rotate by 0.21 to 0.52 radians and columns by 0.17 to 0.006."""
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
        # One position per frame (two samples at 2 Hz).
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
    """One training stage, bounded by ``steps`` or ``minutes``, with ``batch`` examples per step.

    ``rate``: peak learning rate, reached after the share ``warm_up`` of the stage; ``decay``: weight decay;
    ``train_tower``: False freezes the vision tower; ``replays``: replayed examples per new one.
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

    * ``validate_minutes``: interval between validations
    * ``average``: decay of the exponential moving average (EMA) of the weights, which is validated and exported
    """

    shape: str = "demo"
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    validate_minutes: float = 8.0
    validation_scenes: int = 48
    average: float = 0.995
    stages: tuple[StageSettings, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"unknown model size {self.shape!r}; there are: {', '.join(SHAPES)}")

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]
