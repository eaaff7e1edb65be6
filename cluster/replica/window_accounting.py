"""Accounts for every stride of one camera's video: as a window, as dropped, or as lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types import MICROSECONDS, FrameSample, WindowRequest
from cluster.types.reports import CLOCK_JUMP_S, ROUNDING, AccountedSpan, CameraMoment, gap_s


@dataclass(slots=True)
class WindowAccounting:
    """Each stride since a camera's first frame is a window, was dropped and counted by the decoder, or is lost here.

    While frames arrive, windows follow each other. A gap is video that never arrived: lost packets, a dead decoder, an
    unreachable camera; the next frame is marked as following a gap. Windows continue behind it in phase, skipping
    strides without video: these are lost, minus those that the decoder reports as counted.

    A fresh frame restarts the windows: the whole strides between the end of the last window and that frame are lost,
    including the one that it cuts short, even if that is the only one. The fraction of a stride left over is carried
    until a window is answered; otherwise many short gaps would add up to uncounted windows.

    ``closed``: number of closed windows, and the end of the last one since the restart, on the camera's clock.
    ``in_progress``: whether frames have come since the last window closed; False once the open stride is counted.

    Times are the camera's own, in microseconds, as long as they agree with the arrival of frames (monotonic seconds).
    After a clock jump in either direction, the gap's length is how long the frame took to arrive.
    """

    closed: tuple[int, int | None] = (0, None)
    in_progress: bool = False
    _end: int | None = None
    _at_s: float = 0.0
    _left: float = 0.0
    _dropped: int = 0
    _number: int = -1
    _newest: FrameSample | None = None
    _begin: tuple[int, float] | None = None
    # Start of the first frame here, until the windows restart.
    _first: int | None = None

    def continues(self, sample: FrameSample, arrived_s: float, *, patient: bool = False) -> bool:
        """Whether the windows continue with this frame, which arrived at ``arrived_s`` (monotonic); they restart on a
        scene cut, another grid, or a clock that jumps back or too far ahead. ``patient``: see :meth:`restart`."""
        if sample.fresh:
            return False
        if not sample.gap or self._newest is None or self._end is None:
            return True
        hole_s = (sample.pts - self._end) / MICROSECONDS
        late = not patient and hole_s > arrived_s - self._at_s + CLOCK_JUMP_S
        return sample.pts > self._newest.pts and sample.grid == self._newest.grid and not late

    def restart(self, sample: FrameSample, arrived_s: float, stride_s: float, *, patient: bool = False) -> int:
        """Restart the windows at a fresh frame, which arrived at ``arrived_s`` (monotonic); returns how many are lost.
        ``patient``: frames are held back, so that arrival times mean nothing."""
        missing = self._left
        if self._end is not None:
            waited_s = 0.0 if patient else arrived_s - self._at_s
            missing += gap_s((sample.pts - self._end) / MICROSECONDS, waited_s) / stride_s
        lost = max(int(self.in_progress), math.floor(missing + ROUNDING))
        self._left = max(0.0, missing - lost)
        lost = max(0, lost - self._counted(sample.windows_dropped))
        self._end, self._at_s, self.in_progress = sample.pts, arrived_s, False
        self._begin = self._begin or (sample.pts, arrived_s)
        # Numbers skipped until here are counted above, by time.
        self.closed, self._first, self._number = (self.closed[0], None), None, -1
        return lost

    def add_frame(self, sample: FrameSample, arrived_s: float, closed: Sequence[WindowRequest], stride_s: float) -> int:
        """Count a frame that ``closed`` these windows; returns how many before it were skipped for lack of video."""
        counted = self._counted(sample.windows_dropped) if sample.gap else 0
        if self._end is None:
            self._end, self._at_s = sample.pts, arrived_s
            self._begin = sample.pts, arrived_s
            self._first = sample.pts
        self._newest = sample
        if closed:
            # Updated first: the reporting thread may account for too little meanwhile, but never for too much.
            self.closed = self.closed[0] + len(closed), closed[-1].end
        # The frame that closes a window usually lies behind its end and belongs to the next one.
        place = sample.pts + sample.duration // 8
        self.in_progress = not closed or place >= closed[-1].end
        lost = 0
        for request in closed:
            lost += request.window - self._number - 1 if self._number >= 0 else 0
            # After a restored window that another replica began, the decoder counts up to the first frame here.
            if self._first is None or request.end > self._first:
                self._number = request.window
            # Arrival time of a frame at the window's end.
            self._end, self._at_s = request.end, arrived_s + (request.end - sample.pts) / MICROSECONDS
        stride = round(stride_s * MICROSECONDS)
        if self._number >= 0 and (skipped := (place - self._end) // stride) > 0:
            self._number += skipped
            lost += skipped
            self._end += skipped * stride
            self._at_s = arrived_s + (self._end - sample.pts) / MICROSECONDS
        return max(0, lost - counted)

    def window_answered(self) -> None:
        """A window was answered: drop the carried remainder."""
        self._left = 0.0

    def count_abandoned(self, now_s: float, stride_s: float) -> int:
        """Count the windows lost until now because the decoder died; returns how many."""
        if self._end is None:
            return 0
        passed_s = now_s - self._at_s
        missing = self._left + passed_s / stride_s
        self._end, self._at_s = self._end + round(passed_s * MICROSECONDS), now_s
        return max(int(self.in_progress), math.floor(missing + ROUNDING))

    def accounted(self, settled: int, stride_s: float) -> AccountedSpan | None:
        """Part of the video whose windows are all answered or counted; ``None`` before the first frame. ``settled``:
        windows answered or dropped so far; other closed windows still wait."""
        if self._begin is None or self._end is None:
            return None
        waiting_s = max(0, self.closed[0] - settled) * stride_s
        end = CameraMoment(self._end - round(waiting_s * MICROSECONDS), self._at_s - waiting_s)
        return AccountedSpan(CameraMoment(*self._begin), end)

    def _counted(self, dropped: int) -> int:
        """Windows that decoders counted since the last frame. A restarted controller may forget some of a dead one."""
        before, self._dropped = self._dropped, dropped
        return 0 if self._end is None else max(0, dropped - before)
