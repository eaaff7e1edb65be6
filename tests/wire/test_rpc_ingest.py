"""Push over loopback, to a decoder and through a gateway: order, credit, resume, and every kind of bad input."""

import asyncio
import contextlib
import re
from dataclasses import replace

import grpc
import pytest
from google.protobuf.message import DecodeError
from http2_deaf import DeafClient
from ingest_parts import LIMIT, Decoder, Gateway, chain, pusher, serving
from sightline.v1 import ingest_pb2, ingest_pb2_grpc
from waiting import until_async

from cluster.codec import PushSource, StreamHeader
from cluster.decoder import ingest
from cluster.decoder.ingest import IngestServicer, QueueSink
from cluster.errors import UnavailableError
from cluster.gateway import ingest_proxy
from cluster.wire.channel import CallEndedError, ChannelPool, write
from cluster.wire.convert import packet_to_proto, push_from_bytes

HOPS = pytest.mark.parametrize("hops", ["decoder", "gateway"])


@HOPS
async def test_packets_arrive_unchanged_and_are_acknowledged(make, hops):
    async with chain(hops) as (decoder, address), pusher(address) as client:
        decoder.consume()
        start = await client.open(width=640, height=480, extradata=b"config")
        assert (start.next_sequence, start.credit, start.dropped) == (0, 256, 0)
        sent = make.packets(100)
        for i in range(0, 100, 7):
            await client.send(*sent[i : i + 7])
        await client.read_until(100)
        await client.end()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.received["gate"] == sent
        header = decoder.headers[0]
        assert (header.codec, header.width, header.height, header.extradata) == ("h264", 640, 480, b"config")
        assert await client.status() == ("OK", "")


@HOPS
@pytest.mark.parametrize(
    ("opening", "code", "sentence"),
    [
        ({"camera": "nobody"}, "NOT_FOUND", "no camera is called 'nobody'"),
        ({"camera": "pulled"}, "FAILED_PRECONDITION", "only a camera without a source takes push"),
        ({"camera": ""}, "INVALID_ARGUMENT", "needs the camera's name"),
        ({"session": ""}, "INVALID_ARGUMENT", "needs a session id"),
        ({"codec": "realvideo"}, "INVALID_ARGUMENT", "unknown codec 'realvideo'; there are: av1, h264, hevc"),
        ({"width": 1 << 20, "height": 4}, "INVALID_ARGUMENT", "larger than 16384x16384"),
        ({"extradata": bytes(1 << 17)}, "INVALID_ARGUMENT", "extradata of 131072 bytes"),
    ],
)
async def test_bad_open(hops, opening, code, sentence):
    async with chain(hops) as (_, address), pusher(address) as client:
        with contextlib.suppress(Exception):
            await client.open(**opening)
        got, details = await client.status()
        assert got == code
        assert sentence in details


async def test_a_queue_that_is_shorter_than_the_credit_is_not_looked_at_while_it_is_empty(monkeypatch):
    looked = []
    source = PushSource(max_packets=16)
    monkeypatch.setattr(source, "credit", lambda: looked.append(1) or 16)
    sink = QueueSink(source, max_credit=256)
    assert (await sink.open(StreamHeader("h264", 0, 0, b""), "session")).credit == 16
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sink.progress(), 0.2)
    assert len(looked) == 2


async def test_a_camera_that_the_decoder_has_not_heard_of_may_be_tried_again():
    """The controller, which the gateway has asked, may be ahead of it."""
    decoder = Decoder()
    async with serving(decoder.servicer) as far:
        gateway = Gateway(far)
        async with serving(gateway.servicer) as address, pusher(address) as client:
            with contextlib.suppress(Exception):
                await client.open("unheard-of")
            code, details = await client.status()
            assert code == "UNAVAILABLE"
            assert "no camera is called 'unheard-of'" in details
        assert len(gateway.channels._channels) == 0, "the channel to the decoder was given back"


async def test_a_controller_that_takes_its_time_is_not_taken_for_the_decoder():
    async def route(_camera):
        await asyncio.sleep(0.4)
        raise UnavailableError("the controller did not answer within 8 s; see its log")

    proxy = ingest_proxy.IngestProxy(route, ChannelPool(), reply_s=0.1)
    async with serving(proxy) as address, pusher(address) as client:
        with contextlib.suppress(Exception):
            await client.open()
        assert await client.status() == ("UNAVAILABLE", "the controller did not answer within 8 s; see its log")


