"""How far a vector reaches: FFmpeg tells the sign of the reference's distance, never the distance."""

from __future__ import annotations

from collections import deque

# More than any decoder's reference and reorder depth (H.264: 16 + 16).
_DEPTH = 33


class ReferenceDistance:
    """Per shown picture, the share of a vector that happened since the picture shown before it.

    With B-frames a P-frame's vector spans several pictures and a B-frame's points both ways; adding them up as they are
    counts motion twice. Encoders refer to the nearest reference nearly always, so vectors are scaled by
    ``(pts - shown) / (pts - nearest past reference)`` and ``(pts - shown) / (nearest future reference - pts)``.
    """

    def __init__(self) -> None:
        self._decoded: deque[tuple[int, bool]] = deque(maxlen=_DEPTH)
        self._shown: int | None = None

    def reset(self) -> None:
        self._decoded.clear()
        self._shown = None

    def decoded(self, pts: int | None, reference: bool) -> None:
        """A packet went into the decoder."""
        if pts is not None:
            self._decoded.append((pts, reference))

    def shown(self, pts: int | None, reorders: bool) -> tuple[float, float]:
        """Factors for vectors to past and to future references; (1, 1) where order or times are unknown."""
        before, self._shown = self._shown, pts
        if not reorders or pts is None or before is None or before >= pts:
            return 1.0, 1.0
        past: int | None = None
        future: int | None = None
        for time, reference in self._decoded:
            if time == pts:
                break
            if not reference:
                continue
            if time < pts:
                past = time if past is None else max(past, time)
            else:
                future = time if future is None else min(future, time)
        step = pts - before
        return (
            1.0 if past is None else min(1.0, step / (pts - past)),
            1.0 if future is None else min(1.0, step / (future - pts)),
        )
