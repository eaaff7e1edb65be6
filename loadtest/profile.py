"""A profile: what cameras send, when, and what goes wrong on the way. Data, checked like a configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from cluster.config.base import Section
from cluster.config.problems import InvalidConfigError, from_validation
from cluster.errors import ConfigError

SHIPPED = Path(__file__).parent / "profiles"


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


def profile_names() -> list[str]:
    """Profiles that come with Sightline."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by its name, or any by the path of its YAML file.

    Raises:
        ConfigError: there is none, or something in it is wrong; the message names the key.
    """
    path = SHIPPED / f"{name_or_path}.yaml" if name_or_path in profile_names() else Path(name_or_path)
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"there is no load profile {name_or_path!r}; name a file, or one of: {', '.join(profile_names())}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not YAML; a load profile is a mapping of settings") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{path} must be a mapping of settings, not {type(body).__name__}")
    try:
        return Profile.model_validate(body)
    except ValidationError as error:
        raise InvalidConfigError(from_validation(error, Profile), where=str(path)) from None
