"""Principals: who a call comes from, and which cameras it may touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cluster.errors import ForbiddenError
from cluster.security.roles import IMPLIED, Role


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody with ``roles`` over the cameras that match one of ``cameras`` (shell patterns, case matters)."""

    name: str
    roles: frozenset[Role]
    cameras: tuple[str, ...] = ("*",)

    def may(self, role: Role) -> bool:
        """Whether one of its roles covers ``role``."""
        return any(role in IMPLIED[own] for own in self.roles)

    def sees(self, camera: str) -> bool:
        """Whether the camera is in its scope."""
        return any(fnmatchcase(camera, pattern) for pattern in self.cameras)

    @property
    def sees_all(self) -> bool:
        """Whether every camera is in its scope, also those that are not there yet."""
        return "*" in self.cameras

    def require(self, role: Role, cameras: Iterable[str] = ()) -> None:
        """Refuse what it may not.

        Raises:
            ForbiddenError: it lacks the role, or a camera is out of its scope.
        """
        if not self.may(role):
            own = ", ".join(sorted(self.roles))
            raise ForbiddenError(f"this needs a token with the role {role}; {self.name!r} has: {own}")
        for camera in cameras:
            if not self.sees(camera):
                # The same for a camera that exists and one that does not: names are nobody's business either.
                raise ForbiddenError(f"camera {camera!r} is not among those that {self.name!r} may touch")


ANYBODY = Principal("anybody", frozenset(Role))
"""Who calls where nothing is checked."""

_current: ContextVar[Principal] = ContextVar("principal", default=ANYBODY)


def current() -> Principal:
    """Who the call being served comes from."""
    return _current.get()


def serve_as(principal: Principal) -> None:
    """Everything this task does from here on is done for ``principal``."""
    _current.set(principal)


@contextmanager
def serving(principal: Principal) -> Iterator[None]:
    """What is done inside is done for ``principal``."""
    token = _current.set(principal)
    try:
        yield
    finally:
        _current.reset(token)
