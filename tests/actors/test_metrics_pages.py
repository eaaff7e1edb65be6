"""Where the gateway finds the pages of processes: without Ray, with handles that answer, are late, and go."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from actors.controller_directory import MetricsPages
from actors.gateway import Gateway
from cluster.errors import UnavailableError

NODE = "0123456789abcdef" * 3 + "01234567"
TIER = f"tier-{NODE}"


class Handle:
    """An actor handle: answers with a place, or fails with an error; ``None`` never answers."""

    def __init__(self, place):
        self.place = place
        self.metrics_address = SimpleNamespace(remote=self._say)

    async def _say(self):
        if self.place is None:
            await asyncio.sleep(3600)
        if isinstance(self.place, Exception):
            raise self.place
        return self.place


class Members(Handle):
    def __init__(self):
        super().__init__({"controller": "c:1", "replica-0": "r:1"})
        self.metrics_addresses = self.metrics_address


@pytest.fixture
def members(monkeypatch):
    members = Members()
    monkeypatch.setattr("actors.remote.controller", lambda: members)
    monkeypatch.setattr("actors.controller_directory.ANSWER_S", 0.5)
    return members


def test_everybody_is_found_and_a_tier_is_named_after_its_node(members):
    handles = {"alerting": Handle("a:1"), "reconciler": Handle("k:1"), TIER: Handle("t:1")}
    found = asyncio.run(MetricsPages(lambda: handles).addresses())
    others = {"alerting": "a:1", "reconciler": "k:1", "tier-0123456789ab": "t:1"}
    assert found == {"controller": "c:1", "replica-0": "r:1", **others}


def test_who_does_not_answer_stays_where_it_was_and_who_is_gone_is_not_shown(members):
    tier, alerting = Handle("t:1"), Handle("a:1")
    handles = {"alerting": alerting, TIER: tier, "reconciler": Handle(None)}
    known = MetricsPages(lambda: handles)

    async def others():
        return (await known.addresses()).keys() - {"controller", "replica-0"}, known._known.get("tier-0123456789ab")

    async def play():
        # The reconciler has never answered: it is there, and down.
        assert await others() == ({"alerting", "reconciler", "tier-0123456789ab"}, "t:1")
        tier.place, alerting.place = None, OSError("its own affair")
        assert await others() == ({"alerting", "reconciler", "tier-0123456789ab"}, "t:1")
        tier.place = "t:2"
        assert (await others())[1] == "t:2", "restarted, elsewhere"
        del handles[TIER]
        assert await others() == ({"alerting", "reconciler"}, None)

    asyncio.run(play())


def test_without_word_from_ray_the_last_places_stand(members):
    handles = {TIER: Handle("t:1")}

    def look():
        if not handles:
            raise RpcError("no word from the head")
        return handles

    known = MetricsPages(look)

    async def play():
        before = await known.addresses()
        handles.clear()
        assert await known.addresses() == before
        assert before["tier-0123456789ab"] == "t:1"

    asyncio.run(play())


def test_a_controller_that_is_away_is_said(members):
    members.place = UnavailableError("the controller restarts")
    with pytest.raises(UnavailableError, match="the controller restarts"):
        asyncio.run(MetricsPages(dict).addresses())


async def test_a_gateway_that_is_gone_is_shown_so_while_the_controller_is_away_too():
    async def away():
        raise UnavailableError("the controller did not answer within 8 s; see its log")

    async def ask_others(_method):
        return {"gateway-1": False}

    shown = object.__new__(Gateway)
    shown._name, shown._others, shown._missed = "gateway", {"gateway-1": True}, 0
    shown._directory, shown._hub = SimpleNamespace(metrics_addresses=away), SimpleNamespace(missed=0)
    shown._ask_others = ask_others
    following = asyncio.create_task(shown._follow_metrics())
    try:
        await asyncio.sleep(0.05)
        assert shown._others == {"gateway-1": False}
    finally:
        following.cancel()
