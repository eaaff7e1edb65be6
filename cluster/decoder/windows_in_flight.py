"""A camera's windows in flight, which are lost when the replica dies, and those of which no frame was sent."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cluster.types import MICROSECONDS, FrameSample
from cluster.types.reports import AccountedSpan, CameraMoment

_ROUNDING = 0.02
"""Tolerance, as a share of a stride, for cameras' rounded clocks."""
_SEAMS = 64
"""Scene cuts and gaps that may be taken back: more than a queue of frames holds."""
_KEYFRAMES_US = 10 * MICROSECONDS
"""Longest gap between two keyframes, microseconds, that can be the decoder's own skipping."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """The stride of the last window when its replica was lost, until it is known whether the next replica's windows are
    in phase with it.

    ``start`` and ``end``: of the stride in which the first frame since then lies, on the camera's clock; ``uncertain``:
    1 where that window may be lost; ``resumed``: a frame has been sent since.
    """

    start: int
    end: int
    uncertain: int
    resumed: bool = False


@dataclass(slots=True)
class WindowsInFlight:
    """Strides begun with sent frames, minus windows the replica has settled.

    Windows end one stride apart, counted from the first frame of a scene (``cluster.engine``), so both sides count
    alike. Windows of which nothing was sent are not in flight, and the replica counts the one that a fresh frame cuts
    short, if there is a replica.
    """

    stride_s: float
    _closed: int = 0
    _settled: int = 0
    # Windows at the replica that ended before the first frame of those counted here, answered or not, less those
    # counted here that it skipped.
    _before: int = 0
    _origin: int | None = None
    _end: int = 0
    _phase: _Phase | None = None
    # Video between the end of that and the first frame since, less whole strides, microseconds: short lives of several
    # replicas may add up to a window.
    _lead: int = 0
    # Start of the first frame since counting began anew, until the replica has told a window's end behind it: it may
    # continue windows that began before.
    _first: int | None = None
    # Windows begun before a hand-over, and the first frame after it.
    _moved: tuple[int, int] | None = None
    # Frames at which the windows began anew, and what was counted before each: (pts, closed, origin, end).
    _seams: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_SEAMS))

    def add_frame(self, sample: FrameSample, *, moved: bool = False) -> int:
        """Count a sent frame. ``moved``: the first for the hand-over's target. Returns 1 where the window that was open
        at :meth:`count_lost` has ended without a frame since, and is lost."""
        lost = self._first_after_loss(sample)
        if moved and self._origin is not None:
            self._moved = self._closed + self._begun(), sample.pts
        before = self._closed, self._origin, self._end
        if self._origin is None:
            self._first = sample.pts
        elif sample.fresh:
            lost += self._resolve(in_phase=False)
        if self._origin is None or sample.fresh or sample.pts < self._end - sample.duration:
            self._closed += math.floor(self._strides())
            self._origin = sample.pts
        elif sample.gap:
            stride = self.stride_s * MICROSECONDS
            begun = self._begun()
            passed = math.floor((sample.pts - self._origin) / stride + _ROUNDING)
            if passed >= begun:
                self._closed += begun
                self._origin += round(passed * stride)
        closed, origin, end = before
        if origin is not None and origin != self._origin:
            self._seams.append((sample.pts, closed, origin, end))
        self._end = sample.end
        return lost

    def _first_after_loss(self, sample: FrameSample) -> int:
        if self._phase is None or self._phase.resumed:
            return 0
        stride = self._phase.end - self._phase.start
        passed = (sample.pts + sample.duration // 8 - self._phase.start) // stride
        start = self._phase.start + passed * stride
        uncertain = self._phase.uncertain
        self._lead = max(0, sample.pts - start) if passed else 0
        self._phase = _Phase(start, start + stride, 0 if passed else uncertain, resumed=True)
        return uncertain if passed else 0

    def truncate(self, pts: int) -> None:
        """Frames from ``pts`` on were dropped after all and never reached the replica."""
        while self._seams and self._seams[-1][0] > pts:
            place, self._closed, self._origin, self._end = self._seams.pop()
            if self._end > place + self.stride_s * MICROSECONDS:
                # The camera's clock was set back there: ``pts`` says nothing of earlier frames.
                return
        if self._origin is not None and pts < self._end:
            # Behind a gap, windows begin before the first frame that they have.
            first = self._seams[-1][0] if self._seams else self._origin
            self._end = pts if pts > first else self._origin

    def set_stride(self, stride_s: float) -> None:
        """Change the stride: the next window ends that much after the last closed one."""
        if self._origin is not None:
            closed = math.floor(self._strides())
            self._closed += closed
            self._origin += round(closed * self.stride_s * MICROSECONDS)
            self._seams.clear()
        self.stride_s = stride_s

    def set_settled(self, windows: int, closed: int, window_end: int | None) -> int:
        """Set what the replica tells of its windows, of any decoder's frames: how many are answered or dropped, how
        many have closed (those and the ones that wait), and the end of the last that closed since they began, on the
        camera's clock. Fewer than before where the replica has closed the camera in between.

        Returns 1 where this tells that the window that was open at :meth:`count_lost` was not continued, and is lost.
        """
        resolved = self._first is None
        lost = 0 if resolved else self._find_phase(closed, window_end)
        if self._origin is None:
            self._before = closed
        elif closed < self._before:
            self._before = 0
        if resolved and self._origin is not None and window_end is not None and window_end <= self._end:
            begun = math.floor((window_end - self._origin) / (self.stride_s * MICROSECONDS) + _ROUNDING)
            if begun > 0:
                # It has closed fewer than were begun until then: it lost the others with a connection, and counts them.
                self._before = min(self._before, closed - self._closed - begun)
        self._settled = max(0, windows - self._before)
        return lost

    def _find_phase(self, closed: int, window_end: int | None) -> int:
        """Tell the replica's windows before the first frame from those behind it, and count in the phase of these."""
        first, stride = self._first, round(self.stride_s * MICROSECONDS)
        assert first is not None
        behind = 0
        if window_end is not None and window_end <= self._end + _ROUNDING * stride:
            behind = max(0, math.ceil((window_end - first) / stride - _ROUNDING))
        self._before = max(0, closed - behind)
        if window_end is None or not behind:
            return 0
        # That of the window in which the first frame is.
        start = window_end - behind * stride
        if self._origin == first and not self._closed:
            self._origin = start
        return self._resolve(in_phase=self._phase is not None and abs(start - self._phase.start) <= _ROUNDING * stride)

    def _resolve(self, *, in_phase: bool) -> int:
        """Whether the replica's windows are in phase with those of the one before is known; returns the lost ones."""
        phase, self._phase, self._first = self._phase, None, None
        return 0 if phase is None or in_phase else phase.uncertain

    @property
    def last_window_end(self) -> int | None:
        """End of the last window that the replica has a frame of, or had before it was lost, on the camera's clock;
        ``None`` where there is none. The replica knows nothing of later windows."""
        if self._origin is None:
            return None if self._phase is None else self._phase.end
        return self._origin + round(self._begun() * self.stride_s * MICROSECONDS)

    def uncounted_since(self, sample: FrameSample, cut: int | None) -> int:
        """Where unsent windows are counted from when ``sample`` is the first unsent frame: the end of the window that
        the replica has begun, which it answers although frames are missing. ``cut``: start of a queue that was dropped
        before it."""
        since = self.last_window_end
        stride = round(self.stride_s * MICROSECONDS)
        # Longer than two windows, or negative: the clock jumped, or video never came, which the replica counts.
        most = 2 * stride + _KEYFRAMES_US + (sample.pts - cut if cut is not None else 0)
        return since if since is not None and -stride <= sample.pts - since <= most else sample.pts

    def count(self) -> int:
        """Windows begun and neither answered nor dropped."""
        return max(0, self._closed + self._begun() - self._settled)

    @property
    def unsettled(self) -> float:
        """Strides of video sent since the end of the last settled window."""
        uncertain = self.uncertain_us / (self.stride_s * MICROSECONDS)
        return uncertain + max(0.0, self._closed + self._strides() - self._settled)

    @property
    def uncertain_us(self) -> int:
        """Length of a window that was open when its replica was lost, until it is known whether it is lost too."""
        return 0 if self._phase is None else self._phase.uncertain * (self._phase.end - self._phase.start)

    def restart(self) -> None:
        """The next frame begins windows anew; a replica that is reachable counts what was in flight."""
        self._closed = self._settled = 0
        self._origin = self._moved = self._first = None
        self._lead = 0
        self._seams.clear()

    def count_lost(self) -> int:
        """The replica is gone: return the number of lost windows and start over.

        The open window is not among them until :meth:`add_frame` or :meth:`set_settled` says so: the next replica may
        continue it.
        """
        if self._origin is not None and not (self._settled or self._closed):
            self._origin -= self._lead
        lost = self._phase.uncertain if self._phase is not None and self._phase.resumed else 0
        if self._origin is not None and (end := self.last_window_end) is not None:
            begun = self.count()
            still_open = min(1, begun)
            self._phase = _Phase(end - round(self.stride_s * MICROSECONDS), end, still_open)
            lost += begun - still_open
        self._before = 0
        self.restart()
        return lost

    def cancel_hand_over(self, settled: int) -> int:
        """A hand-over failed after the old replica settled so many windows, and the new one starts with the first frame
        after it. Returns the lost windows."""
        self._settled = max(0, settled - self._before)
        if self._moved is None:
            return self.count_lost()
        begun, origin = self._moved
        lost = max(0, begun - self._settled)
        self._before = 0
        self.restart()
        self._origin = self._first = origin
        return lost

    def _begun(self) -> int:
        """Windows begun since the origin; a clock's rounding begins none."""
        return math.ceil(self._strides() - _ROUNDING)

    def _strides(self) -> float:
        if self._origin is None:
            return 0.0
        return (self._end - self._origin) / (self.stride_s * MICROSECONDS)


