"""``sightline tokens``: create, list and revoke API tokens of the gateway."""

import time
from pathlib import Path
from typing import Annotated

import typer

from actors.cli.options import Json
from actors.cli.output import console, make_table, print_json
from cluster.errors import ConfigError

app = typer.Typer(
    help="Create, list and revoke the API tokens of a gateway (security.tokens_file).", no_args_is_help=True
)

File = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", envvar="SIGHTLINE_TOKENS", help="The gateway's token file.")
]
DEFAULT_FILE = Path("tokens.json")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Owner: a person or a system.")],
    role: Annotated[list[str], typer.Option("--role", "-r", help="ingest, view, ask or admin; may be repeated.")],
    camera: Annotated[
        list[str] | None,
        typer.Option(
            "--camera",
            metavar="PATTERN",
            help="Cameras it gives access to, as in 'gate-*'; may be repeated. Default: all.",
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0.001, max=36_500.0, help="Days until it expires. Default: never.")
    ] = None,
    file: File = DEFAULT_FILE,
) -> None:
    """Create a token. Its secret is printed once, alone on standard output, and never stored.

    A running gateway accepts it within a second.

    $ sightline tokens create control-room --role ask --camera 'station-*' --days 365 > control-room.token
    """
    from cluster.security.roles import Role
    from cluster.security.tokens import DAY_S, make_token, read_tokens, write_tokens

    unknown = [each for each in role if each not in set(Role)]
    if unknown:
        raise ConfigError(f"there is no role {unknown[0]!r}; there are: {', '.join(Role)}")
    expires_s = None if days is None else time.time() + days * DAY_S
    secret, token = make_token(name, [Role(each) for each in role], camera or ["*"], expires_s=expires_s)
    known = read_tokens(file) if file.exists() else ()
    write_tokens(file, [*known, token])
    console(stderr=True).print(f"{name} was added to {file}; keep its secret, which is not stored:")
    print(secret)


@app.command("list")
def list_tokens(file: File = DEFAULT_FILE, json: Json = None) -> None:
    """List the tokens in a file; their secrets are not stored.

    $ sightline tokens list --file tokens.json
    """
    from cluster.security.tokens import read_tokens

    rows = []
    for token in read_tokens(file):
        until = "never" if token.expires_s is None else time.strftime("%Y-%m-%d", time.gmtime(token.expires_s))
        if token.expires_s is not None and token.expires_s <= time.time():
            until = f"{until} (expired)"
        rows.append(
            {"name": token.name, "roles": sorted(token.roles), "cameras": list(token.cameras), "expires": until}
        )
    if print_json(json, {"tokens": rows}):
        cells = [(r["name"], ", ".join(r["roles"]), ", ".join(r["cameras"]), r["expires"]) for r in rows]
        console().print(make_table("name|roles|cameras|expires", cells))


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="As shown by `tokens list`.")], file: File = DEFAULT_FILE) -> None:
    """Remove a token; a running gateway rejects it within a second, and ends streams within 15 s.

    $ sightline tokens revoke control-room --file tokens.json
    """
    from cluster.security.tokens import read_tokens, write_tokens

    tokens = read_tokens(file)
    kept = [token for token in tokens if token.name != name]
    if len(kept) == len(tokens):
        there = ", ".join(token.name for token in tokens) or "none"
        raise ConfigError(f"there is no token {name!r} in {file}; there are: {there}")
    write_tokens(file, kept)
    print(f"{name} is revoked")
