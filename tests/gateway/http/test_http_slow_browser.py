"""A browser that does not read its events, with a real socket: what it is told afterwards, and when it is cut off."""

import asyncio
import contextlib
import json
import socket

from gateway_parts import World
from http_parts import dropped, listening
from prometheus_client import CollectorRegistry

from cluster import metrics
from cluster.gateway.http.application import make_application
from cluster.gateway.http.calls import InProcessCalls
from cluster.gateway.http.live import QUEUE, Event, Live
from cluster.wire.answers import AnswerHub

PAD = "x" * 2**14
"""So much in each event that a few hundred of them fill what the system keeps between the two ends."""
AT_ONCE, PAUSE_S = 20, 0.01
"""Slow enough that a browser that reads misses nothing."""


class Feeding:
    """Events with a number each, into the feed of a gateway that serves nothing else."""

    def __init__(self) -> None:
        self.live = Live(World(0), AnswerHub(), InProcessCalls({}))
        self.sent = 0

    def put(self, kind="answer"):
        self.live.feed.put(Event.of(kind, "gate", {"number": self.sent, "pad": PAD}))
        self.sent += 1

    async def until(self, condition):
        async with asyncio.timeout(45):
            while not condition():
                for _ in range(AT_ONCE):
                    self.put()
                await asyncio.sleep(PAUSE_S)

    def missed(self):
        return sum(reader.missed for reader in self.live.feed._readers)


@contextlib.asynccontextmanager
async def browser(**options):
    """``(feeding, socket)``; the stream has begun, and from here on nobody reads the socket but the test."""
    feeding, loop = Feeding(), asyncio.get_running_loop()
    application = make_application({}, feeding.live, CollectorRegistry())
    async with listening(application, **options) as (url, _):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", int(url.rpartition(":")[2])))
            # HTTP/1.0: the body comes as it is, and not in chunks.
            await loop.sock_sendall(connection, b"GET /v1/events HTTP/1.0\r\nHost: localhost\r\n\r\n")
            head = b""
            while b"event: hello" not in head:
                head += await loop.sock_recv(connection, 4096)
            yield feeding, connection
            await feeding.live.stop()


def parsed(stream):
    """``(kind, body)`` of every whole event."""
    for block in stream.split(b"\n\n")[:-1]:
        lines = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
        if b"event" in lines:
            yield lines[b"event"].decode(), json.loads(lines[b"data"])


async def test_a_browser_that_reads_again_is_told_how_many_it_missed_and_has_the_newest():
    before = metrics.REGISTRY.get_sample_value("sightline_http_events_missed_total")
    async with browser() as (feeding, connection):
        await feeding.until(feeding.missed)
        feeding.put("incident")
        stream = bytearray()
        async with asyncio.timeout(45):
            while b"event: incident" not in stream[-2 * len(PAD) :] or not stream.endswith(b"\n\n"):
                stream += await asyncio.get_running_loop().sock_recv(connection, 2**20)
        events = list(parsed(bytes(stream)))
    numbers = [body["number"] for kind, body in events if kind in ("answer", "incident")]
    missed = sum(body["events"] for kind, body in events if kind == "missed")
    assert missed > 0
    assert len(numbers) + missed == feeding.sent, "every event came, or was counted"
    assert numbers == sorted(numbers)
    assert numbers[-QUEUE:] == list(range(feeding.sent - QUEUE, feeding.sent)), "the newest are whole"
    told = next(at for at, (kind, _) in enumerate(events) if kind == "missed")
    assert events[told + 1][1]["number"] - events[told - 1][1]["number"] == events[told][1]["events"] + 1
    assert metrics.REGISTRY.get_sample_value("sightline_http_events_missed_total") - before == missed


async def test_a_browser_that_never_reads_is_cut_off_and_forgotten():
    before = dropped("cut")
    async with browser(stall_s=0.3) as (feeding, _):
        await feeding.until(lambda: dropped("cut") > before and not feeding.live.feed)
        assert dropped("cut") - before == 1
