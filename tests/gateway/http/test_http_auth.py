"""Every route times every role and scope; sessions; pages that are not ours; the audit log and the rate."""

import asyncio
import json

import pytest
from gateway_parts import serving
from http_matrix import MAY, bearer, open_incidents, wrong_replies
from http_parts import Client

from cluster.gateway.http.application import table
from cluster.gateway.http.request_guard import COOKIE, OPEN
from cluster.security.roles import RULES, Role
from cluster.security.sessions import LIFETIME_S, MOST_OF_ONE, Sessions
from cluster.security.tokens import make_token, read_tokens, write_tokens


async def test_every_route_times_every_role_and_scope(tmp_path):
    names = {f"{route.method} {route.path}" for route in table()}
    assert names == set(MAY), "a route that the matrix does not know, or the other way round"
    assert all(route.rule in RULES or route.rule == OPEN for route in table())
    async with serving(tmp_path, cameras=2, tokens=True, scopes=["cam-000"]) as served:
        assert not await wrong_replies(served, {role: [bearer(secret)] for role, secret in served.secrets.items()})


async def test_replies_hold_only_what_the_token_is_for(tmp_path):
    async with serving(tmp_path, cameras=3, tokens=True, scopes=["cam-001"]) as served:
        await open_incidents(served, ["cam-000", "cam-001"])
        async with Client(served.url, served.secrets["view"]) as client:
            _, cameras = await client("GET", "/v1/cameras")
            _, incidents = await client("GET", "/v1/incidents")
            _, models = await client("GET", "/v1/models")
            served.gateway._live.look()
            for _ in range(100):
                _, fleet = await client("GET", "/v1/fleet")
                if fleet["cameras"]:
                    break
            assert [camera["name"] for camera in cameras["cameras"]] == ["cam-001"]
            assert [incident["camera"] for incident in incidents["incidents"]] == ["cam-001"]
            assert [model["id"] for model in models["data"]] == ["camera/cam-001", "fleet"]
            assert fleet["cameras"] == 1
            status, body = await client("GET", "/v1/cameras/cam-000")
            other, same = await client("GET", "/v1/cameras/cam-999")
            assert (status, other) == (403, 403), "a camera that exists and one that does not look alike"
            assert body["error"].replace("000", "") == same["error"].replace("999", "")


async def test_a_session_has_a_cookie_of_its_own_that_no_script_reads(tmp_path):
    async with serving(tmp_path, cameras=2, tokens=True) as served, Client(served.url) as client:
        assert (await client("GET", "/v1/me"))[0] == 401
        assert (await client("POST", "/v1/session", {"token": "sl_wrong"}))[0] == 401
        async with client.open("POST", "/v1/session", json={"token": served.secrets["ask"]}) as reply:
            cookie = reply.cookies[COOKIE]
            assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
            assert await reply.json() == {
                "name": "ask-token",
                "roles": ["ask"],
                "cameras": ["*"],
                "authenticated": True,
            }
            assert reply.cookies[COOKIE].value not in served.secrets.values()
        assert not cookie["secure"], "it would not come back over plain HTTP"
        assert int(cookie["max-age"]) == 12 * 3600
        assert (await client("GET", "/v1/cameras"))[0] == 200
        session = {COOKIE: cookie.value}
        for stolen in (
            Client(served.url, cookies=session, headers={"User-Agent": "another browser"}),
            Client(served.url, cookie.value),
            Client(served.url, cookies={COOKIE: served.secrets["ask"]}),
        ):
            async with stolen as other:
                assert (await other("GET", "/v1/cameras"))[0] == 401
        async with Client(served.url) as other:
            assert (await other("POST", "/v1/session", {"token": served.secrets["ask"]}))[0] == 200
            signed_out = {COOKIE: next(iter(other.session.cookie_jar)).value}
            assert (await other("DELETE", "/v1/session"))[0] == 200
        async with Client(served.url, cookies=signed_out) as other:
            assert (await other("GET", "/v1/cameras"))[0] == 401, "it went on for whoever had copied the cookie"
        async with Client(served.url, served.secrets["admin"]) as other:
            assert (await other("POST", "/v1/replicas/replica-0/drain", {"undo": True}))[0] == 200
        proxied, token = {"X-Forwarded-Proto": "https"}, {"token": served.secrets["view"]}
        async with (
            Client(served.url) as other,
            other.open("POST", "/v1/session", json=token, headers=proxied) as reply,
        ):
            assert reply.cookies[COOKIE]["secure"]
        assert (await client("GET", "/v1/cameras"))[0] == 200
        assert (await client("DELETE", "/v1/cameras/cam-000"))[0] == 403
        tokens = tmp_path / "tokens.json"
        write_tokens(tokens, [token for token in read_tokens(tokens) if token.name != "ask-token"])
        for _ in range(300):
            if (await client("GET", "/v1/cameras"))[0] == 401:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("a revoked token's session goes on")
        assert (await client("DELETE", "/v1/session"))[0] == 200
        assert not list(client.session.cookie_jar)


async def test_a_session_is_short_and_one_token_has_few():
    now_s = 0.0
    sessions = Sessions(clock=lambda: now_s)
    first = await sessions.begin_session("ann", "sl_a", "firefox")
    of_another = await sessions.begin_session("ben", "sl_b", "firefox")
    assert await sessions.credential_of_session(first, "firefox") == "sl_a"
    assert await sessions.credential_of_session(first, "chrome") is None
    assert await sessions.credential_of_session("", "firefox") is None
    later = [await sessions.begin_session("ann", "sl_a", "firefox") for _ in range(MOST_OF_ONE)]
    assert await sessions.credential_of_session(first, "firefox") is None
    assert {await sessions.credential_of_session(each, "firefox") for each in later} == {"sl_a"}
    now_s = LIFETIME_S
    assert await sessions.credential_of_session(of_another, "firefox") is None


