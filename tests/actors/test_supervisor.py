"""What the supervisor makes of gateways that do not listen in time, and of passes over the processes that fail."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from actors.supervisor import Supervisor, check_listening
from cluster.config import load_config
from cluster.errors import UnavailableError

CONFIG = load_config(None, {"gateway": {"port": 0, "http_port": 0}, "cluster": {"gateways": 2, "start_timeout_s": 7}})


@pytest.mark.parametrize("listening", [(), ("alerting",), ("gateway", "gateway-1")])
def test_without_any_gateway_or_alerting_it_does_not_start(listening) -> None:
    missing = ", ".join(name for name in ("gateway", "gateway-1", "alerting") if name not in listening)
    with pytest.raises(UnavailableError, match=f"^{missing} did not listen within 7 s; .*cluster.placement.gateway"):
        check_listening(CONFIG, set(listening))


def test_a_gateway_whose_node_is_away_keeps_the_others_from_nothing(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        check_listening(CONFIG, {"gateway-1", "alerting"})
    assert "gateway did not listen within 7 s" in caplog.text


@pytest.mark.parametrize("error", [OSError("Broken pipe"), ValueError("no such actor"), KeyError("Resources")])
async def test_whatever_a_pass_fails_of_the_next_one_is_made(monkeypatch, caplog, error) -> None:
    """Ray's core has ``OSError`` and ``ValueError`` for some of its states, beside errors of its own."""
    monkeypatch.setattr("actors.supervisor.POLL_S", 0.01)
    supervisor, failing = object.__new__(Supervisor), [error]
    supervisor._looked, supervisor._ending = asyncio.Event(), asyncio.Event()

    def reconcile() -> None:
        if failing:
            raise failing.pop()

    supervisor._reconcile = reconcile
    supervising = asyncio.create_task(supervisor._supervise())
    try:
        await asyncio.wait_for(supervisor._looked.wait(), 5.0)
    finally:
        supervising.cancel()
    assert "could not reconcile the processes" in caplog.text


async def test_a_start_waits_for_rays_head_as_it_does_for_a_process(monkeypatch) -> None:
    """The head may restart while the cluster starts: the deployment failed, and its processes were started again."""
    monkeypatch.setattr("actors.supervisor.POLL_S", 0.04)
    listens = asyncio.get_running_loop().create_future()
    listens.set_result(None)
    handle = SimpleNamespace(ready=SimpleNamespace(remote=lambda: listens))
    answers = [RaySystemError("the GCS is away"), ValueError("no such actor"), handle]

    def get_actor(*_: object, **__: object) -> object:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get_actor", get_actor)
    supervisor = object.__new__(Supervisor)
    supervisor._listening = set()
    await asyncio.wait_for(supervisor._until_listens("gateway"), 5.0)
    assert supervisor._listening == {"gateway"}
    assert not answers


async def test_the_pass_that_is_made_at_the_end_starts_nothing_after_it(monkeypatch) -> None:
    """A process that it starts once all have ended would be nobody's."""
    monkeypatch.setattr("actors.supervisor._application_ends", lambda: True)
    supervisor, began, go, done = object.__new__(Supervisor), threading.Event(), threading.Event(), []
    supervisor._looked, supervisor._ending = asyncio.Event(), asyncio.Event()

    def reconcile() -> None:
        began.set()
        assert go.wait(10.0)
        done.append("pass")

    supervisor._reconcile, supervisor._end_all = reconcile, lambda: done.append("end")
    supervisor._task = asyncio.create_task(supervisor._supervise())
    assert await asyncio.to_thread(began.wait, 10.0)
    asyncio.get_running_loop().call_later(0.2, go.set)
    await supervisor.__del__()
    await asyncio.to_thread(go.wait, 10.0)
    assert done == ["pass", "end"]
