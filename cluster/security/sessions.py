"""Sessions of browsers signed in with a token or at a provider: the store (``Sessions``), and a gateway's view of it
(``SessionStore``, ``CachedSessions``)."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import UnavailableError
from cluster.security.roles import Principal

LIFETIME_S = 12 * 3600.0
"""Lifetime of a session from its sign-in: one shift."""
MOST_OF_ONE = 32
"""Maximum concurrent sessions of a principal; a new one ends the oldest."""


class SessionStore(Protocol):
    """A gateway's store of sessions, with the methods of :class:`Sessions`. All raise ``UnavailableError`` if the store
    does not answer."""

    async def begin_session(
        self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S
    ) -> str: ...

    async def credential_of_session(self, session: str, browser: str) -> str | Principal | None: ...
    async def end_session(self, session: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Session:
    principal: str
    credential: str | Principal
    browser: str
    ends_s: float


class Sessions:
    """In-memory sessions: one ends with this process, at sign-out, with its token, or after its lifetime.

    A session's id is not a token, and valid only for the browser it was created for.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    async def begin_session(
        self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S
    ) -> str:
        """Create a session; returns its id.

        ``credential``: the token, checked with every request, or the principal that a provider vouched for.
        ``browser``: identifies the browser by what its requests have in common.
        """
        now_s = self._clock()
        self._sessions = {key: each for key, each in self._sessions.items() if each.ends_s > now_s}
        own = [key for key, each in self._sessions.items() if each.principal == principal]
        for key in own[: max(0, len(own) - MOST_OF_ONE + 1)]:
            del self._sessions[key]
        made = secrets.token_urlsafe(32)
        self._sessions[made] = _Session(principal, credential, browser, now_s + lifetime_s)
        return made

    async def credential_of_session(self, session: str, browser: str) -> str | Principal | None:
        """Token or principal of a session; ``None`` if it does not exist, has ended, or is another browser's."""
        found = self._sessions.get(session)
        if found is None or found.ends_s <= self._clock() or found.browser != browser:
            return None
        return found.credential

    async def end_session(self, session: str) -> None:
        """Sign out; idempotent."""
        self._sessions.pop(session, None)


KEPT_S = 2.0
"""Seconds that a gateway serves a session without checking whether it has ended."""
MOST_KEPT = 1024
MOST_ASKED = 64
"""Maximum concurrent look-ups: clients sending invented ids must not keep the store busy."""


class CachedSessions:
    """Caches the sessions of ``store`` for :data:`KEPT_S`, so that many requests need one look-up."""

    def __init__(self, store: SessionStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._kept: dict[tuple[str, str], tuple[float, str | Principal]] = {}
        self._asked = self._ends = 0

    async def begin_session(
        self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S
    ) -> str:
        return await self._store.begin_session(principal, credential, browser, lifetime_s)

    async def credential_of_session(self, session: str, browser: str) -> str | Principal | None:
        now_s = self._clock()
        kept = self._kept.get((session, browser))
        if kept is not None and now_s < kept[0]:
            return kept[1]
        self._kept.pop((session, browser), None)
        if self._asked >= MOST_ASKED:
            raise UnavailableError("too many sessions are being looked up; try again in a moment")
        ends = self._ends
        self._asked += 1
        try:
            found = await self._store.credential_of_session(session, browser)
        finally:
            self._asked -= 1
        if found is not None and ends == self._ends:
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[session, browser] = (now_s + KEPT_S, found)
        return found

    async def end_session(self, session: str) -> None:
        try:
            await self._store.end_session(session)
        finally:
            # A look-up in progress may return the earlier state.
            self._ends += 1
            self._kept = {key: each for key, each in self._kept.items() if key[0] != session}
