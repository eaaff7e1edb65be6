"""What the processes tell the controller once per heartbeat, and what it makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import CameraStateName, LastAnswer, PatchGeometry, PictureHealth


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
    """A replica that is ready. ``instance`` is new with every start; the directory names it."""

    instance: str
    address: str
    metrics_address: str
    pid: int
    geometry: PatchGeometry


@dataclass(frozen=True, slots=True)
class CameraReport:
    """One camera as its decoder sees it. ``life``: see :class:`~cluster.types.StreamSpec`.

    Keys of ``counts`` are counter fields of :class:`~cluster.types.CameraStatus`; they
    count since the decoder started it.
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


@dataclass(frozen=True, slots=True)
class StreamReport:
    """One camera as its replica sees it; counts since the replica admitted it, ``latency_s`` of its last window.

    ``memory_*``: as of now, and like the fields of the same names of :class:`~cluster.types.CameraStatus`.
    """

    camera: str
    latency_s: float = 0.0
    last_answers: tuple[LastAnswer, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_frames: int = 0
    memory_oldest_s: float = 0.0
    memory_state: str = ""
    life: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How full a replica is. ``busy_s``: seconds that it spent on windows and questions since it started, in ``steps``
    that computed ``windows``; ``backlog_s``: seconds of windows that wait; ``held``: cameras whose windows it holds;
    ``trouble``: why its engine answers nothing just now, empty while it does."""

    busy_s: float
    backlog_s: float
    held: int = 0
    steps: int = 0
    windows: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as an operator sees it.

    * ``draining``: it takes no cameras; one that holds none may be stopped without a loss
    * ``cameras``: placed on it, ``lowered`` of them below full quality; ``held``: whose windows it holds
    * ``utilisation``: work over capacity, what waits included; 0 where nobody knows what a window costs, and so is
      ``expected_lag_s``, from a window's last frame to its answer
    * ``backlog_s``: seconds of windows that wait
    * ``trouble``: why its engine answers nothing just now; empty while it does
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


class Totals:
    """Sums counters of one camera over the processes it has lived in, each of which counts from zero.

    ``update(source, counts)`` replaces what ``source`` said before, unless a counter fell: then the process began anew
    and what it had said is kept beside it.
    """

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._latest: dict[str, Counter[str]] = {}

    def update(self, source: str, counts: Mapping[str, int]) -> None:
        before = self._latest.get(source, Counter())
        if any(counts.get(key, 0) < value for key, value in before.items()):
            self._kept.update(before)
        self._latest[source] = Counter(dict(counts))

    def end(self, source: str) -> None:
        """The process is gone; what it counted stays."""
        self._kept.update(self._latest.pop(source, Counter()))

    def add(self, key: str, amount: int) -> None:
        self._kept[key] += amount

    def counts(self) -> dict[str, int]:
        total = Counter(self._kept)
        for latest in self._latest.values():
            total.update(latest)
        return dict(total)
