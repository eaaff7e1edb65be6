"""Pictures and clips over HTTP: newest pictures by their tag, and clips in ranges as players ask for them."""

import asyncio
import contextlib
from dataclasses import replace

import aiohttp
import pytest
from gallery_parts import Gallery, clip
from gateway_parts import make_answer, serving
from http_parts import Client, bare_application, listening
from sightline.v1 import pictures_pb2

from cluster.gateway.guard import Guard
from cluster.security.roles import Role
from cluster.security.tokens import TokenFile, make_token, write_tokens


@contextlib.asynccontextmanager
async def incident(folder):
    """``(client, path of an incident, served)``."""
    async with serving(folder, cameras=1) as served, Client(served.url) as client:
        for window in (1, 2):
            served.publish([make_answer("cam-000", "person", 0.9, window)])
        (found,) = await served.alerts.incidents()
        yield client, f"/v1/incidents/{found.id}", served


async def fetch(client, path, **headers):
    async with client.open(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    ) as reply:
        return reply.status, await reply.read(), reply.headers


async def test_a_camera_as_it_is_now(tmp_path):
    async with incident(tmp_path) as (client, _, served):
        path = "/v1/cameras/cam-000/picture.jpg?kept=1&width=160"
        status, data, headers = await fetch(client, path)
        assert (status, data[:2], headers["Content-Type"]) == (200, b"\xff\xd8", "image/jpeg")
        assert headers["Cache-Control"] == "no-store"
        assert (await fetch(client, path, If_None_Match=headers["ETag"]))[:2] == (304, b"")
        served.gallery.version = 2
        status, newer, _ = await fetch(client, path, If_None_Match=headers["ETag"])
        assert (status, newer == data) == (200, False)
        for wrong in ("?kept=2", "?width=-1", "?width=x"):
            assert (await fetch(client, f"/v1/cameras/cam-000/picture.jpg{wrong}"))[0] == 400
        assert (await fetch(client, "/v1/cameras/none/picture.jpg"))[0] == 404
        served.world.cameras["dark"] = served.world.cameras["cam-000"]
        status, body = await client("GET", "/v1/cameras/dark/picture.jpg")
        assert (status, body["error"]) == (404, "camera 'dark' has shown nothing yet")


RANGES = {
    "bytes=0-99": (206, 0, 100),
    "bytes=100-": (206, 100, None),
    "bytes=-10": (206, -10, None),
    "bytes=0-999999999": (206, 0, None),
    "bytes=-999999999": (206, 0, None),
    "bytes=5-5": (206, 5, 6),
    "bytes=0-1,5-6": (200, 0, None),
    "seconds=1-2": (200, 0, None),
    "bytes=x": (200, 0, None),
}


@pytest.mark.parametrize("wanted", RANGES)
async def test_a_clip_in_ranges(tmp_path, wanted):
    status, first, end = RANGES[wanted]
    async with incident(tmp_path) as (client, path, _):
        found, data, headers = await fetch(client, f"{path}/clip.mp4", Range=wanted)
        assert (found, data) == (status, clip()[first:end])
        assert headers["Accept-Ranges"] == "bytes"
        assert headers["Content-Type"] == "video/mp4"
        if status == 206:
            begin = first if first >= 0 else len(clip()) + first
            assert headers["Content-Range"] == f"bytes {begin}-{begin + len(data) - 1}/{len(clip())}"


async def test_what_is_asked_for_of_an_incident(tmp_path):
    async with incident(tmp_path) as (client, path, _):
        status, data, headers = await fetch(client, f"{path}/snapshot.jpg")
        assert (status, data[:2], headers["X-Note"]) == (200, b"\xff\xd8", "it begins late")
        tag = headers["ETag"]
        # What has a tag is not sent again to whoever names it (RFC 9110, 13.1.2 and 13.2.2: before any range).
        for named in (tag, f"W/{tag}", f'"another", {tag}', "*"):
            status, data, headers = await fetch(client, f"{path}/clip.mp4", If_None_Match=named, Range="bytes=0-9")
            assert (status, data, headers["ETag"]) == (304, b"", tag), named
        assert (await fetch(client, f"{path}/snapshot.jpg", If_None_Match='"another"'))[0] == 200
        assert (await fetch(client, f"{path}/clip.mp4", Range="bytes=0-9", If_Range='"another"'))[0] == 200
        assert (await fetch(client, f"{path}/clip.mp4", Range="bytes=0-9", If_Range=tag))[0] == 206
        async with client.open("HEAD", f"{path}/clip.mp4") as reply:
            assert (reply.status, int(reply.headers["Content-Length"])) == (200, len(clip()))
            assert await reply.read() == b""
        beyond = len(clip())
        status, _, headers = await fetch(client, f"{path}/clip.mp4", Range=f"bytes={beyond}-")
        assert (status, headers["Content-Range"]) == (416, f"bytes */{beyond}")
        assert (await client("GET", f"{path}/clip.mp4?part=end"))[1] == {"error": "the clip of its end is not there"}
        assert (await client("GET", f"{path}/clip.mp4?part=middle"))[0] == 400
        assert (await client("GET", "/v1/incidents/none/clip.mp4"))[0] == 404


async def test_a_clip_that_breaks_off_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    async with incident(tmp_path) as (client, path, served):

        async def broken(request, context, footage=type(served.gallery).Footage):
            if request.only_about:
                await footage(served.gallery, request, context)
            else:
                request.length = 10
                await footage(served.gallery, request, context)
                raise RuntimeError("the disk is gone")

        monkeypatch.setitem(
            served.gateway._server.services,
            "sightline.v1.Pictures",
            type("Broken", (), {"Footage": staticmethod(broken)}),
        )
        with pytest.raises(aiohttp.ClientError):
            await fetch(client, f"{path}/clip.mp4")


class Endless(Gallery):
    """Cameras that send video without end."""

    async def Live(self, request, context):
        while True:
            await context.write(pictures_pb2.LivePart(data=clip()))
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("cameras", [[], ["yard"]], ids=["revoked", "another camera's"])
async def test_a_token_that_may_no_more_watches_no_more(tmp_path, cameras):
    secret, token = make_token("somebody", [Role.VIEW], ["gate"])
    path = tmp_path / "tokens.json"
    write_tokens(path, [token])
    guard = Guard(TokenFile(path, check_s=0.1).verify)
    application = bare_application({"sightline.v1.Pictures": Endless(None)}, guard=guard, ping_s=0.2)
    async with (
        listening(application) as (url, _),
        Client(url, secret) as client,
        client.open("GET", "/v1/cameras/gate/live.mp4") as reply,
        asyncio.timeout(30),
    ):
        # For many checks it goes on.
        assert await reply.content.readexactly(50 * len(clip())) == 50 * clip()
        write_tokens(path, [replace(token, cameras=tuple(cameras))] if cameras else [])
        while await reply.content.readany():
            pass
