"""Answers: the hub's bounded queues, Watch, and the gateway's merger."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import gateway_parts
import grpc
import grpc.aio
import pytest
import rpc_serving
from sightline.v1 import results_pb2, results_pb2_grpc
from waiting import until_async

from cluster.gateway.merger import ResultsMerger
from cluster.wire import answers
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.channel import open_channel
from cluster.wire.convert import answer_from_proto


def serving(hub, port=0):
    return rpc_serving.serving(ResultsServicer(hub), port=port)


async def take(subscription, count):
    async with asyncio.timeout(30.0):
        return [await anext(subscription) for _ in range(count)]


async def test_everyone_gets_what_they_watch(make):
    hub = AnswerHub()
    with hub.subscribe() as everything, hub.subscribe(["yard"]) as yard:
        given = [make.answer(0), make.answer(0, stream="yard"), make.answer(1)]
        hub.publish(given)
        assert await take(everything, 3) == [(answer, 0) for answer in given]
        assert await take(yard, 1) == [(given[1], 0)]
    assert len(hub._subscriptions) == 0


async def test_a_slow_subscriber_loses_the_oldest_and_is_told(make):
    hub = AnswerHub(limit=3)
    with hub.subscribe() as slow, hub.subscribe(limit=100) as patient:
        hub.publish(make.answer(window) for window in range(10))
        got = await take(slow, 3)
        assert [(answer.window, missed) for answer, missed in got] == [(7, 7), (8, 0), (9, 0)]
        assert hub.missed == 7
        assert len(await take(patient, 10)) == 10
        hub.publish([make.answer(10)])
        assert await take(slow, 1) == [(make.answer(10), 0)]


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_nothing_is_lost_uncounted(make, limit):
    """Received + missed = published, whatever the interleaving of publishing and reading."""
    hub = AnswerHub(limit=limit)
    received = missed = 0
    with hub.subscribe() as subscription:
        for round_ in range(20):
            hub.publish(make.answer(window) for window in range(round_ % 7))
            for _ in range(min(round_ % 3, limit, round_ % 7)):
                _, lost = await anext(subscription)
                received, missed = received + 1, missed + lost
        hub.close()
        async for _, lost in subscription:
            received, missed = received + 1, missed + lost
    assert received + missed == hub.published
    assert missed == hub.missed


async def test_publishing_from_threads(make):
    hub = AnswerHub(limit=1000)
    with hub.subscribe() as subscription:

        def work(stream):
            for window in range(100):
                hub.publish([make.answer(window, stream=stream)])

        threads = [threading.Thread(target=work, args=(f"camera-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        got = [answer for answer, _ in await take(subscription, 400)]
        for thread in threads:
            thread.join()
    for n in range(4):
        assert [answer.window for answer in got if answer.stream == f"camera-{n}"] == list(range(100))


async def test_watch(make):
    hub = AnswerHub()
    async with serving(hub) as address, open_channel(address) as channel:
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest(cameras=["gate"]))
        await call.initial_metadata()
        hub.publish([make.answer(0, stream="yard"), make.answer(1)])
        assert answer_from_proto(await call.read()) == make.answer(1)
        hub.close()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_watching_too_much_is_refused_with_a_sentence():
    async with rpc_serving.serving(ResultsServicer(AnswerHub(), most=0)) as address, open_channel(address) as channel:
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "watch already" in failure.value.details()


async def test_a_watcher_that_does_not_read_costs_its_queue_only(make):
    """Answers with a long text fill the transport quickly; the hub's queue stays at its limit."""
    from dataclasses import replace

    hub = AnswerHub(limit=4)
    async with serving(hub) as address, open_channel(address) as channel:
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest())
        await call.initial_metadata()
        published = 0
        async with asyncio.timeout(30.0):
            while hub.missed < 10:
                hub.publish([replace(make.answer(published), text="x" * 100_000)])
                published += 1
                await asyncio.sleep(0)
        received = missed = 0
        while received + missed < published:
            message = await call.read()
            received, missed = received + 1, missed + message.missed
        assert missed == hub.missed
        assert received + missed == published


