"""Sessions of browsers that have signed in, with a token or at a provider (``Sessions``)."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.security.roles import Principal

LIFETIME_S = 12 * 3600.0
"""A session ends so long after its sign-in: a shift, and no more."""
MOST_OF_ONE = 32
"""Sessions of one principal at once; a new one ends the oldest."""


@dataclass(frozen=True, slots=True)
class _Session:
    principal: str
    credential: str | Principal
    browser: str
    ends_s: float


class Sessions:
    """In memory: a session ends with this process, at sign-out, with its token, or after its lifetime.

    Its id is no token, and good for nothing but the browser that it was made for.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def begin(self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S) -> str:
        """Id of a new session.

        Args:
            principal: name of whose it is.
            credential: the token, checked with every request; or the principal itself, as a provider vouched for it.
            browser: what its requests have in common.
            lifetime_s: longest that it lasts.
        """
        now_s = self._clock()
        self._sessions = {key: each for key, each in self._sessions.items() if each.ends_s > now_s}
        own = [key for key, each in self._sessions.items() if each.principal == principal]
        for key in own[: max(0, len(own) - MOST_OF_ONE + 1)]:
            del self._sessions[key]
        made = secrets.token_urlsafe(32)
        self._sessions[made] = _Session(principal, credential, browser, now_s + lifetime_s)
        return made

    def credential_of(self, session: str, browser: str) -> str | Principal | None:
        """Token or principal of a session; None where there is none, it has ended, or another browser comes with it."""
        found = self._sessions.get(session)
        if found is None or found.ends_s <= self._clock() or found.browser != browser:
            return None
        return found.credential

    def end(self, session: str) -> None:
        """Sign out; idempotent."""
        self._sessions.pop(session, None)
