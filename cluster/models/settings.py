"""``sightline.json`` in a checkpoint's folder: the settings it was trained and calibrated with.

All entries are optional; the configuration takes precedence. Does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError

from cluster.errors import ModelError
from cluster.files import replacing

FILE = "sightline.json"


def _check_profile(shares: tuple[float, ...]) -> tuple[float, ...]:
    if min(shares, default=-1) < 0 or sorted(shares, reverse=True) != list(shares) or not sum(shares):
        raise ValueError("must hold a share per layer, non-increasing")
    return shares


_Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Positive = Annotated[_Finite, Field(gt=0)]
_Share = Annotated[_Finite, Field(ge=0, le=1)]
_Text = Annotated[str, Strict()]
_Profile = Annotated[tuple[_Finite, ...], AfterValidator(_check_profile)]


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

    window_s: _Positive | None = None
    stride_s: _Positive | None = None
    fps: _Positive | None = None
    anchor_interval_s: _Positive | None = None
    memory_s: _Positive | None = None
    max_pixels: Annotated[int, Strict(), Field(gt=0)] | None = None
    score_temperature: _Positive | None = None
    score_bias: _Finite | None = None
    answer_temperature: _Positive | None = None
    answer_bias: _Finite | None = None
    threshold: _Share | None = None
    thresholds: Mapping[str, _Share] = field(default_factory=dict)
    questions: Mapping[str, _Text] = field(default_factory=dict)
    open_instruction: _Text | None = None
    layer_profile: _Profile = ()

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load the settings in ``folder``; empty if there is no file. Unknown entries are ignored. Raises
        ``ModelError``: the file is not a JSON object, or an entry has an invalid value."""
        path = Path(folder) / FILE
        if not path.is_file():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said = first["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should", "must")
            raise ModelError(f"{path}: {'.'.join(map(str, first['loc']))} {said}") from None

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
