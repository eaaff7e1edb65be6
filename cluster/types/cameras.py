"""Camera state, picture health, specifications and counters."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, Self

from cluster.errors import ConfigError


class Packed:
    """Mixin for slotted dataclasses of at least two fields: pickles them positionally, which halves pickling time.
    Heartbeats carry one such object per camera in both directions."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), attrgetter(*self.__slots__)(self)


NOT_ASKED = "no question is asked now (when)"
"""Status reason of a running camera all of whose questions are outside their schedules."""


class Priority(StrEnum):
    """Priority classes in serving order; ``rank`` is 0 for the most urgent."""

    CRITICAL = "critical"
    NORMAL = "normal"
    BACKGROUND = "background"

    rank: int

    @classmethod
    def of(cls, name: str) -> Self:
        """The class called ``name``. Raises ``ConfigError`` if it is unknown."""
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown priority {name!r}; there are: {', '.join(cls)}") from None


for _rank, _priority in enumerate(Priority):
    # A plain attribute, not a property: read for every queued window.
    _priority.rank = _rank


@dataclass(frozen=True, slots=True)
class Question:
    """A standing yes/no question of one camera."""

    id: str
    text: str
    threshold: float = 0.5
    explain: bool = False


WAITING, INDEX = 8, 4
"""Divisors of a memory's cap. ``WAITING``: maximum share of waiting frames, on the replica's device. ``INDEX``:
approximate share of the index, in host memory (measured: up to 0.24, ``resv`` 0.12; only ``tokens``, which does not
cluster, takes 0.33)."""


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Settings of a stream's memory.

    * ``cap_bytes``: maximum bytes of KV in any tier; ``target``: share of it left after a compression
    * ``keep``: share of each batch's tokens that is stored; at 1 only the cap triggers compression
    * ``retention_s``: age at which frames are deleted; ``None``: only the cap limits them
    * ``block_frames``: number of frames clustered together; fewer wait unclustered
    * ``kv_dtype`` of clustered KV: ``int8``, or the ``model``'s dtype
    * ``compressor``, ``organiser``, ``retriever``: policy names, each with its options
    * ``frame_retrieval``: policy by which new frames read the memory, with its options; ``None``: they do not
    * ``life``: of the camera (see :class:`StreamSpec`); empty matches any
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
        """Stored bytes per token and head: key and value (in int8 with a 2-byte scale each), frame and cell.
        ``width``, ``itemsize``: of the model's keys."""
        return 2 * (width + 2 if self.kv_dtype == "int8" else width * itemsize) + 8


IDLE_SPREAD = 1 / 3


def name_share(name: str) -> float:
    """A camera's share of a spread, in [0, 1): a hash of its name, equal in every process. Not a CRC, which is linear:
    numbered names would share a few values."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A camera's specification for an engine.

    ``fps``: samples per second; ``lookback_s``: how long before its start a window may open. ``patient``: the source
    can be throttled (a file read as fast as possible), so windows are never dropped. ``priority``: name of a
    :class:`Priority`. ``life``: changes when the camera is removed and added again, which invalidates everything stored
    before.
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
        """Seconds for which answers are reused while nothing changes: ``max_idle_s``, reduced by up to ``IDLE_SPREAD``
        by a hash of the name, so that cameras that went quiet together are not recomputed in lockstep."""
        return self.max_idle_s * (1 - IDLE_SPREAD * name_share(self.stream))

    @property
    def own_memory(self) -> MemorySpec | None:
        """Memory settings bound to this camera's ``life``, which rejects the memory of an earlier namesake."""
        return None if self.memory is None else replace(self.memory, life=self.life)


CameraStateName = Literal["waiting", "connecting", "running", "backoff", "error", "ended", "paused"]


@dataclass(frozen=True, slots=True)
class PictureHealth(Packed):
    """Health features of one camera's newest sample (``cluster.decoder.picture_statistics``).

    * ``pts``: of the sample, microseconds on the camera's clock
    * ``changed``: share of cells that differ visibly from the previous sample, 0..1
    * ``still_s``: seconds on the camera's clock since any cell changed, even by noise
    * ``luma``, ``spread``: mean and standard deviation of the picture, grey levels
    * ``strangeness``: 0 for the scene learned so far, 1 for one that has nothing in common with it
    """

    pts: int
    changed: float
    still_s: float
    luma: float
    spread: float
    strangeness: float


@dataclass(frozen=True, slots=True)
class LastAnswer(Packed):
    """The newest answer to one question; ``end``: of its window, microseconds on the camera's clock."""

    question: str
    score: float
    positive: bool
    end: int


@dataclass(frozen=True, slots=True)
class CameraStatus(Packed):
    """One camera as ``cameras list`` shows it. Counters start when the camera is added; unknown sizes are 0.

    ``memory_bytes``, ``memory_frames``: size of its memory; ``memory_oldest_s``: from its oldest frame to its
    newest; ``memory_state``: why part of it is unavailable, else empty. ``rung``: of the quality ladder;
    ``rung_reason``: why it is not the top one. ``windows_per_s``, ``expected_lag_s``: the scheduler's estimates, the
    latter from a window's last frame to its answer; 0 without a cost estimate. ``manager``: the only party that may
    change the camera. ``life``: changes when it is removed and added again. ``decode``: "cuda" or "cpu", with the share
    of frames that lazy decoding skips, or why it skips none; empty until it is known.
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
    """Whether a question asks for more than yes or no, judged by its first word; English only."""
    return _OPEN.match(text) is not None


def answer_remark(question: str, answer: str) -> str:
    """Note for the asker when an open question got a bare yes or no, as from a small model; else empty."""
    if is_open_question(question) and answer.strip(" .").lower() in ("yes", "no"):
        return "the question asks for more than yes or no; this model answered no more than that"
    return ""


def several_cameras(names: Sequence[str]) -> str:
    """Phrase for a list of cameras, shortened since it may hold thousands."""
    return f"camera {names[0]}" if len(names) == 1 else f"{len(names)} cameras ({names[0]}, …)"


HEALTH_SUBJECTS = ("camera-offline", "frozen-image", "covered-lens", "scene-change", "camera-unanswered")


@dataclass(frozen=True, slots=True)
class SourceTest:
    """Result of a source test, pictures as JPEG; see ``TestReply`` in protos/sightline/v1/pictures.proto."""

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
    """One stream of a discovered camera. This class and the next two mirror protos/sightline/v1/pictures.proto."""

    profile: str
    codec: str
    width: int
    height: int
    fps: float
    source: str


@dataclass(frozen=True, slots=True)
class DiscoveredCamera:
    """A device that answered, with its streams, or the error that kept them unknown."""

    address: str
    name: str = ""
    model: str = ""
    streams: tuple[DiscoveredStream, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Progress of a search; ``camera``: the one just finished, if any."""

    probed: int
    total: int
    answered: int = 0
    asked: int = 0
    camera: DiscoveredCamera | None = None