async def spoilt(client, make, messages):
    await client.open()
    with contextlib.suppress(CallEndedError):
        for message in messages(make):
            await write(client.call, message)


def batch(*packets):
    return ingest_pb2.PushRequest(packets=ingest_pb2.PacketBatch(packets=[packet_to_proto(p) for p in packets]))


@HOPS
@pytest.mark.parametrize(
    ("messages", "code", "sentence"),
    [
        (
            lambda m: [batch(m.packet(0), m.packet(2), m.packet(1))],
            "INVALID_ARGUMENT",
            "packet 1 .* came after packet 2",
        ),
        (
            lambda m: [batch(m.packet(0), m.packet(1)), batch(m.packet(0))],
            "INVALID_ARGUMENT",
            "packet 0 .* after packet 1",
        ),
        (lambda m: [batch(m.packet(0), m.packet(0))], "INVALID_ARGUMENT", "packet 0 .* came after packet 0"),
        (
            lambda m: [batch(m.packet(0, size=LIMIT + 1))],
            "INVALID_ARGUMENT",
            f"{LIMIT + 1} bytes, more than .* {LIMIT}",
        ),
        (lambda m: [batch(m.packet(0, size=2 * 2**20))], "RESOURCE_EXHAUSTED", "larger than max"),
        (lambda m: [batch(m.packet(0, size=0))], "INVALID_ARGUMENT", "packet 0 of camera 'gate' is empty"),
        (
            lambda m: [batch(replace(m.packet(0), sequence=2**64 - 1))],
            "INVALID_ARGUMENT",
            f"has a number above {2**64 - 2}",
        ),
        (lambda m: [batch()], "INVALID_ARGUMENT", "a batch of camera 'gate' has no packets"),
        (lambda m: [ingest_pb2.PushRequest()], "INVALID_ARGUMENT", "an empty message"),
        (lambda m: [ingest_pb2.PushRequest(open=ingest_pb2.Open(camera="gate"))], "INVALID_ARGUMENT", "not 'open'"),
        (
            lambda m: [batch(*m.packets(300, size=10))],
            "RESOURCE_EXHAUSTED",
            "300 packets in flight, more than its credit",
        ),
    ],
)
async def test_bad_messages(make, hops, messages, code, sentence):
    async with chain(hops) as (decoder, address), pusher(address) as client:
        await spoilt(client, make, messages)
        got, details = await client.status()
        assert (got, bool(re.search(sentence, details))) == (code, True), details
        # Nothing is stuck: the next agent gets in.
        async with pusher(address) as again:
            decoder.consume()
            await again.open(session="s2")
            await again.send(make.packet(0))
            await again.read_until(1)


@HOPS
async def test_the_last_number_but_one_is_taken(make, hops):
    async with chain(hops) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        await client.send(replace(make.packet(0), sequence=2**64 - 2))
        assert (await client.read_until(2**64 - 1)).next_sequence == 2**64 - 1


@HOPS
async def test_packets_before_open(make, hops):
    async with chain(hops) as (_, address), pusher(address) as client:
        await client.send(make.packet(0))
        assert await client.status() == ("INVALID_ARGUMENT", "the first message of a push must be `open`")


@HOPS
@pytest.mark.parametrize("opened", [False, True], ids=["first", "later"])
async def test_a_message_of_too_many_packets_is_refused_whole(hops, opened):
    """Half a million empty packets take forty times the megabyte that they came in."""
    message = b"\x12\x80\x80\x40" + b"\x0a\x00" * 2**19
    assert len(ingest_pb2.PushRequest.FromString(message).packets.packets) == 2**19
    async with chain(hops) as (_, address), pusher(address) as client:
        if opened:
            await client.open()
        await write(client.call, message)
        code, details = await client.status()
        assert (code, details) == ("RESOURCE_EXHAUSTED", "a message has more than 65536 packets; send fewer at a time")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x12", b"\x12\x00", b"\x12\x02\x0a\x00", b"\x1a\x00", b"\x12\x83\x01\x0a\x80\x01\x0a\x7e" + bytes(126)],
)
def test_what_is_taken_apart(data):
    try:
        whole = ingest_pb2.PushRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            push_from_bytes(data)
    else:
        assert push_from_bytes(data) == whole


@pytest.mark.parametrize("data", [b"\xff", b"\x92\x00\x00", b"\x12\x02\x22\x00"])
def test_what_is_of_no_kind(data):
    with pytest.raises(DecodeError):
        push_from_bytes(data)


