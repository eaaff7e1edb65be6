"""Pictures over HTTP: what a camera shows now, and an incident's snapshot and clip, of which players ask for ranges."""

from __future__ import annotations

from typing import Any

import grpc
from aiohttp import web
from sightline.v1 import pictures_pb2

from cluster.errors import NotReadyError
from cluster.gateway.http.body import flag, number
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.cameras import name_of, text
from cluster.gateway.http.forms import Query, Route
from cluster.gateway.http.replies import HttpError
from cluster.wire.status import RefusedError

SERVICE = "/sightline.v1.Pictures/"
WIDEST = 4096
_KINDS = {"image/jpeg", "video/mp4"}


class PictureRoutes:
    """See :meth:`routes`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def routes(self) -> list[Route]:
        footage, one = f"{SERVICE}Footage", "/v1/incidents/{id}"
        look = (
            Query("kept", "1: patches that the model does not see are dark.", "integer"),
            Query("width", "Pixels; as large as the sample unless given.", "integer"),
        )
        part = (Query("part", "begin (unless given) or end."),)
        return [
            Route(
                "GET",
                "/v1/cameras/{name}/picture.jpg",
                f"{SERVICE}Picture",
                self.picture,
                "The newest sample, as the model sees it; 304 where the client names it by its ETag.",
                media="image/jpeg",
                query=look,
                errors=(404,),
            ),
            Route(
                "GET",
                f"{one}/snapshot.jpg",
                footage,
                self.snapshot,
                "The incident's picture.",
                media="image/jpeg",
                errors=(404, 416),
            ),
            Route(
                "GET",
                f"{one}/clip.mp4",
                footage,
                self.clip,
                "The incident's clip, also in ranges.",
                media="video/mp4",
                query=part,
                errors=(404, 416),
            ),
        ]

    async def picture(self, request: web.Request) -> web.Response:
        width = int(min(number(request, "width"), WIDEST))
        asked = pictures_pb2.PictureRequest(camera=name_of(request), kept=flag(request, "kept"), width=width)
        try:
            found = await self._calls.unary(f"{SERVICE}Picture", asked)
        except (RefusedError, NotReadyError) as error:
            raise _not_there(error) from None
        tag = _tag(found.etag)
        headers = {
            "ETag": tag,
            "Cache-Control": "no-store",
            "X-Age-Seconds": f"{found.age_s:.3f}",
            "X-Pts": str(found.pts),
        }
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.jpeg, content_type="image/jpeg", headers=headers)

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        return await self._footage(request, "snapshot")

    async def clip(self, request: web.Request) -> web.StreamResponse:
        part = request.query.get("part", "begin")
        if part not in ("begin", "end"):
            raise HttpError(400, f"part is {part[:80]!r}; it is begin or end")
        return await self._footage(request, "clip" if part == "begin" else "end")

    async def _footage(self, request: web.Request, kind: str) -> web.StreamResponse:
        incident = text(request.match_info["id"], "the incident's id")
        about = await self._about(pictures_pb2.FootageRequest(incident=incident, kind=kind, only_about=True))
        tag = _tag(about.etag)
        headers = {
            "Accept-Ranges": "bytes",
            "ETag": tag,
            "Cache-Control": "no-store",
            "Content-Type": about.media_type if about.media_type in _KINDS else "application/octet-stream",
        }
        if about.note:
            headers["X-Note"] = about.note.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")
        wanted = _range(request, about.size, tag)
        first, end = wanted or (0, about.size)
        headers["Content-Length"] = str(end - first)
        if wanted is not None:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{about.size}"
        response = web.StreamResponse(status=200 if wanted is None else 206, headers=headers)
        if request.method == "HEAD" or first == end:
            await response.prepare(request)
            return response
        asked = pictures_pb2.FootageRequest(incident=incident, kind=kind, offset=first, length=end - first)
        # Checked and written down already, when it was asked what there is.
        parts: Any = self._calls.inner_stream(f"{SERVICE}Footage", asked)
        try:
            await response.prepare(request)
            async for part in parts:
                if part.data:
                    await response.write(part.data)
        finally:
            await parts.aclose()
        await response.write_eof()
        return response

    async def _about(self, asked: pictures_pb2.FootageRequest) -> Any:
        parts: Any = self._calls.stream(f"{SERVICE}Footage", asked)
        try:
            async for part in parts:
                return part.about
        except (RefusedError, NotReadyError) as error:
            raise _not_there(error) from None
        finally:
            await parts.aclose()
        raise HttpError(404, "there is nothing of this incident")


def _not_there(error: RefusedError | NotReadyError) -> Exception:
    """What is not there yet, or no more, is not there."""
    if isinstance(error, RefusedError) and error.code is not grpc.StatusCode.FAILED_PRECONDITION:
        return error
    return HttpError(404, str(error))


def _tag(etag: str) -> str:
    return f'"{"".join(letter for letter in etag if letter.isalnum() or letter in "-_.")}"'


def _range(request: web.Request, size: int, tag: str) -> tuple[int, int] | None:
    """``[first, end)`` of the bytes that are asked for; ``None``: all of them.

    Raises:
        HttpError: 416, there are no such bytes.
    """
    if "Range" not in request.headers or request.headers.get("If-Range", tag) != tag:
        return None
    try:
        wanted = request.http_range
    except ValueError:
        # Several ranges, or no range at all: RFC 9110 lets a server send everything.
        return None
    first = wanted.start or 0
    if first < 0:
        first = max(0, size + first)
    end = size if wanted.stop is None else min(wanted.stop, size)
    if first >= end:
        raise HttpError(416, f"the file has {size} bytes; ask for some of them", Content_Range=f"bytes */{size}")
    return first, end
