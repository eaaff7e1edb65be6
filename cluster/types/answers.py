"""Windows and their answers."""

from dataclasses import dataclass, field


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
    ``traceparent``, empty unless traced."""

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