async def test_a_watcher_that_leaves_is_forgotten(until):
    hub = AnswerHub()
    async with serving(hub) as address, open_channel(address) as channel:
        call = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest())
        await call.initial_metadata()
        assert len(hub._subscriptions) == 1
        call.cancel()
        await until(lambda: len(hub._subscriptions) == 0)


def make_hub(monkeypatch, *, ahead_s=0.0, ago_s=0.0, **limits):
    """A hub made ``ago_s`` seconds ago at a host whose clock is ``ahead_s`` ahead."""
    with monkeypatch.context() as there:
        clocks = {
            "monotonic": lambda: time.monotonic() - ago_s,
            "time_ns": lambda: time.time_ns() + round(1e9 * (ahead_s - ago_s)),
        }
        there.setattr(answers, "time", SimpleNamespace(**clocks))
        return AnswerHub(**limits)


@asynccontextmanager
async def merging():
    hub = AnswerHub()
    merger = ResultsMerger(hub, retry_s=0.02, max_retry_s=0.05)
    try:
        with hub.subscribe() as subscription:
            yield merger, subscription
    finally:
        await merger.stop()


async def test_merging_a_changing_set_of_replicas(make, until):
    one, two = AnswerHub(), AnswerHub()
    async with serving(one) as first, serving(two) as second, merging() as (merger, merged):
        merger.follow([first])
        await until(lambda: len(one._subscriptions) == 1)
        merger.follow([first, second])
        await until(lambda: len(two._subscriptions) == 1)
        one.publish([make.answer(0)])
        two.publish([make.answer(0, stream="yard")])
        got = {answer.stream for answer, _ in await take(merged, 2)}
        assert got == {"gate", "yard"}
        merger.follow([second])
        await until(lambda: len(one._subscriptions) == 0)
        one.publish([make.answer(1)])
        two.publish([make.answer(1, stream="yard")])
        assert (await take(merged, 1))[0][0].stream == "yard"


async def test_a_replica_that_comes_back_is_followed_again(make, until, caplog):
    hub = AnswerHub()
    async with merging() as (merger, merged):
        async with serving(hub) as address:
            merger.follow([address])
            await until(lambda: len(hub._subscriptions) == 1)
            hub.publish([make.answer(0)])
            await take(merged, 1)
        await until(lambda: f"the answer stream of the replica at {address} ended: " in caplog.text)
        again = AnswerHub()
        async with serving(again, port=int(address.rpartition(":")[2])):
            await until(lambda: len(again._subscriptions) == 1)
            again.publish([make.answer(1)])
            assert (await take(merged, 1))[0][0].window == 1


async def test_answers_of_a_break_come_after_it_and_what_is_gone_by_then_is_counted(make, monkeypatch, until):
    """Of a watcher that began with what came from then on, too."""
    hub = make_hub(monkeypatch, ago_s=60.0, recent=3)
    hub.publish([make.answer(0)])
    async with merging() as (merger, merged):
        async with serving(hub) as address:
            merger.follow([address])
            assert await take(merged, 1) == [(make.answer(0), 0)]
        await until(lambda: len(hub._subscriptions) == 0)
        hub.publish([make.answer(1)])
        async with serving(hub, port=int(address.rpartition(":")[2])):
            assert await take(merged, 1) == [(make.answer(1), 0)]
        await until(lambda: len(hub._subscriptions) == 0)
        hub.publish(make.answer(window) for window in range(2, 10))
        async with serving(hub, port=int(address.rpartition(":")[2])):
            got = [(answer.window, missed) for answer, missed in await take(merged, 3)]
            assert got == [(7, 5), (8, 0), (9, 0)]


