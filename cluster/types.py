"""The types that cross a border between two packages (docs/architecture.md, "The types that cross a border").

All are frozen, slotted dataclasses over numpy arrays; nothing here imports torch, Ray or PyAV, so
that a decoder process stays small. Shapes are named in the docstrings; times are integer
microseconds of the camera's own clock (``pts``) unless a name ends in ``_s`` (seconds, float).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

BoolGrid = npt.NDArray[np.bool_]
FloatGrid = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """How one camera's frames are cut into patches: ``rows x cols`` patches of ``patch`` pixels.

    ``merge x merge`` patches make one visual token (a *group*); ``temporal`` samples make one frame.
    """

    rows: int
    cols: int
    patch: int
    merge: int
    temporal: int

    @property
    def height(self) -> int:
        """Pixels, ``rows * patch``."""
        return self.rows * self.patch

    @property
    def width(self) -> int:
        """Pixels, ``cols * patch``."""
        return self.cols * self.patch

    @property
    def group_rows(self) -> int:
        return self.rows // self.merge

    @property
    def group_cols(self) -> int:
        return self.cols // self.merge

    @property
    def tokens(self) -> int:
        """Visual tokens of one frame with nothing pruned."""
        return self.group_rows * self.group_cols


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """What a model family tells the decoders about its patches; says nothing else about the model.

    ``square`` set: every camera is resized to ``square x square`` pixels (InternVL's tile).
    Otherwise the grid follows the camera's shape within ``max_pixels`` (Qwen's native resolution).
    """

    patch: int
    merge: int
    temporal: int
    max_pixels: int = 448 * 448
    min_pixels: int = 56 * 56
    square: int | None = None

    def grid(self, width: int, height: int) -> PatchGrid:
        """The patch grid for a camera of ``width x height`` native pixels.

        Raises:
            ValueError: a side is not positive.
        """
        if width <= 0 or height <= 0:
            raise ValueError(f"a camera's picture must have positive sides, not {width}x{height}")
        unit = self.patch * self.merge
        if self.square is not None:
            side = self.square // self.patch
            return PatchGrid(side, side, self.patch, self.merge, self.temporal)
        scale = 1.0
        if width * height > self.max_pixels:
            scale = math.sqrt(self.max_pixels / (width * height))
        elif width * height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
        rows = max(1, math.floor(height * scale / unit + 1e-6)) * self.merge
        cols = max(1, math.floor(width * scale / unit + 1e-6)) * self.merge
        return PatchGrid(rows, cols, self.patch, self.merge, self.temporal)


@dataclass(frozen=True, slots=True)
class EncodedPacket:
    """One encoded packet as it left the source. ``data`` is Annex-B for H.264/HEVC, or the container's own form.

    ``sequence`` counts packets of one session from 0 without holes; a hole is a gap in transport.
    """

    codec: str
    data: bytes
    pts: int | None
    dts: int | None
    keyframe: bool
    sequence: int


@dataclass(frozen=True, slots=True)
class ChangeGrid:
    """What the codec saw change since the last sample, on the patch grid.

    All planes are ``[rows, cols]`` float32.

    * ``max_motion``: largest single displacement of any block over the cell, native pixels per frame
    * ``net_motion``: length of the displacement summed over the skipped frames, native pixels
    * ``intra``: largest fraction of the cell covered by intra or uncovered blocks in any inter frame, 0..1
    * ``luma``: mean absolute luma difference to the previous sample, grey levels, global gain removed
    """

    max_motion: FloatGrid
    net_motion: FloatGrid
    intra: FloatGrid
    luma: FloatGrid
    cue: Literal["vectors+luma", "luma"]
    frames: int


@dataclass(frozen=True, slots=True)
class SampledFrame:
    """One sampled picture, resized to the patch grid, with what changed since the last one (codec -> vision).

    ``rgb`` is ``[height, width, 3]`` uint8, ``luma`` ``[height, width]`` uint8, both on the grid's pixels.
    ``fresh`` is true when nothing before this sample may be relied on: stream start, or recovery after a gap,
    corruption, a resolution change or a restart. ``hidden`` ``[rows, cols]``: cells that privacy masks cover as a
    whole and that are black; ``None`` where there are none.
    """

    index: int
    pts: int
    anchor: bool
    fresh: bool
    grid: PatchGrid
    rgb: UInt8Array
    luma: UInt8Array
    change: ChangeGrid
    hidden: BoolGrid | None = None


@dataclass(frozen=True, slots=True)
class FrameTrace:
    """The trace that a frame belongs to: ``parent`` as W3C's ``traceparent``, ``sent_s`` Unix seconds when it left."""

    parent: str
    sent_s: float


