"""Which strides of one camera's video became windows, and how many never did: nothing is lost without being counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.types import MICROSECONDS, FrameSample, WindowRequest

JUMP_S = 10.0
"""A camera's clock that runs this much further than time did was set anew: what it says of a hole is worth nothing."""

ROUNDING = 0.05
"""Share of a stride by which a window's end may be off: cameras' clocks are rounded, and frames have a length."""


@dataclass(slots=True)
class WindowAccounting:
    """Every stride since a camera's first frame is a window, one that its decoder dropped and counted, or lost here.

    Windows follow each other while frames come. What leaves holes is video that never came: packets lost on the way, a
    decoder that died, a camera that was away. The next frame follows a gap then. Windows go on behind it at their own
    phase, and those whose stride had no video were passed over: the numbers between two that closed are lost, less
    those that the decoder says it has counted itself.

    A fresh frame begins the windows anew: the whole strides between the end of the last window and that frame are lost,
    the one that it cuts short among them, also where it is the only one. What is left of a stride counts on until a
    window is answered, or many short holes would add up to windows that nobody misses.

    Times are the camera's own, in microseconds, as long as they agree with when frames arrived (monotonic seconds). A
    clock that jumped, ahead or back, is not believed, and the hole is as long as the wait for the frame was.
    """

    _end: int | None = None
    _at_s: float = 0.0
    _under_way: bool = False
    _left: float = 0.0
    _dropped: int = 0
    _number: int = -1
    _newest: FrameSample | None = None
    # Gaps that no window has closed behind: where the frame after it is placed, and windows that the decoder counted.
    _gaps: list[tuple[int, int]] = field(default_factory=list)

    def continues(self, sample: FrameSample, arrived_s: float, *, patient: bool = False) -> bool:
        """Whether the camera's windows go on with this frame, or begin anew with it: a scene begins, its picture has
        another grid, or its clock runs back or further ahead than time did.

        Args:
            patient: see :meth:`fresh`.
        """
        if sample.fresh:
            return False
        if not sample.gap or self._newest is None or self._end is None:
            return True
        hole_s = (sample.pts - self._end) / MICROSECONDS
        late = not patient and hole_s > arrived_s - self._at_s + JUMP_S
        return sample.pts > self._newest.pts and sample.grid == self._newest.grid and not late

    def add_gap(self, sample: FrameSample) -> None:
        """Windows go on with this frame, before which video is missing."""
        self._gaps.append((sample.pts + sample.duration // 8, self._counted(sample.windows_dropped)))

    @property
    def in_progress(self) -> bool:
        """Frames have come since the last window closed."""
        return self._under_way

    def restart(self, sample: FrameSample, arrived_s: float, stride_s: float, *, patient: bool = False) -> int:
        """A fresh frame begins the windows anew; returns how many are lost.

        Args:
            patient: frames wait for each other, so that when they arrive says nothing.
        """
        missing = self._left
        if self._end is not None:
            missing += self._hole_s(sample.pts, 0.0 if patient else arrived_s - self._at_s) / stride_s
        lost = max(int(self._under_way), math.floor(missing + ROUNDING))
        self._left = max(0.0, missing - lost)
        lost = max(0, lost - self._counted(sample.windows_dropped))
        self._end, self._at_s, self._under_way = sample.pts, arrived_s, False
        self._gaps.clear()
        return lost

    def add_frame(self, sample: FrameSample, arrived_s: float, closed: Sequence[WindowRequest]) -> int:
        """A frame was taken and ``closed`` these windows; returns how many before them ended without video and were
        passed over."""
        lost = 0
        if self._end is None:
            self._end, self._at_s = sample.pts, arrived_s
        self._newest = sample
        for request in closed:
            passed = request.window - self._number - 1 if self._number >= 0 else 0
            before = [windows for place, windows in self._gaps if place < request.end]
            del self._gaps[: len(before)]
            lost += max(0, passed - sum(before))
            self._number = request.window
            # When a frame of that moment would have arrived.
            self._end, self._at_s = request.end, arrived_s + (request.end - sample.pts) / MICROSECONDS
        # The frame that closes a window usually lies behind its end and belongs to the next one.
        self._under_way = not closed or sample.pts + sample.duration // 8 >= closed[-1].end
        return lost

    def window_answered(self) -> None:
        """A window was answered: what is missed from here on is missed since its end."""
        self._left = 0.0

    def close_window(self) -> None:
        """What was under way is a window now, or has been counted."""
        self._under_way = False

    def count_abandoned(self, now_s: float, stride_s: float) -> int:
        """Nobody brings frames any more; returns how many windows are lost until now."""
        if self._end is None:
            return 0
        missing = self._left + (now_s - self._at_s) / stride_s
        return max(int(self._under_way), math.floor(missing + ROUNDING) - sum(windows for _, windows in self._gaps))

    def _hole_s(self, pts: int, waited_s: float) -> float:
        assert self._end is not None
        hole_s = (pts - self._end) / MICROSECONDS
        return hole_s if 0 <= hole_s <= waited_s + JUMP_S else waited_s

    def _counted(self, dropped: int) -> int:
        """Windows that the decoder has counted since the last such frame; one that has just started counts from 0."""
        before, self._dropped = self._dropped, dropped
        if self._end is None:
            return 0
        return dropped - before if dropped >= before else dropped