@pytest.mark.parametrize("ahead_s", [0.0, 300.0, -300.0])
async def test_a_replica_that_begins_later_is_followed_from_its_first_answer(make, monkeypatch, ahead_s):
    """Also where its host's clock is minutes off."""
    async with merging() as (merger, merged):
        hub = make_hub(monkeypatch, ahead_s=ahead_s, recent=2)
        hub.publish(make.answer(window) for window in range(3))
        async with serving(hub) as address:
            merger.follow([address])
            assert [(answer.window, missed) for answer, missed in await take(merged, 2)] == [(1, 1), (2, 0)]


@pytest.mark.parametrize("ahead_s", [300.0, -300.0])
async def test_a_replica_that_began_earlier_missed_nothing_whatever_its_clock(make, monkeypatch, until, ahead_s):
    hub = make_hub(monkeypatch, ahead_s=ahead_s, ago_s=60.0, recent=2)
    hub.publish(make.answer(window) for window in range(3))
    async with serving(hub) as address, merging() as (merger, merged):
        merger.follow([address])
        await until(lambda: len(hub._subscriptions) == 1)
        hub.publish([make.answer(3)])
        # The last minute's are read, too.
        assert [(answer.window, missed) for answer, missed in await take(merged, 3)] == [(1, 0), (2, 0), (3, 0)]


async def test_a_gateway_that_was_restarted_has_what_was_answered_meanwhile(make):
    """For watchers who go on with a number of the gateway that is gone; JavaScript rounds numbers above 2**53."""
    replica, after, got = AnswerHub(recent=10), 0, []
    async with serving(replica) as address:
        for windows in [0], [1, 2]:
            replica.publish(map(make.answer, windows))
            hub = AnswerHub(recent=10)
            merger = ResultsMerger(hub)
            async with serving(hub) as gateway, open_channel(gateway) as channel:
                stub = results_pb2_grpc.ResultsStub(channel)
                call = stub.Watch(results_pb2.WatchRequest(after=after, recent=True))
                await call.initial_metadata()
                merger.follow([address])
                async with asyncio.timeout(30.0):
                    while not got or got[-1].window < windows[-1]:
                        got.append(await call.read())
                after = got[-1].number
                call.cancel()
            await merger.stop()
    assert sorted({each.window for each in got}) == [0, 1, 2]
    assert [each.missed for each in got] == [0] * len(got)
    assert all(each.number < 2**53 for each in got)


async def test_a_replica_is_followed_again_after_a_failure_of_another_kind(make, monkeypatch, until):
    """A certificate that vanishes while it is read, say."""
    failures = [OSError("no such file")]

    def open_channel_later(*arguments, **options):
        if failures:
            raise failures.pop()
        return open_channel(*arguments, **options)

    monkeypatch.setattr("cluster.gateway.merger.open_channel", open_channel_later)
    hub = AnswerHub()
    async with serving(hub) as address, merging() as (merger, _):
        merger.follow([address])
        await until(lambda: not failures)
        await asyncio.sleep(0)
        merger.follow([address])
        await until(lambda: len(hub._subscriptions) == 1)


async def test_how_long_an_answer_was_on_its_way_is_told(make, monkeypatch, until):
    clock_s = [100.0]
    hub, merged = AnswerHub(recent=10), AnswerHub(limit=10)
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: clock_s[0], time_ns=time.time_ns))
    merger = ResultsMerger(merged)
    hub.publish([make.answer(0)])
    clock_s[0] += 30.0
    async with serving(hub) as address:
        merger.follow([address])
        with merged.subscribe() as subscription:
            ((answer, _),) = await take(subscription, 1)
            assert (answer.age_s, answer.lag_s) == (30.0, 30.0 + answer.timing.latency_s)
        await merger.stop()