async def test_where_nobody_is_asked_for_a_token(tmp_path):
    async with serving(tmp_path, cameras=2) as served, Client(served.url) as client:
        _, me = await client("GET", "/v1/me")
        assert me == {"name": "anybody", "roles": sorted(Role), "cameras": ["*"], "authenticated": False}
        status, same = await client("POST", "/v1/session", {"token": "whatever"})
        assert (status, same) == (200, me)
        assert not list(client.session.cookie_jar)


PAGES = {
    "another page": ({"Origin": "http://evil.example"}, 403),
    "a page without a name": ({"Origin": "null"}, 403),
    "another port of this machine": ({"Origin": "http://127.0.0.1:1"}, 403),
    "a picture in another page": ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    "a link in another page": ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
    "our own page": ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    "a name that was made to lead here": ({"Host": "evil.example:9464"}, 403),
    "localhost": ({"Host": "localhost:9464"}, 200),
    "IPv6": ({"Host": "[::1]:9464"}, 200),
    "no name": ({"Host": ""}, 403),
}


async def test_pages_that_are_not_ours_get_nothing(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        for what, (headers, status) in PAGES.items():
            assert (await client("GET", "/v1/cameras", headers=headers))[0] == status, what
        assert (await client("GET", "/v1/cameras", headers={"Origin": served.url}))[0] == 200


async def test_a_gateway_that_others_reach_has_any_name_where_it_asks_for_tokens(tmp_path):
    async with serving(tmp_path, cameras=1, tokens=True) as served:
        headers = {"Host": "gateway.city", "Authorization": f"Bearer {served.secrets['view']}"}
        async with Client(served.url, headers=headers) as client:
            assert (await client("GET", "/v1/cameras"))[0] == 200


async def test_browsers_are_told_what_they_may_do_with_every_reply(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        for path in ("/", "/v1/cameras", "/v1/nothing", "/metrics", "/v1/events"):
            async with client.open("GET", path) as reply:
                policy = reply.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy, path
                assert "frame-ancestors 'none'" in policy, path
                assert "unsafe" not in policy, path
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert reply.headers["Referrer-Policy"] == "no-referrer"
                assert reply.headers["X-Request-Id"]
                assert "aiohttp" not in reply.headers.get("Server", "")
        async with client.open("GET", "/v1/cameras", headers={"X-Request-Id": "abc-1"}) as reply:
            assert reply.headers["X-Request-Id"] == "abc-1"
        async with client.open("GET", "/v1/cameras", headers={"X-Request-Id": "a b"}) as reply:
            assert reply.headers["X-Request-Id"] != "a b"


async def test_the_audit_log_tells_what_was_asked_over_http(tmp_path):
    async with serving(tmp_path, cameras=2, tokens=True, scopes=["cam-000"]) as served:
        async with Client(served.url, served.secrets["ask"]) as client:
            await client.ask("Who?", "cam-000")
            await client.ask("Who?", "cam-001")
            await client("GET", "/v1/cameras")
            async with client.open("GET", "/v1/events?cameras=cam-000"):
                pass
        async with Client(served.url, "sl_unknown") as client:
            await client("GET", "/v1/cameras")
            assert (await client("POST", "/v1/session", {"token": "sl_guessed"}))[0] == 401
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    ask = "/sightline.v1.Memory/Ask"
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    assert [(line["who"], line["call"], line["cameras"], line["outcome"], line.get("text")) for line in lines] == [
        ("ask-token", ask, ["cam-000"], "ok", "Who?"),
        ("ask-token", ask, ["cam-001"], "forbidden", "Who?"),
        ("ask-token", "GET /v1/events", ["cam-000"], "ok", None),
        ("?", "/sightline.v1.Cameras/List", [], "unauthenticated", None),
        ("?", "POST /v1/session", [], "unauthenticated", None),
    ]


async def test_who_asks_too_often_is_told_when_to_come_back(tmp_path):
    limits = {"calls_burst": 3, "calls_per_s": 0.001}
    served_with = serving(tmp_path, cameras=1, tokens=True, security=limits)
    async with served_with as served, Client(served.url, served.secrets["view"]) as client:
        statuses = [(await client("GET", "/v1/cameras"))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        async with client.open("GET", "/v1/fleet") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
            assert "calls too often" in (await reply.json())["error"]
        assert (await client("GET", "/healthz"))[0] == 200


async def test_an_expired_token_is_named(tmp_path):
    async with serving(tmp_path, cameras=1, tokens=True) as served:
        secret, token = make_token("old", [Role.VIEW], ["*"], expires_s=1.0)
        write_tokens(tmp_path / "tokens.json", [token])
        async with Client(served.url, secret) as client:
            for _ in range(300):
                status, body = await client("GET", "/v1/cameras")
                if "expired" in body["error"]:
                    break
                await asyncio.sleep(0.01)
            assert status == 401
            assert "'old' expired on 1970-01-01" in body["error"]


async def test_secrets_and_questions_are_not_in_the_log(tmp_path, caplog):
    caplog.set_level("DEBUG")
    async with serving(tmp_path, cameras=1, tokens=True) as served:
        secret = served.secrets["view"]
        async with Client(served.url, secret, cookies={COOKIE: secret}) as client:
            await client("GET", "/v1/cameras/none")
            await client("GET", "/v1/cameras/none?hush=hush")
            await client("POST", "/v1/session", {"token": secret})
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "request" in text
    assert "/v1/cameras/none by view-token: 404" in text
    assert secret not in text
    assert "hush" not in text