@HOPS
async def test_junk_in_the_middle_of_a_push(hops):
    async with chain(hops) as (_, address), pusher(address) as client:
        await client.open()
        await write(client.call, b"\xff\xff\xff\xff")
        code, details = await client.status()
        assert code == "INVALID_ARGUMENT"
        assert "invalid message for /sightline.v1.Ingest/Push" in details


class Stalled(ingest_pb2_grpc.IngestServicer):
    """A decoder that takes the opening and nothing more."""

    async def Push(self, request_iterator, context):
        await context.read()
        await context.write(ingest_pb2.PushReply(credit=10_000))
        await asyncio.Event().wait()


STANDS_STILL = "has acknowledged nothing for 0.2 s", "did not confirm the end of the stream in 0.2 s"


@pytest.mark.parametrize("what", STANDS_STILL)
async def test_a_decoder_that_stands_still(make, monkeypatch, what):
    monkeypatch.setattr(ingest_proxy, "STALL_S", 0.2)
    monkeypatch.setattr(ingest_proxy, "MOVED_S", 60.0 if "end" in what else 0.1)
    async with serving(Stalled()) as far:
        gateway = Gateway(far)
        async with serving(gateway.servicer) as address, pusher(address) as client:
            await client.open()
            with contextlib.suppress(CallEndedError):
                if "end" in what:
                    await client.end()
                while "end" not in what:
                    await client.send(make.packet(0, size=LIMIT))
            code, details = await client.status()
            assert code == "UNAVAILABLE"
            assert f"the decoder of camera 'gate' {what}" in details
        assert len(gateway.channels._channels) == 0


async def test_a_decoder_that_hangs_loses_its_pushes_also_while_agents_wait_for_credit(make, monkeypatch):
    """Its connection takes megabytes more, and answers pings; the controller has given the camera to another."""

    class Hangs(ingest_pb2_grpc.IngestServicer):
        async def Push(self, request_iterator, context):
            await context.read()
            await context.write(ingest_pb2.PushReply(credit=1))
            while await context.read() is not grpc.aio.EOF:
                pass

    monkeypatch.setattr(ingest_proxy, "STALL_S", 0.2)
    monkeypatch.setattr(ingest_proxy, "MOVED_S", 0.1)
    async with serving(Hangs()) as far, serving(Gateway(far).servicer) as address, pusher(address) as client:
        await client.open()
        await asyncio.sleep(1.0)
        assert not client.call.done(), "who sends nothing waits for nothing"
        await client.send(make.packet(0))
        code, details = await asyncio.wait_for(client.status(), 10.0)
        assert (code, details) == ("UNAVAILABLE", "the decoder of camera 'gate' has acknowledged nothing for 0.2 s")


class Dies(ingest_pb2_grpc.IngestServicer):
    """A decoder that takes two packets and answers nothing after them, on a connection that stays."""

    async def Push(self, request_iterator, context):
        for taken in range(3):
            await context.read()
            await context.write(ingest_pb2.PushReply(credit=256, next_sequence=taken))
        while await context.read() is not grpc.aio.EOF:
            pass


async def test_a_decoder_that_hangs_before_its_last_reply_was_told(make, monkeypatch):
    """What was sent since that reply is unanswered, however late the agent is told of it."""
    monkeypatch.setattr(ingest_proxy, "STALL_S", 0.5)
    monkeypatch.setattr(ingest_proxy, "MOVED_S", 0.1)
    gateway = Gateway("", idle_reply_s=0.5)
    async with serving(Dies()) as gateway.address, serving(gateway.servicer) as address, pusher(address) as client:
        await client.open()
        for number in range(3):
            await client.send(make.packet(number))
            await asyncio.sleep(0.1)
        code, details = await asyncio.wait_for(client.status(), 10.0)
        assert (code, details) == ("UNAVAILABLE", "the decoder of camera 'gate' has acknowledged nothing for 0.5 s")


async def test_a_push_to_a_node_without_power_ends_when_its_camera_has_moved(make, monkeypatch):
    """Nothing ends the connection for as long as keepalive takes; the controller knows sooner."""
    monkeypatch.setattr(ingest_proxy, "MOVED_S", 0.1)
    gateway = Gateway("")
    async with serving(Dies()) as gateway.address, serving(gateway.servicer) as address, pusher(address) as client:
        await client.open()
        await client.send(make.packet(0), make.packet(1))
        await client.send(make.packet(2))
        # The decoder's last reply: what is sent from now on is not answered.
        await client.read_until(2)
        await client.send(make.packet(3))
        await asyncio.sleep(0.5)
        assert not client.call.done(), "the controller still says that it is there"
        # Between two decoders there is none.
        gateway.address = None
        await asyncio.sleep(0.5)
        assert not client.call.done()
        gateway.address = "127.0.0.1:1"
        code, details = await asyncio.wait_for(client.status(), 5.0)
        assert (code, details) == ("UNAVAILABLE", "the decoder of camera 'gate' has changed")


