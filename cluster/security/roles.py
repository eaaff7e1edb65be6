"""Roles, and the role required for each call of the gateway. Calls that are not listed are refused."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate
from functools import lru_cache

from cluster.errors import ForbiddenError


class Role(StrEnum):
    """What a token permits.

    * ``ingest``: push a camera's packets
    * ``view``: read cameras, answers, incidents, memory status, metrics
    * ``ask``: ``view``, plus asking free questions, acknowledging and reviewing incidents
    * ``admin``: everything, including adding and removing cameras, draining replicas, deleting memory
    """

    INGEST = "ingest"
    VIEW = "view"
    ASK = "ask"
    ADMIN = "admin"


IMPLIED: Mapping[Role, frozenset[Role]] = {
    Role.INGEST: frozenset({Role.INGEST}),
    Role.VIEW: frozenset({Role.VIEW}),
    Role.ASK: frozenset({Role.VIEW, Role.ASK}),
    Role.ADMIN: frozenset(Role),
}
"""Role -> roles whose calls it permits."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requirements of a call.

    * ``role``: required role; ``None``: any token
    * ``camera``: request field with the camera's name; empty if the request names none, and the reply is filtered by
      the caller's scope
    * ``about``: further request fields for the audit log
    * ``audited``: whether calls are written to the audit log
    * ``late``: audited only once the service knows the cameras, which the request does not name: :func:`note_cameras`
    * ``cost``: weight in the rate limit
    * ``everybody``: concerns all cameras, and is refused to tokens for some of them
    """

    role: Role | None
    camera: str = ""
    about: tuple[str, ...] = ()
    audited: bool = True
    late: bool = False
    cost: float = 1.0
    everybody: bool = False


PUSH = "/sightline.v1.Ingest/Push"
SIGN_IN = "POST /v1/session"
METRICS = "GET /metrics"
EVENTS = "GET /v1/events"
HISTORY = "GET /v1/cameras/{name}/history"
FLEET = "GET /v1/fleet"
MODELS = "GET /v1/models"
REHEARSE = "POST /v1/rehearse"
IMPORT = "POST /v1/cameras/import"

RULES: Mapping[str, Rule] = {
    PUSH: Rule(Role.INGEST, late=True),
    SIGN_IN: Rule(None),
    METRICS: Rule(Role.VIEW, audited=False),
    EVENTS: Rule(Role.VIEW, "cameras"),
    HISTORY: Rule(Role.VIEW, "name", audited=False),
    FLEET: Rule(Role.VIEW, audited=False),
    MODELS: Rule(Role.VIEW, audited=False),
    REHEARSE: Rule(Role.VIEW, audited=False),
    IMPORT: Rule(Role.ADMIN),
    "/sightline.v1.Cameras/List": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Cameras/Get": Rule(Role.VIEW, "name", audited=False),
    "/sightline.v1.Cameras/Add": Rule(Role.ADMIN, "name"),
    "/sightline.v1.Cameras/Remove": Rule(Role.ADMIN, "name"),
    "/sightline.v1.Cameras/Update": Rule(Role.ADMIN, "name"),
    "/sightline.v1.Cameras/Export": Rule(Role.ADMIN, "names", ("secrets",)),
    "/sightline.v1.Replicas/List": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Replicas/Drain": Rule(Role.ADMIN, about=("name", "undo"), everybody=True),
    "/sightline.v1.Results/Watch": Rule(Role.VIEW, "cameras"),
    "/sightline.v1.Memory/Ask": Rule(Role.ASK, "camera", ("text",)),
    "/sightline.v1.Memory/Replay": Rule(Role.ASK, "camera", ("text",)),
    "/sightline.v1.Memory/AskAll": Rule(Role.ASK, about=("text",), late=True, cost=5.0),
    "/sightline.v1.Memory/Describe": Rule(Role.VIEW, "camera", audited=False),
    "/sightline.v1.Memory/Forget": Rule(Role.ADMIN, "camera", ("before_s",)),
    "/sightline.v1.Incidents/List": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Incidents/Get": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Incidents/Follow": Rule(Role.VIEW, "cameras"),
    "/sightline.v1.Incidents/Acknowledge": Rule(Role.ASK, about=("id",), late=True),
    "/sightline.v1.Incidents/Review": Rule(Role.ASK, about=("id", "verdict"), late=True),
    "/sightline.v1.Incidents/Timeline": Rule(Role.VIEW, "camera", audited=False),
    "/sightline.v1.Incidents/Mute": Rule(Role.ASK, about=("camera", "subject", "for_s")),
    "/sightline.v1.Incidents/Unmute": Rule(Role.ASK, about=("camera", "subject")),
    "/sightline.v1.Incidents/ListMutes": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Incidents/Outbox": Rule(Role.VIEW, audited=False),
    "/sightline.v1.Incidents/Resend": Rule(Role.ADMIN, about=("sink", "key")),
    "/sightline.v1.Incidents/TestSink": Rule(Role.ADMIN, about=("sink",), everybody=True),
    "/sightline.v1.Pictures/Picture": Rule(Role.VIEW, "camera", audited=False, cost=0.1),
    "/sightline.v1.Pictures/Test": Rule(Role.ADMIN, "camera"),
    "/sightline.v1.Pictures/Discover": Rule(Role.ADMIN, about=("network",), cost=5.0, everybody=True),
    "/sightline.v1.Pictures/Live": Rule(Role.VIEW, "camera"),
    "/sightline.v1.Pictures/Footage": Rule(Role.VIEW, about=("incident", "kind"), late=True),
    "/sightline.v1.Pictures/Forget": Rule(Role.ADMIN, "camera", ("before_s",)),
}
"""gRPC method or HTTP-only call -> rule. ``Push`` names its camera in its first message.

