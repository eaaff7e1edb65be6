"""Servicers behind a real server on loopback, for as long as a block lasts."""

import asyncio
import gc
from contextlib import ExitStack, asynccontextmanager, contextmanager

from loop_thread import EventLoopThread
from sightline.v1.ingest_pb2 import PushRequest

from cluster.wire import channel
from cluster.wire.channel import CallEndedError
from cluster.wire.server import RpcServer


@asynccontextmanager
async def serving(*servicers, port=0, **options):
    """``host:port`` of a server of these; ``options``: of :class:`RpcServer`."""
    server = RpcServer(**options)
    server.add(*servicers)
    bound = server.bind("127.0.0.1", port)
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0.0)


async def collect_servers():
    """grpc.aio waits for ever when the last of its servers is collected after its loop has ended."""
    gc.collect()
    await asyncio.sleep(0.01)


@contextmanager
def serving_in_thread(*servicers, **options):
    """The same on a loop of its own, for tests that block."""
    with EventLoopThread() as thread, ExitStack() as stack:
        served = serving(*servicers, **options)
        address = thread.run(served.__aenter__(), 10.0)
        stack.callback(lambda: thread.run(served.__aexit__(None, None, None), 10.0))
        yield address


def refuse_writes(monkeypatch, writer, kind, times=2):
    """Core refuses the first writes of ``kind`` in the module ``writer``, and says nothing more; returns those."""
    write, refused = writer.write, []

    async def refuse(call, message):
        seen = PushRequest.FromString(message) if isinstance(message, bytes) else message
        if seen.HasField(kind) and len(refused) < times:
            refused.append(message)
            raise CallEndedError
        await write(call, message)

    monkeypatch.setattr(writer, "write", refuse)
    monkeypatch.setattr(channel, "_STATUS_S", 0.05)
    return refused
