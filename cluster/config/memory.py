"""``memory:`` — what a camera remembers of the frames that left its window, and how it is found again."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cluster.config.base import Section
from cluster.config.quantity import Duration, Size
from cluster.types import MemorySpec

_DEFAULTS = MemorySpec()
_OPTIONS = "by name; its own defaults stand for what is left out."


class MemoryConfig(Section):
    """How much a camera remembers, for how long, and by which policies."""

    enabled: bool = Field(
        default=True, description="Keep the KV of frames that left the window, so that questions can go back to them."
    )
    cap: Size = Field(
        default=_DEFAULTS.cap_bytes,
        ge=64 * 2**10,
        description="Most bytes one camera's memory takes in any tier, index and saved window included: a number, or a "
        "size like 64MiB; never exceeded.",
    )
    retention: Duration | None = Field(
        default=_DEFAULTS.retention_s,
        gt=0,
        description="What is older is forgotten: seconds, or a length of time like 24h; null keeps all the cap allows.",
    )
    keep: float = Field(
        default=_DEFAULTS.keep,
        gt=0,
        le=1,
        description="Share of new frames' tokens that is remembered at all, 0..1; 1 leaves choosing to the cap.",
    )
    target: float = Field(
        default=_DEFAULTS.target, gt=0, lt=1, description="Share of the cap that is left when it was reached, 0..1."
    )
    block_frames: int = Field(
        default=_DEFAULTS.block_frames, ge=1, le=1024, description="Frames that are put in order and stored together."
    )
    compressor: str = Field(
        default=_DEFAULTS.compressor,
        description="Which tokens stay when the cap is reached: infinipot_v, cords, uniform or sliding among others.",
    )
    compressor_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the compressor {_OPTIONS}"
    )
    organiser: str = Field(
        default=_DEFAULTS.organiser,
        description="How tokens are grouped for finding them again: mosaic, resv (V-Rex), frames (ReKV) or tokens.",
    )
    organiser_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the organiser {_OPTIONS}"
    )
    retriever: str = Field(
        default=_DEFAULTS.retriever,
        description="Which groups a question reads: two_stage (Mosaic), wicsum (V-Rex) or top_k among others.",
    )
    retriever_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the retriever {_OPTIONS}"
    )

    def spec(self) -> MemorySpec | None:
        """What the engine must know of it; None where nothing is remembered."""
        if not self.enabled:
            return None
        return MemorySpec(
            compressor=self.compressor,
            organiser=self.organiser,
            retriever=self.retriever,
            cap_bytes=self.cap,
            target=self.target,
            keep=self.keep,
            retention_s=self.retention,
            block_frames=self.block_frames,
            compressor_options=self.compressor_options,
            organiser_options=self.organiser_options,
            retriever_options=self.retriever_options,
        )