Over HTTP, ``camera`` is a name in the path, or comma-separated names in the query.
"""

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Calls without authentication: a probe has no token."""


PERSON = "oidc:"
"""Prefix of the names of principals from a sign-in provider; no token's name may have it."""
EVERY = ("*",)
"""Scope of every camera, present or future."""


def is_pattern(text: str) -> bool:
    """Whether a text is a shell pattern, and not the name of one camera."""
    return not set(text).isdisjoint("*?[")


def in_scope(camera: str, patterns: Iterable[str]) -> bool:
    """Whether a camera matches one of ``patterns`` (case-sensitive shell patterns)."""
    names, matches = _compiled(tuple(patterns))
    return camera in names or matches(camera) is not None


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], Callable[[str], object]]:
    """A scope as one lookup and one match: it may name hundreds of cameras, and is asked for each of thousands."""
    shells = list(filter(is_pattern, patterns))
    return frozenset(patterns).difference(shells), re.compile("|".join(map(translate, shells)) or "(?!)").match


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller with ``roles`` over the cameras that match one of ``cameras`` (case-sensitive shell patterns)."""

    name: str
    roles: frozenset[Role]
    cameras: tuple[str, ...] = ("*",)

    def may(self, role: Role) -> bool:
        return any(role in IMPLIED[own] for own in self.roles)

    def sees(self, camera: str) -> bool:
        return in_scope(camera, self.cameras)

    def require(self, role: Role | None, cameras: Iterable[str] = (), *, everybody: bool = False) -> None:
        """Check role and scope. Raises ``ForbiddenError``: the role is missing, or a camera is out of scope;
        ``everybody``: or the scope is not all cameras."""
        if role is not None and not self.may(role):
            own = ", ".join(sorted(self.roles))
            raise ForbiddenError(f"this needs a token with the role {role}; {self.name!r} has: {own}")
        for camera in cameras:
            if not self.sees(camera):
                # The same message for existing and missing cameras, so that names do not leak.
                raise ForbiddenError(f"camera {camera!r} is not among those that {self.name!r} may touch")
        if everybody and "*" not in self.cameras:
            raise ForbiddenError(f"this concerns all cameras and needs a token for all; {self.name!r} has some")


ANYBODY = Principal("anybody", frozenset(Role))
"""The caller when authentication is off."""

_current: ContextVar[Principal] = ContextVar("principal", default=ANYBODY)
_peer: ContextVar[str] = ContextVar("peer", default="")
NOTE_LATE: ContextVar[list[Callable[[list[str]], None]]] = ContextVar("note_late")
"""Writes this task's call to the audit log, once; see :func:`note_cameras`."""


def current_principal() -> Principal:
    """Principal of the call being served."""
    return _current.get()


def current_peer() -> str:
    """Caller's address of the call being served, for the audit log; empty if unknown."""
    return _peer.get()


def note_cameras(*cameras: str) -> None:
    """Write the call being served to the audit log: it is permitted, and concerns these cameras or patterns."""
    if note := NOTE_LATE.get([]):
        note.pop()(list(cameras))


def serve_as(principal: Principal, peer: str = "") -> None:
    """Set the principal and the caller's address of the current task."""
    _current.set(principal)
    _peer.set(peer)