async def test_a_silent_client_is_not_kept(make):
    async with chain("decoder", open_s=0.1) as (_, address), pusher(address) as client:
        await client.call.wait_for_connection()
        code, details = await client.status()
        assert code == "DEADLINE_EXCEEDED"
        assert "not complete within 0.1 s" in details


@HOPS
async def test_a_second_agent_is_refused_while_the_first_is_there(make, hops, until):
    async with chain(hops) as (decoder, address), pusher(address) as first:
        await first.open(session="s1")
        async with pusher(address) as second:
            with contextlib.suppress(Exception):
                await second.open(session="s2")
            assert await second.status() == ("ALREADY_EXISTS", "another agent already pushes for camera 'gate'")
        await first.send(make.packet(0))
        await first.read_until(1)
        first.call.cancel()
        await until(lambda: not decoder.pushing)
        async with pusher(address) as third:
            assert (await third.open(session="s3")).next_sequence == 0


@HOPS
async def test_a_quiet_agent_of_a_camera_that_moved_is_told_without_a_packet(make, hops, monkeypatch):
    """Else its session would keep the camera at the old decoder until it sends."""
    monkeypatch.setattr(ingest, "RETIRED_S", 0.05)
    async with chain(hops) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        await client.send(make.packet(0))
        await client.read_until(1)
        decoder.sinks["gate"].retire()
        code, details = await asyncio.wait_for(client.status(), 10.0)
        assert (code, details) == ("UNAVAILABLE", "the camera no longer runs here")
        assert decoder.pushing == []


@HOPS
async def test_a_connection_that_breaks_just_after_a_batch_leaves_the_camera_free(make, hops):
    async with chain(hops) as (decoder, address):
        decoder.consume()
        for number in range(5):
            async with pusher(address) as client:
                await client.open(session="s1")
                # The decoder waits for something to reply.
                await asyncio.sleep(0.05)
                await client.send(make.packet(number))
                client.call.cancel()
            await until_async(lambda: not decoder.pushing, "the end of the connection", 5.0)


@HOPS
async def test_the_same_session_takes_over_and_resumes(make, hops):
    async with chain(hops) as (decoder, address), pusher(address) as old:
        decoder.consume()
        await old.open(session="s1")
        await old.send(*make.packets(5))
        await old.read_until(5)
        async with pusher(address) as new:
            assert (await new.open(session="s1")).next_sequence == 5
            code, details = await old.status()
            assert (code, details) == ("ABORTED", "a newer connection of the same session took over")
            # What it did not know to be taken over may come again; it is not decoded twice.
            await new.send(make.packet(3), make.packet(4), make.packet(5))
            reply = await new.read_until(6)
            assert reply.repeats == 2
            await new.end()
            await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.sequences() == [0, 1, 2, 3, 4, 5]


class Burst:
    """A call whose packets arrive while the servicer waits for something to reply, with the end right behind them."""

    def __init__(self, packet):
        batch = ingest_pb2.PacketBatch(packets=[packet_to_proto(packet)])
        opened = ingest_pb2.Open(camera="gate", codec="h264", session="s1")
        self.messages = [{"end": ingest_pb2.End()}, {"packets": batch}, {"open": opened}]
        self.acknowledged = 0

    async def read(self):
        message = self.messages.pop()
        if "packets" in message:
            await asyncio.sleep(0.02)
        return ingest_pb2.PushRequest(**message)

    async def write(self, reply):
        self.acknowledged = reply.next_sequence


async def test_an_end_that_is_read_at_once_after_packets_ends_the_push(make):
    decoder, call, before = Decoder(), Burst(make.packet(0)), asyncio.all_tasks()
    async with asyncio.timeout(5.0):
        await decoder.servicer.Push(None, call)
    assert call.acknowledged == 1
    assert asyncio.all_tasks() == before, "nothing still looks for news of it"


