"""How many windows of a camera are under way, as its decoder can tell: what is lost when the replica dies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.types import MICROSECONDS, FrameSample


@dataclass(slots=True)
class InFlight:
    """Strides begun with frames that were sent, against windows the replica has settled.

    Windows end one stride apart, counted from the first frame after a fresh start (``cluster.engine``), so both sides
    count alike. The one that a fresh start cuts short is the replica's to count, if there still is a replica.
    """

    stride_s: float
    _closed: int = 0
    _settled: int = 0
    _origin: int | None = None
    _end: int = 0

    def sent(self, sample: FrameSample) -> None:
        """A frame left for the replica."""
        if self._origin is None or sample.fresh:
            self._closed += math.floor(self._strides())
            self._origin = sample.pts
        self._end = sample.end

    def restride(self, stride_s: float) -> None:
        """Windows are ``stride_s`` apart from here on: the next one ends that much after the last closed one."""
        if self._origin is not None:
            closed = math.floor(self._strides())
            self._closed += closed
            self._origin += round(closed * self.stride_s * MICROSECONDS)
        self.stride_s = stride_s

    def settled(self, windows: int) -> None:
        """The replica has answered or dropped ``windows`` in total since :meth:`lose` or the beginning."""
        self._settled = windows

    def count(self) -> int:
        """Windows begun and neither answered nor dropped."""
        return max(0, self._closed + math.ceil(self._strides()) - self._settled)

    def lose(self) -> int:
        """The replica is gone with all it had; returns what it took with it and begins anew."""
        lost = self.count()
        self._closed = self._settled = 0
        self._origin = None
        return lost

    def _strides(self) -> float:
        if self._origin is None:
            return 0.0
        return (self._end - self._origin) / (self.stride_s * MICROSECONDS)
