"""The rungs of a quality ladder: what each changes, what it saves, and what it costs in F1."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, SightlineError

FILE = "ladder.json"
"""Name of a model's ladder in its folder."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of reduced quality.

    * ``name``: ``full``, ``prune``, ``refresh``, ``stride``, ``fps``, ``shed``; several of a kind have a suffix
    * ``prune``: factor on the pruner's threshold; ``stride``, ``fps``: factors on the camera's stride and sampling rate
    * ``refresh_budget``: share of the overlap that is computed again; ``None``: the camera's own
    * ``shed``: no window is answered at all
    * ``kept``: factor on the tokens a frame keeps on average, anchors included: at a lower rate more changes between
      two frames, and more of them are anchors
    * ``f1``: F1 at this rung over F1 at full quality; ``source``: ``measured``, or how it was derived
    """

    name: str
    prune: float = 1.0
    refresh_budget: float | None = None
    stride: float = 1.0
    fps: float = 1.0
    shed: bool = False
    kept: float = 1.0
    f1: float = 1.0
    source: str = ""

    @property
    def value(self) -> float:
        """What the answers at this rung are worth of full quality's: their F1 times how many of them there are. F1 of
        whole videos does not see that an alert comes later when a camera is asked half as often; this counts each
        answer that a longer stride leaves out as one that was dropped."""
        return 0.0 if self.shed else self.f1 / self.stride

    def __post_init__(self) -> None:
        for name in ("prune", "stride", "fps", "kept"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"rung {self.name!r}: {name} is a factor above 0, not {value!r}")
        if not 0 <= self.f1 <= 1:
            raise ConfigError(f"rung {self.name!r}: f1 is a share of full quality's, 0 to 1, not {self.f1!r}")
        if self.refresh_budget is not None and not 0 <= self.refresh_budget <= 1:
            raise ConfigError(f"rung {self.name!r}: refresh_budget is a share, 0 to 1, not {self.refresh_budget!r}")


FULL = Rung("full")
"""Full quality."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """``rungs[0]`` is full quality, each later one costs less and is worth no more; the last one sheds.

    ``source``: one sentence, where the F1 of the rungs come from.
    """

    rungs: tuple[Rung, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.rungs or self.rungs[0] != Rung(self.rungs[0].name, source=self.rungs[0].source):
            raise ConfigError("a ladder begins with full quality, which changes nothing and has an f1 of 1")
        if len({rung.name for rung in self.rungs}) != len(self.rungs):
            raise ConfigError("the rungs of a ladder must have different names")
        for upper, lower in zip(self.rungs, self.rungs[1:], strict=False):
            if lower.f1 > upper.f1:
                raise ConfigError(f"rung {lower.name!r} must not be better than {upper.name!r}, which is above it")
        if any(rung.shed for rung in self.rungs[:-1]):
            raise ConfigError("only the last rung of a ladder may shed a camera")

    @property
    def floor(self) -> int:
        """The lowest rung at which windows are still answered."""
        return len(self.rungs) - 1 - self.rungs[-1].shed

    def at(self, name: str) -> int:
        """The place of the rung called ``name``.

        Raises:
            ConfigError: there is none.
        """
        for place, rung in enumerate(self.rungs):
            if rung.name == name:
                return place
        raise ConfigError(f"there is no rung {name!r}; there are: {', '.join(rung.name for rung in self.rungs)}")

    def to_json(self) -> str:
        """As the file has it."""
        return json.dumps({"source": self.source, "rungs": [asdict(rung) for rung in self.rungs]}, indent=2)

    @classmethod
    def load(cls, path: Path) -> Ladder:
        """From a file, or from a model's folder.

        Raises:
            ConfigError: there is none, or it is not a ladder.
        """
        file = path / FILE if path.is_dir() else path
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigError(f"there is no ladder at {file}; make one with: sightline eval ladder") from None
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON ({error}); write it anew with: sightline eval ladder") from None
        try:
            return cls(tuple(_rung(each) for each in body["rungs"]), str(body["source"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} is not a ladder ({error!r}); write it anew with: sightline eval ladder"
            ) from None

    def save(self, path: Path) -> None:
        """Write where :meth:`load` reads.

        Raises:
            SightlineError: the file cannot be written.
        """
        file = path / FILE if path.is_dir() else path
        try:
            file.write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise SightlineError(f"cannot write {file}: {error.strerror or error}; choose another place") from None


def _rung(body: Any) -> Rung:
    if not isinstance(body, dict):
        raise TypeError(f"a rung has names and values, it is not {body!r}")
    unknown = set(body) - {field.name for field in fields(Rung)}
    if unknown:
        raise ConfigError(f"a rung has no {', '.join(sorted(unknown))}")
    return Rung(**body)


def default() -> Ladder:
    """For a model without a ladder of its own: the usual order, with guesses for what each rung costs."""
    guess = "unmeasured: a guess"
    return Ladder(
        (
            Rung("full"),
            Rung("prune", prune=1.5, kept=0.85, f1=0.99, source=guess),
            Rung("refresh", prune=1.5, refresh_budget=0.0, kept=0.85, f1=0.98, source=guess),
            Rung("stride", prune=1.5, refresh_budget=0.0, stride=2.0, kept=0.85, f1=0.93, source=guess),
            Rung("fps", prune=1.5, refresh_budget=0.0, stride=2.0, fps=0.5, kept=1.2, f1=0.85, source=guess),
            Rung("shed", shed=True, f1=0.0, source="no answer"),
        ),
        "unmeasured: this model has no ladder; make one with: sightline eval ladder",
    )
