"""The console's files: fresh, small, and nothing from outside their folder."""

import asyncio
import gzip

import pytest
from http_parts import Client, bare_application, listening


@pytest.fixture
def folder(tmp_path):
    static = tmp_path / "static"
    (static / "js").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html><title>Sightline</title>")
    (static / "js" / "app.js").write_text("export const x = 1;\n" * 100)
    (tmp_path / "secret.txt").write_text("secret")
    (static / "link.txt").symlink_to(tmp_path / "secret.txt")
    return static


async def fetch(client, path, **headers):
    async with client.open("GET", path, headers=headers) as reply:
        return reply.status, await reply.read(), reply.headers


async def test_files_of_the_console(folder):
    async with listening(bare_application(static=folder)) as (url, _), Client(url, auto_decompress=False) as client:
        status, data, headers = await fetch(client, "/")
        assert (status, data) == (200, (folder / "index.html").read_bytes())
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        status, data, headers = await fetch(client, "/console/js/app.js", **{"Accept-Encoding": "gzip"})
        assert gzip.decompress(data) == (folder / "js" / "app.js").read_bytes()
        assert headers["Content-Type"].startswith("text/javascript")
        _, data, plain = await fetch(client, "/console/js/app.js", **{"Accept-Encoding": "identity"})
        assert (data, plain["ETag"]) == ((folder / "js" / "app.js").read_bytes(), headers["ETag"])
        tag = {"If-None-Match": headers["ETag"]}
        assert (await fetch(client, "/console/js/app.js", **tag))[:2] == (304, b"")
        (folder / "js" / "app.js").write_text("new")
        assert (await fetch(client, "/console/js/app.js", **tag))[:2] == (200, b"new")
        (folder / "js" / "app.js").unlink()
        assert (await fetch(client, "/console/js/app.js"))[0] == 404


OUTSIDE = [
    "../secret.txt",
    "..%2fsecret.txt",
    "js/../../secret.txt",
    "%2e%2e/secret.txt",
    "link.txt",
    "js",
    "js/",
    "/etc/passwd",
]
OUTSIDE += ["a%00b", "..\\secret.txt", "js//app.js", "."]


async def test_nothing_from_outside_the_folder(folder):
    async with listening(bare_application(static=folder)) as (url, _):
        host, _, port = url.removeprefix("http://").rpartition(":")
        for path in OUTSIDE:
            assert b" 404 " in await raw(host, int(port), f"/console/{path}"), path


async def raw(host, port, path):
    """The reply's first line; clients tidy paths up."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return line


async def test_a_gateway_without_a_console(tmp_path):
    async with listening(bare_application(static=tmp_path / "none")) as (url, _), Client(url) as client:
        assert await client("GET", "/") == (404, {"error": "the console has no file 'index.html'"})
