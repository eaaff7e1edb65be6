"""Windows of a step: work, results, statistics, and the static gate, which answers windows without computing them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.engine.window.stream import LastWindow, Stream, StreamFrame
from cluster.engine.window.windows import FIRST_WINDOWS
from cluster.memory.frame_retrieval import FrameReads
from cluster.types import MICROSECONDS, Timing, TokenCount, WindowRequest


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Work done for one computed window. FLOPs as the model counts them (multiply-add = 2).

    ``computed``: rows through the language model; ``attended``: pairs of a row and a slot it attended to; both averaged
    over layers (a narrowing policy computes fewer rows in deeper ones). ``omitted``: of both, what a layer only
    projects to keys and values: the last one all but each question's last row, and CacheBlend's probe what is dropped
    there. ``decoded``: explanation tokens, which are not in ``llm_flops``. ``reads``: what the window's frames read of
    the past, which ``attended`` includes.
    """

    stream: str
    window: int
    tokens: TokenCount
    timing: Timing
    computed: float
    attended: float
    omitted: tuple[float, float]
    tower_flops: int
    llm_flops: int
    decoded: int
    reads: FrameReads


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one ``step``: computed windows, and the number of gated and of expired ones."""

    windows: tuple[WindowStats, ...] = ()
    gated: int = 0
    expired: int = 0

    @property
    def tower_flops(self) -> int:
        return sum(window.tower_flops for window in self.windows)

    @property
    def llm_flops(self) -> int:
        return sum(window.llm_flops for window in self.windows)


@dataclass(slots=True, eq=False)
class WindowWork:
    """A window to compute in a step."""

    stream: Stream
    request: WindowRequest
    frames: list[StreamFrame]


@dataclass(frozen=True, slots=True)
class ComputedWindow:
    """Result of one :class:`WindowWork`.

    * ``scores``, ``texts``: one per question; a text is ``None`` if no explanation was requested
    * ``rows``: ``computed`` of :class:`WindowStats`; ``attended``, ``decoded``, ``reads``, ``omitted``: the same there
    """

    tokens: TokenCount
    scores: Sequence[float]
    texts: Sequence[str | None]
    rows: float
    attended: float
    decoded: int = 0
    reads: FrameReads = field(default_factory=FrameReads)
    omitted: tuple[float, float] = (0, 0)


def last_valid_answers(stream: Stream, end: int) -> LastWindow | None:
    """Static gate: the last window if, by the frames so far, its answers hold for a window ending at ``end``, else
    ``None``.

    They hold while no frame since that window's end shows change (anchors included), the questions are the same, and
    at most ``idle_s`` of camera time has passed.
    """
    spec, last = stream.spec, stream.last
    if not spec.static_gate or last is None or stream.windows_since_fresh < FIRST_WINDOWS:
        return None
    if last.questions != spec.questions or end - last.end > spec.idle_s * MICROSECONDS:
        return None
    if stream.last_motion_dropped is not None and stream.last_motion_dropped >= last.end:
        return None
    return None if any(frame.moving for frame in stream.frames if last.end <= frame.window_time < end) else last
