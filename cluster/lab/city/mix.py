"""Description of a city's cameras: classes, activity by the hour, and bursts that make many of them busy at once."""

from __future__ import annotations

import math
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
class BurstPeriod:
    """One occurrence of a burst in ``[start_s, end_s)``. ``classes``: indices of the affected classes."""

    name: str
    start_s: float
    end_s: float
    share: float
    classes: frozenset[int]


@dataclass(frozen=True, slots=True)
class BurstEffect:
    """A spell's effect on one district. ``cameras``: mask of the cameras that it makes busy."""

    start_s: float
    end_s: float
    cameras: Bools

    def reaches(self, camera: Ints, end_s: Floats) -> Bools:
        """Mask of the windows, given by camera and end time, that it makes busy."""
        found: Bools = self.cameras[camera] & (end_s >= self.start_s) & (end_s < self.end_s)
        return found


def spells(mix: Mix, seconds: float, rng: np.random.Generator) -> list[BurstPeriod]:
    """Draw the bursts of a mix over ``seconds`` as Poisson processes."""
    found = []
    names = [each.name for each in mix.classes]
    for burst in mix.bursts:
        reached = frozenset(names.index(name) for name in burst.classes or names)
        at = float(rng.exponential(burst.every_s))
        while at < seconds:
            found.append(BurstPeriod(burst.name, at, at + burst.duration_s, burst.share, reached))
            at += float(rng.exponential(burst.every_s))
    return sorted(found, key=lambda spell: spell.start_s)


def wakes(spells: Sequence[BurstPeriod], kinds: Ints, rng: np.random.Generator) -> list[BurstEffect]:
    """Draw the cameras that each spell affects. ``kinds``: class index per camera."""
    return [
        BurstEffect(
            spell.start_s,
            spell.end_s,
            np.isin(kinds, sorted(spell.classes)) & (rng.random(len(kinds)) < spell.share),
        )
        for spell in spells
    ]


HOURS = 24
FOREVER_S = 1e9


class GeometrySection(Section):
    """The model's patch geometry; the default is Qwen2.5-VL's with frames of at most 448 x 448 pixels."""

    patch: int = Field(default=14, ge=1, description="Side of a patch in pixels.")
    merge: int = Field(default=2, ge=1, description="Patches per side that are merged into one token.")
    temporal: int = Field(default=2, ge=1, description="Samples that are merged into one frame.")
    max_pixels: int = Field(default=448 * 448, ge=1, description="Maximum pixels; larger frames are downscaled.")

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

    busy: float = Field(ge=0, le=1, description="Share of windows with motion in hours whose profile is 1.")
    dwell_s: Duration = Field(default=60.0, gt=0, description="Mean length of a stretch with motion.")
    profile: tuple[float, ...] = Field(
        default=(1.0,) * HOURS, description="24 factors on busy, one per hour, starting at midnight."
    )
    kept: float = Field(default=0.2, ge=0, le=1, description="Share of its tokens that a frame between anchors keeps.")
    spread: float = Field(
        default=0.3, ge=0, le=3, description="Sigma of the lognormal factor on a window's work; its mean is 1."
    )

    @model_validator(mode="after")
    def _day(self) -> ActivitySection:
        if len(self.profile) != HOURS or min(self.profile) < 0:
            raise ValueError(
                f"profile must be {HOURS} factors of at least 0, one per hour, not {len(self.profile)} values"
            )
        return self

    def share(self, hour: float) -> float:
        """Busy share at a time of day in hours, interpolated between mid-hours; at most 0.98 if ``busy`` < 1."""
        place = (hour - 0.5) % HOURS
        first = int(place)
        between = place - first
        factor = (1 - between) * self.profile[first] + between * self.profile[(first + 1) % HOURS]
        return min(0.98 if self.busy < 1 else 1.0, self.busy * factor)


