"""How often a pusher is told what was taken over: seldom while nothing hangs on it, at once when it needs credit."""

import asyncio

from ingest_parts import chain, pusher

from cluster.gateway.ingest_proxy import SHORT_CREDIT, UNACKNOWLEDGED_BYTES

NEVER_S = 60.0


async def test_a_slow_camera_is_told_seldom_and_before_it_lacks_credit(make, until):
    async with chain("gateway", proxy={"idle_reply_s": NEVER_S}) as (decoder, address), pusher(address) as client:
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


async def test_a_pusher_that_holds_much_is_told(make):
    size = 60_000
    async with chain("gateway", proxy={"idle_reply_s": NEVER_S}) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        packets = make.packets(UNACKNOWLEDGED_BYTES // size + 3, size=size)
        await client.send(packets[0])
        assert (await client.read()).next_sequence == 1
        for packet in packets[1:]:
            await client.send(packet)
        reply = await asyncio.wait_for(client.read(), 20.0)
        assert reply.next_sequence > UNACKNOWLEDGED_BYTES // size


async def test_a_pusher_with_little_credit_is_told_at_once(make):
    """An agent that may send no whole batch waits for the next reply."""
    proxy = {"idle_reply_s": NEVER_S}
    async with chain("gateway", credit=SHORT_CREDIT, proxy=proxy) as (decoder, address), pusher(address) as client:
        decoder.consume()
        await client.open()
        for packet in make.packets(5):
            await client.send(packet)
            await asyncio.wait_for(client.read_until(packet.sequence + 1), 20.0)


async def test_a_slow_camera_is_told_in_the_end(make):
    async with chain("gateway", proxy={"idle_reply_s": 0.05}) as (_, address), pusher(address) as client:
        await client.open()
        for packet in make.packets(5):
            await client.send(packet)
        assert (await client.read_until(5)).next_sequence == 5
