"""Footage of any length with known truth: one camera and place, short stretches of life, and quiet in between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.stretches import Drive, Stretch, write_stretch
from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.camera import CameraSettings, draw_camera, draw_conditions
from cluster.lab.scenes.clips import Clip
from cluster.lab.scenes.layout import Layout
from cluster.lab.scenes.places import make_layout
from cluster.lab.scenes.scene import Scene
from cluster.lab.scenes.script import Script
from cluster.lab.scenes.vocabulary import SPLITS, Split

# Leads every seed, so that none meets a seed of an ordinary scene.
_SEED = 404
_SHORTEST_S = 60.0
_LEAST_QUIET_S = 4.0
# Colours that come once or never; ordinary traffic has the others.
_RARE = 4
# When those that come once do, as shares of the length: what is asked later lies in the past for long.
_NEEDLES = (0.05, 0.6)


@dataclass(frozen=True, eq=False)
class LongScene:
    """Long footage, written first and drawn picture by picture: nothing of its length lies in memory.

    It is always a day scene of full contrast: what is said of colours must be certain.

    Args:
        seconds: length, at least 60.
        seed: the same arguments give the same footage.
        split: the layouts and camera settings to draw from; ``test`` has its own.
        quiet_s: mean time without anybody between two stretches, at least 8.
        needle_colors: vehicles that come once or never have colours of these (at least three); ordinary traffic has
            the rest.
        camera: size, rate and encoder; None draws one of the split's.

    Raises:
        ConfigError: an argument out of these bounds.
    """

    seconds: float
    seed: int
    split: Split = "test"
    quiet_s: float = 30.0
    needle_colors: tuple[str, ...] = tuple(COLORS)
    camera: CameraSettings | None = None

    def __post_init__(self) -> None:
        if self.seconds < _SHORTEST_S:
            raise ConfigError(f"footage with a past must last at least {_SHORTEST_S:.0f} s, not {self.seconds:g}")
        if self.seed < 0:
            raise ConfigError(f"a seed must be at least 0, not {self.seed}")
        if self.split not in SPLITS:
            raise ConfigError(f"unknown split {self.split!r}; there are: {', '.join(SPLITS)}")
        if self.quiet_s < 2 * _LEAST_QUIET_S:
            raise ConfigError(f"the mean quiet must last at least {2 * _LEAST_QUIET_S:.0f} s, not {self.quiet_s:g}")
        unknown = [color for color in self.needle_colors if color not in COLORS]
        if unknown:
            raise ConfigError(f"unknown colour {unknown[0]!r}; there are: {', '.join(COLORS)}")
        if len(set(self.needle_colors)) < 3:
            raise ConfigError(
                f"at least three colours are needed for rare vehicles, not {len(set(self.needle_colors))}"
            )

    @cached_property
    def scene(self) -> Scene:
        """What a renderer or encoder takes. An ordinary scene may have the same name: ``clip`` gives its own."""
        look = self._chance(1)
        return Scene(
            split=self.split,
            index=self.seed,
            seconds=self.seconds,
            layout=self._layout,
            light="day",
            strata=frozenset(),
            camera=self.camera or draw_camera(self.split, look),
            conditions=draw_conditions("day", frozenset(), look),
            actors=tuple(actor for stretch in self.stretches for actor in stretch.actors),
            events=tuple(event for stretch in self.stretches for event in stretch.events),
            tree=bool(look.random() < 0.5),
            pole=False,
            seed=int(look.integers(2**31)),
        )

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """When there is life, in order; before, between and after there are at least four quiet seconds."""
        rng = self._chance(2)
        rare, common = self._palette(rng)
        first, second = np.sort(rng.uniform(*_NEEDLES, size=2)) * self.seconds
        needles = [(float(first), Drive(rare[0])), (float(second), Drive(rare[1], stops=True))]
        if rng.random() < 0.5:
            needles = [(float(first), needles[1][1]), (float(second), needles[0][1])]
        found: list[Stretch] = []
        start, actors = self._quiet(rng), 0
        while True:
            drives = [Drive(str(rng.choice(common))) for _ in range(int(rng.choice([0, 1, 2], p=[0.35, 0.45, 0.2])))]
            if needles and start >= needles[0][0]:
                drives = [needles.pop(0)[1]]
            people = int(rng.choice([0, 1, 2], p=[0.3, 0.5, 0.2])) if drives else 1
            stretch = write_stretch(Script(self._layout, self.seconds, rng), drives, people).moved(start, actors)
            if stretch.end_s > self.seconds - _LEAST_QUIET_S:
                return tuple(found)
            found.append(stretch)
            start, actors = stretch.end_s + self._quiet(rng), actors + len(stretch.actors)

    @cached_property
    def moments(self) -> tuple[float, ...]:
        """Instants at which nobody is there, ascending: 0, one after every stretch but the last, and the end."""
        gaps = zip(self.stretches, self.stretches[1:], strict=False)
        return (0.0, *(round((here.end_s + there.start_s) / 2, 3) for here, there in gaps), self.seconds)

    def clip(self, folder: Path) -> Clip:
        """The footage as a clip to be encoded with others by ``make_clips``: ``folder/past-test-000001.mp4``."""
        return Clip(self.scene, None, folder / f"past-{self.scene.name}.mp4")

    @cached_property
    def _layout(self) -> Layout:
        return make_layout(self.split, self._chance(0))

    def _palette(self, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Rare colours (the first passes once, the second stops once, the others never come) and common ones."""
        drawn = [str(color) for color in rng.permutation(sorted(set(self.needle_colors)))]
        rare = drawn[:_RARE]
        return rare, [color for color in COLORS if color not in rare]

    def _quiet(self, rng: np.random.Generator) -> float:
        return float(max(_LEAST_QUIET_S, rng.uniform(0.4, 1.6) * self.quiet_s))

    def _chance(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([_SEED, SPLITS.index(self.split), self.seed, purpose])
