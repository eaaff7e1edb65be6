"""``cameras:`` — the cameras, each with what it overrides of the global sections."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from cluster.config.base import Section
from cluster.config.memory import MemoryConfig
from cluster.config.privacy import MAX_MASKS, MaskPolygon
from cluster.config.pruning import PruningConfig
from cluster.config.question import QuestionConfig
from cluster.config.sampling import SamplingConfig
from cluster.config.source import SourceConfig
from cluster.config.window import WindowConfig
from cluster.redaction import SourceAddress
from cluster.types import StreamSpec

PriorityName: TypeAlias = Literal["critical", "normal", "background"]


class CameraEntry(Section):
    """A camera as written: a section given here overrides single keys of the global one."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[\w.-]+$",
        description="Unique name of the camera: letters, digits, _ . -",
    )
    source: SourceAddress = Field(
        default=SourceAddress(),
        description="rtsp:// or rtsps:// address, path of a video file, or empty for a camera that pushes over gRPC.",
    )
    priority: PriorityName = Field(
        default="normal",
        description="critical: never late while anything else can give way; background: the first to be shed.",
    )
    sampling: SamplingConfig | None = Field(
        default=None, description="Keys that differ from the global sampling section."
    )
    pruning: PruningConfig | None = Field(default=None, description="Keys that differ from the global pruning section.")
    window: WindowConfig | None = Field(default=None, description="Keys that differ from the global window section.")
    memory: MemoryConfig | None = Field(default=None, description="Keys that differ from the global memory section.")
    source_options: SourceConfig | None = Field(
        default=None, description="Keys that differ from the global source section."
    )
    questions: list[QuestionConfig] | None = Field(
        default=None, description="Questions of this camera, in place of the global ones."
    )
    privacy_masks: list[MaskPolygon] = Field(
        default_factory=list,
        max_length=MAX_MASKS,
        description="Parts of the picture that are black before anything looks at them: each a list of points [x, y], "
        "text like '0,0 0.3,0 0.3,0.5', or a rectangle {x, y, width, height}, in shares of the picture 0..1.",
    )


class CameraConfig(Section):
    """A camera with every setting resolved (global sections, then its own keys)."""

    name: str = Field(description="Unique name of the camera.")
    source: SourceAddress = Field(description="Address or path; empty for a camera that pushes.")
    priority: PriorityName = Field(default="normal", description="critical, normal or background.")
    sampling: SamplingConfig = Field(description="Resolved sampling section.")
    pruning: PruningConfig = Field(description="Resolved pruning section.")
    window: WindowConfig = Field(description="Resolved window section.")
    memory: MemoryConfig = Field(description="Resolved memory section.")
    source_options: SourceConfig = Field(description="Resolved source section.")
    questions: list[QuestionConfig] = Field(description="Resolved questions.")
    privacy_masks: list[MaskPolygon] = Field(default_factory=list, description="Parts of the picture that are black.")

    def stream_spec(self) -> StreamSpec:
        """What the engine must know of this camera."""
        return StreamSpec(
            stream=self.name,
            questions=tuple(question.question() for question in self.questions),
            window_s=self.window.length_s,
            stride_s=self.window.stride_s,
            refresh=self.window.refresh,
            refresh_budget=self.window.refresh_budget,
            static_gate=self.window.static_gate,
            max_idle_s=self.window.max_idle_s,
            patient=self.is_file and not self.source_options.realtime,
            memory=self.memory.spec(),
            priority=self.priority,
        )

    @property
    def is_file(self) -> bool:
        """Whether the source is a video file."""
        return bool(self.source) and self.source.scheme in ("", "file")

    @property
    def is_pushed(self) -> bool:
        """Whether an agent outside sends the packets."""
        return not self.source
