"""Accounts for every stride of one camera's video: as a window, as dropped, or as lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.types import MICROSECONDS, FrameSample, WindowRequest
from cluster.types.reports import JUMP_S, ROUNDING, AccountedSpan, CameraMoment, gap_s


@dataclass(slots=True)
class WindowAccounting:
    """Every stride since a camera's first frame is a window, one that its decoder dropped and counted, or lost here.

    Windows follow each other while frames come. Gaps are video that never came: packets lost on the way, a decoder that
    died, a camera that was away. The next frame follows a gap then. Windows continue behind it in phase, skipping
    strides without video: the numbers missing between two closed windows are lost, less those that the decoder says it
    has counted itself.

    A fresh frame restarts the windows: the whole strides between the end of the last window and that frame are lost,
    including the one that it cuts short, even if that is the only one. The remainder of a stride is carried over until
    a window is answered, or many short gaps would add up to uncounted windows.

    ``closed``: how many windows have closed, and the end of the last since the windows began, on the camera's clock.

    Times are the camera's own, in microseconds, as long as they agree with the arrival of frames (monotonic seconds).
    After a jump of the clock, ahead or back, the gap's length is the waiting time for the frame.
    """

    closed: tuple[int, int | None] = (0, None)
    _end: int | None = None
    _at_s: float = 0.0
    _under_way: bool = False
    _left: float = 0.0
    _dropped: int = 0
    _number: int = -1
    _newest: FrameSample | None = None
    _begin: tuple[int, float] | None = None
    # Start of the first frame here, until windows begin anew.
    _first: int | None = None
    # Gaps that no window has closed behind: place of the frame after it, and windows that the decoder counted.
    _gaps: list[tuple[int, int]] = field(default_factory=list)

    def continues(self, sample: FrameSample, arrived_s: float, *, patient: bool = False) -> bool:
        """Whether the camera's windows continue with this frame, which came at ``arrived_s`` (monotonic); they restart
        on a scene cut, another grid, or a clock that jumps back or too far ahead. ``patient``: see :meth:`restart`."""
        if sample.fresh:
            return False
        if not sample.gap or self._newest is None or self._end is None:
            return True
        hole_s = (sample.pts - self._end) / MICROSECONDS
        late = not patient and hole_s > arrived_s - self._at_s + JUMP_S
        return sample.pts > self._newest.pts and sample.grid == self._newest.grid and not late

    def add_gap(self, sample: FrameSample) -> None:
        """Continue with this frame after missing video."""
        self._gaps.append((sample.pts + sample.duration // 8, self._counted(sample.windows_dropped)))

    @property
    def in_progress(self) -> bool:
        """Whether frames have come since the last window closed."""
        return self._under_way

    def restart(self, sample: FrameSample, arrived_s: float, stride_s: float, *, patient: bool = False) -> int:
        """Restart the windows at a fresh frame, which came at ``arrived_s`` (monotonic); returns how many are lost.
        ``patient``: frames wait for each other, so that arrival times mean nothing."""
        missing = self._left
        if self._end is not None:
            waited_s = 0.0 if patient else arrived_s - self._at_s
            missing += gap_s((sample.pts - self._end) / MICROSECONDS, waited_s) / stride_s
        lost = max(int(self._under_way), math.floor(missing + ROUNDING))
        self._left = max(0.0, missing - lost)
        lost = max(0, lost - self._counted(sample.windows_dropped) - sum(windows for _, windows in self._gaps))
        self._end, self._at_s, self._under_way = sample.pts, arrived_s, False
        self._begin = self._begin or (sample.pts, arrived_s)
        self._gaps.clear()
        # Numbers skipped until here are counted above, by time.
        self.closed, self._first, self._number = (self.closed[0], None), None, -1
        return lost

    def add_frame(self, sample: FrameSample, arrived_s: float, closed: Sequence[WindowRequest]) -> int:
        """Count a frame that ``closed`` these windows; returns how many before them were skipped for lack of video."""
        lost = 0
        if self._end is None:
            self._end, self._at_s = sample.pts, arrived_s
            self._begin = sample.pts, arrived_s
            self._first = sample.pts
        self._newest = sample
        if closed:
            # First, since reports are made by another thread: less may be accounted for than it says, but not more.
            self.closed = self.closed[0] + len(closed), closed[-1].end
        for request in closed:
            passed = request.window - self._number - 1 if self._number >= 0 else 0
            before = [windows for place, windows in self._gaps if place < request.end]
            del self._gaps[: len(before)]
            lost += max(0, passed - sum(before))
            # Behind a saved window that another replica had begun, the decoder counts until its first frame here.
            if self._first is None or request.end > self._first:
                self._number = request.window
            # When a frame of that moment would have arrived.
            self._end, self._at_s = request.end, arrived_s + (request.end - sample.pts) / MICROSECONDS
        # The frame that closes a window usually lies behind its end and belongs to the next one.
        self._under_way = not closed or sample.pts + sample.duration // 8 >= closed[-1].end
        return lost

    def window_answered(self) -> None:
        """A window was answered: drop the carried remainder."""
        self._left = 0.0

    def close_window(self) -> None:
        """The open stride has become a window, or has been counted."""
        self._under_way = False

    def count_abandoned(self, now_s: float, stride_s: float) -> int:
        """The decoder is gone; returns how many windows are lost until now."""
        if self._end is None:
            return 0
        passed_s = now_s - self._at_s
        missing = self._left + passed_s / stride_s
        self._end, self._at_s = self._end + round(passed_s * MICROSECONDS), now_s
        return max(int(self._under_way), math.floor(missing + ROUNDING) - sum(windows for _, windows in self._gaps))

    def accounted(self, settled: int, stride_s: float) -> AccountedSpan | None:
        """Part of the video whose windows are all answered or counted; ``None`` before the first frame. ``settled``:
        windows answered or dropped so far; others that have closed wait."""
        if self._begin is None or self._end is None:
            return None
        waiting_s = max(0, self.closed[0] - settled) * stride_s
        end = CameraMoment(self._end - round(waiting_s * MICROSECONDS), self._at_s - waiting_s)
        return AccountedSpan(CameraMoment(*self._begin), end)

    def _counted(self, dropped: int) -> int:
        """Windows that the decoder has counted since its last report; a restarted decoder counts from 0."""
        before, self._dropped = self._dropped, dropped
        if self._end is None:
            return 0
        return dropped - before if dropped >= before else dropped
