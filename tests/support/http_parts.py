"""A client that holds every JSON reply against the OpenAPI document, and small applications to serve."""

import contextlib
import functools
import json

import aiohttp
from gateway_parts import World
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry, Counter

from cluster import metrics
from cluster.gateway.http import application
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import Live
from cluster.gateway.http.server import HttpServer
from cluster.replica.memory_service import SERVICE, MemoryServicer
from cluster.wire.answers import AnswerHub


def bare_application(services=None, world=None, **options):
    """The application over ``services`` alone; nothing is looked at."""
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    services = services or {}
    live = Live(world or World(3), AnswerHub(), InProcessCalls(services))
    return make_application(services, live, registry, **options)


@contextlib.asynccontextmanager
async def listening(served, **options):
    """``(url, server)``."""
    server = HttpServer(served, **options)
    try:
        yield f"http://{await server.start('127.0.0.1', 0)}", server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def answering(replica, *, max_asks=32, stall_s=30.0, **options):
    """``(client, server)`` of an application with one scripted replica's memory behind it."""
    served = bare_application({SERVICE: MemoryServicer(replica)}, max_asks=max_asks, stall_s=stall_s)
    async with listening(served, stall_s=stall_s, **options) as (url, server), Client(url) as client:
        yield client, server


def dropped(reason):
    """Connections that were dropped for this reason, as the metric counts them."""
    return metrics.REGISTRY.get_sample_value("sightline_http_connections_dropped_total", {"reason": reason}) or 0.0


@functools.cache
def document():
    return application.document()


def operations():
    """``(method, path template, operation)`` of the document."""
    return [
        (method.upper(), path, operation)
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]


class Client:
    """Requests to one gateway; ``secret`` goes along with each."""

    def __init__(self, url, secret=None, **options):
        self.url = url
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._options = {"headers": headers, "cookie_jar": aiohttp.CookieJar(unsafe=True), **options}

    async def __aenter__(self):
        self.session = aiohttp.ClientSession(**self._options)
        return self

    async def __aexit__(self, *what):
        await self.session.close()

    def open(self, method, path, **options):
        return self.session.request(method, self.url + path, **options)

    async def __call__(self, method, path, body=None, **options):
        """``(status, JSON)``; the reply must be what the document says."""
        if body is not None:
            options["json"] = body
        async with self.open(method, path, **options) as reply:
            data = await reply.read()
            found = json.loads(data) if data else None
            check(method, path, reply.status, found)
            return reply.status, found

    async def ask(self, text="Who?", camera="gate", **more):
        """``(status, lines)``."""
        async with self.open("POST", "/v1/ask", json={"camera": camera, "text": text, **more}) as reply:
            lines = [json.loads(line) for line in (await reply.read()).splitlines()]
            for line in lines:
                check("POST", "/v1/ask", reply.status, line)
            return reply.status, lines


def check(method, path, status, body):
    """The reply has a form that the document has for it."""
    operation = _operation(method, path.partition("?")[0])
    if operation is None:
        assert status in (400, 403, 404, 405), (method, path, status)
        return
    responses = operation["responses"]
    assert str(status) in responses or status in (405, 408, 413, 415, 500), (
        f"{method} {path} is not said to give {status}"
    )
    content = responses.get(str(status), responses["400"])["content"]
    media = content.get("application/json") or content.get("application/x-ndjson")
    if media is None or not media.get("schema"):
        return
    schema = {**media["schema"], "components": document()["components"]}
    Draft202012Validator(schema).validate(body)


def _operation(method, path):
    parts = path.split("/")
    for known, template, operation in operations():
        names = template.split("/")
        fits = len(names) == len(parts) and all(
            name.startswith("{") or name == part for name, part in zip(names, parts, strict=True)
        )
        if known == method and fits:
            return operation
    return None
