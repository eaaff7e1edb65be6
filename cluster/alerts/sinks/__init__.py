"""Destinations of alerts: the ``Sink`` protocol and its error. Sinks import their client library on first use."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from cluster.alerts.incident import AlertEvent, Incident
from cluster.errors import ConfigError, SightlineError

ReadPicture = Callable[[Incident], Awaitable[bytes | None]]
"""Reads an incident's JPEG snapshot; None: there is none (yet). Waits for the disk: set a deadline."""


class DeliveryError(SightlineError):
    """A sink did not accept an alert. ``retryable``: a later attempt may succeed; ``after_s``: seconds for which the
    receiver asks not to be contacted, 0: it does not say."""

    def __init__(self, message: str, *, retryable: bool, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.after_s = after_s


def check_above_0(**options: float) -> None:
    """Raises ``ConfigError``: an option is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value:g}")


class Sink(Protocol):
    """Accepts events until closed. Created on the event loop it is used on; its dataclass fields are its options.

    ``send`` may run concurrently, but never for two events of one incident, and is cancelled on timeout. When it
    returns, the receiver has durably accepted the event.
    """

    async def send(self, event: AlertEvent) -> None:
        """Deliver one event. Raises ``DeliveryError``; other exceptions count as retryable and are logged."""
        ...

    async def close(self) -> None:
        """Close connections; the sink can still be used afterwards."""
        ...


@runtime_checkable
class PictureSink(Sink, Protocol):
    """A sink that also sends snapshots."""

    def use_pictures(self, read: ReadPicture) -> None:
        """Set the snapshot reader; called before the first event."""
        ...


@runtime_checkable
class CameraSink(Sink, Protocol):
    """A sink that announces cameras to its receiver."""

    def follow_cameras(self, cameras: Mapping[str, Mapping[str, str]], ongoing: Sequence[Incident] = ()) -> None:
        """Called whenever cameras change. ``cameras``: name -> question id -> text; ``ongoing``: open incidents that
        the receiver knows, possibly from a previous process. Must not wait."""
        ...
