"""Windows, free questions about the past and their answers; memory status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SAYS_YES = 0.5
"""P(yes) from which the answer to a free question is yes."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window ready to be answered: frames with ``start <= pts < end``, opening at the last complete frame at or
    before ``start``. ``arrived_s``: monotonic time of its last frame's arrival."""

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
    """Seconds spent on one window; ``latency_s``: from the arrival of its last frame to its answer, queueing
    included."""

    queue_s: float = 0.0
    vision_s: float = 0.0
    plan_s: float = 0.0
    llm_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer on one window. ``score``: P(yes) in 0..1; ``gated``: the last answer, still valid;
    ``incarnation``: changes each time a replica opens the stream; windows are numbered within it; ``trace``: W3C
    ``traceparent``, empty unless traced; ``memory_shift``: microseconds from the camera's clock to the memory's;
    ``age_s``: seconds from its being given until it came here."""

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
        """Seconds from the arrival of its last frame until it came here."""
        return self.timing.latency_s + self.age_s


@dataclass(frozen=True, slots=True)
class AskSpec:
    """A free question about what a camera has seen.

    * ``turns``: (question, answer) pairs of the conversation so far
    * ``since_s``: seconds before the newest frame; older ones are left out; ``None`` asks about everything
    * ``max_new_tokens``: longest answer
    * ``span``: only frames with ``start <= t < end`` on the memory's clock, and all of them
    * ``standing``: asked as the standing yes/no questions are; the result has ``yes`` and no text
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
    """A time span that an answer is based on: ``[start, end)`` in microseconds of the memory's clock, which is the
    camera's but goes on where that restarts, and its share of the answer's attention to pictures."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class AskResult:
    """An answer with its statistics; ``text`` is the whole answer.

    * ``moments``: heaviest first; ``newest``: the newest frame the answer may know of, ``oldest`` the oldest
    * ``tokens_held``, ``tokens_read``: of the memory, all layers and heads; ``bytes_read`` from the tiers
    * ``first_token_s``: from the start of the computation; ``degraded``: part of the memory was out of reach
    * ``prompt_tokens``, ``answer_tokens``: of the text asked, what was said before included, and of the answer
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

    @property
    def says_yes(self) -> bool:
        return self.yes >= SAYS_YES


@dataclass(frozen=True, slots=True)
class DeletedMemory:
    """Frames and bytes deleted from a camera's memory."""

    frames: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Contents and health of one camera's memory.

    * ``oldest``, ``newest``: of the stored frames, microseconds of the memory's clock; 0 while there are none
    * ``tokens``: over all layers and heads; ``tier_bytes``: of KV, by tier, ``recent`` for frames in no tier yet
    * ``counts``: counters so far; ``tier_states``: by tier, empty while it works, else why not
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