@dataclass(frozen=True, slots=True)
class FrameSample:
    """What travels from a decoder to the replica that owns the stream: the kept patches and nothing else.

    * ``mask`` ``[rows, cols]`` bool, whole merge groups
    * ``patches`` ``[n, T, C, p, p]`` uint8 (RGB), ``n = mask.sum()``, in **group order**: groups row-major over the
      merged grid, then the ``merge x merge`` patches of a group row-major
    * ``pts``: of the first of its ``T`` samples; ``duration``: microseconds it stands for (T / fps)
    * ``activity``: share of groups the codec saw change, before anchors and dilation, 0..1
    * ``fresh``: see :class:`SampledFrame`; the replica forgets the stream's window when it is set
    * ``windows_dropped``: windows that the decoder has counted as dropped until this frame, which it did not send
    * ``trace``: ``None`` for all but the few that are traced
    """

    stream: str
    index: int
    pts: int
    duration: int
    anchor: bool
    fresh: bool
    grid: PatchGrid
    mask: BoolGrid
    patches: UInt8Array
    activity: float
    digest: str
    windows_dropped: int = 0
    trace: FrameTrace | None = None

    @property
    def tokens(self) -> int:
        """Visual tokens this frame costs."""
        return len(self.patches) // (self.grid.merge**2)

    @property
    def complete(self) -> bool:
        """Nothing pruned: a window may open here, since every cell of the scene is present."""
        return len(self.patches) == self.grid.rows * self.grid.cols

    @property
    def end(self) -> int:
        return self.pts + self.duration


def mask_digest(mask: BoolGrid, index: int, pts: int) -> str:
    """Content key of one frame's kept cells: a cached value made under another mask must never match."""
    hasher = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=12)
    hasher.update(f"{mask.shape}{index}:{pts}".encode())
    return hasher.hexdigest()


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
    ``priority``: a class of :class:`~cluster.scheduling.priority.Priority` by name.
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


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window that is ready to be answered. ``start <= pts < end`` of its frames, except that it opens at the last
    complete frame at or before ``start``. ``arrived_s``: monotonic clock when its last frame came."""

    stream: str
    window: int
    start: int
    end: int
    arrived_s: float


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of one window. ``full``: with nothing pruned; ``kept = reused + refreshed + new``; ``query``: questions.

    ``computed`` counts what went through the language model for this window; ``encoded`` the visual
    tokens that went through the tower for it.
    """

    full: int
    kept: int
    reused: int
    refreshed: int
    new: int
    query: int
    encoded: int

    @property
    def computed(self) -> int:
        return self.refreshed + self.new + self.query


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds spent on one window; ``latency_s``: arrival of its last frame to its answer, queueing included."""

    queue_s: float = 0.0
    vision_s: float = 0.0
    plan_s: float = 0.0
    llm_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One question answered on one window. ``score`` is P(yes) in 0..1; ``gated``: the last answer still stands;
    ``trace``: the window's trace as W3C's ``traceparent``, empty for all but the few that are traced."""

    stream: str
    window: int
    start: int
    end: int
    question: str
    score: float
    positive: bool
    text: str
    gated: bool
    tokens: TokenCount
    timing: Timing = field(default_factory=Timing)
    trace: str = ""


