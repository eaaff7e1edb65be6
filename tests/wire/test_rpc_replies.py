"""How often a pusher is told what was taken over: seldom while nothing hangs on it, at once when it needs credit."""

import asyncio

import pytest
from ingest_parts import LIMIT, chain, pusher
from sightline.v1 import ingest_pb2

from cluster.wire.convert import packet_to_proto
from cluster.wire.ingest import SHORT_CREDIT, UNTOLD_BYTES, Ledger, PushProgress

NEVER_S = 60.0


def batch(packets):
    return ingest_pb2.PacketBatch(packets=[packet_to_proto(packet) for packet in packets])


def test_a_pusher_is_pressing_once_half_of_its_credit_is_used(make):
    ledger = Ledger("gate", PushProgress(0, 256), LIMIT)
    ledger.admit(batch(make.packets(127)))
    assert not ledger.pressing
    ledger.admit(batch([make.packet(127)]))
    assert ledger.pressing
    ledger.grant(PushProgress(128, 256))
    assert not ledger.pressing
    ledger.grant(PushProgress(128, 40))
    assert not ledger.pressing, "what was promised is not taken back"


def test_a_pusher_is_pressing_when_it_holds_much(make):
    ledger = Ledger("gate", PushProgress(0, 256), UNTOLD_BYTES)
    ledger.admit(batch([make.packet(0, size=UNTOLD_BYTES - 1)]))
    assert not ledger.pressing
    ledger.admit(batch([make.packet(1, size=1)]))
    assert ledger.pressing
    ledger.grant(PushProgress(1, 255))
    assert not ledger.pressing


def test_a_pusher_with_little_credit_is_always_pressing():
    """An agent that may send no whole batch waits for the next reply."""
    assert Ledger("gate", PushProgress(0, SHORT_CREDIT), LIMIT).pressing
    ledger = Ledger("gate", PushProgress(0, 0), LIMIT)
    assert ledger.pressing
    ledger.grant(PushProgress(0, 200))
    assert not ledger.pressing


@pytest.mark.parametrize("hops", ["decoder", "gateway"])
async def test_a_slow_camera_is_told_seldom_and_before_it_lacks_credit(make, until, hops):
    async with chain(hops, idle_reply_s=NEVER_S) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        packets = make.packets(200, size=10)
        await client.send(packets[0])
        assert (await client.read()).next_sequence == 1, "the first is told at once"
        for packet in packets[1:100]:
            await client.send(packet)
        await until(lambda: len(decoder.sequences()) == 100)
        for packet in packets[100:]:
            await client.send(packet)
        reply = await asyncio.wait_for(client.read(), 20.0)
        assert reply.next_sequence > 100, "of the packets before, nobody was told one by one"
        assert reply.next_sequence + reply.credit >= 200 + SHORT_CREDIT
        await client.end()
        assert (await client.read_until(200)).next_sequence == 200, "the end is told at once"
        assert await client.status() == ("OK", "")


async def test_a_slow_camera_is_told_in_the_end(make):
    async with chain("gateway", idle_reply_s=0.05) as (_, address), pusher(address) as client:
        await client.open()
        for packet in make.packets(5):
            await client.send(packet)
        assert (await client.read_until(5)).next_sequence == 5
