"""Signing in at a real OpenID provider: the matrix, sessions, and everything that can be wrong with a token."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache

import aiohttp
import pytest
from gateway_parts import serving
from http_matrix import bearer, wrong_replies
from http_parts import Client
from joserfc import jwt
from joserfc.jwk import KeySet, OctKey
from oidc_parts import new_keys, provider, sentence, sign_in

from cluster.config import load_config
from cluster.config.security import OidcConfig
from cluster.errors import ConfigError, UnauthenticatedError
from cluster.gateway import oidc as gateway_oidc
from cluster.gateway.claims import Attempt, Claims
from cluster.gateway.http.pages import ATTEMPT_COOKIE
from cluster.gateway.http.request_guard import COOKIE
from cluster.lab.bench.processes import free_port
from cluster.security.limits import RateLimit
from cluster.security.roles import Role

PEOPLE = {
    "ann": {"groups": ["visitors", "guards"]},
    "ben": {"groups": ["platform"]},
    "eve": {"groups": ["sales"]},
    "noa": {},
    **{role: {"groups": [f"{role}ers"]} for role in Role},
}
GROUPS = [
    {"group": "guards", "roles": ["view", "ask"], "cameras": ["cam-000"]},
    {"group": "visitors", "roles": ["admin"]},
    {"group": "platform", "roles": ["admin"]},
    *({"group": f"{role}ers", "roles": [role], "cameras": ["cam-000"]} for role in Role),
]
PROVIDER = {
    "issuer": "https://sso",
    "client_id": "a",
    "url": "https://city",
    "groups": [{"group": "g", "roles": ["view"]}],
}


@cache
def usual_keys():
    """Of every provider here that needs none of its own."""
    return new_keys()


@asynccontextmanager
async def signing_in(folder, *, keys=None, port=None, inside=None, tokens=False, security=None, **options):
    """``(gateway, provider)``; ``options`` are the provider's, ``inside`` those of ``security.oidc``."""
    own = free_port()
    url = f"http://127.0.0.1:{own}"
    keys = keys or usual_keys()
    with provider(PEOPLE, f"{url}/v1/sign-in/callback", keys=keys, port=port, **options) as issuer:
        oidc = {"issuer": issuer.url, "client_id": "sightline", "url": url, "groups": GROUPS}
        oidc |= {"bearer_audience": "urn:sightline", **(inside or {})}
        security = {"oidc": oidc, "audit_log": str(folder / "audit.jsonl"), **(security or {})}
        async with serving(folder, cameras=2, port=own, security=security, tokens=tokens) as served:
            for _ in range(200):
                if served.gateway._guard.provider._keys is not None:
                    break
                await asyncio.sleep(0.01)
            yield served, issuer


def inner(served):
    return served.gateway._guard.provider


async def cookie_of(served, name):
    """What requests of somebody who has signed in have."""
    async with Client(served.url) as client:
        status, page = await sign_in(client.session, served.url, name)
        assert status == 200, sentence(page)
        assert (await client("GET", "/v1/me"))[1]["name"] == f"oidc:{name}"
        return next(each.value for each in client.session.cookie_jar if each.key == COOKIE)


async def test_the_matrix_by_sessions_and_by_bearer_tokens(tmp_path):
    async with signing_in(tmp_path, tokens=True) as (served, issuer):
        inner(served).rate = RateLimit(1000.0, 1000)
        agent = {"User-Agent": aiohttp.http.SERVER_SOFTWARE}
        callers = {}
        for role in Role:
            session = {"headers": {"Cookie": f"{COOKIE}={await cookie_of(served, role)}", **agent}}
            callers[role] = [session, bearer(await issuer.robot_token(role))]
        assert not await wrong_replies(served, callers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keys": new_keys("EC"), "alg": "ES256"},
        {"inIdToken": False},
        {"secret": "s3cret/with:signs+and%more"},
    ],
    ids=["RSA", "EC", "groups of userinfo", "a client with a secret"],
)
async def test_a_person_gets_what_the_first_of_their_groups_has(tmp_path, options):
    inside = {}
    if "secret" in options:
        (tmp_path / "secret").write_text("renewed since")
        inside["client_secret_file"] = str(tmp_path / "secret")
    async with signing_in(tmp_path, inside=inside, **options) as (served, _), Client(served.url) as client:
        if "secret" in options:
            (tmp_path / "secret").write_text(options["secret"] + "\n")
        assert (await client("GET", "/v1/sign-in"))[1] == {"tokens": False, "provider": "127.0.0.1"}
        assert (await client("GET", "/v1/me"))[0] == 401
        status, page = await sign_in(client.session, served.url, "ann")
        assert status == 200, sentence(page)
        _, me = await client("GET", "/v1/me")
        assert me == {
            "name": "oidc:ann",
            "roles": ["ask", "view"],
            "cameras": ["cam-000"],
            "authenticated": True,
        }
        assert (await client("DELETE", "/v1/session"))[0] == 200
        assert (await client("GET", "/v1/me"))[0] == 401


