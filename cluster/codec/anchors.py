"""Which samples are anchors: kept whole, and where windows may open (docs/windows.md)."""

from __future__ import annotations

from cluster.types import MICROSECONDS


class AnchorRule:
    """The first sample at or after an I-frame, at least ``interval_s`` after the last anchor.

    Forced at the interval when the camera's I-frames stand further apart than that, or none came within it: cameras
    send one every 10 to 250 frames, and some none at all. ``tolerance`` (microseconds, half a sampling period) keeps an
    I-frame that comes a hair early from being passed over for a whole GOP.
    """

    def __init__(self, interval_s: float, tolerance: int) -> None:
        self._interval = int(interval_s * MICROSECONDS)
        self._tolerance = tolerance
        self._distance: int | None = None
        self.reset()

    def reset(self) -> None:
        """The next sample is an anchor."""
        self._last_anchor: int | None = None
        self._last_intra: int | None = None
        self._intra_since_sample = False

    def intra_picture(self, time: int | None) -> None:
        """An I-frame was shown."""
        self._intra_since_sample = True
        if time is not None:
            if self._last_intra is not None:
                self._distance = time - self._last_intra
            self._last_intra = time

    def sample(self, time: int) -> bool:
        """Whether the sample at ``time`` is an anchor."""
        intra, self._intra_since_sample = self._intra_since_sample, False
        if self._last_anchor is not None:
            if time - self._last_anchor < self._interval - self._tolerance:
                return False
            if not intra and not self._overdue(time):
                return False
        self._last_anchor = time
        return True

    def _overdue(self, time: int) -> bool:
        long_gop = self._distance is not None and self._distance > self._interval + self._tolerance
        return long_gop or self._last_intra is None or time - self._last_intra >= self._interval - self._tolerance
