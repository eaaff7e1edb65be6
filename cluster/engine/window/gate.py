"""The static gate: when nothing moved, the last answers stand and no model runs."""

from __future__ import annotations

from cluster.engine.base import WindowRequest
from cluster.engine.window.stream import LastWindow, Stream
from cluster.types import MICROSECONDS

# Windows to compute after a (fresh) start before an answer may stand: the first holds a single stride, and one answer
# alone would hide for `max_idle_s` that the camera only just came up.
FIRST_WINDOWS = 2


def standing(stream: Stream, request: WindowRequest) -> LastWindow | None:
    """The window whose answers still stand for this request, or ``None`` if it must be computed.

    They stand when nothing changed in any frame since that window's end, anchors included, the questions are the same,
    and at most ``max_idle_s`` of the camera's time has passed.
    """
    spec, last = stream.spec, stream.last
    if not spec.static_gate or last is None or stream.windows_since_fresh < FIRST_WINDOWS:
        return None
    if last.questions != spec.questions or request.end - last.end > spec.max_idle_s * MICROSECONDS:
        return None
    if stream.last_motion_dropped is not None and stream.last_motion_dropped >= last.end:
        return None
    since = [frame for frame in stream.frames if last.end <= frame.place < request.end]
    return last if since and not any(frame.moving for frame in since) else None
