"""Searching a network for ONVIF cameras, against devices that speak it on loopback."""

import asyncio
from ipaddress import IPv4Network

import pytest
from onvif_camera import OnvifCamera

from cluster.decoder import discovery
from cluster.decoder.discovery import NetworkSearch, named_network
from cluster.errors import CapacityError, ConfigError, NotReadyError
from cluster.types.cameras import DiscoveredStream

ALLOWED = [IPv4Network("127.0.0.0/24")]


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(discovery, "REPLY_S", 0.5)


async def found(port, network="127.0.0.0/30", user="admin", password="right"):
    search = NetworkSearch(ALLOWED, probe_port=port)
    parts = [each async for each in search.search(network, user, password)]
    return [each.camera for each in parts if each.camera is not None], parts


async def test_a_camera_is_found_with_its_streams_and_without_its_password():
    async with OnvifCamera("rtsp://admin:right@127.0.0.1:8554/main?x=1") as camera:
        [each], parts = await found(camera.probe_port)
    assert each.address == f"127.0.0.1:{camera.port}"
    assert (each.name, each.model, each.error) == ("Acme Dome 4", "Dome 4", "")
    assert each.streams == (DiscoveredStream("mainStream", "H264", 1920, 1080, 25.0, "rtsp://127.0.0.1:8554/main?x=1"),)
    # The two addresses of a /30 and nothing else.
    assert (parts[-1].probed, parts[-1].total, parts[-1].answered, parts[-1].asked) == (2, 2, 1, 1)
    assert camera.probes == 1


@pytest.mark.parametrize("vacant", [0, 31])
async def test_channels_without_a_camera_hide_no_other(vacant):
    """A recorder of 32 channels, and a camera whose first profile has no video."""
    async with OnvifCamera("rtsp://127.0.0.1/32", vacant=vacant) as recorder:
        [each], _ = await found(recorder.probe_port)
    assert [stream.source for stream in each.streams] == ["rtsp://127.0.0.1/32"]
    assert each.error == ""


async def test_a_device_that_gives_no_stream_says_why():
    async with OnvifCamera("rtsp://127.0.0.1/a", connected=False) as camera:
        [each], _ = await found(camera.probe_port)
    assert each.error == "it offers no video stream: The specified media profile contains no video"
    assert each.streams == ()


async def test_a_device_that_wants_the_digest_of_http_gets_it():
    """Cameras may be set to accept nothing else."""
    async with OnvifCamera("rtsp://127.0.0.1/a", http_digest=True) as camera:
        [each], _ = await found(camera.probe_port)
        [refused], _ = await found(camera.probe_port, password="wrong")
    assert ([stream.source for stream in each.streams], each.error) == (["rtsp://127.0.0.1/a"], "")
    assert refused.error == "its ONVIF service failed: it refuses this user or password"


async def test_a_wrong_password_is_said_and_the_others_are_found():
    async with (
        OnvifCamera("rtsp://127.0.0.1/a", password="another") as first,
        OnvifCamera("rtsp://127.0.0.2/b", host="127.0.0.2", probe_port=first.probe_port),
    ):
        cameras, _ = await found(first.probe_port)
    wrong, good = sorted(cameras, key=lambda each: each.address)
    assert "not authorized" in wrong.error
    assert wrong.streams == ()
    assert good.streams[0].source == "rtsp://127.0.0.2/b"


async def test_nobody_outside_the_network_is_asked():
    async with OnvifCamera("rtsp://127.0.0.9/x", host="127.0.0.9") as outside:
        port = outside.probe_port
        async with (
            # Its addresses name another host; it is asked where it answered from. Its stream is elsewhere.
            OnvifCamera("rtsp://127.0.0.9/x", probe_port=port, claimed="127.0.0.9") as inside,
            OnvifCamera(
                "rtsp://127.0.0.2/x",
                host="127.0.0.2",
                probe_port=port,
                redirect=f"http://127.0.0.9:{outside.port}/onvif/device_service",
            ),
        ):
            cameras, _ = await found(port)
        claims, redirects = sorted(cameras, key=lambda each: each.address)
        assert claims.error == "its streams are not rtsp:// addresses within 127.0.0.0/30"
        assert "GetStreamUri" in inside.calls
        assert "redirects" in redirects.error
        assert outside.probes == 0
        assert outside.calls == []


async def test_an_endless_reply_is_cut_off():
    async with OnvifCamera("rtsp://127.0.0.1/a", padding=2 * 2**20) as camera:
        [each], _ = await found(camera.probe_port)
    assert "longer than" in each.error


async def test_a_search_that_is_left_makes_room_for_the_next():
    search = NetworkSearch(ALLOWED, probe_port=9)
    first = search.search("127.0.0.0/24")
    await anext(first)
    with pytest.raises(CapacityError, match="being searched already"):
        await anext(search.search("127.0.0.0/30"))
    await first.aclose()
    second = search.search("127.0.0.0/30")
    assert (await anext(second)).total == 2
    await second.aclose()


async def test_a_device_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(discovery, "DEVICE_S", 0.3)
    async with OnvifCamera("rtsp://127.0.0.1/a") as camera:
        monkeypatch.setattr(camera, "_GetServices", lambda: "")

        async def never(_request):
            await asyncio.sleep(20)

        server = await asyncio.start_server(lambda *_: asyncio.sleep(5), "127.0.0.1", 0)
        camera.port = server.sockets[0].getsockname()[1]
        [each], _ = await found(camera.probe_port)
        server.close()
    assert each.error == "it did not answer within 0.3 s"


@pytest.mark.parametrize(
    ("network", "allowed", "error", "sentence"),
    [
        ("10.0.0.0/24", [], NotReadyError, "no network may be searched"),
        ("10.1.0.0/24", ["10.0.0.0/16"], NotReadyError, "not within security.discovery_networks: 10.0.0.0/16"),
        ("10.0.0.0/15", ["10.0.0.0/16"], ConfigError, "131072 addresses; at most 1024"),
        ("10.0.0.0/16", ["10.0.0.0/8"], ConfigError, "65536 addresses"),
        ("10.0.0.1/24", ["10.0.0.0/24"], ConfigError, "host bits"),
        ("fe80::/120", ["10.0.0.0/24"], ConfigError, "is not a network like"),
        ("cameras", ["10.0.0.0/24"], ConfigError, "is not a network like"),
        ("", ["10.0.0.0/24"], ConfigError, "is not a network like"),
    ],
)
def test_other_networks_are_refused(network, allowed, error, sentence):
    with pytest.raises(error, match=sentence):
        named_network(network, [IPv4Network(each) for each in allowed])
