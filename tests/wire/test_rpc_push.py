"""The push agent against real servers that come, go, refuse and stall."""

import asyncio
import threading
from contextlib import asynccontextmanager
from itertools import pairwise

import av
import numpy as np
import pytest
import rpc_serving
from ingest_parts import HEADER, LIMIT, QUICK, Decoder, Scripted, chain, serving
from sightline.v1 import ingest_pb2, ingest_pb2_grpc

from cluster.codec.file import FileSource
from cluster.codec.source import CameraState, StreamHeader
from cluster.codec.supervisor import Backoff
from cluster.errors import (
    CameraExistsError,
    CapacityError,
    ConfigError,
    NotReadyError,
    SightlineError,
    SourceError,
    UnauthenticatedError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.gateway.guard import Guard
from cluster.security.roles import Principal, Role
from cluster.wire.push import PushAgent, PushOptions
from cluster.wire.tls import ClientCredentials


@asynccontextmanager
async def running(agent):
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize("hops", ["decoder", "gateway"])
async def test_a_source_arrives_whole(make, hops):
    sent = make.packets(200)
    states = []
    async with chain(hops) as (decoder, address):
        decoder.consume()
        agent = PushAgent(
            Scripted((HEADER, sent)), address, "gate", options=PushOptions(**QUICK), on_progress=states.append
        )
        status = await agent.run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
    assert decoder.received["gate"] == sent
    assert decoder.headers == [HEADER]
    assert (status.state, status.packets, status.read) == (CameraState.ENDED, 200, 200)
    assert (status.bytes, status.dropped, status.cluster_dropped, status.reconnects) == (200 * 100, 0, 0, 0)
    assert {CameraState.RUNNING, CameraState.ENDED} <= {status.state for status in states}
    counted = [status.packets for status in states]
    assert counted == sorted(counted)


async def test_a_real_file_arrives_packet_for_packet(tmp_path):
    """Encoded, demultiplexed, pushed through a gateway, and decodable at the other end."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"g": "10", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for i in range(40):
            picture = np.full((96, 128, 3), i * 5, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    reference = FileSource(path)
    header = reference.open()
    sent = list(reference.packets())
    async with chain("gateway") as (decoder, address):
        decoder.consume()
        await PushAgent(FileSource(path), address, "gate", options=PushOptions(**QUICK)).run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
    assert decoder.headers == [header]
    assert decoder.received["gate"] == sent
    context = av.CodecContext.create(header.codec, "r")
    context.extradata = decoder.headers[0].extradata
    frames = [frame for packet in decoder.received["gate"] for frame in context.decode(av.Packet(packet.data))]
    assert len(frames + context.decode(None)) == 40


async def test_a_slow_cluster_slows_a_file_down_and_loses_nothing(make):
    async with chain("gateway", max_packets=16, credit=16) as (decoder, address):
        agent = PushAgent(Scripted((HEADER, make.packets(300))), address, "gate", options=PushOptions(**QUICK))
        async with running(agent) as task:
            await asyncio.sleep(0.2)
            assert decoder.sources["gate"].queued == 16
            decoder.consume()
            status = await task
    assert decoder.sequences() == list(range(300))
    assert status.dropped == status.cluster_dropped == 0


async def test_a_live_camera_drops_whole_gops_when_the_cluster_stalls(make, until):
    """Credit never runs over, so all loss is the agent's own, counted, and ends at a keyframe."""
    options = PushOptions(**QUICK, buffer_packets=40)
    async with chain("decoder", max_packets=16, credit=16) as (decoder, address):
        agent = PushAgent(
            Scripted((HEADER, make.packets(500)), live=True, hold_at=20), address, "gate", options=options
        )
        source = agent._source
        async with running(agent) as task:
            await until(lambda: decoder.sources["gate"].queued == 16)
            source.gate.set()
            await until(lambda: agent.status.read >= 500 or agent._numbered == 500)
            decoder.consume()
            status = await task
    got = decoder.sequences()
    assert got == sorted(got)
    assert status.dropped > 300
    assert len(got) + status.dropped == 500
    assert got[-1] == 499, "the newest wins"
    for before, after in pairwise(got):
        assert after == before + 1 or after % 10 == 0, "what follows a hole is a keyframe"
    assert status.cluster_dropped == 0


async def test_the_server_restarts_and_the_agent_resumes(make, until):
    """A decoder instance replaced on the same port: unacknowledged packets come again, nothing acknowledged does."""
    first, second = Decoder(), Decoder()
    first.consume()
    second.consume()
    source = Scripted((HEADER, make.packets(60)), hold_at=40)
    async with serving(first.servicer) as address:
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
        task = asyncio.create_task(agent.run())
        await until(lambda: agent.status.packets == 40)
    await until(lambda: agent.status.state is CameraState.BACKOFF)
    assert agent.status.reason
    source.gate.set()
    async with serving(second.servicer, port=int(address.rpartition(":")[2])):
        status = await task
    await asyncio.wait_for(second.ended.wait(), 5.0)
    first.close()
    assert first.sequences() == list(range(40))
    assert second.sequences() == list(range(40, 60))
    assert status.packets == 60
    assert status.reconnects >= 1


async def test_another_server_in_the_gateways_place_is_waited_out(make, until):
    """While a gateway is replaced, a proxy before it may answer with a page of its own (404: UNIMPLEMENTED)."""
    decoder = Decoder()
    decoder.consume()
    source = Scripted((HEADER, make.packets(60)), hold_at=40)
    async with serving(decoder.servicer) as address:
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
        task = asyncio.create_task(agent.run())
        await until(lambda: agent.status.packets == 40)
    port = int(address.rpartition(":")[2])
    async with rpc_serving.serving(port=port):
        await until(lambda: task.done() or "no Sightline gateway" in agent.status.reason)
    source.gate.set()
    async with serving(decoder.servicer, port=port):
        assert (await task).packets == 60
    # Where there never was a gateway, the address is wrong.
    async with rpc_serving.serving() as address:
        with pytest.raises(SightlineError, match=f"{address} answers, but it is no Sightline gateway"):
            await PushAgent(Scripted((HEADER, [])), address, "gate", options=PushOptions(**QUICK)).run()
    decoder.close()


async def test_the_connection_breaks_and_the_session_goes_on(make, until):
    """The same decoder behind another server instance: the session is still known, every packet arrives once."""
    decoder = Decoder()
    decoder.consume()
    source = Scripted((HEADER, make.packets(300)), hold_at=150)
    async with serving(decoder.servicer) as address:
        task = asyncio.create_task(PushAgent(source, address, "gate", options=PushOptions(**QUICK)).run())
        await until(lambda: len(decoder.sequences()) > 50)
    source.gate.set()
    async with serving(decoder.servicer, port=int(address.rpartition(":")[2])):
        status = await task
    await asyncio.wait_for(decoder.ended.wait(), 5.0)
    decoder.close()
    assert decoder.sequences() == list(range(300))
    assert status.packets == 300


@pytest.mark.parametrize(
    ("camera", "header", "packets", "error", "sentence"),
    [
        ("nobody", HEADER, 1, UnknownCameraError, "no camera is called 'nobody'"),
        ("pulled", HEADER, 1, NotReadyError, "only a camera without a source takes push"),
        ("gate", StreamHeader("realvideo", 0, 0, b""), 1, ConfigError, "unknown codec 'realvideo'"),
        ("gate", HEADER, "large", ConfigError, r"more than the limit of 65536 \(gateway.max_packet_bytes\)"),
        ("gate", HEADER, "huge", CapacityError, r"larger than max .* see gateway\.max_packet_bytes"),
    ],
)
@pytest.mark.parametrize("hops", ["decoder", "gateway"])
async def test_what_cannot_work_fails_with_its_sentence(make, hops, camera, header, packets, error, sentence):
    size = {"large": LIMIT + 1, "huge": 2 * 2**20}.get(packets, 100)
    async with chain(hops) as (_, address):
        source = Scripted((header, make.packets(30, size=size)))
        with pytest.raises(error, match=sentence):
            await PushAgent(source, address, camera, options=PushOptions(**QUICK)).run()
        assert source.closed.is_set()


async def test_nobody_there():
    async with chain("decoder") as (_, address):
        pass
    options = PushOptions(**QUICK, give_up_s=0.2)
    with pytest.raises(UnavailableError, match=rf"no connection to {address} for 0\.2 s"):
        await PushAgent(Scripted((HEADER, [])), address, "gate", options=options).run()


async def test_giving_up_counts_from_the_break_not_from_the_last_packet(make, until):
    """A quiet camera that was connected all along has its full time to reconnect."""
    decoder = Decoder()
    decoder.consume()
    source = Scripted((HEADER, make.packets(20)), hold_at=10)
    agent = PushAgent(source, "127.0.0.1:1", "gate", options=PushOptions(**QUICK, give_up_s=0.3))
    async with serving(decoder.servicer) as address:
        agent._address = address
        task = asyncio.create_task(agent.run())
        await until(lambda: agent.status.packets == 10)
        await asyncio.sleep(0.4)
    source.gate.set()
    async with serving(decoder.servicer, port=int(address.rpartition(":")[2])):
        assert (await task).packets == 20
    decoder.close()


async def test_another_agent_is_waited_for_and_then_reported(make, until, monkeypatch):
    async with chain("gateway") as (decoder, address):
        decoder.consume()
        first = PushAgent(
            Scripted((HEADER, make.packets(20)), hold_at=10), address, "gate", options=PushOptions(**QUICK)
        )
        second = PushAgent(Scripted((HEADER, make.packets(5))), address, "gate", options=PushOptions(**QUICK))
        async with running(first):
            await until(lambda: first.status.packets == 10)
            with monkeypatch.context() as patch:
                patch.setattr("cluster.wire.push._OCCUPIED_S", 0.0)
                with pytest.raises(CameraExistsError, match="another agent already pushes"):
                    await PushAgent(
                        Scripted((HEADER, make.packets(5))), address, "gate", options=PushOptions(**QUICK)
                    ).run()
            waiting = asyncio.create_task(second.run())
            await until(lambda: second.status.state is CameraState.BACKOFF)
            assert "another agent already pushes for camera 'gate'" in second.status.reason
        assert (await waiting).packets == 5


def test_not_an_address():
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        PushAgent(Scripted(), "gateway", "gate")


async def test_a_source_that_cannot_be_read():
    async with chain("decoder") as (_, address):
        source = Scripted(fail=SourceError("file.mp4 is not a video", retryable=False))
        source.stretches = []
        with pytest.raises(SourceError, match="is not a video"):
            await PushAgent(source, address, "gate", options=PushOptions(**QUICK)).run()


async def test_a_source_that_fails_on_the_way_delivers_what_it_had(make):
    async with chain("decoder") as (decoder, address):
        decoder.consume()

        class Breaking(Scripted):
            def packets(self):
                yield from super().packets()
                raise SourceError("the file is truncated", retryable=False)

        with pytest.raises(SourceError, match="truncated"):
            await PushAgent(Breaking((HEADER, make.packets(25))), address, "gate", options=PushOptions(**QUICK)).run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.sequences() == list(range(25))


async def test_an_empty_source_ends_the_camera():
    async with chain("gateway") as (decoder, address):
        decoder.consume()
        status = await PushAgent(Scripted((HEADER, [])), address, "gate", options=PushOptions(**QUICK)).run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert (status.packets, status.state) == (0, CameraState.ENDED)


async def test_a_reconnected_source_leaves_a_hole_in_the_numbers(make):
    """The RTSP camera came back: what it sent in between is missing, which the decoder must know."""
    async with chain("decoder") as (decoder, address):
        decoder.consume()
        source = Scripted((HEADER, make.packets(5)), (HEADER, make.packets(5)))
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
        agent._supervisor.backoff = Backoff(first_s=0.01)
        await agent.run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.sequences() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("hops", ["decoder", "gateway"])
async def test_a_source_that_comes_back_different_opens_again(make, hops):
    other = StreamHeader("hevc", 1280, 720, b"other")
    async with chain(hops) as (decoder, address):
        decoder.consume()
        source = Scripted((HEADER, make.packets(30)), (other, make.packets(30, codec="hevc")))
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK))
        agent._supervisor.backoff = Backoff(first_s=0.01)
        status = await agent.run()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.headers == [HEADER, other]
        assert [packet.codec for packet in decoder.received["gate"]] == ["h264"] * 30 + ["hevc"] * 30
        assert decoder.sequences() == [*range(30), *range(31, 61)]
        assert status.packets == 60


