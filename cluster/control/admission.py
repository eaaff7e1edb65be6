"""Admission control: accepts a new camera, accepts it at reduced quality, or refuses it and says what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cluster.control.costs import CostModel
from cluster.control.ladder import Ladder
from cluster.types.cameras import Priority

UNEQUAL = 0.2
"""Squared coefficient of variation of the compute times of one replica's windows."""

ROUNDING = 1e-9
"""Loads are sums of floats: anything below this is zero."""

Verdict = Literal["accepted", "reduced", "refused"]


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether the fleet takes a camera; of a refused one the ``reason``, and the capacity missing with every camera at
    its lowest permitted rung, in cameras like this one and in replicas."""

    verdict: Verdict
    reason: str = ""
    missing_streams: float = 0.0
    missing_replicas: float = 0.0


class MemoryDemand(NamedTuple):
    """Memory that a camera takes on its replica at full quality, or that replicas offer: ``tokens`` of windows, and
    ``waiting_bytes`` of frames on the device that are not yet clustered."""

    tokens: float = 0.0
    waiting_bytes: float = 0.0

    def plus(self, other: MemoryDemand, sign: float = 1.0) -> MemoryDemand:
        """The sum; with a ``sign`` of -1 the difference."""
        return MemoryDemand(self.tokens + sign * other.tokens, self.waiting_bytes + sign * other.waiting_bytes)


UNBOUNDED = MemoryDemand(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Combined capacity of the replicas that take cameras: ``seconds`` per second, and ``held`` memory.

    ``replica_s``: mean seconds per second of one replica, ``None`` while there is none.
    """

    seconds: float
    held: MemoryDemand
    replica_s: float | None

    def largest_share_s(self, load_s: float, held: MemoryDemand) -> float:
        """The largest of a camera's shares of the pool's seconds, tokens and bytes, in seconds per second. Balancing
        replicas by it balances the scarce resource (dominant resource, Ghodsi et al., NSDI 2011)."""
        shares = [mine / all_ for mine, all_ in zip(held, self.held, strict=True) if all_]
        return max([load_s, *(self.seconds * share for share in shares)])


class Commitments:
    """What all cameras need: seconds per second at each rung, by class, as if all were there and sent video, and
    memory. ``timed``: whether the seconds were measured on such replicas; if not, no camera is refused for lack of
    time."""

    def __init__(self, ladder: Ladder, *, timed: bool = True) -> None:
        self._ladder = ladder
        self._timed = timed
        self._seconds = {each: [0.0] * len(ladder.rungs) for each in Priority}
        self._held = MemoryDemand()

    def add(self, priority: Priority, loads: Sequence[float], sign: float = 1.0) -> None:
        """Add a camera's seconds per second at each rung; with a ``sign`` of -1 subtract them."""
        sums = self._seconds[priority]
        for place, load in enumerate(loads):
            sums[place] += sign * load

    def hold(self, held: MemoryDemand, sign: float = 1.0) -> None:
        """Add a camera's memory; with a ``sign`` of -1 subtract it."""
        self._held = self._held.plus(held, sign)

    def refusal(
        self, priority: Priority, loads: Sequence[float], held: MemoryDemand, pool: PoolCapacity
    ) -> Admission | None:
        """The refusal of one more camera that does not fit: in time, with every camera at its lowest permitted rung
        (background cameras may be shed for other classes, not for their own), or in memory, which rungs hardly save;
        ``None`` if it fits."""
        floor = self._ladder.floor
        missing = self._held.plus(held).plus(pool.held, -1.0)
        missing_s = loads[floor] - pool.seconds
        for each, sums in self._seconds.items():
            if not (each is Priority.BACKGROUND is not priority and self._ladder.rungs[-1].shed):
                missing_s += sums[floor]
        if not loads[floor] and not held.tokens:
            # Paused: it needs nothing.
            return None
        if pool.replica_s is None and not self._timed:
            # Without replicas there is no limit to exceed.
            return None
        replicas, streams = missing_s / (pool.replica_s or 1.0), missing_s / loads[floor]
        if pool.replica_s is None:
            reason = f"no replica is ready; this camera alone needs {replicas:.2f}"
        elif self._timed and missing_s > ROUNDING:
            reason = (
                "the fleet is full even with every camera at its lowest permitted rung: "
                f"{streams:.2f} cameras like this one too many, or {replicas:.2f} replicas too few"
            )
        elif missing.tokens > ROUNDING:
            replicas, streams = 0.0, missing.tokens / held.tokens
            reason = (
                f"the replicas' memory is full: it holds windows of {pool.held.tokens:.0f} tokens, and this camera's "
                f"{held.tokens:.0f} would exceed that by {missing.tokens:.0f} (model.kv_bytes, model.host_kv_bytes)"
            )
        elif missing.waiting_bytes > ROUNDING and held.waiting_bytes:
            replicas, streams = 0.0, missing.waiting_bytes / held.waiting_bytes
            reason = (
                f"the replicas' devices are full of frames for memories: they hold {_mib(pool.held.waiting_bytes)}, "
                f"and this camera's {_mib(held.waiting_bytes)} would exceed that by {_mib(missing.waiting_bytes)} "
                "(lower memory.cap, or raise tiers.device_bytes)"
            )
        else:
            return None
        return Admission("refused", reason, streams, replicas)

    def fitting(self, loads: Sequence[float], pool: PoolCapacity) -> int:
        """The first rung at which all cameras and one more fit; the lowest that still answers if none does."""
        for place in range(self._ladder.floor):
            if sum(sums[place] for sums in self._seconds.values()) + loads[place] <= pool.seconds:
                return place
        return self._ladder.floor


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def expected_lag_s(*, load: float, windows_per_s: float, busy: float, costs: CostModel, max_batch: int) -> float:
    """Mean seconds from a window's last frame to its answer on one replica; infinite when it is overloaded.

    A window waits for the queue caused by uneven arrivals and unequal windows (Kingman 1961, ``r / (1 - r) · w · (ca² +
    cs²) / 2``) and then for its own step, shared with the windows that arrived during the last one: with ``w`` seconds
    per window and ``step_s`` per step, arrivals at rate ``a`` make steps of ``S = step_s + b·w`` for ``b = a·S``
    windows, hence ``S = step_s / (1 - a·w)``, at least one window's and at most ``max_batch`` windows'.

    Windows of staggered cameras are due evenly, and the gate passes each at random, so that ``ca² = 1 - busy``; cs² is
    :data:`UNEQUAL`. Accurate to a third against simulated replicas at loads of 0.3 to 0.9.

    Args:
        load: busy seconds per second of the replica.
        windows_per_s: computed windows per second.
        busy: fraction of windows that the static gate passes.
    """
    if windows_per_s <= 0:
        return 0.0
    if load >= 1:
        return math.inf
    # ``load`` includes each window's part of ``step_s``, divided by the windows assumed to share a step.
    per_window = max(load / windows_per_s - costs.step_s / max_batch, 1e-9)
    shared = windows_per_s * per_window
    step = costs.step_s / (1 - shared) if shared < 1 else math.inf
    step = min(max(step, costs.step_s + per_window), costs.step_s + max_batch * per_window)
    return load / (1 - load) * per_window * (1 - busy + UNEQUAL) / 2 + step