async def test_who_may_not_is_told_why_and_written_down(tmp_path):
    async with signing_in(tmp_path) as (served, issuer):
        for name, status, said in (
            ("eve", 403, "in none of the groups"),
            ("noa", 403, "in none of the groups"),
            ("nobody", 403, "declined at the provider"),
        ):
            async with Client(served.url) as client:
                got, page = await sign_in(client.session, served.url, name)
                assert (got, said in sentence(page)) == (status, True), page
                assert (await client("GET", "/v1/me"))[0] == 401
        async with Client(served.url) as client:
            await sign_in(client.session, served.url, "ben")
            assert (await client("DELETE", "/v1/cameras/cam-001"))[0] == 200
        async with Client(served.url, await issuer.robot_token("eve")) as client:
            status, body = await client("GET", "/v1/cameras")
            assert (status, "in none of the groups" in body["error"]) == (403, True)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    callback = "/v1/sign-in/callback"
    told = [(line["who"], line["call"], line["outcome"]) for line in lines]
    assert told[:3] == [("?", callback, "forbidden")] * 3
    assert ("oidc:ben", callback, "ok") in told
    assert ("oidc:ben", "/sightline.v1.Cameras/Remove", "ok") in told


async def test_a_sign_in_is_good_once_and_in_its_browser_alone(tmp_path):
    async with signing_in(tmp_path) as (served, _):
        begin, callback = f"{served.url}/v1/sign-in/provider", f"{served.url}/v1/sign-in/callback"
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as victim:
            async with victim.get(begin, allow_redirects=False) as reply:
                made, where = reply.cookies[ATTEMPT_COOKIE], reply.headers["Location"]
                assert (made["httponly"], made["samesite"], made["path"]) == (True, "lax", "/v1/sign-in")
                assert "code_challenge_method=S256" in where
                assert Attempt.read(made.value).verifier not in where
            # A code and a state that somebody else began.
            async with victim.get(callback, params={"code": "c", "state": "theirs"}) as reply:
                assert reply.status == 401
                assert "not begun in this browser" in sentence(await reply.text())
            async with victim.get(callback, params={"code": "c", "state": "theirs"}) as reply:
                assert reply.status == 401
            async with victim.get(begin, allow_redirects=False) as reply:
                attempt = Attempt.read(reply.cookies[ATTEMPT_COOKIE].value.partition("~")[0])
            async with victim.get(callback, params={"code": "invented", "state": attempt.state}) as reply:
                assert reply.status == 401
                assert "invalid_grant" in sentence(await reply.text())
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as ann:
            # What the provider sent back to Ann's browser, caught before it arrives.
            async with ann.get(begin) as reply:
                page = reply.url
            where, at = page, "POST"
            while not str(where).startswith(callback):
                async with ann.request(at, where, data={"login": "ann"}, allow_redirects=False) as reply:
                    where, at = reply.headers["Location"], "GET"
            async with aiohttp.ClientSession() as thief, thief.get(where) as reply:
                assert (reply.status, COOKIE in reply.cookies) == (401, False)
            jar = {each.key: each.value for each in ann.cookie_jar}
            async with ann.get(where, allow_redirects=False) as reply:
                assert (reply.status, reply.headers["Location"], COOKIE in reply.cookies) == (303, "/", True)
                assert reply.cookies[COOKIE]["samesite"] == "strict"
            async with aiohttp.ClientSession(cookies=jar) as again, again.get(where) as reply:
                assert (reply.status, "invalid_grant" in sentence(await reply.text())) == (401, True)


