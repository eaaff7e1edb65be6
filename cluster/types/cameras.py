"""Camera state, picture health, specifications and counters."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, Self

from cluster.errors import ConfigError


class Packed:
    """A dataclass with slots and at least two fields that is pickled as these in order, in half the time: processes
    tell the controller of every camera once a heartbeat, and are told."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), attrgetter(*self.__slots__)(self)


NOT_ASKED = "no question is asked now (when)"
"""Reason of a running camera whose questions are all outside their schedules."""


class Priority(StrEnum):
    """Priority classes in serving order; ``rank`` is 0 for the most urgent."""

    CRITICAL = "critical"
    NORMAL = "normal"
    BACKGROUND = "background"

    rank: int

    @classmethod
    def of(cls, name: str) -> Self:
        """The class called ``name``. Raises ``ConfigError``: there is none of that name."""
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown priority {name!r}; there are: {', '.join(cls)}") from None


for _rank, _priority in enumerate(Priority):
    # Not a property: every window that waits is asked for it.
    _priority.rank = _rank


@dataclass(frozen=True, slots=True)
class Question:
    """A standing yes/no question of one camera."""

    id: str
    text: str
    threshold: float = 0.5
    explain: bool = False


WAITING, INDEX = 8, 4
"""Divisors of a memory's cap: the most that its waiting frames take, on the replica's device, and about what its index
takes in the host's memory (the organisers' largest took 0.24 of it, resv 0.12; 0.33 only ``tokens``, which groups
nothing)."""


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Settings of a stream's memory.

    * ``cap_bytes``: most bytes of KV in any tier; ``target``: share of it left after a compression
    * ``keep``: share of each batch's tokens that is stored at all; 1 leaves selection to the cap
    * ``retention_s``: older frames are deleted; ``None`` keeps them while there is room
    * ``block_frames``: frames that are clustered together; until then they wait unclustered
    * ``kv_dtype`` of what is clustered: ``int8``, or the ``model``'s own
    * ``compressor``, ``organiser``, ``retriever`` by name, each with its options
    * ``frame_retrieval``: policy by which new frames read the memory, with its options; ``None``: they do not
    * ``life``: of the camera (:class:`StreamSpec`); empty: whichever has its name
    """

    compressor: str = "novelty"
    organiser: str = "resv"
    retriever: str = "wicsum"
    cap_bytes: int = 64 * 2**20
    target: float = 0.75
    keep: float = 1.0
    retention_s: float | None = None
    block_frames: int = 16
    kv_dtype: Literal["int8", "model"] = "int8"
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    organiser_options: Mapping[str, Any] = field(default_factory=dict)
    retriever_options: Mapping[str, Any] = field(default_factory=dict)
    frame_retrieval: str | None = None
    frame_retrieval_options: Mapping[str, Any] = field(default_factory=dict)
    life: str = ""

    def token_bytes(self, width: int, itemsize: int) -> int:
        """Stored bytes of one token of one head: key and value (int8 with a scale of two bytes each), frame and cell.
        ``width``, ``itemsize``: of the model's keys."""
        return 2 * (width + 2 if self.kv_dtype == "int8" else width * itemsize) + 8


IDLE_SPREAD = 1 / 3


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A camera's specification for an engine.

    ``fps``: samples a second; ``lookback_s``: longest time before its start at which a window may open. ``patient``:
    frames may be held back (a file read as fast as possible), so no window is ever dropped. ``priority``: name of a
    :class:`~cluster.types.cameras.Priority`. ``life``: changes when the camera is removed and added again, which
    invalidates everything stored before.
    """

    stream: str
    questions: tuple[Question, ...]
    window_s: float = 40.0
    stride_s: float = 8.0
    fps: float = 2.0
    lookback_s: float = 0.0
    refresh: str = "anchors"
    refresh_budget: float | None = None
    static_gate: bool = True
    max_idle_s: float = 60.0
    patient: bool = False
    memory: MemorySpec | None = None
    priority: str = "normal"
    life: str = ""

    @property
    def idle_s(self) -> float:
        """Seconds for which answers stand while nothing changes: by the camera's name ``max_idle_s`` or up to
        ``IDLE_SPREAD`` less, so that cameras that became quiet together are not computed together for ever after."""
        return self.max_idle_s * (1 - IDLE_SPREAD * zlib.crc32(self.stream.encode()) / 2**32)

    @property
    def own_memory(self) -> MemorySpec | None:
        """Settings of this camera's memory, not that of another of its name."""
        return None if self.memory is None else replace(self.memory, life=self.life)


