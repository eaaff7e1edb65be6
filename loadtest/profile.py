"""Load profiles: what cameras send, when, and what goes wrong on the way; and the resulting packets of each camera."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from cluster.config.problems import Section
from cluster.lab.shipped import ShippedFiles
from cluster.types import MICROSECONDS, EncodedPacket
from loadtest.footage import Footage, shifted


@dataclass(frozen=True, slots=True)
class CameraScript:
    """Parameters of one camera of a fleet.

    * ``phase``: start time within a stride, 0 to 1
    * ``rank``: position in the cumulative shares of the mix, 0 to 1, which selects the footage it sends
    """

    name: str
    phase: float
    rank: float
    seed: tuple[int, int]


def script(profile: Profile, number: int, prefix: str = "load") -> CameraScript:
    """Camera ``number`` of a profile: the same in every run, whatever the size of the fleet."""
    random = np.random.default_rng([profile.seed, number])
    drawn = float(random.random())
    phase = {"aligned": 0.0, "even": radical_inverse(number), "random": drawn}[profile.phases]
    # Low-discrepancy: for any fleet size every share of the mix is met to within about one camera.
    rank = (radical_inverse(number, 3) + 0.5 / 3**12) % 1.0
    return CameraScript(f"{prefix}-{number:05d}", phase, rank, (profile.seed, number))


def radical_inverse(number: int, base: int = 2) -> float:
    """Van der Corput sequence: for every n, its first n members are spread evenly over 0 to 1."""
    value, place = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value += digit * place
        place /= base
    return value


def kind_at(profile: Profile, rank: float, at_s: float) -> str:
    """Name of the footage that a camera of this rank sends ``at_s`` seconds into the test."""
    shares = np.array(list(profile.mix.values()), dtype=np.float64)
    shares /= shares.sum()
    if profile.day_s is not None:
        # Share of the first kind: none at midnight, when the test starts, its full share at noon.
        light = shares[0] * (1 - math.cos(2 * math.pi * at_s / profile.day_s)) / 2
        rest = shares[1:].sum()
        # What the first kind loses goes to the others; a mix without others has no night.
        others = shares[1:] / rest if rest else np.full(len(shares) - 1, 1 / max(1, len(shares) - 1))
        shares = np.concatenate(([light], (1 - light) * others)) if len(shares) > 1 else shares
    place = int(np.searchsorted(np.cumsum(shares), rank, side="right"))
    return list(profile.mix)[min(place, len(shares) - 1)]


@dataclass(frozen=True, slots=True)
class Due:
    """A packet and its sending time in seconds from the camera's start. ``lost``: it is withheld, which leaves a gap in
    the sequence numbers."""

    at_s: float
    packet: EncodedPacket
    lost: bool


def packets(
    profile: Profile, camera: CameraScript, footage: Mapping[str, Footage], *, began_s: float = 0.0
) -> Iterator[Due]:
    """Infinite sequence of the camera's packets, in order of arrival.

    The first GOP is drawn at random, later ones follow in the footage's order; if the day switches the footage, it does
    so at a keyframe. ``began_s``: seconds into the test at which the camera starts.
    """
    random = np.random.default_rng([*camera.seed, 1])
    next_gop = {name: int(random.integers(len(each.gops))) for name, each in footage.items()}
    clock = sequence = 0
    arrived = 0.0
    while True:
        kind = kind_at(profile, camera.rank, began_s + clock / MICROSECONDS)
        each = footage[kind]
        gop = each.gops[next_gop[kind]]
        next_gop[kind] = (next_gop[kind] + 1) % len(each.gops)
        for stored in gop.packets:
            packet = shifted(stored, clock, sequence)
            late = profile.jitter_s * float(random.random()) if profile.jitter_s else 0.0
            # Packets of one connection never overtake each other.
            arrived = max(arrived, max(0, packet.dts or 0) / MICROSECONDS + late)
            lost = bool(profile.loss and random.random() < profile.loss)
            yield Due(arrived, packet, lost)
            sequence += 1
        clock += gop.duration


class Storm(Section):
    """Periodic loss of many connections at once, as when a switch restarts."""

    every_s: float = Field(default=30.0, gt=0, description="Seconds between storms, and before the first.")
    share: float = Field(default=1.0, gt=0, le=1, description="Share of the cameras that lose their connection.")


class Profile(Section):
    """Behaviour of a load test's cameras. Window and stride come from the cluster's configuration."""

    about: str = Field(default="", description="Description in one sentence.")
    transport: Literal["push", "rtsp"] = Field(default="push", description="How packets reach the cluster.")
    streams: int = Field(default=50, ge=1, description="Number of cameras, unless given on the command line.")
    fps: float = Field(default=5.0, gt=0, le=120, description="Frame rate of generated footage.")
    width: int = Field(default=640, ge=64, le=4096, description="Width of generated footage, in pixels.")
    height: int = Field(default=360, ge=64, le=4096, description="Height of generated footage, in pixels.")
    crf: int | None = Field(
        default=None,
        ge=0,
        le=51,
        description="x264 CRF of generated footage, null for 23; a camera's second stream is closer to 28.",
    )
    mix: dict[str, float] = Field(
        default={"busy": 1.0},
        min_length=1,
        description="Footage (busy, quiet, noisy, or the path of a video file) -> share of the cameras that send it.",
    )
    phases: Literal["random", "even", "aligned"] = Field(
        default="random",
        description="Start times within a stride: random, evenly spaced, or all at once (the worst case).",
    )
    gather_s: float = Field(
        default=0.05,
        ge=0,
        le=5,
        description="Seconds for which an agent gathers packets into one message; `sightline push` uses 0.05.",
    )
    jitter_s: float = Field(default=0.0, ge=0, le=10, description="Maximum delay in seconds, uniformly drawn.")
    loss: float = Field(default=0.0, ge=0, lt=1, description="Share of packets that never arrive.")
    churn_per_min: float = Field(
        default=0.0, ge=0, le=1, description="Share of the cameras that are replaced by new ones per minute."
    )
    storm: Storm | None = Field(default=None, description="Periodic loss of many connections at once; null for none.")
    day_s: float | None = Field(
        default=None,
        gt=0,
        description="Length of a day in seconds, over which the share of the mix's first kind rises from none to its "
        "own and falls again; null for no night.",
    )
    ramp_s: float = Field(default=4.0, ge=0, description="Seconds over which cameras connect.")
    warmup_s: float | None = Field(
        default=None, ge=0, description="Seconds before measuring; null for a window and a stride."
    )
    measure_s: float = Field(default=60.0, gt=0, description="Length of the measurement in seconds.")
    seed: int = Field(default=0, ge=0, description="Seed of phases, jitter, losses and churn.")

    @field_validator("mix")
    @classmethod
    def _shares(cls, mix: dict[str, float]) -> dict[str, float]:
        if any(not math.isfinite(share) or share < 0 for share in mix.values()) or sum(mix.values()) <= 0:
            raise ValueError("shares must be non-negative numbers, not all 0")
        return mix


PROFILES = ShippedFiles("load profile", Path(__file__).parent / "profiles", Profile)
