"""What needs no camera: the console's files, probes, metrics, and the description of all of it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import mimetypes
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.errors import UnavailableError
from cluster.gateway.http.forms import OPEN, Health, Route
from cluster.gateway.http.live import Live
from cluster.gateway.http.replies import HttpError, reply
from cluster.security.roles import METRICS, Principal, current

STATIC = Path(__file__).parent.parent / "console" / "static"
LATE_S = 30.0
"""Without a word from the controller for so long, cameras cannot be served."""
_COMPRESSED = ("text/", "application/javascript", "application/json", "image/svg")


@dataclass(frozen=True, slots=True)
class _File:
    stamp: tuple[int, int]
    kind: str
    tag: str
    data: bytes
    packed: bytes


class Files:
    """Files of a folder, in memory from their first use; one that changes is read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._read: dict[str, _File] = {}

    def reply(self, request: web.Request, name: str) -> web.Response:
        """The file, or that the browser has it already.

        Raises:
            HttpError: 404.
        """
        file = self._file(name)
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        data = file.data
        if file.packed and "gzip" in request.headers.get("Accept-Encoding", ""):
            data = file.packed
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=data, headers={**headers, "Content-Type": file.kind})

    def _file(self, name: str) -> _File:
        missing = HttpError(404, f"the console has no file {name!r}")
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
            raise missing
        path = self._folder.joinpath(*parts)
        try:
            # A link may lead out of the folder.
            if not path.resolve(strict=True).is_relative_to(self._folder):
                raise missing
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            known = self._read.get(name)
            if known is None or known.stamp != stamp:
                known = self._read[name] = _read(path, stamp)
            return known
        except OSError:
            self._read.pop(name, None)
            raise missing from None


def _read(path: Path, stamp: tuple[int, int]) -> _File:
    data = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("text/") or kind == "application/javascript":
        kind += "; charset=utf-8"
    packed = gzip.compress(data, 6, mtime=0) if kind.startswith(_COMPRESSED) and len(data) > 500 else b""
    return _File(stamp, kind, f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"', data, packed)


class _Seen(Collector):
    """What is in ``registry``, without the series of cameras that ``principal`` may not see."""

    def __init__(self, registry: CollectorRegistry, principal: Principal) -> None:
        self._registry, self._sees = registry, principal.sees

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            seen = copy(metric)
            seen.samples = [
                each for each in metric.samples if "camera" not in each.labels or self._sees(each.labels["camera"])
            ]
            yield seen


class PageRoutes:
    """See :meth:`routes`.

    Args:
        live: tells whether cameras can be served.
        registry: of ``/metrics``; collected on a thread, since it asks other processes.
        document: the OpenAPI document, made when it is first asked for.
        static: folder of the console.
    """

    def __init__(
        self, live: Live, registry: CollectorRegistry, document: Callable[[], Mapping[str, Any]], static: Path = STATIC
    ) -> None:
        self._live = live
        self._registry = registry
        self._document = document
        self._described = b""
        self._files = Files(static)
        # Scrapes of two servers at once; more of them wait, and hold up nothing else.
        self._scrapes = ThreadPoolExecutor(2, thread_name_prefix="metrics")

    def routes(self) -> list[Route]:
        page = "text/html"
        return [
            Route("GET", "/", OPEN, self.index, "The console.", media=page, errors=(404,)),
            Route("GET", "/console/{path:.+}", OPEN, self.file, "A file of the console.", media="*/*", errors=(404,)),
            Route("GET", "/healthz", OPEN, self.healthy, "Whether the gateway serves.", Health),
            Route("GET", "/readyz", OPEN, self.ready, "Whether cameras can be served.", Health),
            Route(
                "GET",
                "/metrics",
                METRICS,
                self.metrics,
                "Metrics of all processes, for Prometheus.",
                media="text/plain",
            ),
            Route("GET", "/v1/openapi.json", OPEN, self.describe, "This description.", dict[str, Any]),
        ]

    def close(self) -> None:
        self._scrapes.shutdown(wait=False, cancel_futures=True)

    async def index(self, request: web.Request) -> web.Response:
        return self._files.reply(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        return self._files.reply(request, request.match_info["path"])

    async def healthy(self, _request: web.Request) -> web.Response:
        return reply({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        live = self._live
        trouble = "" if time.monotonic() - live.seen_s < LATE_S else live.trouble or "the controller does not answer"
        if not trouble and not live.replicas:
            trouble = "no replica is ready yet"
        if trouble:
            raise UnavailableError(trouble)
        return reply({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        loop = asyncio.get_running_loop()
        seen = _Seen(self._registry, current())
        data = await loop.run_in_executor(self._scrapes, encode, seen)
        response = web.Response(body=data, headers={"Content-Type": kind, "Cache-Control": "no-store"})
        response.enable_compression()
        return response

    async def describe(self, _request: web.Request) -> web.Response:
        if not self._described:
            self._described = json.dumps(self._document()).encode()
        return web.Response(body=self._described, content_type="application/json")
