"""A search of a network through the gateway, its guard and audit log, to a decoder, over real gRPC."""

import asyncio
import json
import subprocess
from ipaddress import IPv4Network
from urllib.parse import quote

import pytest
import yaml
from footage_parts import Site, configuration
from onvif_camera import OnvifCamera

from actors.cli import main
from cluster.client import GatewayClient
from cluster.decoder import discovery
from cluster.errors import ForbiddenError, NotReadyError, UnauthenticatedError
from cluster.gateway.guard import Guard
from cluster.security.audit import AuditLog
from cluster.security.roles import Principal, Role
from cluster.wire.tls import ClientCredentials

METHOD = "/sightline.v1.Pictures/Discover"
PEOPLE = {
    "all": Principal("alice", frozenset({Role.ADMIN})),
    "some": Principal("sam", frozenset({Role.ADMIN}), ("gate",)),
    "ask": Principal("ann", frozenset({Role.ASK})),
}


def verify(secret):
    if secret not in PEOPLE:
        raise UnauthenticatedError("nobody")
    return PEOPLE[secret]


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(discovery, "REPLY_S", 0.5)


async def served(tmp_path, camera, networks=("127.0.0.0/24",)):
    config = configuration()
    allowed = {"discovery_networks": [IPv4Network(each) for each in networks]}
    config = config.model_copy(update={"security": config.security.model_copy(update=allowed)})
    site = Site(tmp_path, config, Guard(verify, audit=AuditLog(tmp_path / "audit.jsonl")))
    site.probe_port = camera.probe_port
    await site.start()
    return site


async def search(address, secret, network="127.0.0.0/30"):
    def there():
        with GatewayClient(address, credentials=ClientCredentials(token=secret)) as client:
            return [each.camera for each in client.discover(network, "admin", "right") if each.camera]

    return await asyncio.to_thread(there)


async def test_administrators_of_all_cameras_search_and_it_is_audited(tmp_path):
    async with OnvifCamera("rtsp://127.0.0.1:8554/main") as camera:
        site = await served(tmp_path, camera)
        try:
            [found] = await search(site.address, "all")
            assert [each.source for each in found.streams] == ["rtsp://127.0.0.1:8554/main"]
            with pytest.raises(ForbiddenError, match="needs a token for all"):
                await search(site.address, "some")
            with pytest.raises(ForbiddenError, match="the role admin"):
                await search(site.address, "ask")
            with pytest.raises(NotReadyError, match=r"10\.0\.0\.0/30 is not within security\.discovery_networks"):
                await search(site.address, "all", "10.0.0.0/30")
        finally:
            await site.stop()
        assert camera.probes == 1
    written = (tmp_path / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    told = [(line["who"], line["outcome"], line.get("text")) for line in lines if line["call"] == METHOD]
    assert ("alice", "ok", "127.0.0.0/30") in told
    assert {("ann", "forbidden"), ("sam", "forbidden")} < {each[:2] for each in told}
    assert ("sam", "ok") not in [each[:2] for each in told]
    assert "right" not in written


async def test_without_networks_nothing_is_sent(tmp_path):
    async with OnvifCamera("rtsp://127.0.0.1:8554/main") as camera:
        site = await served(tmp_path, camera, networks=())
        try:
            with pytest.raises(NotReadyError, match="no network may be searched"):
                await search(site.address, "all")
        finally:
            await site.stop()
        assert camera.probes == 0


async def test_the_command_writes_a_file_to_apply(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SIGHTLINE_TOKEN", "all")
    monkeypatch.setenv("CAMERA_PASSWORD", "right")
    file = tmp_path / "found.yaml"
    async with OnvifCamera("rtsp://127.0.0.1:8554/main") as camera:
        site = await served(tmp_path, camera)
        try:
            asked = [
                "cameras",
                "discover",
                "127.0.0.0/30",
                "--user",
                "admin",
                "-o",
                str(file),
                "--gateway",
                site.address,
            ]
            assert await asyncio.to_thread(main, asked) == 0
        finally:
            await site.stop()
    assert "mainStream: H264 1920x1080 at 25 fps  rtsp://127.0.0.1:8554/main" in capsys.readouterr().out
    text = file.read_text()
    [entry] = yaml.safe_load(text)["cameras"]
    source = "rtsp://admin:${CAMERA_PASSWORD_ESCAPED}@127.0.0.1:8554/main"
    assert entry == {"name": "acme-dome-4-127-0-0-1", "source": source}
    # The command that the file shows makes the value that an address needs.
    [shown] = [line.removeprefix("#").strip() for line in text.splitlines() if "export" in line]
    script = f'{shown}; printf %s "$CAMERA_PASSWORD_ESCAPED"'
    monkeypatch.setenv("CAMERA_PASSWORD", "p/1#?@%")
    made = await asyncio.to_thread(subprocess.check_output, ["sh", "-c", script], text=True)
    assert made == quote("p/1#?@%", safe="")
