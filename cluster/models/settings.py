"""``sightline.json`` in a checkpoint's folder: the settings it was trained and calibrated with.

All entries are optional; the configuration takes precedence. Does not import torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from cluster.errors import ModelError
from cluster.files import replacing

FILE = "sightline.json"
_POSITIVE = (
    "window_s",
    "memory_s",
    "stride_s",
    "fps",
    "anchor_interval_s",
    "max_pixels",
    "score_temperature",
    "answer_temperature",
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A checkpoint's settings; ``None`` or empty if not given.

    * ``window_s, stride_s, fps, anchor_interval_s``: the window it was trained for, in seconds and samples per second
    * ``memory_s``: maximum past before the window that it was trained with, in seconds at the window's frame rate
    * ``max_pixels``: maximum frame size, for families of native resolution
    * ``score_temperature``, ``score_bias``: calibration of the yes/no score
    * ``answer_temperature``, ``answer_bias``: the same for answers to free questions
    * ``threshold``: score at or above which an answer is positive; ``thresholds``: exceptions by kind of event
    * ``questions``: kind of event -> the standing question it was trained on
    * ``open_instruction``: text appended to a free question
    * ``layer_profile``: share of a window's overlap that each layer recomputes under ``first_percent``, relative to the
      mean over layers; non-increasing
    """

    window_s: float | None = None
    stride_s: float | None = None
    fps: float | None = None
    anchor_interval_s: float | None = None
    memory_s: float | None = None
    max_pixels: int | None = None
    score_temperature: float | None = None
    score_bias: float | None = None
    answer_temperature: float | None = None
    answer_bias: float | None = None
    threshold: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    questions: Mapping[str, str] = field(default_factory=dict)
    open_instruction: str | None = None
    layer_profile: tuple[float, ...] = ()

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load the settings in ``folder``; empty if there is no file. Unknown entries are ignored. Raises
        ``ModelError``: the file is not JSON, or an entry has an invalid value."""
        path = Path(folder) / FILE
        if not path.is_file():
            return cls()
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(body, dict):
            raise ModelError(f"{path} must hold one JSON object")
        known = {each.name for each in fields(cls)}
        return cls(**{name: _checked(path, name, value) for name, value in body.items() if name in known})

    def threshold_of(self, kind: str) -> float | None:
        """Threshold for a kind of event; None if the checkpoint gives none."""
        return self.thresholds.get(kind, self.threshold)


def write_settings(folder: Path, entries: Mapping[str, Any]) -> None:
    """Set these entries of the checkpoint's ``sightline.json``, keeping the others. Raises ``ModelError``: there is no
    such file."""
    path = folder / FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {FILE}")
    body = json.loads(path.read_text(encoding="utf-8")) | entries
    with replacing(path) as part:
        part.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _checked(path: Path, name: str, value: Any) -> Any:
    if name == "layer_profile":
        return _checked_profile(path, value)
    if name in ("questions", "thresholds"):
        wanted = str if name == "questions" else (int, float)
        if not isinstance(value, dict) or not all(isinstance(entry, wanted) for entry in value.values()):
            raise ModelError(
                f"{path}: {name} must map each kind of event to a {'text' if name == 'questions' else 'number'}"
            )
        numbers = list(value.values()) if name == "thresholds" else []
    elif name == "open_instruction":
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{path}: {name} must be a text, not {value!r}")
        numbers = []
    else:
        numbers = [] if value is None else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ModelError(f"{path}: {name} must be a number, not {number!r}")
        if name in _POSITIVE and number <= 0:
            raise ModelError(f"{path}: {name} must be above 0, not {number:g}")
        if name.startswith("threshold") and not 0 <= number <= 1:
            raise ModelError(f"{path}: a threshold must lie between 0 and 1, not {number:g}")
    return int(value) if name == "max_pixels" and value is not None else value


def _checked_profile(path: Path, value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else [None]
    valid = all(isinstance(each, (int, float)) and math.isfinite(each) and each >= 0 for each in numbers)
    if not valid or sorted(numbers, reverse=True) != numbers or not sum(numbers):
        raise ModelError(f"{path}: layer_profile must hold a share per layer, non-increasing, not {value!r}")
    return tuple(float(each) for each in numbers)
