"""Source supervision: open, forward packets, and reconnect with exponential backoff."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.codec.source import CameraState, Source, SourceStatus, StreamHeader
from cluster.errors import SourceError
from cluster.redaction import redact
from cluster.types import EncodedPacket


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter: attempt n waits ``first_s * factor**n``, at most ``longest_s``, ± ``jitter``.

    Jitter keeps a site's cameras from returning all at once after its switch restarts. A source that ran for
    ``well_after_s`` starts counting anew.
    """

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 60.0
    jitter: float = 0.2
    well_after_s: float = 30.0

    def delay_s(self, attempt: int, draw: float) -> float:
        """Seconds before attempt ``attempt`` (0 = first retry); ``draw`` is uniform in 0..1."""
        # The exponent is capped so that a year of failures does not overflow a float.
        plain = min(self.longest_s, self.first_s * self.factor ** min(attempt, 64))
        return min(self.longest_s, plain * (1.0 + self.jitter * (2.0 * draw - 1.0)))


class SourceSupervisor:
    """Runs one source in the calling thread until it ends, fails for good, or another thread calls ``stop``."""

    def __init__(self, source: Source, backoff: Backoff | None = None, *, seed: int | None = None) -> None:
        self.source = source
        self.backoff = backoff or Backoff()
        self._random = random.Random(seed)
        self._stopped = threading.Event()
        self._attempts = 0

    def stop(self) -> None:
        """Make ``run`` return within about a second, even while waiting or blocked in the network."""
        self._stopped.set()
        self.source.close()

    def run(
        self,
        on_header: Callable[[StreamHeader], None],
        on_packet: Callable[[EncodedPacket], None],
        on_state: Callable[[SourceStatus], None] = lambda _: None,
        on_defect: Callable[[], None] | None = None,
    ) -> SourceStatus:
        """Blocking: calls ``on_header`` at every (re)connection, then ``on_packet`` for each packet. Returns the last
        status.

        An unexpected exception of source or callbacks propagates after the source is closed. With ``on_defect``, which
        is called while it is handled, that of a live source is a lost connection instead: what one packet has brought
        about ends no camera.
        """
        self._on_state = on_state
        with contextlib.closing(self.source):
            return self._run(self.source, on_header, on_packet, on_defect)

    def _run(
        self,
        source: Source,
        on_header: Callable[[StreamHeader], None],
        on_packet: Callable[[EncodedPacket], None],
        on_defect: Callable[[], None] | None,
    ) -> SourceStatus:
        while not self._stopped.is_set():
            self._tell(CameraState.WAITING if source.pushed else CameraState.CONNECTING)
            started: float | None = None
            defect = False
            reason = "the connection was lost: the stream ended"
            try:
                header = source.open()
                if self._stopped.is_set():
                    break
                started = time.monotonic()
                on_header(header)
                self._tell(CameraState.RUNNING)
                for packet in source.packets():
                    if self._stopped.is_set():
                        break
                    on_packet(packet)
            except SourceError as error:
                if not error.retryable and not self._stopped.is_set():
                    return self._tell(CameraState.ERROR, str(error))
                reason = str(error)
            except Exception as error:
                if on_defect is None or not source.live:
                    raise
                defect, reason = True, f"internal error: {type(error).__name__}: {error}"
                on_defect()
            if self._stopped.is_set():
                break
            if source.ended:
                return self._tell(CameraState.ENDED)
            if started is not None and source.pushed and not defect:
                continue
            if started is not None and time.monotonic() - started >= self.backoff.well_after_s:
                self._attempts = 0
            delay = self.backoff.delay_s(self._attempts, self._random.random())
            self._attempts += 1
            self._tell(CameraState.BACKOFF, reason, delay)
            self._stopped.wait(delay)
        return self._tell(CameraState.ENDED, "stopped")

    def _tell(self, state: CameraState, reason: str = "", retry_in_s: float = 0.0) -> SourceStatus:
        # Libraries quote the source, or a piece of it.
        status = SourceStatus(state, redact(reason), retry_in_s)
        self._on_state(status)
        return status
