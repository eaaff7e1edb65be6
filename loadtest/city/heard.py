"""What replicas have counted of each camera since the controller was last told, and of whom there is news."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cluster.control.demand import Measured

CHANGED = 0.1
"""Change of a camera's computed share that is news."""

SILENT = 6
"""Cameras without news are told of this many times less often."""


class Heard:
    """Counts by camera. One whose windows go on being computed, or held, as before is reported seldom: its estimate has
    settled, and telling it again would change nothing."""

    def __init__(self, count: int) -> None:
        self._gated = np.zeros(count, dtype=np.int64)
        self._computed = np.zeros(count, dtype=np.int64)
        self._dropped = np.zeros(count, dtype=np.int64)
        self._seconds = np.zeros(count)
        self._since_s = np.zeros(count)
        self._share = np.full(count, -1.0)

    def gated(self, camera: npt.NDArray[np.int64]) -> None:
        """For a window of each of these the last answer stands; a camera may be there twice."""
        np.add.at(self._gated, camera, 1)

    def answered(self, camera: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64]) -> None:
        """A window of each of these was computed, in so much of the engine's time."""
        np.add.at(self._computed, camera, 1)
        np.add.at(self._seconds, camera, seconds)

    def dropped(self, camera: npt.NDArray[np.int64]) -> None:
        """A window of each of these was given up."""
        np.add.at(self._dropped, camera, 1)

    def forget(self, camera: int | npt.NDArray[np.int64], now_s: float) -> None:
        """What was counted so far was under other settings, or the camera has begun anew; of one or of several."""
        self._gated[camera] = self._computed[camera] = self._dropped[camera] = 0
        self._seconds[camera] = 0.0
        self._since_s[camera] = now_s
        self._share[camera] = -1.0

    def due(self, now_s: float, every_s: float) -> Iterator[tuple[int, Measured]]:
        """Cameras that are to be reported now; their counts begin anew."""
        period = now_s - self._since_s
        windows = self._gated + self._computed
        ready = np.flatnonzero((period >= every_s) & (windows + self._dropped > 0))
        share = self._computed[ready] / np.maximum(windows[ready], 1)
        news = (np.abs(share - self._share[ready]) > CHANGED) | (period[ready] >= SILENT * every_s)
        chosen = ready[news]
        self._share[chosen] = share[news]
        rows = zip(
            chosen.tolist(),
            period[chosen].tolist(),
            windows[chosen].tolist(),
            self._gated[chosen].tolist(),
            self._seconds[chosen].tolist(),
            self._dropped[chosen].tolist(),
            strict=True,
        )
        for camera, period_s, count, gated, seconds, dropped in rows:
            yield camera, Measured(period_s, count, gated, seconds=seconds, dropped=dropped)
        for counts in (self._gated, self._computed, self._dropped, self._seconds):
            counts[chosen] = 0
        self._since_s[chosen] = now_s
