"""Where people are told of incidents. Each sink loads the library it needs when it first sends.

The ``Sink`` protocol: one place where people are told, and how it says that it could not take an alert.
"""

from __future__ import annotations

from typing import Protocol

from cluster.alerts.incident import AlertEvent
from cluster.errors import SightlineError


class DeliveryError(SightlineError):
    """A sink did not take an alert. ``retryable``: it may later; else only a
    change helps."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Sink(Protocol):
    """Takes events until it is closed. Made on the event loop it is used on; a sink's options are its dataclass fields.

    ``send`` may run several times at once, but never for two events of one incident, and is cancelled when it takes
    too long. When it returns, the other side has taken the event over for good.
    """

    async def send(self, event: AlertEvent) -> None:
        """Raises ``DeliveryError``; anything else raised counts as retryable and is logged."""
        ...

    async def close(self) -> None:
        """Let go of connections; the sink may be used again after it."""
        ...
