"""Heartbeat reports from decoders and replicas to the controller, and the statuses derived from them."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import CameraStateName, LastAnswer, PatchGeometry, PictureHealth
from cluster.types.cameras import Packed


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """Registration of a started decoder process. ``instance`` is new with every start, ``name`` is stable."""

    name: str
    instance: str
    address: str
    metrics_address: str
    pid: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Registration of a ready replica. ``instance`` is new with every start; the directory assigns the name.
    ``window_tokens``, ``waiting_bytes``: its capacity (:class:`~cluster.control.admission.MemoryDemand`)."""

    instance: str
    address: str
    metrics_address: str
    pid: int
    geometry: PatchGeometry
    window_tokens: float = math.inf
    waiting_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class CameraMoment(Packed):
    """A moment in a camera's video: ``pts`` on its clock (microseconds), ``at_s`` on the reporting process's (monotonic
    seconds)."""

    pts: int
    at_s: float


CLOCK_JUMP_S = 10.0
"""Seconds a camera's clock may run ahead of arrival times before it counts as reset and its gaps as unknown."""

ROUNDING = 0.05
"""Tolerance when counting strides, as a share of one: cameras round their clocks, and frames have a duration."""


def gap_s(video_s: float, waited_s: float) -> float:
    """Length of a gap in seconds: ``video_s``, by the camera's clock, unless that jumped; then the waiting time. A gap
    shorter than the wait is no jump: edge agents buffer packets while disconnected."""
    return video_s if 0 <= video_s <= waited_s + CLOCK_JUMP_S else waited_s


@dataclass(frozen=True, slots=True)
class AccountedSpan(Packed):
    """Part of a camera's video for which the reporting process has answered or counted every window."""

    begin: CameraMoment
    end: CameraMoment


@dataclass(frozen=True, slots=True)
class CameraReport(Packed):
    """One camera as its decoder sees it. ``life``: see :class:`~cluster.types.StreamSpec`.

    Keys of ``counts`` are counter fields of :class:`~cluster.types.CameraStatus`. They count from the start of ``run``,
    which is new each time a decoder starts the camera. ``decode``: see :class:`~cluster.types.CameraStatus`.

    ``accounted``: from the run's first frame, excluding frames in flight to the replica. ``idle``: no window is due,
    since no question is asked or the video has ended. ``now_s``: monotonic time of the report.
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
        """Width and height of the camera's pictures, native pixels; 0 before the first."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class StreamReport(Packed):
    """One camera as its replica sees it; ``latency_s``: of its last window. ``counts`` start with ``run``, which
    continues when the camera returns to the same process; ``computed``: ``tokens_full`` and ``tokens_kept`` of windows
    that were not gated, and how many of these followed a gated one (``windows_resumed``), over the same time.

    ``accounted``: since the camera was opened; ``accounted_before``: of the previous time it was open here; ``now_s``:
    monotonic time of the report; ``memory_*``: see :class:`~cluster.types.CameraStatus`.
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
    """Windows of one camera since a replica opened it. ``closed``: settled and still queued ones; ``end``: of the last
    one closed since windows (re)started, microseconds on the camera's clock."""

    done: int = 0
    gated: int = 0
    dropped: int = 0
    closed: int = 0
    end: int | None = None

    @property
    def settled(self) -> int:
        """Windows answered or dropped."""
        return self.done + self.gated + self.dropped


@dataclass(frozen=True, slots=True)
class HandOverResult:
    """Result of a hand-over. ``saved``: another replica can continue the window; ``counters``: final values."""

    saved: bool
    counters: WindowCounters


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Load of a replica. ``busy_s``: seconds spent on windows and free questions since its start, in ``steps`` steps
    that computed ``windows`` windows; ``asked_s``: the part of ``busy_s`` spent on free questions, which use the time
    that windows leave; ``backlog_s``: predicted seconds of queued windows; ``held``: number of cameras whose windows it
    holds; ``trouble``: why its engine cannot answer now, else empty; ``memory``: failed tiers, with reasons."""

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

    * ``draining``: accepts no more cameras; with ``held`` at 0 it can be stopped without loss
    * ``cameras``: placed on it, ``lowered`` of them below full quality; ``held``: those whose windows it holds
    * ``utilisation``: work over capacity, backlog included; ``expected_lag_s``: from a window's last frame to its
      answer; both 0 without a cost estimate
    * ``backlog_s``: predicted seconds of queued windows
    * ``trouble``: why its engine cannot answer now, else empty
    * ``memory``: failed tiers of its memory, with reasons; empty if there are none
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
    """Decoder count: ``running``, and ``wanted`` for the load, within ``least`` and ``most``."""

    running: int
    wanted: int
    least: int
    most: int


OVER = "over"
MAX_RUNS = 32
"""Runs of one camera tracked separately; beyond that, the least recently updated one counts as ended."""


class Totals:
    """Sums one camera's counters over its runs, each of which counts from zero.

    An update replaces the run's earlier counts, whichever process sends it: one that was declared dead and rejoins
    continues its run. ``runs``: the sum of ended runs first, then the others, least recently updated first.
    """

    def __init__(self, runs: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.runs: dict[str, dict[str, int]] = {OVER: {}} | {run: dict(counts) for run, counts in (runs or {}).items()}

    def update(self, run: str, counts: Mapping[str, int]) -> None:
        """Record a run's counts so far."""
        self.runs.pop(run, None)
        self.runs[run] = dict(counts)
        if len(self.runs) > 1 + MAX_RUNS:
            self.end(list(self.runs)[1])

    def end(self, run: str) -> None:
        """End a run, which is not updated again; its counts stay in the sum."""
        over = Counter(self.runs[OVER])
        over.update(self.runs.pop(run, {}))
        self.runs[OVER] = dict(over)

    def add(self, counts: Mapping[str, int]) -> None:
        """Add counts that belong to no run."""
        self.runs[OVER] = dict(Counter(self.runs[OVER]) + Counter(counts))

    def counts(self) -> dict[str, int]:
        # A Counter takes several times as long, and this runs for every camera once per second.
        total: dict[str, int] = {}
        for counts in self.runs.values():
            for key, count in counts.items():
                total[key] = total.get(key, 0) + count
        return total
