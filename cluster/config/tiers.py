"""``tiers:`` — where the memories of all cameras lie, and how much room they have there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from cluster.config.base import Section
from cluster.config.quantity import Duration, Size
from cluster.redaction import redact

_SCHEMES = ("redis://", "rediss://", "unix://")


class TiersConfig(Section):
    """The tiers below a replica's device, from the fastest down: host, node, Redis. The lowest holds everything."""

    host_bytes: Size = Field(
        default=2**30,
        ge=2**20,
        description="Host memory of each replica for remembered KV: bytes, or a size like 1GiB (the default).",
    )
    node: bool = Field(
        default=True,
        description="Keep memories in a process of their own on each node, so that they outlive a replica.",
    )
    node_bytes: Size = Field(
        default=4 * 2**30,
        ge=2**20,
        description="Host memory of each node's process for remembered KV: bytes, or a size like 4GiB (the default, "
        "which is 64 cameras at the default memory.cap).",
    )
    camera_bytes: Size | None = Field(
        default=None,
        ge=64 * 2**10,
        description="Most bytes of one camera in the node's process, and in Redis, enforced there: a number or a size "
        "like 64MiB. No camera's memory.cap may exceed it; null leaves it to memory.cap.",
    )
    redis_url: str | None = Field(
        default=None,
        description="Redis that also keeps memories, so that they outlive a node: a redis://, rediss:// or unix:// "
        "address.",
    )
    redis_ttl_s: Duration = Field(
        default=24 * 3600,
        ge=1,
        description="Seconds, or a length of time like 24h (the default), after which Redis forgets what was not "
        "written again.",
    )
    store_as: Literal["plain", "int8"] = Field(
        default="plain", description="Form of KV on the way to node and Redis; int8 takes half of bfloat16, rounded."
    )
    deadline_s: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="Longest time in seconds that node or Redis may take for one call before it counts as down.",
    )

    @field_validator("redis_url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and not any(url.startswith(scheme) and len(url) > len(scheme) for scheme in _SCHEMES):
            raise ValueError(f"must be an address like redis://host:6379/0, not {redact(url)!r}")
        return url
