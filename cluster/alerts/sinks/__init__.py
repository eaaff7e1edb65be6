"""Where alerts are delivered: the ``Sink`` protocol and its error. Each loads its client library when first used."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from cluster.alerts.incident import AlertEvent, Incident
from cluster.errors import ConfigError, SightlineError

ReadPicture = Callable[[Incident], Awaitable[bytes | None]]
"""JPEG snapshot of an incident; None: there is none (yet). Takes as long as the disk: give it a deadline."""


class DeliveryError(SightlineError):
    """A sink did not accept an alert. ``retryable``: it may later; otherwise only a change helps. ``after_s``: seconds
    for which it wants no other, 0 where it does not say."""

    def __init__(self, message: str, *, retryable: bool, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.after_s = after_s


def check_above_0(**options: float) -> None:
    """Raises ``ConfigError``: one is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value:g}")


class Sink(Protocol):
    """Accepts events until closed. Created on the event loop it is used on; its dataclass fields are its options.

    ``send`` may run concurrently, but never for two events of one incident, and is cancelled on timeout. When it
    returns, the receiver has accepted the event for good.
    """

    async def send(self, event: AlertEvent) -> None:
        """Deliver one event. Raises ``DeliveryError``; other exceptions count as retryable and are logged."""
        ...

    async def close(self) -> None:
        """Close connections; the sink may be used again after it."""
        ...


@runtime_checkable
class PictureSink(Sink, Protocol):
    """Sends snapshots as well."""

    def use_pictures(self, read: ReadPicture) -> None:
        """Where snapshots are read; called before the first event."""
        ...


@runtime_checkable
class CameraSink(Sink, Protocol):
    """Tells its receiver which cameras there are."""

    def follow_cameras(self, cameras: Mapping[str, Mapping[str, str]], ongoing: Sequence[Incident] = ()) -> None:
        """All cameras with the text of each question by its id, whenever that changes; ``ongoing``: open incidents
        that it was told of, maybe by an earlier process. Must not wait."""
        ...
