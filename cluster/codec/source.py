"""Source interface (step 1): yields encoded packets, decodes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cluster.types import EncodedPacket


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """Stream parameters known before the first packet.

    ``codec``: FFmpeg's name. ``width``, ``height``: pixels, 0 when unknown. ``extradata``: decoder configuration:
    Annex-B parameter sets for H.264 and HEVC (avcC and hvcC too), else the container's own. ``new_clock``: timestamps
    are unrelated to earlier ones, as in another RTSP session.
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

    * ``live``: real-time; silence means that the connection was lost
    * ``pushed``: ``open`` waits for a client without a limit
    * ``ended``: the video is over; opening again would give nothing new
    """

    live: bool
    pushed: bool

    @property
    def ended(self) -> bool: ...

    def open(self) -> StreamHeader:
        """Connect and read the stream's parameters; callable again after ``packets`` ended.

        Raises:
            SourceError: it cannot be read; ``retryable``: trying again may help.
        """
        ...

    def packets(self) -> Iterator[EncodedPacket]:
        """Packets in decoding order until the video ends or the connection is lost.

        Raises:
            SourceError: reading failed.
        """
        ...

    def close(self) -> None:
        """Stop for good, from any thread; a blocked ``open`` or ``packets`` returns within a second."""
        ...
