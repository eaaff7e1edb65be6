"""Window schedule: when windows close and which frames they hold. Pure functions of timestamps in integer microseconds.

Window ``k`` of a stream whose first frame came at ``origin`` ends at ``origin + (k + 1) * stride`` and covers ``[end -
window, end)``, clipped to the stream's beginning: a camera is answered after its first stride, on windows that grow to
full length. A window opens at the last complete frame at or before its start, so that every cell of the scene is
present (CodecSight section 3.4.1: the overlap starts at an anchor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cluster.engine.window.stream import StreamFrame
    from cluster.types import FrameSample

    Timed: TypeAlias = StreamFrame | FrameSample

# How far before its start a window may open. Anchors come every 16 s; if a decoder sends none for longer than this,
# windows open at their start, which bounds memory.
LOOKBACK = 30_000_000

# Windows computed after a (fresh) start before the static gate may repeat answers: the first holds a single stride, and
# repeating its answer would hide for `max_idle_s` that the camera has only just come up.
FIRST_WINDOWS = 2


def clock_tolerance(duration: int) -> int:
    """Timestamp tolerance: an eighth of a frame's duration.

    Camera clocks are rounded (90 kHz ticks, 29.97 frames a second): a frame due at 8 s may carry 7.999989 s, and would
    otherwise fall into one window or the other by chance.
    """
    return duration // 8


def window_time(frame: Timed) -> int:
    """Time by which a frame is assigned to windows: those with ``start <= window_time < end``."""
    return frame.pts + clock_tolerance(frame.duration)


def covered_until(frame: Timed) -> int:
    """End of a frame's video less the tolerance, so that rounding never extends it into the next stride."""
    return frame.pts + frame.duration - clock_tolerance(frame.duration)


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """Window ``number`` covers ``[start, end)``."""

    number: int
    start: int
    end: int


@dataclass(slots=True)
class WindowClock:
    """Closes windows as time passes; ``end`` and ``number`` are those of the next window to close."""

    window: int
    stride: int
    number: int = 0
    origin: int = 0
    end: int = 0

    def restart(self, origin: int) -> None:
        """Restart at a new origin; window numbers continue."""
        self.origin = origin
        self.end = origin + self.stride

    def change_lengths(self, window: int, stride: int) -> None:
        """Change the lengths; the next window ends one new stride after the last closed one."""
        self.end += stride - self.stride
        self.window, self.stride = window, stride

    @property
    def start(self) -> int:
        """Start of the next window to close."""
        return max(self.origin, self.end - self.window)

    def close(self, now: int, video: int | None) -> list[WindowSpan]:
        """Close the windows that end at or before ``now``; ``video``: end of the stream's video
        (:func:`covered_until`). A window without video in its last stride is skipped, its number unused."""
        closed: list[WindowSpan] = []
        while self.end <= now:
            if video is not None and video > self.end - self.stride:
                closed.append(WindowSpan(self.number, self.start, self.end))
                passed = 1
            else:
                passed = (now - self.end) // self.stride + 1
            self.number += passed
            self.end += passed * self.stride
        return closed


def opening_index(frames: Sequence[Timed], start: int) -> int:
    """Index of the frame that opens a window starting at ``start``: the last complete frame at or before it, within
    ``LOOKBACK``; else the first frame at or after ``start``; ``len(frames)`` if there is neither."""
    found: int | None = None
    first: int | None = None
    for index, frame in enumerate(frames):
        if first is None and window_time(frame) >= start:
            first = index
        if frame.pts - clock_tolerance(frame.duration) > start:
            break
        if frame.complete and frame.pts >= start - LOOKBACK:
            found = index
    if found is not None:
        return found
    return len(frames) if first is None else first
