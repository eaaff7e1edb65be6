"""What is asked of a camera: its questions, its window, what it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """A standing yes/no question of one camera."""

    id: str
    text: str
    threshold: float = 0.5
    explain: bool = False


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What a stream remembers of the frames that left its window, and how.

    * ``cap_bytes``: most bytes of KV in any tier; ``target``: share of it that a compression leaves
    * ``keep``: share of each block's tokens that is taken in at all; 1 leaves choosing to the cap
    * ``retention_s``: older frames are forgotten; ``None`` keeps them while there is room
    * ``block_frames``: frames that are put in order together; until then they wait as they came
    * ``compressor``, ``organiser``, ``retriever`` by name, each with its options
    """

    compressor: str = "infinipot_v"
    organiser: str = "resv"
    retriever: str = "wicsum"
    cap_bytes: int = 64 * 2**20
    target: float = 0.75
    keep: float = 1.0
    retention_s: float | None = None
    block_frames: int = 16
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    organiser_options: Mapping[str, Any] = field(default_factory=dict)
    retriever_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What an engine must know of a camera to answer its questions on a sliding window.

    ``patient``: its frames may be held back (a file read as fast as it goes), so that no window is ever dropped.
    ``priority``: a class of :class:`~cluster.types.priority.Priority` by name. ``life``: of the camera, another
    when it was removed and added again: nothing of the old one counts for the new one.
    """

    stream: str
    questions: tuple[Question, ...]
    window_s: float = 40.0
    stride_s: float = 8.0
    refresh: str = "anchors"
    refresh_budget: float | None = None
    static_gate: bool = True
    max_idle_s: float = 60.0
    patient: bool = False
    memory: MemorySpec | None = None
    priority: str = "normal"
    life: str = ""