class CameraClass(Section):
    """Identical cameras."""

    name: str = Field(min_length=1, description="Name of the class, such as street.")
    share: float = Field(gt=0, description="Weight of the class among all cameras.")
    priority: Priority = Field(default=Priority.NORMAL, description="critical, normal or background.")
    width: int = Field(default=1920, ge=1, description="Frame width in pixels.")
    height: int = Field(default=1080, ge=1, description="Frame height in pixels.")
    frame_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a whole frame; null derives them from frame size and geometry."
    )
    fps: float = Field(default=2.0, gt=0, le=60, description="Samples per second.")
    window_s: Duration = Field(default=40.0, gt=0, description="Seconds of video an answer is based on.")
    stride_s: Duration = Field(default=8.0, gt=0, description="Seconds between two answers.")
    refresh_budget: float | None = Field(
        default=None, ge=0, le=1, description="Share of the overlap that is recomputed; null: its anchors."
    )
    anchor_interval_s: Duration = Field(default=16.0, gt=0, description="Seconds between anchors, kept whole.")
    questions: int = Field(default=2, ge=1, description="Number of standing questions.")
    query_tokens: int = Field(default=24, ge=1, description="Tokens of one question.")
    static_gate: bool = Field(default=True, description="Repeat the last answer while nothing moves.")
    max_idle_s: Duration = Field(default=60.0, ge=0, description="Maximum time that the gate repeats an answer.")
    activity: ActivitySection

    @model_validator(mode="after")
    def _lengths(self) -> CameraClass:
        if self.stride_s > self.window_s:
            raise ValueError(f"stride_s must be at most window_s ({self.window_s:g}), not {self.stride_s:g}")
        return self

    @classmethod
    def of(cls, demand: Demand, share: float) -> CameraClass:
        """Cameras with this demand, but for its stretches: gating is drawn independently per window."""
        shared = {name: getattr(demand, name) for name in Demand.__dataclass_fields__ if name in cls.model_fields}
        activity = ActivitySection(busy=demand.busy, dwell_s=demand.stride_s / 100, kept=demand.kept, spread=0.0)
        shared |= {"activity": activity, "static_gate": demand.busy < 1, "max_idle_s": FOREVER_S}
        return cls(name=demand.camera, share=share, **shared)

    def computed_shares(self, hour: float) -> tuple[float, float]:
        """Share of windows that the gate lets through, those with motion and in between one per ``idle_s``, and share
        of windows that it lets through after gated ones."""
        if not self.static_gate:
            return 1.0, 0.0
        busy = self.activity.share(hour)
        # Probability that motion follows a window without.
        wakes = max(1e-9, busy * (1 - math.exp(-self.stride_s / max((1 - busy) * self.activity.dwell_s, 1e-12))))
        # How long an answer may stand varies by camera (StreamSpec.idle_s): average over its range.
        spread = IDLE_SPREAD * (np.arange(100) + 0.5) / 100
        gated = self.max_idle_s * (1 - spread) // self.stride_s
        # Of the windows without motion, every (gated + 1)th of a stretch.
        idle = wakes * (1 - wakes) ** gated / (1 - (1 - wakes) ** (gated + 1))
        resumed = wakes * (1 - idle) + idle * (gated > 0)
        return float(busy + (1 - busy) * idle.mean()), float((1 - busy) * resumed.mean())

    def demand(self, camera: str, geometry: GeometrySection, hour: float) -> Demand:
        """The demand that a controller sees for one camera of the class."""
        values = {name: getattr(self, name) for name in Demand.__dataclass_fields__ if name in CameraClass.model_fields}
        busy, resumed = self.computed_shares(hour)
        values |= {
            "camera": camera,
            "frame_tokens": self.frame_tokens or geometry.tokens(self.width, self.height),
            "temporal": geometry.temporal,
            "kept": self.activity.kept,
            "busy": busy,
            "resumed": resumed / busy if busy else 0.0,
            "gated": (1 - busy) / resumed if resumed else 1.0,
        }
        return Demand(**values)


class Burst(Section):
    """An event that makes many cameras busy at once, such as rain."""

    name: str = Field(min_length=1, description="Name of the event.")
    every_s: Duration = Field(gt=0, description="Mean time between two bursts (Poisson process).")
    duration_s: Duration = Field(gt=0, description="Duration.")
    share: float = Field(gt=0, le=1, description="Share of the affected classes' cameras that become busy.")
    classes: tuple[str, ...] = Field(default=(), description="Affected classes; empty for all.")


class Mix(Section):
    """The camera classes and bursts of a city."""

    title: str = Field(default="", description="One-line description.")
    geometry: GeometrySection = GeometrySection()
    classes: list[CameraClass] = Field(min_length=1, description="Camera classes.")
    bursts: list[Burst] = Field(default_factory=list, description="Events that make many cameras busy at once.")

    @model_validator(mode="after")
    def _names(self) -> Mix:
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ValueError(f"classes must have unique names, not {', '.join(names)}")
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
