"""A decoder and a gateway as servers on loopback, and a bare client that can misbehave."""

import asyncio
import contextlib
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import rpc_serving
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster.codec.push import PushSource
from cluster.codec.source import StreamHeader
from cluster.codec.supervisor import Backoff
from cluster.decoder.ingest import IngestServicer, QueueSink
from cluster.errors import NotReadyError, SourceError, UnavailableError, UnknownCameraError
from cluster.gateway.ingest_proxy import IngestProxy
from cluster.wire.channel import ChannelPool, first_reply, open_channel, write
from cluster.wire.convert import packet_to_proto
from cluster.wire.server import push_message_bytes

LIMIT = 64 * 1024


def serving(servicer, *, port=0):
    return rpc_serving.serving(servicer, port=port, max_message_bytes=push_message_bytes(LIMIT))


class Decoder:
    """The decoder's end: push cameras by name, each with a real bounded source; ``pulled`` is a camera that pulls."""

    def __init__(self, *cameras, max_packets=512, max_bytes=32 << 20, credit=256, **options):
        self.sources = {name: PushSource(max_packets=max_packets, max_bytes=max_bytes) for name in cameras or ("gate",)}
        self.sinks = {name: QueueSink(source, max_credit=credit) for name, source in self.sources.items()}
        self.servicer = IngestServicer(self.find, max_packet_bytes=LIMIT, **options)
        self.received = {name: [] for name in self.sources}
        self.headers = []
        self.threads = []
        self.ended = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    async def find(self, camera):
        if camera == "pulled":
            raise NotReadyError("camera 'pulled' reads rtsp://camera itself; only a camera without a source takes push")
        if camera not in self.sinks:
            raise UnknownCameraError(f"no camera is called {camera!r}")
        return self.sinks[camera]

    def consume(self, camera="gate"):
        """Read the source on a thread as a camera pipeline does, session after session."""
        source = self.sources[camera]

        def work():
            try:
                while not source.ended:
                    self.headers.append(source.open())
                    for packet in source.packets():
                        self.received[camera].append(packet)
            except SourceError:
                pass  # closed while waiting for a session
            finally:
                self.loop.call_soon_threadsafe(self.ended.set)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    @property
    def pushing(self):
        """Cameras that have a pusher connected now."""
        return sorted(self.servicer._connections)

    def close(self):
        for source in self.sources.values():
            source.close()
        for thread in self.threads:
            thread.join(2.0)

    def sequences(self, camera="gate"):
        return [packet.sequence for packet in self.received[camera]]


class Gateway:
    """The gateway's end: every camera is forwarded to ``address``, which may change or be missing."""

    def __init__(self, address, **options):
        self.address = address
        self.channels = ChannelPool()
        self.servicer = IngestProxy(self.route, self.channels, **{"idle_reply_s": 0.05} | options)

    async def route(self, camera):
        if camera == "nobody":
            raise UnknownCameraError(f"no camera is called {camera!r}")
        if self.address is None:
            raise UnavailableError(f"camera {camera!r} has no decoder at the moment")
        return self.address


@asynccontextmanager
async def chain(hops, *, decoder=None, proxy=None, **options):
    """A decoder, with a gateway before it if ``hops`` is "gateway": the decoder and the address to push to. ``proxy``:
    options of the gateway's end."""
    async with AsyncExitStack() as stack:
        decoder = decoder or Decoder(**options)
        stack.callback(decoder.close)
        address = await stack.enter_async_context(serving(decoder.servicer))
        if hops == "gateway":
            gateway = Gateway(address, **proxy or {})
            address = await stack.enter_async_context(serving(gateway.servicer))
        yield decoder, address


class Pusher:
    """A bare client of ``Push``."""

    def __init__(self, channel):
        self.call = ingest_pb2_grpc.IngestStub(channel).Push()

    async def open(self, camera="gate", *, codec="h264", session="s1", **fields):
        opened = ingest_pb2.Open(camera=camera, codec=codec, session=session, **fields)
        return await first_reply(self.call, ingest_pb2.PushRequest(open=opened), 10.0)

    async def send(self, *packets):
        batch = ingest_pb2.PacketBatch(packets=[packet_to_proto(packet) for packet in packets])
        await write(self.call, ingest_pb2.PushRequest(packets=batch))

    async def end(self):
        await write(self.call, ingest_pb2.PushRequest(end=ingest_pb2.End()))
        await self.call.done_writing()

    async def read(self):
        return await self.call.read()

    async def read_until(self, next_sequence):
        """Replies up to the one that takes everything below ``next_sequence`` over."""
        while (reply := await self.call.read()).next_sequence < next_sequence:
            pass
        return reply

    async def status(self):
        """The call's end; core holds it back until every reply before it was read."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return (await self.call.code()).name, await self.call.details()


@asynccontextmanager
async def pusher(address):
    async with open_channel(address) as channel:
        client = Pusher(channel)
        try:
            yield client
        finally:
            client.call.cancel()


QUICK = {"backoff": Backoff(first_s=0.02, longest_s=0.05), "flush_s": 0.005, "progress_s": 0.0}


class Scripted:
    """A source of given stretches of packets; ``gate`` holds back everything from ``hold_at`` on."""

    pushed = False

    def __init__(self, *stretches, live=False, hold_at=None, fail=None):
        self.stretches = list(stretches)
        self.live = live
        self.hold_at = hold_at
        self.gate = threading.Event()
        self.closed = threading.Event()
        self.fail = fail
        self.header = None

    @property
    def ended(self):
        return not self.stretches

    def open(self):
        if self.fail and not self.stretches:
            raise self.fail
        self.header, self.current = self.stretches.pop(0)
        return self.header

    def packets(self):
        for packet in self.current:
            if packet.sequence == self.hold_at:
                while not self.gate.wait(0.01) and not self.closed.is_set():
                    pass
            if self.closed.is_set():
                return
            yield packet

    def close(self):
        self.closed.set()


HEADER = StreamHeader("h264", 640, 480, b"config")
