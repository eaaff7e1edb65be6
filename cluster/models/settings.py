"""``sightline.json`` beside a checkpoint: the settings it was trained and calibrated with.

All entries are optional; the configuration takes precedence. Read without torch.
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

    * ``window_s, stride_s, fps, anchor_interval_s``: the window it was trained for, seconds and samples per second
    * ``memory_s``: longest past before the window, in seconds at the window's pace, whose positions it knows
    * ``max_pixels``: largest frame, for families of native resolution
    * ``score_temperature``, ``score_bias``: calibration of its yes/no score
    * ``answer_temperature``, ``answer_bias``: the same, of answers to free questions
    * ``threshold``: score at or above which an answer is positive; ``thresholds``: by kind of event, where it differs
    * ``questions``: kind of event -> the standing question it was trained on
    * ``open_instruction``: what is written after a free question
    * ``layer_profile``: what each layer of the language model recomputes of a window's overlap under
      ``first_percent``, over the mean of all; never rising
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
        """Load the settings in ``folder``; empty without the file. Unknown entries are ignored; ``ModelError`` where
        the file is not JSON, or an entry has an invalid value."""
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
        """Threshold for one kind of event, if the model has any."""
        return self.thresholds.get(kind, self.threshold)


def write_settings(folder: Path, entries: Mapping[str, Any]) -> None:
    """Set these entries of the checkpoint's ``sightline.json``, which must exist (``ModelError``), keeping the
    others."""
    path = folder / FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {FILE} to write into")
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
                f"{path}: {name} must name a {'text' if name == 'questions' else 'number'} per kind of event"
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
            raise ModelError(f"{path}: a threshold must lie in 0 to 1, not {number:g}")
    return int(value) if name == "max_pixels" and value is not None else value


def _checked_profile(path: Path, value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else [None]
    valid = all(isinstance(each, (int, float)) and math.isfinite(each) and each >= 0 for each in numbers)
    if not valid or sorted(numbers, reverse=True) != numbers or not sum(numbers):
        raise ModelError(f"{path}: layer_profile must hold a share per layer, none above the one before, not {value!r}")
    return tuple(float(each) for each in numbers)