async def test_what_is_wrong_with_a_bearer_token_is_said(tmp_path):
    """Each token is a real one of a real provider."""
    async with signing_in(tmp_path) as (served, issuer):
        good = await issuer.robot_token("ben")
        other_audience = await issuer.robot_token("ben", resource="urn:somebody-else")
        with provider(PEOPLE, f"{served.url}/v1/sign-in/callback") as impostor:
            stranger = await impostor.robot_token("ben")
        head, body, signature = good.split(".")
        cases = {
            good: (200, ""),
            other_audience: (401, "'urn:somebody-else', not for 'urn:sightline'"),
            f"{head}.{body}.{signature[:-8]}AAAAAAAA": (401, "not a token that the sign-in provider has signed"),
            "a.b.c": (401, "not a token that the sign-in provider has signed"),
            jwt.encode({"alg": "HS256"}, {"sub": "x"}, OctKey.generate_key(256)): (401, "has signed"),
        }
        for token, (status, said) in cases.items():
            async with Client(served.url, token) as client:
                got, reply = await client("GET", "/v1/cameras")
                assert (got, said in str(reply)) == (status, True), reply
        # Its key is not ours: which may be a new key, hence once "try again"; then no.
        inner(served)._tried_s = float("-inf")
        async with Client(served.url, stranger) as client:
            assert (await client("GET", "/v1/cameras"))[0] == 503
            for _ in range(300):
                status, body = await client("GET", "/v1/cameras")
                if status == 401:
                    break
                await asyncio.sleep(0.01)
            assert (status, "a key that the sign-in provider does not have" in body["error"]) == (401, True)


async def test_an_issuer_with_our_keys_and_another_name_is_refused(tmp_path):
    keys = new_keys()
    async with signing_in(tmp_path, keys=keys) as (served, _):
        with provider(PEOPLE, f"{served.url}/v1/sign-in/callback", keys=keys) as twin:
            token = await twin.robot_token("ben")
        async with Client(served.url, token) as client:
            status, body = await client("GET", "/v1/cameras")
            assert status == 401
            assert f"comes from '{twin.url}'" in body["error"]


async def test_expiry_and_clocks_that_differ(tmp_path):
    async with signing_in(tmp_path, ttl=60) as (served, issuer):
        kept = inner(served)
        token = await issuer.robot_token("ben")
        for ahead_s, status, said in (
            (0, 200, ""),
            (80, 200, ""),
            (95, 401, "expired 3"),
            (-25, 200, ""),
            (-60, 401, "in the future; set the clocks"),
        ):
            kept.claims = replace(kept.claims, clock=lambda by_s=ahead_s: time.time() + by_s)
            async with Client(served.url, token) as client:
                got, body = await client("GET", "/v1/cameras")
                assert (got, said in str(body)) == (status, True), (ahead_s, body)
        kept.claims = replace(kept.claims, clock=lambda: time.time() - 120)
        async with Client(served.url) as client:
            status, page = await sign_in(client.session, served.url, "ann")
            assert (status, "in the future; set the clocks" in sentence(page)) == (401, True)


