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
    # What the replica had settled of it when it began anew here.
    _before: int = 0
    _origin: int | None = None
    _end: int = 0
    # Begun before a camera was handed over, and the frame that it went on with.
    _moved: tuple[int, int] | None = None

    def sent(self, sample: FrameSample, *, goes_on: bool = False) -> None:
        """A frame left for the replica. ``goes_on``: fresh as it is, the windows go on: the camera was handed over."""
        if self._origin is None or (sample.fresh and not goes_on):
            self._closed += math.floor(self._strides())
            self._origin = sample.pts
        elif sample.fresh:
            self._moved = self._closed + math.ceil(self._strides()), sample.pts
        self._end = sample.end

    def restride(self, stride_s: float) -> None:
        """Windows are ``stride_s`` apart from here on: the next one ends that much after the last closed one."""
        if self._origin is not None:
            closed = math.floor(self._strides())
            self._closed += closed
            self._origin += round(closed * self.stride_s * MICROSECONDS)
        self.stride_s = stride_s

    def settled(self, windows: int) -> None:
        """The replica has answered or dropped ``windows`` in total since :meth:`lose` or the beginning; fewer than
        before where it has closed the camera in between."""
        if windows < self._before:
            self._before = 0
        self._settled = windows - self._before

    @property
    def closed_until(self) -> int | None:
        """End of the last window that the replica has every frame of, on the camera's clock; where there is none yet,
        the first frame's time. ``None`` before that."""
        if self._origin is None:
            return None
        return self._origin + round(math.floor(self._strides()) * self.stride_s * MICROSECONDS)

    @property
    def closed_any(self) -> bool:
        """Whether the replica has every frame of a window since the last fresh start."""
        return self._strides() >= 1

    def count(self) -> int:
        """Windows begun and neither answered nor dropped."""
        return max(0, self._closed + math.ceil(self._strides()) - self._settled)

    def restart(self) -> None:
        """The replica is there, and counts what was under way: the next frame begins windows anew."""
        self._before += self._settled
        self._closed = self._settled = 0
        self._origin = self._moved = None

    def lose(self) -> int:
        """The replica is gone with all it had; returns what it took with it and begins anew."""
        lost = self.count()
        self._closed = self._settled = self._before = 0
        self._origin = self._moved = None
        return lost

    def stay_behind(self, settled: int) -> int:
        """The camera was not handed over after all: its old replica settled so many windows, and the new one begins
        anew with the frame that the camera went on with. Returns what is lost."""
        self.settled(settled)
        if self._moved is None:
            return self.lose()
        begun, self._origin = self._moved
        lost = max(0, begun - self._settled)
        self._closed = self._settled = self._before = 0
        self._moved = None
        return lost

    def _strides(self) -> float:
        if self._origin is None:
            return 0.0
        return (self._end - self._origin) / (self.stride_s * MICROSECONDS)
