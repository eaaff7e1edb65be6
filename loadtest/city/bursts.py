"""What makes many cameras busy at once: drawn for a whole city, reaching a share of each district's cameras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.city.mix import Mix


@dataclass(frozen=True, slots=True)
class Spell:
    """One burst in ``[start_s, end_s)``. ``classes``: indices it reaches."""

    name: str
    start_s: float
    end_s: float
    share: float
    classes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Wake:
    """A spell among one district's cameras; ``cameras``: whom it makes busy, by index."""

    start_s: float
    end_s: float
    cameras: npt.NDArray[np.bool_]

    def reaches(self, camera: npt.NDArray[np.int64], end_s: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Windows of these cameras, ending then, that it makes busy."""
        found: npt.NDArray[np.bool_] = self.cameras[camera] & (end_s >= self.start_s) & (end_s < self.end_s)
        return found


def spells(mix: Mix, seconds: float, rng: np.random.Generator) -> list[Spell]:
    """The bursts of a mix over ``seconds``, as Poisson processes."""
    found = []
    names = [each.name for each in mix.classes]
    for burst in mix.bursts:
        reached = frozenset(names.index(name) for name in burst.classes or names)
        at = float(rng.exponential(burst.every_s))
        while at < seconds:
            found.append(Spell(burst.name, at, at + burst.duration_s, burst.share, reached))
            at += float(rng.exponential(burst.every_s))
    return sorted(found, key=lambda spell: spell.start_s)


def wakes(spells: Sequence[Spell], kinds: npt.NDArray[np.int64], rng: np.random.Generator) -> list[Wake]:
    """Whom each spell reaches among cameras of these classes."""
    return [
        Wake(
            spell.start_s,
            spell.end_s,
            np.isin(kinds, sorted(spell.classes)) & (rng.random(len(kinds)) < spell.share),
        )
        for spell in spells
    ]