async def test_what_a_replica_has_sent_already_is_not_published_again(make, until):
    """However many questions a camera has: 400 answers of a minute, after a break."""
    hub, merged = AnswerHub(limit=1000, recent=1000), AnswerHub(limit=1000)
    merger = ResultsMerger(merged, retry_s=0.02)
    with merged.subscribe() as subscription:
        async with serving(hub) as address:
            merger.follow([address])
            await until(lambda: len(hub._subscriptions) == 1)
            hub.publish(make.answer(window, question=f"q{number}") for window in range(50) for number in range(8))
            await take(subscription, 400)
            merger.follow([])
            await until(lambda: len(hub._subscriptions) == 0)
            hub.publish([make.answer(50, question="q0"), make.answer(51, question="q0")])
            merger.follow([address])
            assert [answer.window for answer, _ in await take(subscription, 2)] == [50, 51]
        await merger.stop()
    assert merged.published == 402


async def test_a_removed_cameras_recent_answers_are_sent_to_nobody(make):
    hub = AnswerHub(recent=10)
    hub.publish([make.answer(0), make.answer(0, stream="yard"), make.answer(1)])
    hub.forget(lambda camera: camera == "gate")
    with hub.subscribe(recent=True) as watcher:
        assert [answer.stream for answer, _ in await take(watcher, 1)] == ["yard"]
        hub.publish([make.answer(2)])
        assert [answer.window for answer, _ in await take(watcher, 1)] == [2]


async def test_what_the_hub_missed_is_told_to_every_watcher_with_its_next_answer(make, until):
    """Whoever watches one camera, too: what was lost may have been of it."""
    hub = AnswerHub()
    with hub.subscribe() as everything, hub.subscribe(["yard"]) as yard:
        hub.publish([make.answer(0)], missed=3)
        hub.publish((), missed=2)
        hub.publish([make.answer(1), make.answer(0, stream="yard"), make.answer(1, stream="yard")])
        assert [missed for _, missed in await take(everything, 4)] == [3, 2, 0, 0]
        assert [missed for _, missed in await take(yard, 2)] == [5, 0]
        assert hub.missed == 5


async def test_what_the_gateway_missed_is_told_to_its_watchers(make, until):
    hub = AnswerHub()
    async with serving(hub) as address, merging() as (merger, merged):
        merger.follow([address])
        await until(lambda: len(hub._subscriptions) == 1)
        hub.publish([make.answer(5)], missed=3)
        assert await take(merged, 1) == [(make.answer(5), 3)]


async def test_whoever_comes_back_to_the_gateway_gets_what_was_told_meanwhile(tmp_path):
    """As results.proto says: first those since ``after``, or with ``recent`` those of the last minute."""
    async with gateway_parts.serving(tmp_path, cameras=2) as served, open_channel(served.rpc) as channel:
        stub = results_pb2_grpc.ResultsStub(channel)

        def publish(camera, *windows):
            served.publish([gateway_parts.make_answer(camera, "person", 0.9, window) for window in windows])

        async def watched(count, **request):
            call = stub.Watch(results_pb2.WatchRequest(**request))
            await call.initial_metadata()
            async with asyncio.timeout(30):
                if not request:
                    publish("cam-000", 1)
                got = [await call.read() for _ in range(count)]
            call.cancel()
            return got

        [first] = await watched(1)
        publish("cam-000", 2, 3)
        publish("cam-001", 3)
        for request in {"after": first.number}, {"recent": True, "after": first.number}:
            again = [(each.camera, each.window, each.missed) for each in await watched(3, **request)]
            assert again == [("cam-000", 2, 0), ("cam-000", 3, 0), ("cam-001", 3, 0)]
        assert [each.window for each in await watched(3, recent=True, cameras=["cam-000"])] == [1, 2, 3]
        # What a camera is made to forget is told to nobody, nor is anything of one that is gone.
        await served.gateway.forget_scores("cam-000", 0.0)
        assert [each.camera for each in await watched(1, recent=True)] == ["cam-001"]
        del served.world.cameras["cam-001"]
        served.gateway._live.look()
        await until_async(lambda: not served.gateway._hub._recent)
