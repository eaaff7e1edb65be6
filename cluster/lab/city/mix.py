"""What a city's cameras are and do, as data: classes of cameras, how busy they are by the hour, and what wakes many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from cluster.config.problems import Duration, Section
from cluster.control.demand import Demand
from cluster.lab.city import Bools, Floats, Ints
from cluster.lab.shipped import ShippedFiles
from cluster.types import PatchGeometry
from cluster.types.cameras import IDLE_SPREAD, Priority


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
    cameras: Bools

    def reaches(self, camera: Ints, end_s: Floats) -> Bools:
        """Windows of these cameras, ending then, that it makes busy."""
        found: Bools = self.cameras[camera] & (end_s >= self.start_s) & (end_s < self.end_s)
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


def wakes(spells: Sequence[Spell], kinds: Ints, rng: np.random.Generator) -> list[Wake]:
    """Whom each spell reaches among cameras of these classes."""
    return [
        Wake(
            spell.start_s,
            spell.end_s,
            np.isin(kinds, sorted(spell.classes)) & (rng.random(len(kinds)) < spell.share),
        )
        for spell in spells
    ]


HOURS = 24
FOREVER_S = 1e9


class GeometrySection(Section):
    """How the model cuts pictures; the default is Qwen2.5-VL's with frames of at most 448 x 448 pixels."""

    patch: int = Field(default=14, ge=1, description="Side of a patch in pixels.")
    merge: int = Field(default=2, ge=1, description="Patches per side that become one token.")
    temporal: int = Field(default=2, ge=1, description="Samples that become one frame.")
    max_pixels: int = Field(default=448 * 448, ge=1, description="Most pixels of a frame; larger ones are shrunk.")

    def tokens(self, width: int, height: int) -> int:
        """Visual tokens of one frame with nothing pruned."""
        geometry = PatchGeometry(
            self.patch, self.merge, self.temporal, min_pixels=(self.patch * self.merge) ** 2, max_pixels=self.max_pixels
        )
        grid = geometry.grid(width, height)
        return grid.group_rows * grid.group_cols


class ActivitySection(Section):
    """Whether a window shows motion: a two-state Markov chain per camera, whose busy share follows the hour.

    With busy share ``b`` of the hour and mean length ``d`` of a busy stretch, a busy camera falls quiet at rate ``1/d``
    and a quiet one wakes at rate ``b / ((1 - b) d)``, so that ``b`` is the stationary share.
    """

    busy: float = Field(
        ge=0, le=1, description="Share of a day's windows in which something moves, where profile is 1."
    )
    dwell_s: Duration = Field(default=60.0, gt=0, description="Mean length of a stretch with motion.")
    profile: tuple[float, ...] = Field(
        default=(1.0,) * HOURS, description="24 factors on busy, one per hour from midnight on."
    )
    kept: float = Field(default=0.2, ge=0, le=1, description="Share of its tokens that a frame between anchors keeps.")
    spread: float = Field(
        default=0.3, ge=0, le=3, description="Sigma of the logarithm of one window's work; its mean is 1."
    )

    @model_validator(mode="after")
    def _day(self) -> ActivitySection:
        if len(self.profile) != HOURS or min(self.profile) < 0:
            raise ValueError(
                f"profile must be {HOURS} factors of at least 0, one per hour, not {len(self.profile)} values"
            )
        return self

    def share(self, hour: float) -> float:
        """The busy share at a time of day in hours, between the hours' middles on a straight line; at most 0.98."""
        place = (hour - 0.5) % HOURS
        first = int(place)
        between = place - first
        factor = (1 - between) * self.profile[first] + between * self.profile[(first + 1) % HOURS]
        return min(0.98 if self.busy < 1 else 1.0, self.busy * factor)


