"""Step 1 of the data's way: something that yields encoded packets. Nothing here touches a pixel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cluster.types import EncodedPacket


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """What is known of a stream before its first packet.

    ``codec`` is FFmpeg's name. ``width`` and ``height`` are pixels, 0 when unknown. ``extradata`` is the decoder's
    configuration: Annex-B parameter sets for H.264 and HEVC (avcC, hvcC are understood too), else the container's own.
    ``new_clock``: timestamps have nothing to do with those before it, as in another RTSP session.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    new_clock: bool = False


class CameraState(StrEnum):
    """WAITING for a pushing client, CONNECTING, RUNNING, in BACKOFF before a new attempt, ERROR or ENDED for good."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    RUNNING = "running"
    BACKOFF = "backoff"
    ERROR = "error"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A state with its reason (one sentence, empty when all is well) and, in BACKOFF, the seconds to the next attempt.

    ``attempts`` counts failures since the source last ran well; ``reconnects`` all successful re-openings.
    """

    state: CameraState
    reason: str = ""
    retry_in_s: float = 0.0
    attempts: int = 0
    reconnects: int = 0


class Source(Protocol):
    """A camera's packets. ``open`` and ``packets`` are called by one thread, ``close`` by any.

    * ``live``: packets have a present; when they stop without a word, the connection was lost
    * ``pushed``: ``open`` waits for somebody else to connect, as long as it takes
    * ``ended``: the video is over; opening again would give nothing new
    """

    live: bool
    pushed: bool

    @property
    def ended(self) -> bool: ...

    def open(self) -> StreamHeader:
        """Connect and learn what the stream is; may be called again after ``packets`` ended.

        Raises:
            SourceError: it cannot be read; ``retryable`` says whether trying again may help.
        """
        ...

    def packets(self) -> Iterator[EncodedPacket]:
        """Packets in decoding order until the video ends or the connection is gone.

        Raises:
            SourceError: reading failed on the way.
        """
        ...

    def close(self) -> None:
        """Stop for good, from any thread; a blocked ``open`` or ``packets`` returns within a second."""
        ...
