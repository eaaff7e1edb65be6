"""Two gateways of one cluster: sessions, cameras and deletions are the same at both, and only one of them dies."""

import json
import os
import signal
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
import ray
from cluster_parts import configuration, until

from actors.remote import NAMESPACE, gateway_names
from actors.runtime import Cluster
from cluster.errors import UnavailableError
from cluster.security.roles import Role
from cluster.security.sessions import KEPT_S
from cluster.security.tokens import make_token, write_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

FIRST, SECOND = gateway_names(2)
HOST = "cctv.city.example"
"""One Service is in front of both."""


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    secret, token = make_token("room", [Role.ADMIN], ["*"])
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    write_tokens(file, [token])
    return secret, str(file)


@pytest.fixture(scope="module")
def running(token, tmp_path_factory):
    logs = str(tmp_path_factory.mktemp("logs"))
    config = configuration([], gateways=2, decoders=1, log_dir=logs)
    security = config.security.model_copy(update={"tokens_file": token[1]})
    with Cluster(config.model_copy(update={"security": security})) as cluster:
        yield cluster, logs


def handle(name: str):
    return ray.get_actor(name, namespace=NAMESPACE)


def ask(gateway: str, method: str, path: str, body=None, *, host: str = HOST, **headers: str):
    """``(status, JSON or text, cookie)`` of a gateway, wherever it listens now."""
    address = ray.get(handle(gateway).ready.remote(), timeout=60).metrics
    connection = HTTPConnection(address, timeout=60)
    data = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, data, {"Host": host, "Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status == 503:
            raise UnavailableError(text)
        cookie = (reply.headers.get("Set-Cookie") or "").partition(";")[0]
        return reply.status, json.loads(text) if text.startswith(("{", "[")) else text, cookie
    except (OSError, HTTPException) as error:
        raise UnavailableError(str(error)) from None
    finally:
        connection.close()


def test_a_session_counts_at_every_gateway_and_ends_at_every_gateway(running, token) -> None:
    status, who, cookie = ask(FIRST, "POST", "/v1/session", {"token": token[0]})
    assert (status, who["name"]) == (200, "room")
    for gateway in (FIRST, SECOND):
        assert ask(gateway, "GET", "/v1/me", Cookie=cookie)[:2] == (200, who)
    assert ask(SECOND, "GET", "/v1/me", host="elsewhere.example", Cookie=cookie)[0] == 401
    assert ask(SECOND, "DELETE", "/v1/session", Cookie=cookie)[0] == 200
    assert ask(SECOND, "GET", "/v1/me", Cookie=cookie)[0] == 401
    time.sleep(KEPT_S)
    assert ask(FIRST, "GET", "/v1/me", Cookie=cookie)[0] == 401


def test_a_camera_of_one_is_at_the_other_and_its_scores_are_deleted_at_both(running, token, clip) -> None:
    known = {"Authorization": f"Bearer {token[0]}"}
    status, _, _ = ask(FIRST, "POST", "/v1/cameras", {"name": "archive", "source": str(clip)}, **known)
    assert status == 200

    def ended() -> bool:
        listed = ask(SECOND, "GET", "/v1/cameras", **known)[1]["cameras"]
        return [(each["name"], each["state"], each["windows_done"]) for each in listed] == [("archive", "ended", 12)]

    def scores(gateway: str) -> int:
        found = ask(gateway, "GET", "/v1/cameras/archive/history", **known)[1]
        return len(found["scores"].get("person", []))

    until("all its windows", ended)
    for gateway in (FIRST, SECOND):
        until(f"scores at {gateway}", lambda gateway=gateway: scores(gateway) == 12)
    assert ask(FIRST, "POST", "/v1/forget", {"camera": "archive", "before_s": 0}, **known)[0] == 200
    assert [scores(gateway) for gateway in (FIRST, SECOND)] == [0, 0]


def test_every_series_is_on_one_page(running, token) -> None:
    known = {"Authorization": f"Bearer {token[0]}"}
    up = f'sightline_process_up{{process="{SECOND}"}} 1.0'
    until("the first one to see the second", lambda: up in ask(FIRST, "GET", "/metrics", **known)[1])
    pages = [ask(gateway, "GET", "/metrics", **known)[1] for gateway in (FIRST, SECOND)]
    shown = [{line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")} for page in pages]
    assert not shown[0] & shown[1]
    assert all(f'process="{SECOND}"' in series for series in shown[1])
    for process in (FIRST, "controller", "decoder-0", "replica-0", "alerting"):
        assert f'process="{process}"' in pages[0]


def test_a_killed_gateway_ends_no_session(running, token) -> None:
    cluster, logs = running
    who = ask(FIRST, "POST", "/v1/session", {"token": token[0]})
    before = ray.get(handle(FIRST).process_id.remote())
    os.kill(before, signal.SIGKILL)
    assert ask(SECOND, "GET", "/v1/me", Cookie=who[2])[0] == 200

    def back() -> bool:
        try:
            return ray.get(handle(FIRST).process_id.remote(), timeout=5) != before
        except ray.exceptions.RayError as error:
            raise UnavailableError(str(error)) from None

    until("the first one", back)
    # One that has just started may be too slow to ask the controller in time.
    assert until("an answer", lambda: ask(FIRST, "GET", "/v1/me", Cookie=who[2]))[:2] == (200, who[1])
    assert len({each.metrics for each in cluster.gateways}) == 2
    written = "".join(path.read_text() for path in Path(logs).iterdir())
    assert token[0] not in written
    assert who[2].partition("=")[2] not in written
