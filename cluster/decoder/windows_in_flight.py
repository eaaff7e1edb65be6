"""A camera's windows in flight, which are lost if the replica dies, and windows of which no frame was sent."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cluster.types import MICROSECONDS, FrameSample
from cluster.types.reports import AccountedSpan, CameraMoment, gap_s

_ROUNDING = 0.02
"""Tolerance, as a share of a stride, for cameras' rounded clocks."""
_SEAMS = 64
"""Scene cuts and gaps that can be undone: more than a frame queue holds."""
_KEYFRAMES_US = 10 * MICROSECONDS
"""Longest gap between keyframes, in microseconds, that can be due to decoding keyframes only."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """The stride of the window that was open when its replica was lost, kept until it is known whether the next
    replica's windows are in phase with it.

    ``start`` and ``end``: the stride containing the first frame since then, on the camera's clock; ``uncertain``: 1 if
    that window may be lost; ``resumed``: a frame has been sent since.
    """

    start: int
    end: int
    uncertain: int
    resumed: bool = False


@dataclass(slots=True)
class WindowsInFlight:
    """Strides begun with sent frames, minus windows settled by the replica.

    Windows end one stride apart, counted from the first frame of a scene (``cluster.engine``), so both sides count
    alike. Windows of which nothing was sent are not in flight; a window cut short by a fresh frame is counted by the
    replica, if there is one.
    """

    stride_s: float
    _closed: int = 0
    _settled: int = 0
    # Windows the replica closed before the first frame counted here, less those counted here that it skipped.
    _before: int = 0
    _origin: int | None = None
    _end: int = 0
    _phase: _Phase | None = None
    # Video between that stride's end and the first frame since, modulo the stride, in microseconds: short-lived
    # replicas in a row may add up to a window.
    _lead: int = 0
    # Start of the first frame since counting restarted, until the replica reports a window end after it: the replica
    # may be continuing windows that began earlier.
    _first: int | None = None
    # Windows begun before a hand-over, and the first frame after it.
    _moved: tuple[int, int] | None = None
    # Frames at which windows restarted, each with the state before it: (pts, closed, origin, end).
    _seams: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_SEAMS))
    # End of the newest frame, sent or not; seconds of video missing between frames since the last sent one, and windows
    # counted as unsent up to that.
    _newest: CameraMoment | None = None
    _missing_s: float = 0.0
    _unsent: int = 0

    def note_arrival(self, sample: FrameSample, now_s: float) -> None:
        """Measure missing video before a frame, sent or not, that arrived at ``now_s`` (monotonic)."""
        if self._newest is not None and sample.random_access:
            self._missing_s += gap_s((sample.pts - self._newest.pts) / MICROSECONDS, now_s - self._newest.at_s)
        self._newest = CameraMoment(sample.end, now_s)

    def add_frame(self, sample: FrameSample, *, moved: bool = False, unsent: int = 0) -> int:
        """Count a sent frame. ``moved``: it is the first one for the target of a hand-over; ``unsent``: total of
        :class:`UnsentWindows`. Returns how many windows turn out to be lost: the one open at :meth:`count_lost`, if it
        ended without a further frame, and those without video between the frames of two replicas."""
        lost = 0
        if (end := self.last_window_end) is not None and (moved or self._origin is None):
            passed = (sample.pts + sample.duration // 8 - end) // round(self.stride_s * MICROSECONDS)
            missing = math.floor(self._missing_s / self.stride_s + _ROUNDING)
            lost = max(0, min(passed - (unsent - self._unsent), missing))
            if self._origin is not None and passed >= 0 and self._begun() - self._strides() > _ROUNDING:
                # The window open at the hand-over: its new replica does not know that it was not answered.
                self._before, self._settled = self._before - 1, self._settled + 1
                lost += 1
        self._missing_s, self._unsent = 0.0, unsent
        lost += self._first_after_loss(sample)
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
        """Undo the frames from ``pts`` on: they were dropped from the queue and never reached the replica."""
        while self._seams and self._seams[-1][0] > pts:
            place, self._closed, self._origin, self._end = self._seams.pop()
            if self._end > place + self.stride_s * MICROSECONDS:
                # The camera's clock was set back there: earlier frames cannot be compared with ``pts``.
                return
        if self._origin is not None and pts < self._end:
            # After a gap, a window begins before its first frame.
            first = self._seams[-1][0] if self._seams else self._origin
            self._end = pts if pts > first else self._origin

    def set_stride(self, stride_s: float) -> None:
        """Change the stride: the next window ends one new stride after the last closed one."""
        if self._origin is not None:
            closed = math.floor(self._strides())
            self._closed += closed
            self._origin += round(closed * self.stride_s * MICROSECONDS)
            self._seams.clear()
        self.stride_s = stride_s

    def apply_counts(self, windows: int, closed: int, window_end: int | None) -> int:
        """Apply the replica's window counts, over frames of any decoder: ``windows`` answered or dropped, ``closed``
        (those plus waiting ones), and the end of the last closed window since its windows began, on the camera's clock.
        Counts decrease if the replica has closed the camera in between.

        Returns 1 if the window open at :meth:`count_lost` turns out to be lost: the replica did not continue it.
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
                # The replica closed fewer than had begun by then: it lost the rest with a connection, and counts them;
                # or more: this process stood still, and another decoder had the camera.
                self._before = closed - self._closed - begun
        self._settled = max(0, windows - self._before)
        return lost

    def _find_phase(self, closed: int, window_end: int | None) -> int:
        """Separate the replica's windows before the first frame from those after it, and adopt the latter's phase."""
        first, stride = self._first, round(self.stride_s * MICROSECONDS)
        assert first is not None
        behind = 0
        if window_end is not None and window_end <= self._end + _ROUNDING * stride:
            behind = max(0, math.ceil((window_end - first) / stride - _ROUNDING))
        self._before = max(0, closed - behind)
        if window_end is None or not behind:
            return 0
        # Start of the window that contains the first frame.
        start = window_end - behind * stride
        if self._origin == first and not self._closed:
            self._origin = start
        return self._resolve(in_phase=self._phase is not None and abs(start - self._phase.start) <= _ROUNDING * stride)

    def _resolve(self, *, in_phase: bool) -> int:
        """Settle whether the replica's windows are in phase with its predecessor's; returns the number lost."""
        phase, self._phase, self._first = self._phase, None, None
        return 0 if phase is None or in_phase else phase.uncertain

    @property
    def last_window_end(self) -> int | None:
        """End of the last window of which the replica has a frame, or had before it was lost, on the camera's clock;
        ``None`` if there is none. The replica does not know of later windows."""
        if self._origin is None:
            return None if self._phase is None else self._phase.end
        return self._origin + round(self._begun() * self.stride_s * MICROSECONDS)

    def uncounted_since(self, sample: FrameSample, cut: int | None) -> int:
        """Start of counting unsent windows when ``sample`` is the first unsent frame: the end of the window begun at
        the replica, which it answers despite the missing frames. ``cut``: start of a queue dropped before it."""
        since = self.last_window_end
        stride = round(self.stride_s * MICROSECONDS)
        # Beyond these limits the clock jumped, or video is missing at the source, which the replica counts.
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
        """Length of a window that was open when its replica was lost, until it is known whether it was continued."""
        return 0 if self._phase is None else self._phase.uncertain * (self._phase.end - self._phase.start)

    def restart(self) -> None:
        """Restart windows at the next frame; a reachable replica counts those in flight."""
        self._closed = self._settled = 0
        self._origin = self._moved = self._first = None
        self._lead = 0
        self._seams.clear()

    def count_lost(self) -> int:
        """Handle the loss of the replica: return the number of lost windows and start over.

        Excludes the open window, which the next replica may continue: :meth:`add_frame` or :meth:`apply_counts` reports
        it if lost.
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
        """Handle a failed hand-over: the old replica had settled ``settled`` windows, and the new one starts with the
        first frame after it. Returns the number of lost windows."""
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
        """Windows begun since the origin, tolerating clock rounding."""
        return math.ceil(self._strides() - _ROUNDING)

    def _strides(self) -> float:
        if self._origin is None:
            return 0.0
        return (self._end - self._origin) / (self.stride_s * MICROSECONDS)


@dataclass(slots=True)
class UnsentWindows:
    """Counts whole windows within periods of unsent frames; the replica counts the rest of a gap.

    ``windows``: total. ``reason``: why frames of the latest period are not sent. ``since``: where the next window to
    count starts, on the camera's clock; ``None`` outside such a period.
    """

    windows: int = 0
    reason: str = ""
    since: int | None = None
    # End of the newest frame in this period, its first excluded.
    _newest: int | None = None

    def begin(self, since: int | None, reason: str) -> None:
        """Begin a period at ``since`` in which nothing is sent, for ``reason``; within one, only change the reason."""
        self.reason = reason
        if self.since is None:
            self.since, self._newest = since, None

    def end(self) -> None:
        """End the period: a frame was sent."""
        self.since = None

    def count(self, sample: FrameSample, stride_s: float) -> int:
        """Count windows up to this frame, unsent or the first sent; returns the increase."""
        if self.since is None:
            return 0
        stride = round(stride_s * MICROSECONDS)
        if self._newest is not None and sample.pts - self._newest > stride + _KEYFRAMES_US:
            # The clock jumped ahead, or video is missing at the source, which the replica counts.
            self.since = sample.pts
        self._newest = sample.end
        # As at the replica, a frame belongs to the window that covers most of it.
        windows = math.floor((sample.pts + sample.duration // 8 - self.since) / stride)
        if windows < -1:
            # The camera's clock was set back: restart from here.
            self.since = sample.pts
        if windows <= 0:
            return 0
        self.since += windows * stride
        self.windows += windows
        return windows


@dataclass(slots=True)
class AccountedFrames:
    """The span of a camera's video, from the first frame for which a window is due, in which the decoder knows every
    window to be answered or counted."""

    _begin: CameraMoment | None = None
    _newest: CameraMoment | None = None

    def add(self, sample: FrameSample, now_s: float) -> None:
        """Add a frame, sent or not."""
        self._newest = CameraMoment(sample.end, now_s)
        if self._begin is None:
            self._begin = CameraMoment(sample.pts, now_s)

    def reset(self) -> None:
        """Start over: no window is due until the next frame."""
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
