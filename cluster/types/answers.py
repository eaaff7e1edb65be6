"""Windows and their answers."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    ``incarnation``: of the stream, new each time its replica opens it: windows are numbered within it;
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
    incarnation: str = ""