CameraStateName = Literal["waiting", "connecting", "running", "backoff", "error", "ended", "paused"]


@dataclass(frozen=True, slots=True)
class PictureHealth(Packed):
    """Health features of one camera's newest sample (``cluster.decoder.picture_statistics``).

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
class LastAnswer(Packed):
    """The newest answer to one question; ``end`` is the window's end in the camera's microseconds."""

    question: str
    score: float
    positive: bool
    end: int


@dataclass(frozen=True, slots=True)
class CameraStatus(Packed):
    """One camera as ``cameras list`` shows it. Counters start with the camera; 0 for a size not known yet.

    ``memory_bytes``, ``memory_frames``: what it remembers now; ``memory_oldest_s``: how long ago the oldest of it was;
    ``memory_state``: empty while all of it is in reach, else why not. ``rung``: of the quality ladder, ``rung_reason``
    why it is not the first. ``windows_per_s``, ``expected_lag_s``: what the scheduler counts with, the latter from a
    window's last frame to its answer; 0 where nobody knows what a window costs. ``manager``: who alone may change it
    (``cluster.control.cameras.managed``). ``life``: another when it was removed and added again under its name.
    ``decode``: where it is decoded, "cuda" or "cpu", with lazy decoding what that spares; empty before it is.
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
    life: str = ""
    decode: str = ""


_OPEN = re.compile(
    r"\W*(what|which|who|whom|whose|why|how|describe|list|count|explain|tell|name|summari[sz]e)\b", re.IGNORECASE
)


def is_open_question(text: str) -> bool:
    """Whether an English question asks for more than yes or no, by its first word; other languages are not noticed."""
    return _OPEN.match(text) is not None


def remark_on(question: str, answer: str) -> str:
    """What to tell whoever asked for more than a small model answers; empty where there is nothing to tell."""
    if is_open_question(question) and answer.strip(" .").lower() in ("yes", "no"):
        return "the question asks for more than yes or no; this model answered no more than that"
    return ""


def several_cameras(names: Sequence[str]) -> str:
    """Cameras, of which there may be thousands, in a sentence."""
    return f"camera {names[0]}" if len(names) == 1 else f"{len(names)} cameras ({names[0]}, …)"


HEALTH_SUBJECTS = ("camera-offline", "frozen-image", "covered-lens", "scene-change", "camera-unanswered")


@dataclass(frozen=True, slots=True)
class SourceTest:
    """What a source sends, pictures as JPEG (JSON: base64); see ``TestReply`` in protos/sightline/v1/pictures.proto."""

    codec: str
    width: int
    height: int
    fps: float
    gop_pictures: int
    gop_s: float
    kbit_s: float
    cue: str
    decode: str
    first_picture_s: float
    decode_errors: int
    kept: float
    jpeg: bytes
    kept_jpeg: bytes


@dataclass(frozen=True, slots=True)
class DiscoveredStream:
    """See protos/sightline/v1/pictures.proto, also the next two."""

    profile: str
    codec: str
    width: int
    height: int
    fps: float
    source: str


@dataclass(frozen=True, slots=True)
class DiscoveredCamera:
    """A device that answered, its streams, or why none is known."""

    address: str
    name: str = ""
    model: str = ""
    streams: tuple[DiscoveredStream, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Progress, with the camera that is done, if any."""

    probed: int
    total: int
    answered: int = 0
    asked: int = 0
    camera: DiscoveredCamera | None = None
