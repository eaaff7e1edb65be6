"""A profile: what cameras send, when, and what goes wrong on the way; and what one camera makes of it."""

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
    """One camera of a fleet.

    * ``phase``: where in a stride it begins, 0 to 1
    * ``rank``: its place in the mix, 0 to 1: below the share of the first kind it sends that one, and so on
    """

    name: str
    phase: float
    rank: float
    seed: tuple[int, int]


def script(profile: Profile, number: int, prefix: str = "load") -> CameraScript:
    """The same camera in every run with this profile, however many there are beside it."""
    random = np.random.default_rng([profile.seed, number])
    drawn = float(random.random())
    phase = {"aligned": 0.0, "even": radical_inverse(number), "random": drawn}[profile.phases]
    # Every share of the mix is met within one camera however many there are.
    rank = (radical_inverse(number, 3) + 0.5 / 3**12) % 1.0
    return CameraScript(f"{prefix}-{number:05d}", phase, rank, (profile.seed, number))


def radical_inverse(number: int, base: int = 2) -> float:
    """Van der Corput's sequence: its first n members are spread evenly over 0 to 1, for every n."""
    value, place = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value += digit * place
        place /= base
    return value


def kind_at(profile: Profile, rank: float, at_s: float) -> str:
    """Which footage of the mix a camera of this rank sends ``at_s`` seconds into the test."""
    shares = np.array(list(profile.mix.values()), dtype=np.float64)
    shares /= shares.sum()
    if profile.day_s is not None:
        # 0 at midnight, which is when a test begins, to 1 at noon.
        light = shares[0] * (1 - math.cos(2 * math.pi * at_s / profile.day_s)) / 2
        rest = shares[1:].sum()
        # What the day takes from the first kind goes to the others; a mix without others has no night.
        others = shares[1:] / rest if rest else np.full(len(shares) - 1, 1 / max(1, len(shares) - 1))
        shares = np.concatenate(([light], (1 - light) * others)) if len(shares) > 1 else shares
    place = int(np.searchsorted(np.cumsum(shares), rank, side="right"))
    return profile.kinds[min(place, len(shares) - 1)]


@dataclass(frozen=True, slots=True)
class Due:
    """A packet and when it leaves the camera and arrives, seconds from the camera's beginning. ``lost``: it never
    arrives, and its number is missing."""

    at_s: float
    packet: EncodedPacket
    lost: bool


def packets(
    profile: Profile, camera: CameraScript, footage: Mapping[str, Footage], *, began_s: float = 0.0
) -> Iterator[Due]:
    """Everything the camera sends, without end, in order of arrival.

    GOP after GOP: its first is drawn, those after it follow in the footage's own order, and where the day changes what
    it sends, the other footage goes on at a keyframe. ``began_s``: seconds into the test when the camera begins.
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
            # Packets of one connection overtake nobody.
            arrived = max(arrived, max(0, packet.dts or 0) / MICROSECONDS + late)
            lost = bool(profile.loss and random.random() < profile.loss)
            yield Due(arrived, packet, lost)
            sequence += 1
        clock += gop.duration


class Storm(Section):
    """Connections that all break at once, as when a switch restarts."""

    every_s: float = Field(default=30.0, gt=0, description="Seconds between two storms, the first after as long.")
    share: float = Field(default=1.0, gt=0, le=1, description="Share of the cameras that lose their connection.")


class Profile(Section):
    """What every camera of a load test does. Window and stride are the cluster's own (`--config`, `--set`)."""

    about: str = Field(default="", description="One sentence for people.")
    transport: Literal["push", "rtsp"] = Field(default="push", description="How packets reach the cluster.")
    streams: int = Field(default=50, ge=1, description="Cameras, unless the command line says otherwise.")
    fps: float = Field(default=5.0, gt=0, le=120, description="Frames a second of footage that is made.")
    width: int = Field(default=640, ge=64, le=4096, description="Pixels of footage that is made.")
    height: int = Field(default=360, ge=64, le=4096, description="Pixels of footage that is made.")
    crf: int | None = Field(
        default=None,
        ge=0,
        le=51,
        description="x264's quality of footage that is made, 23 when null; a camera's second stream is nearer to 28.",
    )
    mix: dict[str, float] = Field(
        default={"busy": 1.0},
        min_length=1,
        description="Footage and the share of cameras that send it: busy, quiet, noisy, or paths of video files.",
    )
    phases: Literal["random", "even", "aligned"] = Field(
        default="random",
        description="When cameras begin within a stride: random, evenly spaced, or all at once (the worst case).",
    )
    gather_s: float = Field(
        default=0.05,
        ge=0,
        le=5,
        description="Seconds for which an agent gathers packets into one message; 0.05 is what `sightline push` does.",
    )
    jitter_s: float = Field(default=0.0, ge=0, le=10, description="Most seconds a packet arrives late, evenly drawn.")
    loss: float = Field(default=0.0, ge=0, lt=1, description="Share of packets that never arrive.")
    churn_per_min: float = Field(
        default=0.0, ge=0, le=1, description="Share of the cameras that leave in a minute, each replaced by another."
    )
    storm: Storm | None = Field(default=None, description="Connections that break at once; null for none.")
    day_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds of a day, in which the share of the mix's first kind goes from its own to none and back; "
        "null for no night.",
    )
    ramp_s: float = Field(default=4.0, ge=0, description="Seconds over which cameras connect.")
    warmup_s: float | None = Field(
        default=None, ge=0, description="Seconds before measuring; null takes a window and a stride."
    )
    measure_s: float = Field(default=60.0, gt=0, description="Seconds that are measured.")
    seed: int = Field(default=0, ge=0, description="Of phases, jitter, losses, churn.")

    @field_validator("mix")
    @classmethod
    def _shares(cls, mix: dict[str, float]) -> dict[str, float]:
        if any(not math.isfinite(share) or share < 0 for share in mix.values()) or sum(mix.values()) <= 0:
            raise ValueError("shares must be numbers of at least 0, not all 0")
        return mix

    @property
    def kinds(self) -> list[str]:
        """Footage by name, in the order of the mix."""
        return list(self.mix)


PROFILES = ShippedFiles("load profile", Path(__file__).parent / "profiles", Profile)
