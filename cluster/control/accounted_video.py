"""Tracks which part of a camera's video is accounted for, to find windows lost when decoder and replica die together.

A replica counts the windows lost with a decoder, and a decoder those lost with a replica; if both die, nobody is left
to count. Both therefore report how far they have answered or counted every window, and the controller counts from
there to the first frame of the next replica.
"""

import math
from dataclasses import dataclass, field

from cluster.types import MICROSECONDS
from cluster.types.reports import ROUNDING, AccountedSpan, CameraMoment, CameraReport, StreamReport, gap_s

LATE_REPORTS_S, LATE_HEARTBEATS = 3.0, 3
"""Minimum age of the next replica's first frame when a gap is counted: until then, late reports may shorten it."""

LEAST_S = 0.2
"""Shortest gap: less is the reports' delay on the way to the controller."""


@dataclass(slots=True)
class _Gap:
    """``begin``: end of what was accounted for; ``decoded_s``: first frame of the next decoder; ``counted``: windows
    that decoders have counted since, by run."""

    begin: CameraMoment
    decoded_s: float
    counted: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class AccountedVideo:
    """Accounted video of one camera, reported every ``heartbeat_s``; moments are on the controller's monotonic clock.

    A gap opens with the first frame of a decoder's new run. If the same replica still has the camera, it counts what is
    missing, which closes the gap; if another replica has it, the controller counts.
    """

    heartbeat_s: float = 1.0
    _until: CameraMoment | None = None
    _gap: _Gap | None = None
    _since_s: float = -math.inf

    def reset(self, now_s: float) -> None:
        """Treat everything before ``now_s`` as accounted for: the camera was paused, or no question was asked."""
        self._until = self._gap = None
        self._since_s = now_s

    def add_decoder(self, report: CameraReport, now_s: float) -> None:
        if report.idle:
            self.reset(now_s)
        if report.accounted is None:
            return
        span = _here(report.accounted, now_s - report.now_s)
        if span.end.at_s <= self._since_s:
            return
        if self._gap is None and self._until is not None and span.begin.at_s > self._until.at_s + LEAST_S:
            self._gap = _Gap(self._until, span.begin.at_s)
        if self._gap is None:
            self._until = _later(self._until, span.end)
        elif span.begin.at_s > self._gap.begin.at_s:
            counts = report.counts
            self._gap.counted[report.run] = counts.get("windows_dropped", 0) + counts.get("windows_lost", 0)
        else:
            self._gap.begin = _later(self._gap.begin, span.end)

    def add_replica(self, report: StreamReport, now_s: float, stride_s: float) -> int:
        """Record a replica's report, received at ``now_s``; returns how many uncounted windows were found lost."""
        spans = [_here(span, now_s - report.now_s) for span in (report.accounted_before, report.accounted) if span]
        return sum(self._add_span(span, now_s, stride_s) for span in spans if span.end.at_s > self._since_s)

    def _add_span(self, span: AccountedSpan, now_s: float, stride_s: float) -> int:
        gap, lost = self._gap, 0
        if gap is not None and span.begin.at_s <= gap.begin.at_s:
            gap.begin = _later(gap.begin, span.end)
            if span.end.at_s < gap.decoded_s:
                return 0
        elif gap is not None:
            if now_s - span.begin.at_s < max(LATE_REPORTS_S, LATE_HEARTBEATS * self.heartbeat_s):
                return 0
            first, last = gap.begin, span.begin
            missing_s = gap_s((last.pts - first.pts) / MICROSECONDS, last.at_s - first.at_s)
            missing = math.floor(missing_s / stride_s + ROUNDING)
            lost = max(0, missing - sum(gap.counted.values()))
        self._gap = None
        self._until = _later(self._until, span.end)
        return lost


def _later(first: CameraMoment | None, last: CameraMoment) -> CameraMoment:
    return last if first is None or last.at_s > first.at_s else first


def _here(span: AccountedSpan, ahead_s: float) -> AccountedSpan:
    """Convert to the controller's clock, which is ``ahead_s`` seconds ahead of the reporting process's."""
    begin, end = span.begin, span.end
    return AccountedSpan(CameraMoment(begin.pts, begin.at_s + ahead_s), CameraMoment(end.pts, end.at_s + ahead_s))
