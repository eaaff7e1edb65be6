"""Timestamps, sampling and anchors, robust against clocks that repeat, jump or are missing."""

import bisect

from cluster.types import MICROSECONDS

_DEFAULT_INTERVAL = MICROSECONDS // 25
PATIENCE = 25
"""Consecutive pictures without a usable timestamp after which the camera counts as having no clock."""
REPEAT = MICROSECONDS
"""Largest backward step that is a clock correction rather than a jump."""
LONGEST_STEP = 10 * MICROSECONDS
"""Largest forward step that is not a jump."""
# Largest reordering depth of encoders in use: two in x264 and x265, four in a B-pyramid of 16.
_REORDERED = 4


class Timeline:
    """Strictly increasing times for the pictures of one stream, in display order.

    * missing pts: the last time plus the usual interval; before the first known time, up to 25 pictures are skipped,
      then time counts from 0; after missing video, up to 25 are skipped as well
    * repeated or up to 1 s back: not placed; after 25 in a row the clock is considered stuck and its pts missing
    * further back: a jump
    * more than 10 s ahead: a jump, unless video is missing before the picture (:meth:`resume`)
    """

    def __init__(self) -> None:
        self.jumped = False
        """Whether the clock jumped before the picture placed last."""
        self._interval: int | None = None
        self._last: int | None = None
        self._repeated: int | None = None
        self._unplaced = 0
        self._resuming = False

    def resume(self) -> None:
        """Note that video is missing before the next picture, which may then be any time ahead."""
        self._unplaced = 0
        self._resuming = True

    def restart(self) -> None:
        """Start a new clock: later times are unrelated to earlier ones."""
        self._last = None
        self._unplaced = 0

    def place_picture(self, pts: int | None) -> int | None:
        """Time of the next picture in microseconds, None if it cannot be placed."""
        self.jumped = False
        if pts is None:
            return self._extrapolate()
        if self._last is None:
            return self._at(pts)
        step = pts - self._last
        if step > 0 and self._resuming:
            return self._at(pts)
        if 0 < step <= LONGEST_STEP:
            # A slow average: one long pause must not stretch the interval used to extrapolate missing times.
            usual = self._interval or step
            self._interval = usual + (min(step, 4 * usual) - usual) // 8
            return self._at(pts)
        # Extrapolated times run on, so a stuck clock may fall behind them by any amount.
        stuck = self._unplaced >= PATIENCE and self._repeated is not None and abs(pts - self._repeated) < REPEAT
        if -REPEAT < step <= 0 or stuck:
            if self._unplaced >= PATIENCE:
                return self._extrapolate()
            self._unplaced += 1
            self._repeated = pts
            return None
        self.jumped = True
        return self._at(pts)

    def _at(self, time: int) -> int:
        self._last = time
        self._unplaced = 0
        self._resuming = False
        return time

    def _extrapolate(self) -> int | None:
        interval = self._interval or _DEFAULT_INTERVAL
        if self._last is None or (self._resuming and self._interval is not None):
            if self._unplaced < PATIENCE:
                self._unplaced += 1
                return None
            self._resuming = False
        self._last = 0 if self._last is None else self._last + interval
        return self._last


class DecodingClock:
    """Ascending times for packets in decoding order: every picture displayed up to that time has arrived.

    Derived from presentation times alone. Decoding times are not always sent, and for RTSP, which has none, FFmpeg
    guesses them: if it underestimates the reordering, they go back and forth with the pictures. Here the reordering
    depth is the largest number of pictures seen to precede one displayed before them; while it is being learned, times
    may step back.
    """

    def __init__(self) -> None:
        self.depth = 0
        """Reordering depth seen so far, in pictures."""
        self._latest: list[int] = []

    def restart(self) -> None:
        """Start a new clock: later times are unrelated to earlier ones. Keeps the depth."""
        self._latest.clear()

    def advance(self, pts: int) -> int:
        """Time of the next packet in decoding order, in microseconds like its ``pts``."""
        latest = self._latest
        shown_later = len(latest) - bisect.bisect(latest, pts)
        if shown_later > _REORDERED:
            # Deeper than any reordering: the camera's clock was corrected.
            self.restart()
            shown_later = 0
        self.depth = max(self.depth, shown_later)
        latest.insert(len(latest) - shown_later, pts)
        del latest[: -_REORDERED - 1]
        return latest[max(0, len(latest) - 1 - self.depth)]


class Sampling:
    """Selects samples by time: the first picture at or after each tick of ``fps``."""

    def __init__(self, fps: float) -> None:
        self._next: int | None = None
        self.change_fps(fps)

    def change_fps(self, fps: float) -> None:
        """Change the rate from the next tick on."""
        self.period = max(1, round(MICROSECONDS / fps))
        # Timestamps jitter and are rounded to the container's time base; a picture this early belongs to the tick.
        self._slack = self.period // 20

    @property
    def least_step(self) -> int:
        """Smallest distance between samples, in microseconds."""
        return self.period - self._slack

    def reset(self) -> None:
        """Make the next picture a sample."""
        self._next = None

    def is_sample(self, time: int) -> bool:
        """Whether the picture at ``time`` is a sample; ticks stay on one grid until reset."""
        if self._next is None:
            self._next = time + self.period
            return True
        if time < self._next - self._slack:
            return False
        self._next += self.period * ((time + self._slack - self._next) // self.period + 1)
        return True


class AnchorRule:
    """Selects anchors: samples kept whole, at which a window may open (docs/windows.md).

    An anchor is the first sample at or after an I-frame, at least ``interval_s`` after the last anchor. It is forced at
    the interval if I-frames are further apart or absent: cameras send one every 10 to 250 frames, some none at all.
    ``tolerance`` (microseconds, half a sampling period) accepts a slightly early I-frame instead of waiting a GOP.
    ``first_s``: interval after the first anchor, so that cameras that start together do not refresh together.
    """

    def __init__(self, interval_s: float, tolerance: int, first_s: float | None = None) -> None:
        self._interval = int(interval_s * MICROSECONDS)
        self._first = self._interval if first_s is None else int(first_s * MICROSECONDS)
        self._tolerance = tolerance
        self._distance: int | None = None
        self.reset()

    def reset(self) -> None:
        """Make the next sample an anchor."""
        self._last_anchor: int | None = None
        self._closest = self._first - self._tolerance
        self._last_intra: int | None = None
        self._intra_since_sample = False

    def note_intra_picture(self, time: int | None) -> None:
        self._intra_since_sample = True
        if time is not None:
            if self._last_intra is not None:
                self._distance = time - self._last_intra
            self._last_intra = time

    def is_anchor(self, time: int) -> bool:
        intra, self._intra_since_sample = self._intra_since_sample, False
        if self._last_anchor is not None:
            if time - self._last_anchor < self._closest:
                return False
            long_gop = self._distance is not None and self._distance > self._interval + self._tolerance
            late = self._last_intra is None or time - self._last_intra >= self._interval - self._tolerance
            if not (intra or long_gop or late):
                return False
            self._closest = self._interval - self._tolerance
        self._last_anchor = time
        return True
