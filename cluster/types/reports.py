"""What the processes tell the controller once per heartbeat, and what it makes of it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import CameraStateName, LastAnswer, PatchGeometry, PictureHealth
from cluster.types.cameras import Packed


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """A decoder process that has just started. ``instance`` is new with every start, ``name`` is not."""

    name: str
    instance: str
    address: str
    metrics_address: str
    pid: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica that is ready. ``instance`` is new with every start; the directory names it. ``window_tokens``,
    ``waiting_bytes``: what it can hold (:class:`~cluster.control.admission.Holding`)."""

    instance: str
    address: str
    metrics_address: str
    pid: int
    geometry: PatchGeometry
    window_tokens: float = math.inf
    waiting_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class CameraMoment(Packed):
    """A moment of a camera's video: ``pts`` on its own clock (microseconds), ``at_s`` on the reporting process's
    (monotonic seconds)."""

    pts: int
    at_s: float


JUMP_S = 10.0
"""Seconds by which a camera's clock may run ahead of real time before it counts as reset, and its gaps as unknown."""

ROUNDING = 0.05
"""Tolerance of a window's end, as a share of a stride: cameras' clocks are rounded, and frames have a length."""


def gap_s(video_s: float, waited_s: float) -> float:
    """Length of a gap: ``video_s`` by the camera's clock, unless that jumped; then how long was waited. An agent keeps
    packets while nobody takes them, and sends them then."""
    return video_s if 0 <= video_s <= waited_s + JUMP_S else waited_s


@dataclass(frozen=True, slots=True)
class AccountedSpan(Packed):
    """Part of a camera's video whose windows the reporting process has all answered or counted."""

    begin: CameraMoment
    end: CameraMoment


@dataclass(frozen=True, slots=True)
class CameraReport(Packed):
    """One camera as its decoder sees it. ``life``: see :class:`~cluster.types.StreamSpec`.

    Keys of ``counts`` are counter fields of :class:`~cluster.types.CameraStatus`. They count since ``run`` began, which
    is another one each time that a decoder starts the camera. ``decode``: "cuda" or "cpu".

    ``accounted``: from the run's first frame on, less what is in flight to the replica. ``idle``: no window is due,
    since nothing is asked or the video has ended. ``now_s``: monotonic time of the report.
    """

    camera: str
    state: CameraStateName
    reason: str = ""
    retry_in_s: float = 0.0
    codec: str = ""
    width: int = 0
    height: int = 0
    cue: str = ""
    last_frame_age_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    picture: PictureHealth | None = None
    life: str = ""
    run: str = ""
    decode: str = ""
    now_s: float = 0.0
    accounted: AccountedSpan | None = None
    idle: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its pictures, native pixels; 0 before the first."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class StreamReport(Packed):
    """One camera as its replica sees it; ``latency_s`` of its last window. ``counts`` are since ``run`` began, which
    goes on when the camera comes back to the same process; ``computed``: ``tokens_full`` and ``tokens_kept`` since then
    of windows that were not gated.

    ``accounted``: since the camera was opened, and ``accounted_before`` the last time that it was; ``now_s``: monotonic
    time of the report.

    ``memory_*``: as of now, and like the fields of the same names of :class:`~cluster.types.CameraStatus`.
    """

    camera: str
    latency_s: float = 0.0
    last_answers: tuple[LastAnswer, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_frames: int = 0
    memory_oldest_s: float = 0.0
    memory_state: str = ""
    life: str = ""
    run: str = ""
    now_s: float = 0.0
    accounted: AccountedSpan | None = None
    accounted_before: AccountedSpan | None = None


@dataclass(frozen=True, slots=True)
class WindowCounters:
    """Windows of one camera since it came to a replica; ``closed``: those counted here and those that wait; ``end``: of
    the last that closed since the windows began, on the camera's clock in microseconds."""

    done: int = 0
    gated: int = 0
    dropped: int = 0
    closed: int = 0
    end: int | None = None

    @property
    def settled(self) -> int:
        """Windows that are answered or dropped."""
        return self.done + self.gated + self.dropped


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Result of a hand-over: ``saved``, the window can be continued elsewhere; ``counters``: the last ones."""

    saved: bool
    counters: WindowCounters


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How full a replica is. ``busy_s``: seconds that it spent on windows and questions since it started, in ``steps``
    that computed ``windows``; ``backlog_s``: seconds of windows that wait; ``held``: cameras whose windows it holds;
    ``trouble``: why its engine answers nothing just now, empty while it does; ``asked_s``: of ``busy_s``, those on
    questions, which take whatever time windows leave; ``memory``: tiers that do not work, and why."""

    busy_s: float
    backlog_s: float
    held: int = 0
    steps: int = 0
    windows: int = 0
    trouble: str = ""
    asked_s: float = 0.0
    memory: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as an operator sees it.

    * ``draining``: it takes no cameras; one that holds none may be stopped without a loss
    * ``cameras``: placed on it, ``lowered`` of them below full quality; ``held``: whose windows it holds
    * ``utilisation``: work over capacity, what waits included; 0 where nobody knows what a window costs, and so is
      ``expected_lag_s``, from a window's last frame to its answer
    * ``backlog_s``: seconds of windows that wait
    * ``trouble``: why its engine answers nothing just now; empty while it does
    * ``memory``: tiers of its memory that do not work, and why; empty while all do
    """

    name: str
    address: str = ""
    draining: bool = False
    cameras: int = 0
    held: int = 0
    lowered: int = 0
    utilisation: float = 0.0
    expected_lag_s: float = 0.0
    backlog_s: float = 0.0
    trouble: str = ""
    memory: str = ""


@dataclass(frozen=True, slots=True)
class DecoderNumbers:
    """Decoders that run, and that the load needs, which is from ``least`` to ``most``."""

    running: int
    wanted: int
    least: int
    most: int


OVER = "over"
MOST_RUNS = 32
"""Runs of one camera that are told apart: one that has not been heard of while so many others were is over."""


class Totals:
    """Sums counters of one camera over its runs, each of which counts from zero.

    A run is told of again and again, and by whom does not matter: a process that was given up and joins again goes on
    with the same one, and what it says replaces what it said before. ``runs``: by the longest not heard of, before them
    the sum of those that are over.
    """

    def __init__(self, runs: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.runs: dict[str, dict[str, int]] = {OVER: {}} | {run: dict(counts) for run, counts in (runs or {}).items()}

    def update(self, run: str, counts: Mapping[str, int]) -> None:
        """What a run has counted so far."""
        self.runs.pop(run, None)
        self.runs[run] = dict(counts)
        if len(self.runs) > 1 + MOST_RUNS:
            self.end(list(self.runs)[1])

    def end(self, run: str) -> None:
        """The run is over, and is not told of again; what it counted stays."""
        over = Counter(self.runs[OVER])
        over.update(self.runs.pop(run, {}))
        self.runs[OVER] = dict(over)

    def add(self, counts: Mapping[str, int]) -> None:
        """Add what belongs to no run."""
        self.runs[OVER] = dict(Counter(self.runs[OVER]) + Counter(counts))

    def counts(self) -> dict[str, int]:
        # Without a Counter, which takes several times as long: this is asked of every camera once a second.
        total: dict[str, int] = {}
        for counts in self.runs.values():
            for key, count in counts.items():
                total[key] = total.get(key, 0) + count
        return total
