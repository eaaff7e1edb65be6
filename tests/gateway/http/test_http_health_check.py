"""What the images' HEALTHCHECK runs: a process of its own, against a gateway's HTTP."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest
from certificates import Authority
from http_parts import bare_application, listening

from cluster.wire.tls import TlsFiles

ROOT = Path(__file__).parents[3]


def command():
    """As it stands in the image."""
    [line] = [
        line for line in (ROOT / "deploy/docker/Dockerfile.cpu").read_text().splitlines() if "HEALTHCHECK" in line
    ]
    name, *rest = json.loads(line.partition("CMD ")[2])
    assert name == "python"
    return [sys.executable, *rest]


async def check(address, **environment):
    process = await asyncio.create_subprocess_exec(
        *command(), env={"SIGHTLINE_HTTP": address, **environment}, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode().strip()


async def test_it_tells_a_gateway_from_none():
    async with listening(bare_application()) as (url, _):
        address = url.removeprefix("http://")
        assert await check(address) == (0, "ok")
        code, told = await check(f"{address}/nothing/there")
        assert (code, told) == (1, "the gateway answers 404")
    code, told = await check(address)
    assert code == 1
    assert f"no gateway at {address}" in told
    code, told = await check("nowhere")
    assert code == 1
    assert "SIGHTLINE_HTTP is its HOST:PORT" in told


async def test_connections_that_do_nothing_keep_it_out_of_nothing():
    async with listening(bare_application(), max_anonymous=4) as (url, _), contextlib.AsyncExitStack() as stack:
        host, _, port = url.removeprefix("http://").partition(":")
        for _ in range(300):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
        assert await check(f"{host}:{port}") == (0, "ok")


async def test_with_tls(tmp_path):
    authority = Authority()
    certificate, key = authority.issue(tmp_path, "gateway")
    known = str(authority.write(tmp_path / "ca.crt"))
    async with listening(bare_application(), tls=TlsFiles(certificate, key)) as (url, _):
        address = "localhost:" + url.rpartition(":")[2]
        assert await check(address, SIGHTLINE_CA=known) == (0, "ok")
        code, told = await check(address, SIGHTLINE_TLS="1")
        assert code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in told
        code, told = await check(address, SIGHTLINE_CA=str(tmp_path / "none.crt"))
        assert code == 1
        assert "SIGHTLINE_CERT and SIGHTLINE_KEY are unusable" in told


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_both_images_have_it(image):
    assert json.dumps(["python", *command()[1:]]) in (ROOT / f"deploy/docker/Dockerfile.{image}").read_text()
