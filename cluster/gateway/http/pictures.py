"""Pictures over HTTP: a camera's newest sample and live video, an incident's snapshot and clip (with ranges)."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import grpc
from fastapi import Query, Request, Response
from sightline.v1 import pictures_pb2

from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.replies import HttpError, Stream
from cluster.gateway.http.routes import Backend, Count, Flag, Gateway, Routes
from cluster.security.roles import current_principal
from cluster.wire.status import RefusedError

SERVICE = "/sightline.v1.Pictures/"
FOOTAGE = f"{SERVICE}Footage"
WIDEST = 4096
JPEG, MP4 = "image/jpeg", "video/mp4"
router = Routes()

Kept = Annotated[Flag, Query(description="1: darken patches that the model does not see.")]
Width = Annotated[Count, Query(description="Width in pixels; default: that of the sample.")]
Part = Annotated[str, Query(description="begin (default) or end.")]


@router.on("GET /v1/cameras/{name}/picture.jpg", f"{SERVICE}Picture", media=JPEG, errors=(304, 404))
async def picture(request: Request, name: str, gateway: Gateway, kept: Kept = False, width: Width = 0) -> Response:
    """The newest sample, as the model sees it; 304 if the client has it (ETag)."""
    asked = pictures_pb2.PictureRequest(camera=name, kept=kept, width=min(width, WIDEST))
    try:
        found = await gateway.calls.unary(f"{SERVICE}Picture", asked)
    except RefusedError as error:
        raise _not_there(error) from None
    tag = _tag(found.etag)
    headers = {"ETag": tag, "Cache-Control": "no-store", "X-Age-Seconds": f"{found.age_s:.3f}", "X-Pts": str(found.pts)}
    if _has(request, tag):
        return Response(status_code=304, headers=headers)
    return Response(found.jpeg, media_type=JPEG, headers=headers)


@router.on("GET /v1/cameras/{name}/live.mp4", f"{SERVICE}Live", media=MP4, errors=(404,))
async def live(request: Request, name: str, gateway: Gateway) -> Response:
    """The camera's video, not re-encoded, as an endless fragmented MP4; 404 says why there is none."""
    try:
        return await Stream.begin(_watched(gateway, name, request), MP4)
    except RefusedError as error:
        raise _not_there(error) from None


async def _watched(gateway: Backend, camera: str, request: Request) -> AsyncGenerator[bytes, None]:
    principal, loop = current_principal(), asyncio.get_running_loop()
    checked_s = loop.time()
    async with aclosing(gateway.calls.stream(f"{SERVICE}Live", pictures_pb2.LiveRequest(camera=camera))) as parts:
        async for part in parts:
            if loop.time() - checked_s >= gateway.ping_s:
                checked_s = loop.time()
                if await gateway.request_guard.recheck(request, principal, [camera]) is None:
                    return
            yield part.data


@router.on("GET /v1/incidents/{id}/snapshot.jpg", FOOTAGE, media=JPEG, errors=(206, 304, 404, 416))
async def snapshot(request: Request, id: str, gateway: Gateway) -> Response:
    """The incident's snapshot."""
    return await _footage(request, gateway.calls, id, "snapshot")


@router.on("GET /v1/incidents/{id}/clip.mp4", FOOTAGE, media=MP4, errors=(206, 304, 404, 416))
async def clip(request: Request, id: str, gateway: Gateway, part: Part = "begin") -> Response:
    """The incident's clip; supports ranges."""
    if part not in ("begin", "end"):
        raise HttpError(400, f"part is {part[:80]!r}; it must be begin or end")
    return await _footage(request, gateway.calls, id, "clip" if part == "begin" else "end")


async def _footage(request: Request, calls: InProcessCalls, incident: str, kind: str) -> Response:
    about = await _about(calls, pictures_pb2.FootageRequest(incident=incident, kind=kind, only_about=True))
    tag = _tag(about.etag)
    headers = {"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "no-store"}
    if _has(request, tag):
        return Response(status_code=304, headers=headers)
    if about.note:
        headers["X-Note"] = about.note.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")
    wanted = _range(request, about.size, tag)
    first, end = wanted or (0, about.size)
    headers["Content-Length"] = str(end - first)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{about.size}"
    asked = pictures_pb2.FootageRequest(incident=incident, kind=kind, offset=first, length=end - first)
    pieces = _data(calls, asked, nothing=first == end or request.scope.get("head", False))
    media = about.media_type if about.media_type in (JPEG, MP4) else "application/octet-stream"
    return await Stream.begin(pieces, media, headers, 200 if wanted is None else 206)


async def _data(
    calls: InProcessCalls, asked: pictures_pb2.FootageRequest, *, nothing: bool
) -> AsyncGenerator[bytes, None]:
    if nothing:
        return
    # Unchecked: the call for the file's metadata was checked and audited.
    async with aclosing(calls.inner_stream(FOOTAGE, asked)) as parts:
        async for part in parts:
            if part.data:
                yield part.data


async def _about(calls: InProcessCalls, asked: pictures_pb2.FootageRequest) -> Any:
    try:
        async with aclosing(calls.stream(FOOTAGE, asked)) as parts:
            async for part in parts:
                return part.about
    except RefusedError as error:
        raise _not_there(error) from None
    raise HttpError(404, "there is no footage of this incident")


def _not_there(error: RefusedError) -> Exception:
    return HttpError(404, str(error)) if error.code is grpc.StatusCode.FAILED_PRECONDITION else error


def _tag(etag: str) -> str:
    return f'"{"".join(letter for letter in etag if letter.isalnum() or letter in "-_.")}"'


def _has(request: Request, tag: str) -> bool:
    """Whether ``If-None-Match`` matches ``tag``, by weak comparison or ``*`` (RFC 9110, 13.1.2)."""
    named = {each.strip().removeprefix("W/") for each in request.headers.get("If-None-Match", "").split(",")}
    return not named.isdisjoint((tag, "*"))


def _range(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Requested byte range ``[first, end)``; ``None``: the whole file, also for multiple or invalid ranges (RFC 9110,
    14.2). Raises ``HttpError``: 416, the range is beyond the file."""
    asked = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", request.headers.get("Range", ""), re.ASCII)
    if asked is None or not any(asked.groups()) or request.headers.get("If-Range", tag) != tag:
        return None
    begin, last = ((int(text) if text else None) for text in asked.groups())
    if begin is not None and last is not None and last < begin:
        return None
    first = max(0, size - (last or 0)) if begin is None else begin
    end = size if begin is None or last is None else min(last + 1, size)
    if first >= end:
        raise HttpError(416, f"the range is beyond the file's {size} bytes", Content_Range=f"bytes */{size}")
    return first, end