async def test_cancelling_ends_everything(make, until):
    async with chain("decoder") as (decoder, address):
        decoder.consume()
        source = Scripted((HEADER, make.packets(100)), hold_at=10)
        task = asyncio.create_task(PushAgent(source, address, "gate", options=PushOptions(**QUICK)).run())
        await until(lambda: len(decoder.sequences()) == 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.closed.is_set()
        assert not [thread for thread in threading.enumerate() if thread.name == "push gate"]
        await until(lambda: not decoder.pushing)


class Refusing(ingest_pb2_grpc.IngestServicer):
    """Grants credit, then ends every connection with the same status."""

    def __init__(self, error):
        self.error = error
        self.calls = 0

    async def Push(self, request_iterator, context):
        self.calls += 1
        await context.read()
        await context.write(ingest_pb2.PushReply(credit=8))
        await context.read()
        raise self.error


async def test_a_server_that_is_always_exhausted_is_given_up(make):
    """A packet that is refused each time it is sent again must not become an endless loop."""
    servicer = Refusing(CapacityError("no room for packet 0"))
    async with serving(servicer) as address:
        with pytest.raises(CapacityError, match="no room for packet 0"):
            await PushAgent(Scripted((HEADER, make.packets(5))), address, "gate", options=PushOptions(**QUICK)).run()
    assert servicer.calls == 3


async def test_an_agent_waits_for_its_turn_where_many_come_back_at_once(make):
    """A gateway that has just restarted takes no more calls of a token, or of all, than it can: the next try may do."""

    class Busy(ingest_pb2_grpc.IngestServicer):
        left = 6

        async def Push(self, request_iterator, context):
            if self.left:
                self.left -= 1
                raise CapacityError("'agents' calls too often; try again in 0.1 s")
            await decoder.servicer.Push(request_iterator, context)

    decoder = Decoder()
    decoder.consume()
    async with serving(Busy()) as address:
        agent = PushAgent(Scripted((HEADER, make.packets(20))), address, "gate", options=PushOptions(**QUICK))
        assert (await agent.run()).packets == 20
    decoder.close()


async def test_a_server_that_is_unavailable_is_tried_again(make, until):
    servicer = Refusing(UnavailableError("the controller restarts"))
    async with serving(servicer) as address:
        told = []
        source = Scripted((HEADER, make.packets(5)))
        agent = PushAgent(source, address, "gate", options=PushOptions(**QUICK), on_progress=told.append)
        async with running(agent):
            await until(lambda: servicer.calls > 5)
    reasons = {status.reason for status in told if status.state is CameraState.BACKOFF}
    assert reasons == {"the controller restarts"}


async def test_a_renewed_token_is_read_with_the_next_connection(make, until, tmp_path):
    """An agent runs for months, and its token, like its certificate, ends before that."""
    token, decoder = tmp_path / "agent.token", Decoder()
    token.write_text("old")

    def verify(secret):
        if secret != "new":
            raise UnauthenticatedError("the token 'agent' has expired")
        return Principal("agent", frozenset({Role.INGEST}))

    def credentials():
        return ClientCredentials.from_environment({"SIGHTLINE_TOKEN_FILE": str(token)})

    async with rpc_serving.serving(decoder.servicer, guard=Guard(verify)) as address:
        decoder.consume()
        source = Scripted((HEADER, make.packets(20)))
        told = []
        options = {"options": PushOptions(**QUICK), "on_progress": told.append}
        agent = PushAgent(source, address, "gate", credentials=credentials, **options)
        async with running(agent) as task:
            await until(lambda: "has expired" in agent.status.reason)
            # A renewal may take the old file away first.
            token.unlink()
            before = len(told)
            await until(lambda: len(told) > before + 1)
            token.write_text("new")
            assert (await asyncio.wait_for(task, 5.0)).packets == 20
    decoder.close()


async def test_the_time_without_a_connection_begins_where_the_last_one_ended(monkeypatch):
    """Also where it ended well, with a new header of the source."""
    agent = PushAgent(Scripted(), "127.0.0.1:1", "gate", options=PushOptions(**QUICK, give_up_s=0.3))
    connect, tries = agent._connection, 0

    async def first_one_ends_well():
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.sleep(0.5)
            return False
        return await connect()

    monkeypatch.setattr(agent, "_connection", first_one_ends_well)
    agent._buffer.begin(HEADER)
    with pytest.raises(UnavailableError, match=r"for 0\.3 s"):
        await agent._send()
    assert tries > 2