@dataclass(frozen=True, slots=True)
class AskSpec:
    """A free question about what a camera has seen.

    * ``turns``: (question, answer) pairs of the conversation so far
    * ``since_s``: seconds before the newest frame; older ones are left out; ``None`` asks about everything
    * ``max_new_tokens``: longest answer
    """

    stream: str
    text: str
    turns: tuple[tuple[str, str], ...] = ()
    since_s: float | None = None
    max_new_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of time that an answer rests on: ``[start, end)`` in the camera's microseconds, and its share of the
    attention that the answer gave to pictures."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class AskResult:
    """How an answer came about; ``text`` is the whole of it.

    * ``moments``: heaviest first; ``newest``: the newest frame the answer may know of, ``oldest`` the oldest
    * ``tokens_held``, ``tokens_read``: of the memory, all layers and heads; ``bytes_read`` from the tiers
    * ``first_token_s``: from the start of the computation; ``degraded``: part of the memory was out of reach
    * ``prompt_tokens``, ``answer_tokens``: of the text asked, what was said before included, and of the answer
    """

    stream: str
    text: str
    moments: tuple[Moment, ...]
    oldest: int
    newest: int
    tokens_held: int
    tokens_read: int
    bytes_read: int
    first_token_s: float
    total_s: float
    degraded: bool = False
    prompt_tokens: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a camera no longer remembers."""

    frames: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What one camera remembers.

    * ``oldest``, ``newest``: camera's microseconds of the frames of which anything is held; 0 while there are none
    * ``tokens``: of all layers and heads; ``tier_bytes``: of KV, by tier, ``recent`` for what is in no tier yet
    * ``counts``: what happened so far; ``tier_states``: by tier, empty while it works, else why not
    """

    camera: str
    frames: int
    tokens: int
    oldest: int
    newest: int
    cap_bytes: int
    tier_bytes: Mapping[str, int]
    compressor: str
    organiser: str
    retriever: str
    counts: Mapping[str, int] = field(default_factory=dict)
    tier_states: Mapping[str, str] = field(default_factory=dict)


CameraStateName = Literal["waiting", "connecting", "running", "backoff", "error", "ended"]


@dataclass(frozen=True, slots=True)
class PictureHealth:
    """What one camera's newest sample says of the camera itself (``cluster.vision.picture_watch``).

    * ``pts``: of the sample, the camera's microseconds
    * ``changed``: share of cells that differ visibly from the last sample, 0..1
    * ``still_s``: seconds of the camera's clock since any cell changed at all, were it by noise
    * ``luma``, ``spread``: mean and standard deviation of the picture, grey levels
    * ``strangeness``: 0 for the scene it has seen so far, 1 for one that has nothing in common with it
    """

    pts: int
    changed: float
    still_s: float
    luma: float
    spread: float
    strangeness: float


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """The newest answer to one question; ``end`` is the window's end in the camera's microseconds."""

    question: str
    score: float
    positive: bool
    end: int


@dataclass(frozen=True, slots=True)
class CameraStatus:
    """One camera as ``cameras list`` shows it. Counters start with the camera; 0 for a size not known yet.

    ``memory_bytes``, ``memory_frames``: what it remembers now; ``memory_oldest_s``: how long ago the oldest of it was;
    ``memory_state``: empty while all of it is in reach, else why not. ``rung``: of the quality ladder, ``rung_reason``
    why it is not the first. ``windows_per_s``, ``expected_lag_s``: what the scheduler counts with, the latter from a
    window's last frame to its answer; 0 where nobody knows what a window costs. ``manager``: who alone may change it
    (``cluster.cameras.managers``).
    """

    name: str
    source: str = ""
    state: CameraStateName = "waiting"
    reason: str = ""
    retry_in_s: float = 0.0
    codec: str = ""
    width: int = 0
    height: int = 0
    cue: str = ""
    last_frame_age_s: float = 0.0
    decoder: str = ""
    replica: str = ""
    frames_decoded: int = 0
    frames_sampled: int = 0
    decode_errors: int = 0
    gaps: int = 0
    windows_done: int = 0
    windows_gated: int = 0
    windows_dropped: int = 0
    windows_lost: int = 0
    tokens_full: int = 0
    tokens_kept: int = 0
    tokens_computed: int = 0
    latency_s: float = 0.0
    memory_bytes: int = 0
    memory_frames: int = 0
    memory_oldest_s: float = 0.0
    memory_state: str = ""
    last_answers: tuple[LastAnswer, ...] = ()
    priority: str = "normal"
    rung: str = "full"
    rung_reason: str = ""
    windows_per_s: float = 0.0
    expected_lag_s: float = 0.0
    manager: str = ""
