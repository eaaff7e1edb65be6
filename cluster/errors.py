"""Errors shown to users: each message is one sentence with the problem and its fix."""

from collections.abc import Sequence


class SightlineError(Exception):
    """Base of every error raised on purpose. ``exit_code`` is what the CLI ends with."""

    exit_code = 1


def at_most(most: int, lines: Sequence[str], what: str = "") -> list[str]:
    """The first of many lines, and how many more there are of ``what``."""
    more = len(lines) - most
    return [*lines[:most], f"and {more} more{what}"] if more > 0 else [*lines]


def install_hint(extra: str) -> str:
    """How to install what an extra of pyproject.toml brings; the package is on no index."""
    return f"pip install '.[{extra}]' in a checkout of Sightline"


class ConfigError(SightlineError):
    """The configuration, a file it names, or a command line is wrong; nothing was started."""

    exit_code = 2


class ModelError(ConfigError):
    """The model cannot be loaded: missing path, wrong family, unusable shape."""


class SourceError(SightlineError):
    """A camera's source cannot be read. ``retryable``: trying again later may help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class CapacityError(SightlineError):
    """A bounded queue or budget is full and policy forbids waiting."""


class NotFoundError(SightlineError):
    """Nothing of this name or id: incident, replica, sink."""


class UnknownCameraError(NotFoundError):
    """No camera of this name. Clients raise it for whatever is not found."""


class CameraExistsError(SightlineError):
    """The name is taken, or another agent already pushes for this camera."""


class ManagedElsewhereError(CameraExistsError):
    """The camera belongs to another manager, which has to change it, or from which it has to be taken over."""


class NotReadyError(SightlineError):
    """The camera or process is not in a state that allows the call; a change is needed first, waiting does not help."""


class UnavailableError(SightlineError):
    """The other side is not there right now; the same call may succeed later."""


class NotPlacedError(UnavailableError):
    """No process has the camera right now, as the controller says."""


class NotFiniteError(SightlineError):
    """The model computes no numbers (NaN)."""


class DeviceError(SightlineError):
    """The GPU failed in a way that this process cannot continue from; a new one may."""


class UnauthenticatedError(SightlineError):
    """A call without a token, or with one that is unknown or has expired."""


class ForbiddenError(SightlineError):
    """A token that may not do this, or not with this camera."""


def first_line(error: BaseException) -> str:
    """First line of an error's message; the name of its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