async def test_an_old_connection_that_does_not_end_is_told(monkeypatch):
    never = asyncio.Event()
    monkeypatch.setattr(IngestServicer, "_relay", lambda *_: never.wait())
    async with chain("decoder", open_s=0.2) as (decoder, address), pusher(address) as old:
        decoder.consume()
        await old.open(session="s1")
        async with pusher(address) as new:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await new.open(session="s1")
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ended.value.details() == "the previous connection for camera 'gate' has not ended within 0.2 s"
        never.set()


@HOPS
async def test_a_hole_is_passed_on_as_a_gap(make, hops):
    async with chain(hops) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        await client.send(*make.packets(3))
        await client.send(make.packet(1000))
        reply = await client.read_until(1001)
        assert reply.credit > 200
        await client.end()
        await asyncio.wait_for(decoder.ended.wait(), 5.0)
        assert decoder.sequences() == [0, 1, 2, 1000]


@HOPS
async def test_credit_shrinks_while_nobody_decodes_and_comes_back(make, hops):
    async with chain(hops, max_packets=32, credit=32) as (decoder, address), pusher(address) as client:
        assert (await client.open()).credit == 32
        for packet in make.packets(32):
            await client.send(packet)
        assert (await client.read_until(32)).credit == 0
        assert decoder.sources["gate"].queued == 32
        decoder.consume()
        credit = 0
        while credit < 32:
            credit = (await client.read()).credit
        await client.send(make.packet(32))
        await client.read_until(33)


@HOPS
async def test_more_than_the_credit_is_refused_and_memory_stays_bounded(make, hops):
    async with chain(hops, max_packets=32, credit=32) as (decoder, address), pusher(address) as client:
        await client.open()
        with contextlib.suppress(CallEndedError):
            for packet in make.packets(10_000, size=8192):
                await client.send(packet)
        code, details = await client.status()
        assert code == "RESOURCE_EXHAUSTED"
        assert "more than its credit" in details
        assert decoder.sources["gate"].queued <= 32


async def test_a_packet_too_many_by_bytes_is_dropped_and_counted(make):
    async with chain("decoder", max_bytes=20_000) as (decoder, address), pusher(address) as client:
        await client.open()
        await client.send(*make.packets(5, size=8192))
        reply = await client.read_until(5)
        assert reply.dropped == 3
        assert decoder.sources["gate"].queued == 2


async def test_a_client_that_never_reads_is_cut_off(make, until):
    """Its camera is free for others at once; the status reaches it when it begins to read."""
    async with chain("decoder", reply_s=0.1) as (decoder, address):
        deaf = await DeafClient.connect(address)
        await deaf.send(ingest_pb2.PushRequest(open=ingest_pb2.Open(camera="gate", codec="h264", session="deaf")))
        await until(lambda: decoder.pushing)
        await until(lambda: not decoder.pushing, "the deaf client was cut off")
        await deaf.send(batch(*make.packets(3)))
        decoder.consume()
        async with pusher(address) as other:
            await other.open(session="other")
            await other.send(make.packet(0))
            await other.read_until(1)
        await until(decoder.sequences)
        assert decoder.sequences() == [0], "nothing of the deaf client was taken after it was cut off"
        deaf.listen()
        assert await asyncio.wait_for(deaf.ended(), 5.0) == 1
        deaf.close()


@HOPS
async def test_half_closing_without_end_keeps_the_session(make, hops, until):
    async with chain(hops) as (decoder, address):
        decoder.consume()
        async with pusher(address) as client:
            await client.open()
            await client.send(*make.packets(4))
            await client.read_until(4)
            await client.call.done_writing()
            assert await client.status() == ("OK", "")
        async with pusher(address) as client:
            assert (await client.open()).next_sequence == 4
            await client.end()
            assert await client.status() == ("OK", "")
        await asyncio.wait_for(decoder.ended.wait(), 5.0)


@HOPS
async def test_ending_twice_is_harmless_but_nothing_follows_the_end(make, hops):
    async with chain(hops) as (decoder, address):
        decoder.consume()
        async with pusher(address) as client:
            await client.open()
            await client.send(make.packet(0))
            await client.end()
            assert (await client.status())[0] == "OK"
        async with pusher(address) as client:
            assert (await client.open()).next_sequence == 1
            await client.end()
            assert (await client.status())[0] == "OK"
        async with pusher(address) as client:
            await client.open()
            await client.send(make.packet(1))
            code, details = await client.status()
            assert code == "FAILED_PRECONDITION"
            assert "session 's1' has ended" in details
