"""Demand estimation: a camera's declared load, corrected by its pictures and by window counts."""

import math
import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.control.admission import MemoryDemand
from cluster.control.costs import CostModel, WindowWork
from cluster.control.ladder import Rung
from cluster.types.cameras import Priority

STEP_WINDOWS = 8
"""Windows assumed to share a step, and its fixed ``step_s``, in predicted loads."""

MEMORY_S = 60.0
"""Seconds over which counts are averaged."""

STRETCHES_S = 600.0
"""The same for the lengths of stretches without motion, of which a minute has few."""

MOST = 16.0
"""Cap of measured / declared rate: one outlier must not empty a replica."""

NOTICED = 0.15
"""Relative change of a camera's load that triggers an update."""

DILATION = 1.2
"""Kept tokens over changed groups: 1.10 to 1.28 in twelve test scenes and two real clips."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a camera at full quality.

    * ``frame_tokens``: visual tokens of one unpruned frame; a frame is ``temporal`` samples
    * ``kept``: fraction of these that a frame between anchors keeps
    * ``busy``: fraction of windows that the static gate passes
    * ``resumed``, ``gated``: fraction of these that follow gated ones, and the mean number of gated ones before them;
      ``None``: as if the gate passed each window independently
    * ``refresh_budget``: fraction of the overlap that is recomputed; ``None``: its anchors, once per opening frame
    * ``waiting_bytes``: of its memory's waiting frames on the replica's device; 0 without a memory
    * ``rate``: measured windows per second divided by ``1 / stride_s``
    """

    camera: str
    priority: Priority = Priority.NORMAL
    window_s: float = 40.0
    stride_s: float = 8.0
    fps: float = 2.0
    frame_tokens: int = 256
    temporal: int = 2
    questions: int = 1
    query_tokens: int = 20
    kept: float = 0.2
    busy: float = 1.0
    resumed: float | None = None
    gated: float = 1.0
    anchor_interval_s: float = 16.0
    refresh_budget: float | None = None
    waiting_bytes: int = 0
    rate: float = 1.0


class Measured(NamedTuple):
    """Counts of one camera over ``period_s``.

    ``windows``: answered, gated ones included; ``dropped``: not answered; ``resumed``: computed after a gated one.
    Tokens are summed over computed windows.
    """

    period_s: float
    windows: int
    gated: int = 0
    tokens_full: int = 0
    tokens_kept: float = 0
    dropped: int = 0
    resumed: int = 0


NOTHING = Measured(0.0, 0)
"""No counts: the start of a sum."""


def stride_at(demand: Demand, rung: Rung) -> float:
    """A camera's stride at a rung, seconds."""
    return rung.stride_s(demand.stride_s, demand.window_s)


def whole_share(demand: Demand, fps: float) -> float:
    """Fraction of frames that are anchors, which are kept whole."""
    return min(1.0, demand.temporal / (fps * demand.anchor_interval_s))


def gated_before(demand: Demand, rung: Rung) -> tuple[float, float]:
    """Fraction of computed windows that follow a gated stride, and the expected number of gated strides within such a
    window: each gated stride is the last one with the same probability (with independent windows ``busy``)."""
    resumed, ends = demand.resumed, 1.0 / max(1.0, demand.gated)
    if resumed is None:
        resumed, ends = 1.0 - min(1.0, demand.busy), max(1e-9, demand.busy)
    return resumed, (1 - (1 - ends) ** _overlapped(demand, rung)) / ends


def work(demand: Demand, rung: Rung, *, gated: float | None = None, missed: float = 0.0) -> WindowWork:
    """Work of one computed window at a rung; none at a rung that sheds.

    Frames of the strides since the last computed window are computed with this one: of a missed (dropped) stride all
    that it keeps, of a gated one its anchors, since a window that keeps any other patch is not gated.

    Args:
        gated: gated strides since the last computed window; None: the expected work over :func:`gated_before`.
        missed: dropped strides since then.
    """
    if rung.shed:
        return WindowWork(0.0, 0.0, 0.0)
    if gated is None:
        share, gated = gated_before(demand, rung)
        steady = work(demand, rung, gated=0.0, missed=missed)
        return steady.mixed(work(demand, rung, gated=gated, missed=missed), share) if share else steady
    kept = window_tokens(demand, rung)
    stride_s = stride_at(demand, rung)
    fps = demand.fps * rung.fps
    whole = whole_share(demand, fps)
    most = _overlapped(demand, rung)
    missed = min(missed, most)
    gated = min(gated, most - missed)
    new = min(kept, kept * (1 + missed) * stride_s / demand.window_s)
    # Anchor tokens in the overlap, and those among them that were never computed.
    anchors = (kept - new) * min(1.0, whole / _share(demand, rung))
    deferred = min(anchors, gated * stride_s * fps / demand.temporal * whole * demand.frame_tokens)
    rest = kept - new - deferred
    # A window opens with the same anchor as the last one until an interval has passed.
    moved = min(1.0, (1 + missed + gated) * stride_s / demand.anchor_interval_s)
    refreshed = moved * (anchors - deferred) if demand.refresh_budget is None else demand.refresh_budget * rest
    if rung.refresh_budget is not None:
        refreshed = min(refreshed, rung.refresh_budget * rest)
    query = demand.questions * demand.query_tokens
    return WindowWork.from_layout(
        kept=kept, new=new + deferred, refreshed=refreshed, query=query, encoded=new + deferred
    )


