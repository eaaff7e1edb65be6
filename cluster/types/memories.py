"""Free questions about the past, and what a camera remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class DeletedMemory:
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