@dataclass(slots=True)
class UnsentWindows:
    """Whole windows within periods of unsent frames; the replica counts the rest of a gap.

    ``windows``: in total; ``reason``: why the newest period's frames are not sent; ``since``: where windows are counted
    from in such a period, on the camera's clock, ``None`` outside.
    """

    windows: int = 0
    reason: str = ""
    since: int | None = None
    # End of the newest frame in this period but its first.
    _newest: int | None = None

    def begin(self, since: int | None, reason: str) -> None:
        """Nothing is sent from ``since`` on, for ``reason``; in such a period, only the reason changes."""
        self.reason = reason
        if self.since is None:
            self.since, self._newest = since, None

    def end(self) -> None:
        """A frame was sent."""
        self.since = None

    def count(self, sample: FrameSample, stride_s: float) -> int:
        """Count up to this unsent or first sent frame; returns how many windows that adds."""
        if self.since is None:
            return 0
        stride = round(stride_s * MICROSECONDS)
        if self._newest is not None and sample.pts - self._newest > stride + _KEYFRAMES_US:
            # The clock jumped ahead, or video never came, which the replica counts.
            self.since = sample.pts
        self._newest = sample.end
        # A frame belongs to the window that covers most of it, as at the replica.
        windows = math.floor((sample.pts + sample.duration // 8 - self.since) / stride)
        if windows < -1:
            # The camera's clock was set back: earlier times are meaningless.
            self.since = sample.pts
        if windows <= 0:
            return 0
        self.since += windows * stride
        self.windows += windows
        return windows


@dataclass(slots=True)
class AccountedFrames:
    """Part of a camera's video whose windows its decoder knows to be answered or counted: from the first frame of which
    a window is due on."""

    _begin: CameraMoment | None = None
    _newest: CameraMoment | None = None

    def add(self, sample: FrameSample, now_s: float) -> None:
        """Add a frame, sent or not."""
        self._newest = CameraMoment(sample.end, now_s)
        if self._begin is None:
            self._begin = CameraMoment(sample.pts, now_s)

    def reset(self) -> None:
        """No window is due until the next frame."""
        self._begin = self._newest = None

    def span(self, in_flight: WindowsInFlight, unsent: UnsentWindows) -> AccountedSpan | None:
        begin, newest = self._begin, self._newest
        if begin is None or newest is None:
            return None
        if unsent.since is not None:
            open_us = newest.pts - unsent.since + in_flight.uncertain_us
        else:
            open_us = round(in_flight.unsettled * in_flight.stride_s * MICROSECONDS)
        end = CameraMoment(newest.pts - open_us, newest.at_s - open_us / MICROSECONDS)
        return AccountedSpan(begin, begin if end.at_s < begin.at_s else end)