async def test_keys_are_changed_and_nobody_is_locked_out(tmp_path, monkeypatch):
    async with signing_in(tmp_path) as (served, issuer):
        old = await issuer.robot_token("ben")
        issuer.stop()
        with provider(PEOPLE, f"{served.url}/v1/sign-in/callback", port=issuer.port) as renewed:
            new = await renewed.robot_token("ben")
            async with Client(served.url, old) as client:
                assert (await client("GET", "/v1/cameras"))[0] == 200
            async with Client(served.url, new) as client:
                # Keys were read a moment ago: whoever invents keys does not make us ask the provider again and again.
                assert (await client("GET", "/v1/cameras"))[0] == 401
                monkeypatch.setattr(gateway_oidc, "RETRY_S", 0.0)
                status, body = await client("GET", "/v1/cameras")
                assert (status, "are being fetched; try again" in body["error"]) == (503, True)
                for _ in range(300):
                    status, _ = await client("GET", "/v1/cameras")
                    if status == 200:
                        break
                    await asyncio.sleep(0.01)
                assert status == 200
            async with Client(served.url, old) as client:
                assert (await client("GET", "/v1/cameras"))[0] in (401, 503), "a key that was withdrawn"
            async with Client(served.url) as client:
                assert (await sign_in(client.session, served.url, "ann"))[0] == 200


async def test_while_the_provider_is_down_tokens_and_sessions_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway_oidc, "REFRESH_S", 0.0)
    monkeypatch.setattr(gateway_oidc, "RETRY_S", 0.0)
    async with signing_in(tmp_path, tokens=True) as (served, issuer), Client(served.url) as ann:
        token = await issuer.robot_token("ben")
        assert (await sign_in(ann.session, served.url, "ann"))[0] == 200
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as ben:
            async with ben.get(f"{served.url}/v1/sign-in/provider", allow_redirects=False) as reply:
                state = Attempt.read(reply.cookies[ATTEMPT_COOKIE].value).state
            issuer.stop()
            callback = f"{served.url}/v1/sign-in/callback"
            async with ben.get(callback, params={"code": "c", "state": state}) as reply:
                assert reply.status == 503
                assert "sign-in provider 127.0.0.1 cannot be reached" in sentence(await reply.text())
        assert (await ann("GET", "/v1/cameras"))[0] == 200
        for secret in (token, served.secrets["view"]):
            async with Client(served.url, secret) as client:
                assert (await client("GET", "/v1/cameras"))[0] == 200


async def test_a_provider_that_is_down_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway_oidc, "RETRY_S", 0.0)
    port = free_port()
    oidc = {"issuer": f"http://127.0.0.1:{port}", "client_id": "sightline", "groups": GROUPS}
    own = free_port()
    oidc |= {"url": f"http://127.0.0.1:{own}", "bearer_audience": "urn:sightline"}
    async with serving(tmp_path, cameras=1, port=own, tokens=True, security={"oidc": oidc}) as served:
        async with Client(served.url) as client:
            status, page = await sign_in(client.session, served.url, "ann")
            assert (status, "cannot be reached" in sentence(page)) == (503, True)
        async with Client(served.url, "a.b.c") as client:
            assert (await client("GET", "/v1/cameras"))[0] == 503
        async with Client(served.url, served.secrets["view"]) as client:
            assert (await client("GET", "/v1/cameras"))[0] == 200
        with provider(PEOPLE, f"{served.url}/v1/sign-in/callback", port=port):
            async with Client(served.url) as client:
                assert (await sign_in(client.session, served.url, "ann"))[0] == 200


async def test_an_issuer_that_calls_itself_otherwise_is_named(tmp_path):
    with provider(PEOPLE, "http://127.0.0.1:1/v1/sign-in/callback") as issuer:
        own = free_port()
        oidc = {"issuer": issuer.url + "/", "client_id": "sightline", "url": f"http://127.0.0.1:{own}"}
        security = {"oidc": {**oidc, "groups": GROUPS}}
        async with serving(tmp_path, cameras=1, port=own, security=security) as served, Client(served.url) as client:
            status, page = await sign_in(client.session, served.url, "ann")
            assert (status, "publishes the issuer" in sentence(page)) == (503, True)


async def test_jwts_are_no_bearer_tokens_unless_that_is_wanted(tmp_path):
    async with signing_in(tmp_path, inside={"bearer_audience": None}) as (served, issuer):
        secret = await issuer.robot_token("ben")
        async with Client(served.url, secret) as client:
            status, body = await client("GET", "/v1/cameras")
            assert (status, "accepts no API tokens" in body["error"]) == (401, True)


