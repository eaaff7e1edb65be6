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

    Jitter keeps a site's cameras from reconnecting all at once after a switch restart. A source that ran for
    ``well_after_s`` resets the attempt count.
    """

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 60.0
    jitter: float = 0.2
    well_after_s: float = 30.0

    def delay_s(self, attempt: int, draw: float) -> float:
        """Seconds before retry ``attempt`` (0 = first); ``draw`` is uniform in 0..1."""
        # Capped exponent: after a year of failures the power would overflow a float.
        plain = min(self.longest_s, self.first_s * self.factor ** min(attempt, 64))
        return min(self.longest_s, plain * (1.0 + self.jitter * (2.0 * draw - 1.0)))


LOGIN = Backoff(first_s=30.0, factor=20.0, longest_s=600.0, jitter=0.0)
"""Backoff after a refused user or password, which takes four attempts in half an hour: many cameras lock an address, or
the account for everybody, for up to half an hour after five."""


class SourceSupervisor:
    """Runs one source in the calling thread until it ends, fails permanently, or another thread calls ``stop``."""

    def __init__(self, source: Source, backoff: Backoff | None = None, *, seed: int | None = None) -> None:
        self.source = source
        self.backoff = backoff or Backoff()
        self._random = random.Random(seed)
        self._stopped = threading.Event()
        self._attempts = self._logins = 0

    def stop(self) -> None:
        """Make ``run`` return within about a second, even while it backs off or blocks on the network."""
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

        An unexpected exception from the source or a callback closes the source and propagates. With ``on_defect``, for
        a live source, it counts as a lost connection instead, so that one bad packet cannot end a camera; ``on_defect``
        is called inside the exception handler.
        """
        self._on_state = on_state
        failed = ""
        with contextlib.closing(self.source) as source:
            while not self._stopped.is_set():
                self._report(CameraState.WAITING if source.pushed else CameraState.CONNECTING, failed)
                started: float | None = None
                defect = login = False
                reason = "the connection was lost: the stream ended"
                try:
                    header = source.open()
                    if self._stopped.is_set():
                        break
                    started = time.monotonic()
                    on_header(header)
                    for number, packet in enumerate(source.packets()):
                        if self._stopped.is_set():
                            break
                        if number == 0:
                            # Not before: a camera may accept every connection and send nothing.
                            self._report(CameraState.RUNNING)
                            failed = ""
                        on_packet(packet)
                except SourceError as error:
                    if not error.retryable and not self._stopped.is_set():
                        return self._report(CameraState.ERROR, str(error))
                    reason, login = str(error), error.login
                except Exception as error:
                    if on_defect is None or not source.live:
                        raise
                    defect, reason = True, f"internal error: {type(error).__name__}: {error}"
                    on_defect()
                if self._stopped.is_set():
                    break
                if source.ended:
                    return self._report(CameraState.ENDED)
                if started is not None and source.pushed and not defect:
                    continue
                if started is not None and time.monotonic() - started >= self.backoff.well_after_s:
                    self._attempts = 0
                delay = self.backoff.delay_s(self._attempts, self._random.random())
                if login:
                    delay = LOGIN.delay_s(self._logins, 0.5)
                self._logins = self._logins + 1 if login else 0
                self._attempts += 1
                failed = "" if source.pushed else reason
                self._report(CameraState.BACKOFF, reason, delay)
                self._stopped.wait(delay)
            return self._report(CameraState.ENDED, "stopped")

    def _report(self, state: CameraState, reason: str = "", retry_in_s: float = 0.0) -> SourceStatus:
        # Library messages may quote the source's URL, or part of it.
        status = SourceStatus(state, redact(reason), retry_in_s)
        self._on_state(status)
        return status
