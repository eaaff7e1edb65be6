"""What a gateway keeps of the sessions that another process has: for how long, how many, and what ends it."""

import asyncio

import pytest

from cluster.errors import UnavailableError
from cluster.security.sessions import KEPT_S, MOST_ASKED, MOST_KEPT, CachedSessions, Sessions


class Store(Sessions):
    """Counts look-ups; answers them once ``open`` is set, unless it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.away = 0, False
        self.open = asyncio.Event()
        self.open.set()

    async def credential_of_session(self, session, browser):
        self.asked += 1
        found = await super().credential_of_session(session, browser)
        await self.open.wait()
        if self.away:
            raise UnavailableError("nobody is there")
        return found


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_session_is_looked_up_once_in_a_while_and_ends_everywhere() -> None:
    store, clock = Store(), Clock()
    here, there = CachedSessions(store, clock=clock), CachedSessions(store, clock=clock)
    session = await here.begin_session("ann", "sl_a", "firefox")
    for _ in range(3):
        assert await here.credential_of_session(session, "firefox") == "sl_a"
        assert await there.credential_of_session(session, "firefox") == "sl_a"
    assert store.asked == 2
    assert await here.credential_of_session(session, "chrome") is None
    await here.end_session(session)
    assert await here.credential_of_session(session, "firefox") is None
    clock.now_s = KEPT_S
    assert await there.credential_of_session(session, "firefox") is None


async def test_a_look_up_that_a_sign_out_overtakes_is_not_kept() -> None:
    store = Store()
    sessions = CachedSessions(store)
    session = await sessions.begin_session("ann", "sl_a", "firefox")
    store.open.clear()
    early = asyncio.create_task(sessions.credential_of_session(session, "firefox"))
    await asyncio.sleep(0)
    await sessions.end_session(session)
    store.open.set()
    assert await early == "sl_a", "it was asked before the end"
    assert await sessions.credential_of_session(session, "firefox") is None


async def test_kept_and_pending_look_ups_are_bounded() -> None:
    store = Store()
    sessions = CachedSessions(store)
    for number in range(MOST_KEPT + 5):
        session = await sessions.begin_session(f"{number}", "sl_a", "firefox")
        await sessions.credential_of_session(session, "firefox")
    assert len(sessions._kept) == MOST_KEPT
    for number in range(50):
        assert await sessions.credential_of_session(f"made up {number}", "firefox") is None
    assert len(sessions._kept) == MOST_KEPT, "what is not there takes no room"
    store.open.clear()
    waiting = [asyncio.create_task(sessions.credential_of_session(f"{number}", "x")) for number in range(MOST_ASKED)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="too many sessions are being looked up"):
        await sessions.credential_of_session("one more", "x")
    assert await sessions.credential_of_session(session, "firefox") == "sl_a", "it is kept"
    store.open.set()
    assert await asyncio.gather(*waiting) == [None] * MOST_ASKED
    assert await sessions.credential_of_session("one more", "x") is None


async def test_a_store_that_is_away_is_no_sign_out() -> None:
    store, clock = Store(), Clock()
    sessions = CachedSessions(store, clock=clock)
    session = await sessions.begin_session("ann", "sl_a", "firefox")
    store.away = True
    with pytest.raises(UnavailableError):
        await sessions.credential_of_session(session, "firefox")
    store.away = False
    assert await sessions.credential_of_session(session, "firefox") == "sl_a"