async def test_who_tries_too_often_asks_the_provider_nothing_more(tmp_path):
    async with signing_in(tmp_path) as (served, _):
        statuses = []
        for _ in range(34):
            # As many browsers behind one proxy.
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                async with session.get(f"{served.url}/v1/sign-in/provider", allow_redirects=False) as reply:
                    state = Attempt.read(reply.cookies[ATTEMPT_COOKIE].value).state
                query = {"code": "invented", "state": state}
                async with session.get(f"{served.url}/v1/sign-in/callback", params=query) as reply:
                    statuses.append(reply.status)
        assert (set(statuses[:30]), statuses[-1]) == ({401}, 429)


async def test_two_tabs_of_one_browser_sign_in_at_once(tmp_path):
    async with signing_in(tmp_path) as (served, _), Client(served.url) as client:
        begin = f"{served.url}/v1/sign-in/provider"
        async with client.session.get(begin) as first, client.session.get(begin) as second:
            tabs = [first.url, second.url]
        for tab in tabs:
            async with client.session.post(tab, data={"login": "ann"}) as reply:
                assert reply.status == 200, sentence(await reply.text())
        kept = [each.value for each in client.session.cookie_jar if each.key == ATTEMPT_COOKIE]
        assert not kept, "nothing is under way any more"
        for _ in range(20):
            async with client.session.get(begin, allow_redirects=False) as reply:
                assert len(reply.cookies[ATTEMPT_COOKIE].value) < 2000


def test_a_token_for_several_clients_must_be_ours():
    keys = KeySet.generate_key_set("RSA", 2048, count=1)
    claims = Claims(OidcConfig.model_validate(PROVIDER), clock=lambda: 1000.0)

    def signed(**more):
        told = {"iss": "https://sso", "sub": "1", "aud": ["a", "b"], "exp": 2000, "iat": 900, "nonce": "n", **more}
        return jwt.encode({"alg": "RS256", "kid": keys.keys[0].kid}, told, keys, algorithms=["RS256"])

    assert claims.verify(signed(azp="a"), keys, "a", nonce="n")["sub"] == "1"
    for told, nonce, said in (
        ({"azp": "b"}, "n", "azp"),
        ({}, "another", "nonce"),
        ({"nonce": None}, "n", "nonce"),
        ({"exp": None}, "n", "lacks exp"),
        ({"sub": None}, "n", "lacks sub"),
        ({"nbf": 1500}, "n", "500 s in the future"),
        ({"exp": "soon"}, "n", "exp in the provider's token is wrong"),
    ):
        with pytest.raises(UnauthenticatedError, match=said):
            claims.verify(signed(**told), keys, "a", nonce=nonce)


def test_groups_may_be_inside_and_names_are_told_apart_from_tokens():
    claims = Claims(OidcConfig.model_validate({**PROVIDER, "groups_claim": "realm_access.roles"}))
    assert claims.groups({"realm_access": {"roles": ["g", 7]}}) == ["g"]
    assert claims.groups({"realm_access": "g"}) == []
    assert claims.groups({"realm_access.roles": "g"}) == ["g"]
    told = {"sub": "1", "preferred_username": "admin\n\x1b[31m", "realm_access": {"roles": ["g"]}}
    assert claims.principal(told).name == "oidc:admin[31m"
    assert claims.principal({**told, "preferred_username": ["x"]}).name == "oidc:1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"issuer": "http://sso.example"}, "must begin with https://"),
        ({"issuer": "sso"}, "must be an address"),
        ({"scopes": ["profile"]}, "must include openid"),
        ({"groups": []}, "at least 1"),
        ({"groups": [{"group": "g", "roles": ["king"]}]}, "king"),
        ({"client_secret_file": "/nowhere"}, "cannot be read"),
        ({"ca_file": "/nowhere"}, "cannot be used"),
    ],
)
async def test_a_wrong_configuration_is_refused(change, said):
    oidc = {"issuer": "https://sso", "client_id": "c", "url": "https://s", "groups": GROUPS, **change}
    with pytest.raises(ConfigError) as refusal:
        gateway_oidc.OidcProvider(load_config(None, {"security": {"oidc": oidc}}).security.oidc)
    assert said in str(refusal.value)