def _overlapped(demand: Demand, rung: Rung) -> int:
    """Whole strides of a window before its newest one."""
    return max(0, math.floor(demand.window_s / stride_at(demand, rung)) - 1)


def window_tokens(demand: Demand, rung: Rung) -> float:
    """Visual tokens of a window at a rung; none at a rung that sheds, or of a paused camera (``rate`` 0)."""
    frames = 0.0 if rung.shed or not demand.rate else demand.window_s * demand.fps * rung.fps / demand.temporal
    return frames * demand.frame_tokens * _share(demand, rung)


def holding(demand: Demand, rung: Rung) -> MemoryDemand:
    """Memory that a camera takes on its replica at a rung."""
    return MemoryDemand(window_tokens(demand, rung), demand.waiting_bytes)


def _share(demand: Demand, rung: Rung) -> float:
    """Fraction of tokens kept: anchors are whole at any pruning, and at a lower rate make up more of the frames."""
    whole = whole_share(demand, demand.fps)
    mean = whole + (1 - whole) * demand.kept
    return min(1.0, max(whole_share(demand, demand.fps * rung.fps), mean * rung.kept))


def load(demand: Demand, rung: Rung, costs: CostModel) -> float:
    """Replica seconds per second, with the effect of the static gate."""
    return demand.rate * demand.busy * declared_load(demand, rung, costs)


def declared_load(demand: Demand, rung: Rung, costs: CostModel, *, batch: int = STEP_WINDOWS) -> float:
    """:func:`load` at the declared rate without the static gate, when ``batch`` windows share a step."""
    if rung.shed:
        return 0.0
    seconds = costs.window_seconds(work(demand, rung)) + costs.step_s / batch
    return 1.0 / stride_at(demand, rung) * seconds


class DemandEstimate:
    """One camera's demand: first as declared, then from its pictures, then from counts.

    Counts cover at least a stride and are averaged exponentially over :data:`MEMORY_S`; ``declared`` never changes.
    """

    __slots__ = (
        "_counted",
        "_counted_s",
        "_passed",
        "_resumed",
        "_strides",
        "_waiting",
        "busy",
        "declared",
        "kept",
        "rate",
    )

    def __init__(self, declared: Demand) -> None:
        self.declared = declared
        self._counted = False
        # Counts since the last update, with tokens scaled to full quality, and the strides that they cover.
        self._waiting, self._strides = NOTHING, 0.0
        self.rate, self.busy, self.kept = declared.rate, declared.busy, declared.kept
        # Fractions of windows, over STRETCHES_S: passed by the gate, and passed after a gated one.
        self._counted_s = self._passed = self._resumed = 0.0

    @property
    def demand(self) -> Demand:
        resumed, gated = self.stretches
        return replace(self.declared, rate=self.rate, busy=self.busy, kept=self.kept, resumed=resumed, gated=gated)

    @property
    def stretches(self) -> tuple[float | None, float]:
        """``Demand.resumed`` and ``gated``."""
        if not self._resumed:
            return (0.0 if self._passed else self.declared.resumed), self.declared.gated
        return self._resumed / self._passed, (1 - self._passed) / self._resumed

    def differs(self, other: Demand) -> bool:
        """Whether counts have changed a :func:`declared_load` noticeably since it was computed for ``other``."""
        resumed, gated = self.stretches
        pairs = (self.kept, other.kept), (resumed or 0.0, other.resumed or 0.0), (gated, other.gated)
        return any(abs(now - before) > NOTICED * max(before, NOTICED) for now, before in pairs)

    @property
    def factor(self) -> float:
        """Factor on a :func:`declared_load`."""
        return self.rate * self.busy

    def observe_activity(self, changed: float) -> bool:
        """Update from the fraction of token groups that changed, until there are counts: these and, by dilation, their
        neighbours are kept. Returns whether the demand changed."""
        if not self._counted:
            self.kept = min(1.0, DILATION * max(0.0, changed))
        return not self._counted

    def observe_counts(self, counts: Measured, rung: Rung) -> bool:
        """Update from counts since the last call, all of them at ``rung``; returns whether the demand changed."""
        if rung.shed or not counts.period_s > 0:
            return False
        counts = counts._replace(tokens_kept=counts.tokens_kept / rung.kept)
        self._waiting = Measured(*map(operator.add, self._waiting, counts))
        self._strides += counts.period_s / stride_at(self.declared, rung)
        # Heartbeats are irregular: nine tenths of a stride count as a stride.
        if self._strides < 0.9:
            return False
        counts, strides = self._waiting, self._strides
        self._waiting, self._strides = NOTHING, 0.0
        pace = 1 - math.exp(-counts.period_s / MEMORY_S)
        found = (counts.windows + counts.dropped) / strides
        self.rate += pace * (min(found, MOST) - self.rate)
        if counts.windows <= 0:
            return True
        self._counted = True
        computed = counts.windows - counts.gated
        self._counted_s = min(self._counted_s + counts.period_s, max(STRETCHES_S, counts.period_s))
        slow = counts.period_s / self._counted_s
        self._passed += slow * (computed / counts.windows - self._passed)
        self._resumed += slow * (min(counts.resumed, computed) / counts.windows - self._resumed)
        self.busy += pace * (computed / counts.windows - self.busy)
        if counts.tokens_full > 0:
            whole = whole_share(self.declared, self.declared.fps)
            share = min(1.0, counts.tokens_kept / counts.tokens_full)
            kept = max(0.0, (share - whole) / (1 - whole)) if whole < 1 else 0.0
            self.kept += pace * (kept - self.kept)
        return True
