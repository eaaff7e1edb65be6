"""How many windows of a camera are under way, as its decoder can tell: what is lost when the replica dies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.types import MICROSECONDS, FrameSample

_ROUNDING = 0.02
"""Share of a stride by which frames may be off: cameras' clocks are rounded."""


@dataclass(slots=True)
class WindowsInFlight:
    """Strides begun with frames that were sent, against windows the replica has settled.

    Windows end one stride apart, counted from the first frame of a scene (``cluster.engine``), so both sides count
    alike. Those of which nothing was sent are not under way, and the one that a fresh frame cuts short is the replica's
    to count, if there still is a replica.
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

    def add_frame(self, sample: FrameSample, *, moved: bool = False) -> None:
        """A frame left for the replica. ``moved``: the first for the one that the camera is handed over to."""
        if moved and self._origin is not None:
            self._moved = self._closed + math.ceil(self._strides()), sample.pts
        if self._origin is None or sample.fresh or sample.pts < self._end - sample.duration:
            self._closed += math.floor(self._strides())
            self._origin = sample.pts
        elif sample.gap:
            stride = self.stride_s * MICROSECONDS
            begun = math.ceil(self._strides() - _ROUNDING)
            passed = math.floor((sample.pts - self._origin) / stride + _ROUNDING)
            if passed >= begun:
                self._closed += begun
                self._origin += round(passed * stride)
        self._end = sample.end

    def take_over(self, settled: int) -> None:
        """The replica had settled so many windows when this decoder got the camera, of another one's frames."""
        self._before = settled

    def set_stride(self, stride_s: float) -> None:
        """Windows are ``stride_s`` apart from here on: the next one ends that much after the last closed one."""
        if self._origin is not None:
            closed = math.floor(self._strides())
            self._closed += closed
            self._origin += round(closed * self.stride_s * MICROSECONDS)
        self.stride_s = stride_s

    def set_settled(self, windows: int) -> None:
        """The replica has answered or dropped ``windows`` in total since :meth:`lose` or the beginning; fewer than
        before where it has closed the camera in between."""
        if windows < self._before:
            self._before = 0
        self._settled = windows - self._before

    @property
    def last_window_end(self) -> int | None:
        """End of the last window that the replica has a frame of, on the camera's clock; ``None`` where there is none.
        What is not sent after it is of windows that the replica sees nothing of."""
        if self._origin is None:
            return None
        return self._origin + round(math.ceil(self._strides() - _ROUNDING) * self.stride_s * MICROSECONDS)

    def count(self) -> int:
        """Windows begun and neither answered nor dropped."""
        return max(0, self._closed + math.ceil(self._strides()) - self._settled)

    def restart(self) -> None:
        """The replica is there, and counts what was under way: the next frame begins windows anew."""
        self._before += self._settled
        self._closed = self._settled = 0
        self._origin = self._moved = None

    def count_lost(self) -> int:
        """The replica is gone with all it had; returns what it took with it and begins anew."""
        lost = self.count()
        self._closed = self._settled = self._before = 0
        self._origin = self._moved = None
        return lost

    def cancel_hand_over(self, settled: int) -> int:
        """The camera was not handed over after all: its old replica settled so many windows, and the new one begins
        anew with the frame that the camera went on with. Returns what is lost."""
        self.set_settled(settled)
        if self._moved is None:
            return self.count_lost()
        begun, self._origin = self._moved
        lost = max(0, begun - self._settled)
        self._closed = self._settled = self._before = 0
        self._moved = None
        return lost

    def _strides(self) -> float:
        if self._origin is None:
            return 0.0
        return (self._end - self._origin) / (self.stride_s * MICROSECONDS)
