"""The gateway between an agent and decoders that die: kill -9 in the middle of a push, replacement, deadlines."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from ingest_parts import HEADER, QUICK, Decoder, Gateway, Scripted, chain, pusher, serving
from rpc_serving import refuse_writes
from sightline.v1 import ingest_pb2_grpc

from cluster.codec.source import CameraState
from cluster.gateway import ingest_proxy
from cluster.wire import channel, push
from cluster.wire.channel import open_channel
from cluster.wire.push import PushAgent, PushOptions

ROOT = Path(__file__).parents[2]


class SinkProcess:
    """A decoder in a process of its own that takes packets and throws them away."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.lab.bench.push_processes", "discard"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = f"127.0.0.1:{json.loads(self.process.stdout.readline())['port']}"

    def packets(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["packets"]

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10.0)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


@contextlib.contextmanager
def sink_process():
    sink = SinkProcess()
    try:
        yield sink
    finally:
        sink.close()


async def test_kill_minus_9_of_the_decoder_in_the_middle_of_a_push(make, until):
    """Another process takes over: every packet that was not acknowledged arrives there."""
    with sink_process() as first, sink_process() as second:
        gateway = Gateway(first.address)
        source = Scripted((HEADER, make.packets(2000, size=2000)), hold_at=1000)
        async with serving(gateway.servicer) as address:
            agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
            task = asyncio.create_task(agent.run())
            await until(lambda: agent.status.packets > 300)
            first.kill()
            source.gate.set()
            acknowledged = agent.status.packets
            gateway.address = second.address
            status = await task
        assert status.packets == 2000
        assert status.reconnects >= 1
        assert 2000 - 1000 <= second.packets() <= 2000 - acknowledged + 256
        assert len(gateway.channels._channels) == 0


@pytest.mark.parametrize("where", ["agent", "gateway"])
async def test_a_connection_that_breaks_without_a_status_is_made_again(make, monkeypatch, where):
    """Core refuses a write and says nothing more: whoever wrote ends the call, and its reader goes on."""
    refused = refuse_writes(monkeypatch, push if where == "agent" else ingest_proxy, "packets")
    sent = make.packets(200)
    async with chain("gateway") as (decoder, address):
        decoder.consume()
        agent = PushAgent(Scripted((HEADER, sent)), address, "gate", options=PushOptions(**QUICK))
        status = await asyncio.wait_for(agent.run(), 30.0)
        await asyncio.wait_for(decoder.ended.wait(), 30.0)
    assert len(refused) == 2
    assert decoder.received["gate"] == sent
    assert status.reconnects == 2


async def test_an_outage_counts_once_however_often_the_agent_tries(make, until):
    decoder, told = Decoder(), []
    decoder.consume()
    source = Scripted((HEADER, make.packets(200)), hold_at=100)
    async with serving(decoder.servicer) as address:
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK), on_progress=told.append)
        task = asyncio.create_task(agent.run())
        await until(lambda: agent.status.packets == 100)
    await until(lambda: sum(status.state is CameraState.BACKOFF for status in told) >= 4)
    source.gate.set()
    async with serving(decoder.servicer, port=int(address.rpartition(":")[2])):
        status = await asyncio.wait_for(task, 30.0)
    assert (status.packets, status.reconnects) == (200, 1)
    decoder.close()


async def test_a_reader_that_is_cancelled_ends():
    async with chain("decoder") as (_, address), open_channel(address) as opened:
        task = asyncio.create_task(channel.read(ingest_pb2_grpc.IngestStub(opened).Push()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_a_camera_that_moves_to_a_decoder_takes_its_push_along(make, until):
    """The first decoder lives on and serves others: it must not go on taking packets of a camera that it has lost."""
    first, second = Decoder(), Decoder()
    first.consume()
    second.consume()
    async with serving(first.servicer) as one, serving(second.servicer) as two:
        gateway = Gateway(one)
        source = Scripted((HEADER, make.packets(600, size=200)), hold_at=300)
        async with serving(gateway.servicer) as address:
            agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
            task = asyncio.create_task(agent.run())
            await until(lambda: len(first.received["gate"]) == 300)
            gateway.address = two
            first.sinks["gate"].retire()
            first.close()
            source.gate.set()
            status = await task
            await until(lambda: len(second.received["gate"]) == 300)
        assert (status.packets, status.reconnects, status.dropped) == (600, 1, 0)
        assert [packet.sequence for packet in second.received["gate"]] == list(range(300, 600))
    second.close()


async def test_the_decoder_is_replaced_and_the_session_is_renumbered_nowhere(make, until):
    """The new decoder hears of the session at its next packet: a hole to it, not a repeat to the agent."""
    first, second = Decoder(), Decoder()
    first.consume()
    second.consume()
    async with AsyncExitStack() as stack, serving(second.servicer) as there:
        gateway = Gateway(await stack.enter_async_context(serving(first.servicer)))
        async with serving(gateway.servicer) as address, pusher(address) as client:
            await client.open()
            await client.send(*make.packets(10))
            await client.read_until(10)
            gateway.address = there
            await stack.aclose()
            assert (await client.status())[0] == "UNAVAILABLE"
        async with serving(gateway.servicer) as address, pusher(address) as client:
            await client.open()
            await client.send(*make.packets(20)[10:])
            reply = await client.read_until(20)
            assert reply.dropped == 0
            await client.end()
            assert await client.status() == ("OK", "")
        await asyncio.wait_for(second.ended.wait(), 5.0)
    first.close()
    assert first.sequences() == list(range(10))
    assert second.sequences() == list(range(10, 20))


@pytest.mark.parametrize("gone", ["no decoder", "dead decoder"])
async def test_a_decoder_that_stays_away_ends_the_push_with_unavailable(make, gone):
    decoder = Decoder()
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(serving(decoder.servicer))
        gateway = Gateway(here)
        async with serving(gateway.servicer) as address:
            async with pusher(address) as client:
                await client.open()
                gateway.address = None if gone == "no decoder" else here
                await stack.aclose()
                code, details = await client.status()
                assert code == "UNAVAILABLE"
                assert "the decoder of camera 'gate' is not available" in details
            async with pusher(address) as client:
                with contextlib.suppress(Exception):
                    await client.open()
                code, details = await client.status()
                assert code == "UNAVAILABLE"
                expected = (
                    "has no decoder at the moment" if gone == "no decoder" else "of camera 'gate' is not available"
                )
                assert expected in details


async def test_a_decoder_that_does_not_answer_ends_the_push(make):
    """It accepts connections and says nothing, as a process whose event loop hangs."""
    taken = []
    silent = await asyncio.start_server(lambda reader, writer: taken.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    gateway = Gateway(f"127.0.0.1:{port}", reply_s=0.2)
    async with serving(gateway.servicer) as address, pusher(address) as client:
        with contextlib.suppress(Exception):
            await client.open()
        code, details = await client.status()
        assert code == "UNAVAILABLE"
        assert "does not answer" in details
    for writer in taken:
        writer.close()
    silent.close()


async def test_an_agent_that_leaves_takes_its_connection_to_the_decoder_with_it(make, until):
    decoder = Decoder()
    async with serving(decoder.servicer) as far:
        gateway = Gateway(far)
        async with serving(gateway.servicer) as address:
            async with pusher(address) as client:
                await client.open()
                assert list(decoder.servicer._connections) == ["gate"]
                assert len(gateway.channels._channels) == 1
            await until(lambda: not decoder.servicer._connections)
            await until(lambda: len(gateway.channels._channels) == 0)
