"""A gateway among others, without Ray: where the sessions are elsewhere, and others have scores too."""

import asyncio
import json
import time
from types import SimpleNamespace

from gateway_parts import serving
from http_parts import Client

from actors import gateway as actor
from cluster.errors import UnavailableError
from cluster.security.sessions import Sessions


class Away(Sessions):
    """Sessions of a controller that may not answer."""

    away = False

    async def credential_of_session(self, session, browser):
        self._check()
        return await super().credential_of_session(session, browser)

    async def begin_session(self, *arguments):
        self._check()
        return await super().begin_session(*arguments)

    async def end_session(self, session):
        self._check()
        await super().end_session(session)

    def _check(self):
        if self.away:
            raise UnavailableError("the controller does not answer")


async def test_a_controller_that_does_not_answer_signs_nobody_out(tmp_path, monkeypatch):
    sessions = Away()
    monkeypatch.setattr("gateway_parts.Sessions", lambda: sessions)
    async with serving(tmp_path, cameras=1, tokens=True) as served, Client(served.url) as browser:
        token = {"token": served.secrets["view"]}
        assert (await browser("POST", "/v1/session", token))[0] == 200
        assert (await browser("GET", "/v1/cameras"))[0] == 200
        sessions.away = True
        for method, path, body in (
            ("GET", "/v1/cameras", None),
            ("GET", "/v1/me", None),
            ("POST", "/v1/session", token),
        ):
            status, reply = await browser(method, path, body)
            assert (status, reply["error"]) == (503, "the controller does not answer"), path
        async with Client(served.url, served.secrets["view"]) as program:
            assert (await program("GET", "/v1/cameras"))[0] == 200
        async with Client(served.url) as stranger:
            assert (await stranger("GET", "/v1/cameras"))[0] == 401
            assert (await stranger("GET", "/healthz"))[0] == 200
        sessions.away = False
        assert (await browser("GET", "/v1/cameras"))[0] == 200, "the session went on"
        # Who signs out meanwhile is told that the session goes on, and yet is not signed in any more.
        sessions.away = True
        assert (await browser("DELETE", "/v1/session"))[0] == 503
        sessions.away = False
        assert (await browser("GET", "/v1/cameras"))[0] == 401


class Other:
    """Handle of another gateway."""

    def __init__(self, answers: bool = True) -> None:
        self.told: list[tuple[str, float]] = []
        self.answers = answers
        self.forget_scores = SimpleNamespace(remote=self._forget)
        self.ready = SimpleNamespace(remote=self._wait)

    async def _forget(self, camera, before_s):
        await self._wait()
        self.told.append((camera, before_s))

    async def _wait(self):
        if not self.answers:
            await asyncio.sleep(3600)


async def test_scores_are_deleted_at_every_gateway_or_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "ANSWER_S", 0.2)
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        served.world.others = {"gateway-1": Other(), "gateway-2": Other()}

        async def scores():
            return (await client("GET", "/v1/cameras/cam-000/history"))[1]["scores"]

        async def forget():
            return await client("POST", "/v1/forget", {"camera": "cam-000", "before_s": 0})

        answers = served.world.tick(1.0)

        async def watch():
            served.publish(answers)
            for _ in range(500):
                if any((await scores()).values()):
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("no scores")

        served.gateway._live.start()
        await watch()
        # The others' clocks are five minutes ahead: what this gateway tells them must not be a time.
        behind = SimpleNamespace(time=lambda: time.time() - 300.0)
        with monkeypatch.context() as asking:
            asking.setattr(actor, "time", behind)
            assert (await forget())[0] == 200
        assert not any((await scores()).values())
        await watch()
        await served.gateway.forget_scores(*served.world.others["gateway-1"].told[0])
        assert not any((await scores()).values())
        assert [[camera for camera, _ in each.told] for each in served.world.others.values()] == [["cam-000"]] * 2
        served.world.others["gateway-2"].answers = False
        status, reply = await forget()
        assert status == 503
        assert "its last scores at gateway-2, which did not answer; repeat the deletion" in reply["error"]
        assert len(served.world.others["gateway-1"].told) == 2
        served.world.others["gateway-2"].answers = True
        assert (await forget())[0] == 200


async def test_the_first_page_says_whether_the_others_answer_and_theirs_show_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "ANSWER_S", 0.2)
    monkeypatch.setattr(actor, "POLL_S", 0.05)

    async def page(client):
        async with client.open("GET", "/metrics") as reply:
            return await reply.text()

    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        served.world.others = {"gateway-1": Other(), "gateway-2": Other(answers=False)}
        for _ in range(100):
            text = await page(client)
            if "gateway-2" in text:
                break
            await asyncio.sleep(0.05)
        about = [line for line in text.splitlines() if 'process="gateway-' in line]
        assert about == [
            'sightline_process_up{process="gateway-1"} 1.0',
            'sightline_process_up{process="gateway-2"} 0.0',
        ]
    (tmp_path / "second").mkdir()
    async with serving(tmp_path / "second", cameras=1, name="gateway-1", tokens=True) as served:
        async with Client(served.url, served.secrets["view"]) as client:
            served.world.others = {"gateway": Other()}
            await asyncio.sleep(0.2)
            text = await page(client)
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines
        assert all('process="gateway-1"' in line for line in lines)
        assert "process_up" not in text
        async with Client(served.url, served.secrets["ask"]) as client:
            await client.ask(camera="cam-000")
    names = sorted(path.name for path in (tmp_path / "second").glob("audit*"))
    assert names == ["audit-gateway-1.jsonl"], "several may write to one folder"
    [line] = (tmp_path / "second" / names[0]).read_text().splitlines()
    assert json.loads(line)["who"] == "ask-token"
