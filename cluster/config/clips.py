"""``clips:`` — live pictures aside, what is kept of an incident: a snapshot and a short clip, how long and how much."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from cluster.config.quantity import Duration, Section, Size


class ClipsConfig(Section):
    """Snapshots and clips of incidents."""

    enabled: bool = Field(default=True, description="Whether a snapshot and a clip of each incident are kept.")
    folder: str | None = Field(
        default=None,
        description="Folder of snapshots and clips; null takes `clips` in alerts.folder, or keeps them until the "
        "cluster stops where that is null too.",
    )
    before_s: Duration = Field(default=10.0, ge=0, le=300, description="A clip begins so long before its incident.")
    after_s: Duration = Field(default=10.0, ge=0, le=300, description="A clip goes on for so long after the alert.")
    longest_s: Duration = Field(
        default=120.0, ge=2, le=900, description="Longest clip; what is too much is left out at its beginning."
    )
    at_end: bool = Field(
        default=False, description="Make a second clip when an incident ends, unless the first one shows its end."
    )
    ring_bytes: Size = Field(
        default=2**30,
        ge=2**20,
        description="Encoded packets that a decoder process holds of all its cameras, so that clips can begin before "
        "their incident: bytes, or a size like 1GiB (the default, which 25 cameras of 4 Mbit/s take).",
    )
    ring_camera_bytes: Size = Field(
        default=48 * 2**20,
        ge=2**18,
        description="The same of one camera, like 48MiB (the default, 4.8 Mbit/s with windows of 40 s every 8 s).",
    )
    max_bytes: Size = Field(
        default=10 * 2**30, ge=2**20, description="Most bytes of snapshots and clips; beyond it the oldest go."
    )
    keep_free: Size = Field(
        default=256 * 2**20,
        ge=0,
        description="Room on the disk that clips leave to others: below it none is written.",
    )
    retention: Duration = Field(
        default=30 * 86_400.0, ge=1, description="Snapshots and clips are deleted after so long: like 30d."
    )
    at_once: int = Field(
        default=256, ge=1, le=10_000, description="Clips being made at once; further incidents get none, and say so."
    )
    reencode_height: int = Field(
        default=720,
        ge=144,
        le=2160,
        description="Tallest picture of clips that must be encoded anew: of cameras with privacy masks, or that do "
        "not send H.264.",
    )
    url: str = Field(
        default="",
        description="Address of the gateway's HTTP port as people reach it, like https://sightline.example: alerts "
        "link to snapshots and clips there. Without it the links have no host.",
    )

    @model_validator(mode="after")
    def _fits(self) -> ClipsConfig:
        if self.before_s + self.after_s > self.longest_s:
            raise ValueError(
                f"longest_s = {self.longest_s:g} must be at least before_s + after_s = {self.before_s + self.after_s:g}"
            )
        if self.ring_camera_bytes > self.ring_bytes:
            raise ValueError(
                f"ring_bytes = {self.ring_bytes}, of all cameras, must be at least ring_camera_bytes = "
                f"{self.ring_camera_bytes}, of one"
            )
        return self

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, not {url!r}")
        return url.rstrip("/")
