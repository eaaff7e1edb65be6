"""Sessions of browsers, which the controller has for all gateways: its methods, and a gateway's side of them."""

import asyncio
from typing import Any

from ray.exceptions import RayError

from actors.remote import await_reply, controller
from cluster.errors import UnavailableError
from cluster.security.roles import Principal
from cluster.security.sessions import LIFETIME_S, Sessions

SESSION_S = 2.0
"""Deadline of a look-up: a request with a cookie waits for it."""


class SessionKeeper:
    """Methods of the controller. In its memory alone: they hold tokens, which nothing writes to a disk."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    async def begin_session(self, principal: str, credential: str | Principal, browser: str, lifetime_s: float) -> str:
        """See :class:`Sessions`."""
        return self._sessions.begin(principal, credential, browser, lifetime_s)

    async def credential_of_session(self, session: str, browser: str) -> str | Principal | None:
        """See :class:`Sessions`."""
        return self._sessions.credential_of(session, browser)

    async def end_session(self, session: str) -> None:
        """See :class:`Sessions`."""
        self._sessions.end(session)


class ControllerSessions:
    """The controller's sessions as a :class:`~cluster.security.sessions.SessionStore`."""

    def __init__(self) -> None:
        self._controller: Any = None

    async def begin(
        self, principal: str, credential: str | Principal, browser: str, lifetime_s: float = LIFETIME_S
    ) -> str:
        """See the protocol."""
        return str(await self._ask("begin_session", principal, credential, browser, lifetime_s))

    async def credential_of(self, session: str, browser: str) -> str | Principal | None:
        """See the protocol."""
        found: str | Principal | None = await self._ask("credential_of_session", session, browser)
        return found

    async def end(self, session: str) -> None:
        """See the protocol."""
        await self._ask("end_session", session)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(SESSION_S):
                if self._controller is None:
                    # Asks Ray's head, which may be away.
                    self._controller = await asyncio.to_thread(controller)
                return await await_reply(getattr(self._controller, method).remote(*arguments), timeout_s=SESSION_S)
        except (UnavailableError, RayError, TimeoutError) as error:
            # Its successor may be another actor.
            self._controller = None
            raise UnavailableError(
                "the controller, which has the sessions, does not answer; try again in a moment"
            ) from error
