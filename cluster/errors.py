"""User-facing errors; each message is one sentence of the form ``problem; fix``."""

from collections.abc import Sequence


class SightlineError(Exception):
    """Base class of every deliberately raised error. ``exit_code``: the CLI's exit status."""

    exit_code = 1


def at_most(most: int, lines: Sequence[str], what: str = "") -> list[str]:
    """The first ``most`` lines, followed by ``and N more{what}`` if there are more."""
    more = len(lines) - most
    return [*lines[:most], f"and {more} more{what}"] if more > 0 else [*lines]


def install_hint(extra: str) -> str:
    """How to install an extra of pyproject.toml; the package is not published on an index."""
    return f"pip install '.[{extra}]' in a checkout of Sightline"


class ConfigError(SightlineError):
    """Invalid configuration, referenced file or command line; nothing was started."""

    exit_code = 2


class ModelError(ConfigError):
    """The model cannot be loaded: missing path, unsupported family, unusable shape."""


class SourceError(SightlineError):
    """A camera's source cannot be read. ``retryable``: a later attempt may succeed. ``login``: it refuses the user or
    password."""

    def __init__(self, message: str, *, retryable: bool, login: bool = False) -> None:
        super().__init__(message)
        self.retryable, self.login = retryable, login


class CapacityError(SightlineError):
    """A bounded queue or budget is full and policy forbids waiting."""


class RateLimitError(CapacityError):
    """The token calls too often; the same call succeeds a moment later."""


class NotFoundError(SightlineError):
    """No object with this name or id: incident, replica, sink."""


class UnknownCameraError(NotFoundError):
    """No camera with this name. Clients raise it for every not-found status."""


class CameraExistsError(SightlineError):
    """The name is taken, or another agent already pushes for this camera."""


class ManagedElsewhereError(CameraExistsError):
    """The camera belongs to another manager: change it there, or take it over."""


class NotReadyError(SightlineError):
    """The state of the camera or process rules the call out; retrying does not help until something is changed."""


class UnavailableError(SightlineError):
    """The peer is unavailable; the same call may succeed later."""


class NotPlacedError(UnavailableError):
    """According to the controller, the camera is placed on no process at the moment."""


class NotFiniteError(SightlineError):
    """The model's outputs are not finite (NaN)."""


class DeviceError(SightlineError):
    """A GPU failure that this process cannot recover from; a new process may."""


class UnauthenticatedError(SightlineError):
    """The call carries no token, or an unknown or expired one."""


class ForbiddenError(SightlineError):
    """The token does not permit this call, or not for this camera."""


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
