"""What happens in a clip: who appears when, walks where, stops, and leaves. Repeats with variations, for any length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.lab.clips.backdrop import DOOR_X, FAR_LANE, FAR_WALK, NEAR_LANE, NEAR_WALK
from cluster.lab.clips.sprites import Color, PersonLook

CYCLE_S = 24.0

_CARS: tuple[Color, ...] = ((178, 34, 36), (36, 74, 148), (226, 228, 230), (46, 48, 52), (214, 160, 44), (70, 120, 92))
_COATS: tuple[Color, ...] = ((196, 60, 48), (44, 84, 150), (226, 196, 88), (70, 130, 84), (208, 208, 212), (36, 34, 40))
_TROUSERS: tuple[Color, ...] = ((44, 50, 70), (36, 34, 34), (120, 104, 82), (78, 84, 96))
_HAIR: tuple[Color, ...] = ((34, 24, 18), (92, 60, 32), (150, 118, 66), (120, 118, 116))
_SKIN: tuple[Color, ...] = ((224, 178, 146), (190, 138, 104), (128, 86, 60))

Key = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Actor:
    """One person or car. ``keys``: (second, x, y) of its foot as shares of the picture, straight lines in between.

    Two equal places in a row are a stop. It exists from its first to its last key.
    """

    id: int
    kind: Literal["person", "car"]
    look: PersonLook | Color
    keys: tuple[Key, ...]

    def place(self, second: float) -> tuple[float, float, float, float] | None:
        """(x, y, velocity in x, speed) at a time, shares of the picture (per second); None when it is not there."""
        for (t0, x0, y0), (t1, x1, y1) in zip(self.keys, self.keys[1:], strict=False):
            if t0 <= second < t1:
                share = (second - t0) / (t1 - t0)
                vx, vy = (x1 - x0) / (t1 - t0), (y1 - y0) / (t1 - t0)
                return x0 + share * (x1 - x0), y0 + share * (y1 - y0), vx, math.hypot(vx, vy)
        return None

    def leftwards(self, second: float) -> bool:
        """Which way it looks: the way it goes, or went before it stopped."""
        left = False
        for (t0, x0, _), (_, x1, _) in zip(self.keys, self.keys[1:], strict=False):
            if t0 > second:
                break
            left = x1 < x0 if x1 != x0 else left
        return left


def street_story(seconds: float, seed: int) -> list[Actor]:
    """A quiet street, every 24 s anew: someone walks up, waits at the door and goes on; two cars pass; a passer-by;
    someone crosses the road."""
    rng = np.random.default_rng([seed, 2])
    scripts = [script for cycle in range(math.ceil(seconds / CYCLE_S)) for script in _cycle(cycle * CYCLE_S, rng)]
    actors: list[Actor] = []
    for number, (kind, keys) in enumerate(scripts):
        look = _person_look(rng) if kind == "person" else _CARS[rng.integers(len(_CARS))]
        actors.append(Actor(number, kind, look, keys))
    return actors


def _cycle(start: float, rng: np.random.Generator) -> Iterator[tuple[Literal["person", "car"], tuple[Key, ...]]]:
    def at(second: float) -> float:
        return start + second + float(rng.uniform(-0.4, 0.4))

    come, stop, go = at(0.8), at(7.5), at(14.0)
    door = DOOR_X - 0.02
    yield "person", ((come, -0.05, FAR_WALK), (stop, door, FAR_WALK), (go, door, FAR_WALK), (go + 9, 1.05, FAR_WALK))
    passes = at(4.5)
    yield "car", ((passes, -0.2, NEAR_LANE), (passes + 3.4, 1.2, NEAR_LANE))
    walks = at(9.0)
    yield "person", ((walks, 1.06, NEAR_WALK), (walks + 9.5, -0.06, NEAR_WALK))
    returns = at(14.0)
    yield "car", ((returns, 1.2, FAR_LANE), (returns + 4.0, -0.2, FAR_LANE))
    steps = at(18.8)
    yield "person", ((steps, 0.3, NEAR_WALK + 0.3), (steps + 2, 0.3, 0.9), (steps + 6, 0.33, FAR_WALK + 0.01))


def _person_look(rng: np.random.Generator) -> PersonLook:
    def pick(colors: tuple[Color, ...]) -> Color:
        return colors[int(rng.integers(len(colors)))]

    return PersonLook(pick(_COATS), pick(_TROUSERS), pick(_HAIR), pick(_SKIN))
