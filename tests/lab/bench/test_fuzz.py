"""A small part of ``sightline bench fuzz``, and whether it would notice."""

import argparse
import asyncio
import json
import random

import pytest
from fuzz.bench import run, unexpected_in
from fuzz.documents import DocumentCases
from fuzz.http import HttpCases
from fuzz.rpc import body, methods

from cluster.errors import ConfigError

CASES = 900


def test_nothing_breaks_of_some_hundred_cases():
    result = run(argparse.Namespace(cases=CASES, seed=3, only=None))
    assert result.figures["fuzz_crashes"] == 0, result.notes
    assert result.figures["fuzz_cases"] == CASES
    outcomes = {row["part"]: row["outcomes"] for row in result.rows}
    # Cases get through to the services, and not only to whoever refuses them.
    for wanted in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED"):
        assert wanted in outcomes["rpc"]
    for status in ("200", "400", "401", "404"):
        assert status in outcomes["http"]
    assert {"taken", "refused"} <= set(outcomes["documents"].replace(",", "").split())


def test_every_public_method_is_among_them():
    from cluster.security.roles import RULES

    public = {rule for rule in RULES if rule.startswith("/")}
    assert public <= {method.path for method in methods() if method.where == "gateway"}


def test_a_case_is_the_same_every_time(tmp_path):
    kinds = methods()
    requests = HttpCases("127.0.0.1:1")
    requests._routes = [("POST", "/v1/cameras/{name}", {"type": "object", "properties": {"name": {"type": "string"}}})]
    for number in range(50):
        seen = set()
        for _ in range(2):
            rng = random.Random(f"7:http:{number}")
            seen.add((body(rng, rng.choice(kinds).request), requests.request(rng)))
        assert len(seen) == 1


def test_an_error_that_nobody_expected_is_found(tmp_path, monkeypatch):
    cases = DocumentCases(tmp_path)

    def broken(*_):
        raise IndexError("a defect")

    monkeypatch.setattr("cluster.config.load._line", broken)
    found = [cases.one(random.Random(f"7:documents:{number}")) for number in range(60)]
    assert any("IndexError: a defect" in failure for failure in found)


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "500 to"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ""),
    ],
)
def test_five_hundreds_are_found(reply, failure):
    async def answer(reader, writer):
        await reader.read(2**16)
        writer.write(reply)
        writer.close()

    assert asyncio.run(one_of(answer)).startswith(failure or "")
    assert bool(asyncio.run(one_of(answer))) is bool(failure)


async def one_of(answer):
    """What a case says of a server with such answers."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    cases = HttpCases(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    cases._routes = [("GET", "/", None)]
    try:
        return await cases.one(random.Random(1))
    finally:
        server.close()


def test_a_server_that_never_ends_is_found(monkeypatch):
    from fuzz import http

    async def silent(reader, writer):
        await asyncio.sleep(30)

    monkeypatch.setattr(http, "HANG_S", 0.3)
    monkeypatch.setattr(http, "REST_S", 0.1)
    assert "no end within" in asyncio.run(one_of(silent))


def test_what_counts_in_a_log():
    ours = (
        'Traceback (most recent call last):\n  File "/x/cluster/replica/frames_service.py", line 1, in f\nKeyError: 3\n'
    )
    theirs = 'Traceback (most recent call last):\n  File "/x/grpc/aio.py", line 1, in f\nDecodeError: no\n'
    assert unexpected_in(theirs + "other\n" + ours) == [
        'KeyError: 3 at File "/x/cluster/replica/frames_service.py", line 1, in f'
    ]


@pytest.mark.parametrize("keys", [{"cases": 2}, {"only": "rpc"}, {"only": "nothing:3"}, {"only": "rpc:x"}])
def test_wrong_arguments(keys):
    with pytest.raises(ConfigError):
        run(argparse.Namespace(**{"cases": 100, "seed": 1, "only": None, **keys}))


def test_json_has_the_figure(tmp_path):
    from cluster.lab.bench.harness import main

    assert main(["fuzz", "--only", "documents:5", "--json", str(tmp_path / "fuzz.json")]) == 0
    assert json.loads((tmp_path / "fuzz.json").read_text())["figures"]["fuzz_crashes"] == 0
