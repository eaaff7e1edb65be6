"""HTTP: the routes of the gateway with values that trip, and requests that are no HTTP at all, by raw sockets."""

import asyncio
import json
import random
import re
import urllib.parse
from collections import Counter
from typing import Any

from fuzz.rpc import damaged, raw, text, tree
from fuzz.server import TOKEN

HANG_S = 20.0
STREAM_S = 0.2
"""A reply without an end is read for so long."""

REST_S = 1.0
"""A server that says nothing for so long waits for more: then it is told that no more comes."""

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "G ET", "")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "http/1.1", "")
REFUSALS = {501, 503, 505}
"""Of the five hundreds those that say what is wrong with the request, or that somebody is not there now."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


class HttpCases:
    """Requests to one server, each over a connection of its own."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._routes: list[tuple[str, str, Any]] = []
        self._schemas: dict[str, Any] = {}
        self.outcomes: Counter[str] = Counter()

    async def learn(self) -> None:
        """The routes and their bodies, from the server's own description."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        reply = await reader.read(-1)
        writer.close()
        document = json.loads(reply[reply.index(b"\r\n\r\n") + 4 :])
        self._schemas = document.get("components", {}).get("schemas", {})
        for path, methods in document["paths"].items():
            for method, described in methods.items():
                content = described.get("requestBody", {}).get("content", {})
                schema = next((kind.get("schema") for kind in content.values()), None)
                self._routes.append((method.upper(), path, schema))

    async def one(self, rng: random.Random) -> str:
        """Do one case; empty when all is well, else what went wrong."""
        request = self.request(rng)
        try:
            async with asyncio.timeout(HANG_S):
                reply = await self._exchange(request, rng.random() < 0.3)
        except TimeoutError:
            return f"no end within {HANG_S:g} s of {request[:200]!r}"
        except ConnectionError:
            self.outcomes["closed"] += 1
            return ""
        first = _STATUS.search(reply)
        self.outcomes[first[1].decode() if first else "closed"] += 1
        for found in _STATUS.findall(reply):
            status = int(found)
            if status >= 500 and status not in REFUSALS:
                return f"{status} to {request[:200]!r}: {reply[-200:]!r}"
        return ""

    async def _exchange(self, request: bytes, in_pieces: bool) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            if in_pieces:
                middle = len(request) // 2
                writer.write(request[:middle])
                await asyncio.sleep(0)
                writer.write(request[middle:])
            else:
                writer.write(request)
            reply, ended = b"", False
            while len(reply) < 2**20:
                endless = b"text/event-stream" in reply or b"ndjson" in reply
                wait_s = STREAM_S if endless else HANG_S if ended else REST_S
                try:
                    async with asyncio.timeout(wait_s):
                        part = await reader.read(2**16)
                except TimeoutError:
                    if ended:
                        raise
                    if endless:
                        break
                    # The server waits for the rest of a request that has none.
                    writer.write_eof()
                    ended = True
                    continue
                if not part:
                    break
                reply += part
            return reply
        finally:
            writer.transport.abort()

    def request(self, rng: random.Random) -> bytes:
        """One request, as bytes."""
        if rng.random() < 0.05:
            return raw(rng, 300)
        method, path, schema = rng.choice(self._routes)
        if rng.random() < 0.1:
            method = rng.choice(METHODS)
        path = re.sub(
            r"\{[^}]*\}", lambda _: urllib.parse.quote(text(rng)[:2000], safe="" if rng.random() < 0.8 else "/%"), path
        )
        if rng.random() < 0.3:
            names = ("camera", "cameras", "kept", "width", "limit", "since_s", "open", "subject", text(rng)[:50])
            pairs = [(rng.choice(names), text(rng)[:500]) for _ in range(rng.randrange(1, 4))]
            path += "?" + urllib.parse.urlencode(pairs, errors="replace")
        body = b"" if schema is None and rng.random() < 0.9 else self._body(rng, schema or {})
        version = "HTTP/1.1" if rng.random() < 0.95 else rng.choice(VERSIONS)
        lines = [f"{method} {path} {version}", *self._headers(rng, len(body))]
        chunked = bool(body) and rng.random() < 0.2
        lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {self._length(rng, len(body))}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass")
        whole = head + (_chunks(rng, body) if chunked else body)
        return damaged(rng, whole) if rng.random() < 0.15 else whole

    def _headers(self, rng: random.Random, length: int) -> list[str]:
        found = ["Host: 127.0.0.1", "Connection: close"]
        if rng.random() < 0.9:
            found.append(f"Authorization: Bearer {TOKEN}")
        if length:
            found.append(f"Content-Type: {'application/json' if rng.random() < 0.9 else text(rng)[:100]}")
        for _ in range(rng.randrange(3)):
            name = rng.choice(
                ("Origin", "Cookie", "Range", "If-None-Match", "Expect", "Accept", "Upgrade", "X-A", "Content-Encoding")
            )
            value = rng.choice(
                (
                    text(rng)[:3000],
                    "bytes=0-",
                    "bytes=9-1",
                    "bytes=-0",
                    "100-continue",
                    "websocket",
                    "gzip",
                    "a=b; sightline_session=x",
                )
            )
            found.append(f"{name}: {value}")
        return found

    def _length(self, rng: random.Random, length: int) -> object:
        if rng.random() < 0.95:
            return length
        return rng.choice((length + 1, max(0, length - 1), -1, 2**40, 2**70, "x", "", "+1", "0x10"))

    def _body(self, rng: random.Random, schema: Any) -> bytes:
        choice = rng.random()
        if choice > 0.95:
            return raw(rng, 200)
        value = tree(rng) if choice > 0.85 else self._value(rng, schema, 5)
        data = json.dumps(value).encode("utf-8", "surrogatepass")
        return damaged(rng, data) if rng.random() < 0.2 else data

    def _value(self, rng: random.Random, schema: Any, depth: int) -> Any:
        """What a JSON schema asks for, more or less."""
        if not isinstance(schema, dict) or depth == 0 or rng.random() < 0.05:
            return tree(rng, 2)
        if "$ref" in schema:
            return self._value(rng, self._schemas.get(schema["$ref"].rpartition("/")[2]), depth)
        for several in ("anyOf", "oneOf", "allOf"):
            if schema.get(several):
                return self._value(rng, rng.choice(schema[several]), depth)
        if "enum" in schema and rng.random() < 0.9:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                return {
                    name: self._value(rng, kind, depth - 1)
                    for name, kind in properties.items()
                    if name in schema.get("required", ()) or rng.random() < 0.5
                }
            case "array":
                return [self._value(rng, schema.get("items"), depth - 1) for _ in range(rng.randrange(4))]
            case "string":
                return text(rng)
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                return rng.randrange(-2, 100)
            case "number":
                return rng.uniform(-1, 10)
            case _:
                return tree(rng, 2)


def _chunks(rng: random.Random, body: bytes) -> bytes:
    at, parts = 0, []
    while at < len(body):
        piece = body[at : at + rng.randrange(1, 400)]
        size = f"{len(piece):x}" if rng.random() < 0.97 else rng.choice(("-1", "fffffffffffffffff", "", "zz", "0"))
        parts.append(size.encode() + b"\r\n" + piece + b"\r\n")
        at += len(piece)
    return b"".join(parts) + (b"0\r\n\r\n" if rng.random() < 0.95 else b"")
