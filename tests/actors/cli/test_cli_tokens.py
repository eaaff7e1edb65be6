"""``sightline tokens``: secrets come out once, files hold none, mistakes are one line."""

import json

import pytest

import actors.cli
from cluster.errors import UnauthenticatedError
from cluster.security.roles import Role
from cluster.security.tokens import TokenFile


@pytest.fixture
def run(tmp_path, capsys):
    def call(*arguments):
        code = actors.cli.main(["tokens", *arguments, "--file", str(tmp_path / "tokens.json")])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_token_is_made_listed_and_revoked(run, tmp_path):
    code, secret, err = run("create", "room", "--role", "ask", "--role", "ingest", "--camera", "gate-*", "--days", "9")
    secret = secret.strip()
    assert code == 0
    assert "keep its secret, which is not stored" in err
    principal = TokenFile(tmp_path / "tokens.json").verify(secret)
    assert (principal.name, principal.roles) == ("room", {Role.ASK, Role.INGEST})
    assert principal.cameras == ("gate-*",)
    assert run("create", "other", "-r", "view")[0] == 0
    code, out, _ = run("list", "--json", "-")
    listed = json.loads(out)["tokens"]
    assert [row["name"] for row in listed] == ["other", "room"]
    assert secret not in out
    assert listed[0]["expires"] == "never"
    assert "room" in run("list")[1]
    assert run("revoke", "room")[0] == 0
    with pytest.raises(UnauthenticatedError):
        TokenFile(tmp_path / "tokens.json").verify(secret)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["create", "room", "--role", "king"], "there is no role 'king'; there are: ingest, view, ask, admin"),
        (["create", "other", "--role", "view"], "a token 'other' already exists"),
        (["create", "room", "--role", "view", "--days", "inf"], "Invalid value for '--days'"),
        (["create", "room", "--role", "view", "--days", "0"], "Invalid value for '--days'"),
        (["revoke", "room"], "there is no token 'room'"),
    ],
)
def test_mistakes_are_one_line(run, arguments, why):
    assert run("create", "other", "--role", "view")[0] == 0
    code, out, err = run(*arguments)
    assert code == 2
    assert why in err
    assert out == ""
    assert err.count("error: ") == 1


def test_nothing_to_list_says_how_to_begin(run):
    code, _, err = run("list")
    assert code == 2
    assert "create the file with `sightline tokens create`" in err