class CameraClass(Section):
    """Cameras that are alike."""

    name: str = Field(min_length=1, description="Name of the class, as in street.")
    share: float = Field(gt=0, description="Its part of the cameras, in proportion to the other classes' shares.")
    priority: Priority = Field(default=Priority.NORMAL, description="critical, normal or background.")
    width: int = Field(default=1920, ge=1, description="Pixels across.")
    height: int = Field(default=1080, ge=1, description="Pixels down.")
    frame_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a whole frame; null computes them from the size and the geometry."
    )
    fps: float = Field(default=2.0, gt=0, le=60, description="Samples per second.")
    window_s: Duration = Field(default=40.0, gt=0, description="Seconds of video an answer is based on.")
    stride_s: Duration = Field(default=8.0, gt=0, description="Seconds between two answers.")
    refresh_budget: float | None = Field(
        default=None, ge=0, le=1, description="Share of the overlap that is computed again; null: its anchors."
    )
    anchor_interval_s: Duration = Field(default=16.0, gt=0, description="Seconds between frames that keep everything.")
    questions: int = Field(default=2, ge=1, description="Standing questions.")
    query_tokens: int = Field(default=24, ge=1, description="Tokens of one question.")
    static_gate: bool = Field(default=True, description="Let the last answer stand while nothing moves.")
    max_idle_s: Duration = Field(default=60.0, ge=0, description="Longest time that an answer may stand.")
    activity: ActivitySection

    @model_validator(mode="after")
    def _lengths(self) -> CameraClass:
        if self.stride_s > self.window_s:
            raise ValueError(f"stride_s must be at most window_s ({self.window_s:g}), not {self.stride_s:g}")
        return self

    @classmethod
    def of(cls, demand: Demand, share: float) -> CameraClass:
        """Cameras of this demand. Whether a window is gated is drawn anew for each: a demand says how many are, not in
        which order."""
        shared = {name: getattr(demand, name) for name in Demand.__dataclass_fields__ if name in cls.model_fields}
        activity = ActivitySection(busy=demand.busy, dwell_s=demand.stride_s / 100, kept=demand.kept, spread=0.0)
        shared |= {"activity": activity, "static_gate": demand.busy < 1, "max_idle_s": FOREVER_S}
        return cls(name=demand.camera, share=share, **shared)

    def computed_share(self, hour: float) -> float:
        """Share of its windows that the gate lets through: those with motion, and of the others one per ``idle_s``."""
        if not self.static_gate:
            return 1.0
        busy = self.activity.share(hour)
        # The first window is computed after which an answer may not stand, which differs by camera (StreamSpec.idle_s).
        spread = IDLE_SPREAD * (np.arange(100) + 0.5) / 100
        return float(busy + (1 - busy) * (1 / (self.max_idle_s * (1 - spread) // self.stride_s + 1)).mean())

    def demand(self, camera: str, geometry: GeometrySection, hour: float) -> Demand:
        """What a controller would be told of one camera of the class."""
        told = {name: getattr(self, name) for name in Demand.__dataclass_fields__ if name in CameraClass.model_fields}
        told |= {
            "camera": camera,
            "frame_tokens": self.frame_tokens or geometry.tokens(self.width, self.height),
            "temporal": geometry.temporal,
            "kept": self.activity.kept,
            "busy": self.computed_share(hour),
        }
        return Demand(**told)


class Burst(Section):
    """Something that makes many cameras busy at once, like rain or a flash of lightning."""

    name: str = Field(min_length=1, description="What it is.")
    every_s: Duration = Field(gt=0, description="Mean time between two; they come at random (Poisson).")
    duration_s: Duration = Field(gt=0, description="How long it lasts.")
    share: float = Field(gt=0, le=1, description="Share of the cameras of its classes that it makes busy.")
    classes: tuple[str, ...] = Field(default=(), description="Classes that it reaches; empty for all.")


class Mix(Section):
    """A city's cameras."""

    title: str = Field(default="", description="One line about it.")
    geometry: GeometrySection = GeometrySection()
    classes: list[CameraClass] = Field(min_length=1, description="Kinds of cameras.")
    bursts: list[Burst] = Field(default_factory=list, description="What makes many cameras busy at once.")

    @model_validator(mode="after")
    def _names(self) -> Mix:
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ValueError(f"classes must have names of their own, not {', '.join(names)}")
        for burst in self.bursts:
            if unknown := [name for name in burst.classes if name not in names]:
                raise ValueError(f"burst {burst.name!r} names the class {unknown[0]!r}; there are: {', '.join(names)}")
        return self

    def counts(self, cameras: int) -> list[int]:
        """Cameras of each class, by largest remainder; they add up to ``cameras``."""
        total = sum(each.share for each in self.classes)
        exact = [cameras * each.share / total for each in self.classes]
        counts = [int(value) for value in exact]
        rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for index in rest[: cameras - sum(counts)]:
            counts[index] += 1
        return counts


MIXES = ShippedFiles("mix", Path(__file__).parent / "mixes", Mix)
