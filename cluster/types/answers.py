"""Window requests, answers, free questions about the past, and memory status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

YES_THRESHOLD = 0.5
"""P(yes) at or above which the answer to a free question counts as yes."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window ready to be computed: frames with ``start <= pts < end``, opening at the last complete frame at or
    before ``start``. ``arrived_s``: arrival of its last frame, monotonic seconds."""

    stream: str
    window: int
    start: int
    end: int
    arrived_s: float


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Token counts of one window.

    ``full``: with nothing pruned; ``kept = reused + refreshed + new``; ``query``: of the questions; ``computed``:
    through the language model; ``encoded``: visual tokens through the vision tower.
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
    """Seconds spent on one window; ``latency_s``: from its last frame's arrival to its answer, including queueing."""

    queue_s: float = 0.0
    vision_s: float = 0.0
    plan_s: float = 0.0
    llm_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer on one window.

    ``score``: P(yes), 0..1; ``gated``: the previous answer, repeated because nothing changed; ``incarnation``: changes
    each time a replica opens the stream, and scopes the window numbers; ``trace``: W3C ``traceparent``, empty unless
    traced; ``memory_shift``: offset of the memory's clock from the camera's, microseconds; ``age_s``: seconds the
    answer took to reach this process.
    """

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
    incarnation: str = ""
    memory_shift: int = 0
    age_s: float = field(default=0.0, compare=False)

    @property
    def lag_s(self) -> float:
        """Seconds from the arrival of the window's last frame until the answer reached this process."""
        return self.timing.latency_s + self.age_s


@dataclass(frozen=True, slots=True)
class AskSpec:
    """A free question about what a camera has seen.

    * ``turns``: (question, answer) pairs of the conversation so far
    * ``since_s``: look-back from the newest frame, in seconds; ``None``: all frames
    * ``max_new_tokens``: maximum length of the answer
    * ``span``: read exactly the frames with ``start <= t < end`` on the memory's clock, without retrieval
    * ``standing``: prompt as for a standing yes/no question; the result has ``yes`` but no text
    """

    stream: str
    text: str
    turns: tuple[tuple[str, str], ...] = ()
    since_s: float | None = None
    max_new_tokens: int = 48
    span: tuple[int, int] | None = None
    standing: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A time span an answer is based on: ``[start, end)`` in microseconds on the memory's clock, which follows the
    camera's but continues across its restarts, and ``weight``, its share of the answer's attention to pictures."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class AskResult:
    """Complete answer to a free question, with statistics.

    * ``moments``: heaviest first; ``oldest``, ``newest``: times of the oldest and newest frame available to the answer
    * ``newest_age_s``: seconds since the newest one was seen
    * ``tokens_held``, ``tokens_read``: memory tokens over all layers and heads; ``bytes_read``: from the tiers
    * ``first_token_s``: from the start of the computation; ``degraded``: part of the memory was unavailable
    * ``prompt_tokens``: text tokens of the question and the previous turns; ``answer_tokens``: of the answer
    * ``yes``: P(yes) at the answer's first token
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
    yes: float = 0.0
    newest_age_s: float = 0.0

    @property
    def says_yes(self) -> bool:
        return self.yes >= YES_THRESHOLD


@dataclass(frozen=True, slots=True)
class DeletedMemory:
    """Frames and bytes deleted from a camera's memory."""

    frames: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Contents and health of one camera's memory.

    * ``oldest``, ``newest``: times of the stored frames, microseconds on the memory's clock; 0 if it is empty
    * ``tokens``: over all layers and heads; ``tier_bytes``: KV bytes by tier, ``recent`` for frames not in a tier yet
    * ``counts``: of frames and tokens, by what happened to them; ``tier_states``: error by tier, empty if none
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
