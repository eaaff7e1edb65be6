"""Handing alerts to sinks: order, patience, dead letters, sinks that are down, slow, or choosy."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.alerts.dispatcher import CONCURRENCY, Dispatcher, delay_s
from cluster.alerts.incident import Delivery
from cluster.alerts.sinks import DeliveryError
from cluster.config.alerts import RetryConfig

QUICK = RetryConfig(first_s=0.01, longest_s=0.05)


class Recorder:
    """A sink that takes what ``verdict`` does not raise at, and remembers in which order."""

    def __init__(self, verdict=lambda event: None, delay_s: float = 0.0) -> None:
        self.verdict, self.delay_s = verdict, delay_s
        self.got: list[str] = []
        self.tries = self.at_once = self.most_at_once = 0
        self.closed = False

    async def send(self, event) -> None:
        self.tries += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            self.verdict(event)
        finally:
            self.at_once -= 1
        self.got.append(event.key)

    async def close(self) -> None:
        self.closed = True


class Desk:
    def __init__(self, retry=QUICK, **sinks) -> None:
        self.settled: list[Delivery] = []
        self.dispatcher = Dispatcher(sinks, self.settled.append, retry=retry, seed=1)

    async def __aenter__(self) -> Desk:
        self.dispatcher.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.dispatcher.stop()

    def states(self, state) -> list[str]:
        return [each.event.key for each in self.settled if each.state == state]


def now_event(make, number, **fields):
    return make.event(number, at_s=time.time(), **fields)


def refuse(*, retryable):
    raise DeliveryError("no", retryable=retryable)


@pytest.mark.parametrize(("attempt", "draw", "wanted"), [(1, 0, 0.5), (1, 1, 0.25), (4, 0, 4.0), (99, 0, 60.0)])
def test_patience(attempt, draw, wanted):
    assert delay_s(RetryConfig(), attempt, draw) == wanted


async def test_everything_arrives_once(make, until):
    sink = Recorder(delay_s=0.002)
    async with Desk(ops=sink) as desk:
        desk.dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(50))
        await until(lambda: len(desk.states("delivered")) == 50)
        assert sorted(sink.got) == sorted(now_event(make, n).key for n in range(50))
        assert 1 < sink.most_at_once <= CONCURRENCY
        assert desk.dispatcher.status()["ops"].waiting == 0
    assert sink.closed


async def test_the_events_of_one_incident_stay_in_order(make, until):
    """Whatever fails in between."""
    failures = iter([True, False, True, True] * 50)
    sink = Recorder(lambda event: refuse(retryable=True) if next(failures, False) else None, delay_s=0.001)
    events = [now_event(make, number, events=part) for part in range(1, 6) for number in range(4)]
    async with Desk(ops=sink) as desk:
        desk.dispatcher.enqueue(Delivery(event, "ops") for event in events)
        await until(lambda: len(desk.states("delivered")) == len(events))
    for number in range(4):
        mine = [key for key in sink.got if key.startswith(f"{number:016x}")]
        assert mine == [f"{number:016x}-{part}" for part in range(1, 6)]


async def test_a_sink_that_is_down_is_tried_gently_and_gets_everything_when_it_is_back(make, until):
    away = [True]
    sink = Recorder(lambda event: refuse(retryable=True) if away[0] else None, delay_s=0.001)
    async with Desk(RetryConfig(first_s=0.01, longest_s=0.1), ops=sink) as desk:
        desk.dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(100))
        await until(lambda: sink.tries >= CONCURRENCY + 4)
        before, sink.most_at_once = sink.tries, 0
        await until(lambda: sink.tries >= before + 10)
        assert sink.most_at_once == 1
        assert desk.dispatcher.status()["ops"].trouble == "no"
        away[0] = False
        await until(lambda: len(desk.states("delivered")) == 100)
        assert desk.dispatcher.status()["ops"].trouble == ""


async def test_a_sink_that_says_when_to_come_back_is_left_alone_until_then(make, until):
    """As with ``Retry-After``: neither its alert nor another is tried before."""
    tried_s = []

    def busy(_):
        tried_s.append(time.monotonic())
        if len(tried_s) == 1:
            raise DeliveryError("too many", retryable=True, after_s=0.4)

    async with Desk(ops=Recorder(busy)) as desk:
        desk.dispatcher.enqueue([Delivery(now_event(make, 0), "ops")])
        await until(lambda: tried_s)
        desk.dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(1, 5))
        await until(lambda: len(desk.states("delivered")) == 5)
    assert tried_s[1] - tried_s[0] >= 0.39


async def test_one_sinks_trouble_is_not_anothers(make, until):
    never, good = Recorder(lambda event: refuse(retryable=True)), Recorder()
    async with Desk(never=never, good=good) as desk:
        for sink in ("never", "good"):
            desk.dispatcher.enqueue(Delivery(now_event(make, n), sink) for n in range(20))
        await until(lambda: len(good.got) == 20)
        assert desk.dispatcher.status()["never"].waiting == 20


async def test_an_alert_that_alone_is_refused_holds_nobody_up(make, until):
    bad = now_event(make, 3).key
    sink = Recorder(lambda event: refuse(retryable=True) if event.key == bad else None)
    async with Desk(RetryConfig(first_s=0.01, longest_s=0.02), ops=sink) as desk:
        for n in range(200):
            desk.dispatcher.enqueue([Delivery(now_event(make, n), "ops")])
            await asyncio.sleep(0.001)
        await until(lambda: len(desk.states("delivered")) == 199, timeout_s=5)
        assert desk.dispatcher.status()["ops"].waiting == 1


async def test_what_a_sink_will_never_take_is_a_dead_letter(make, until):
    sink = Recorder(lambda event: refuse(retryable=False) if event.incident.events == 1 else None)
    async with Desk(ops=sink) as desk:
        first, second = now_event(make, 0, events=1), now_event(make, 0, events=2)
        desk.dispatcher.enqueue([Delivery(first, "ops"), Delivery(second, "ops")])
        await until(lambda: desk.states("delivered") == [second.key])
        assert desk.states("dead") == [first.key]
        assert desk.settled[0].error == "no"


async def test_a_sink_that_refuses_for_good_does_not_work(make, until):
    """A wrong token, a path that is not there: nothing arrives, and nothing is tried again."""
    wrong = [True]
    sink = Recorder(lambda event: refuse(retryable=False) if wrong[0] else None)
    async with Desk(ops=sink) as desk:
        desk.dispatcher.enqueue([Delivery(now_event(make, 0), "ops")])
        await until(lambda: desk.states("dead"))
        assert desk.dispatcher.status()["ops"].trouble == "no"
        wrong[0] = False
        desk.dispatcher.enqueue([Delivery(now_event(make, 1), "ops")])
        await until(lambda: desk.states("delivered"))
        assert desk.dispatcher.status()["ops"].trouble == ""


async def test_an_old_alert_is_given_up_and_a_young_one_is_not(make, until):
    sink = Recorder(lambda event: refuse(retryable=True))
    async with Desk(RetryConfig(first_s=0.01, longest_s=0.02, give_up_s=100.0), ops=sink) as desk:
        old, young = make.event(0, at_s=time.time() - 101), now_event(make, 1)
        desk.dispatcher.enqueue([Delivery(old, "ops"), Delivery(young, "ops")])
        await until(lambda: desk.states("dead") == [old.key] and len(desk.states("pending")) > 3)


async def test_a_sink_that_is_not_there_any_more(make):
    async with Desk() as desk:
        desk.dispatcher.enqueue([Delivery(now_event(make, 0), "gone")])
        assert desk.states("dead") == [now_event(make, 0).key]


async def test_a_sink_with_a_bug_is_one_that_fails(make, until):
    def bug(event):
        raise RuntimeError("oh")

    async with Desk(ops=Recorder(bug)) as desk:
        desk.dispatcher.enqueue([Delivery(now_event(make, 0), "ops")])
        await until(lambda: desk.states("pending"))
        assert desk.settled[0].error == "RuntimeError: oh"


async def test_too_much_drops_the_oldest_and_counts(make, until):
    gate = asyncio.Event()

    class Slow(Recorder):
        async def send(self, event):
            await gate.wait()
            await super().send(event)

    sink = Slow()
    settled: list[Delivery] = []
    dispatcher = Dispatcher({"ops": sink}, settled.append, retry=QUICK, most=20)
    dispatcher.start()
    dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(8))
    await asyncio.sleep(0.01)
    dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(8, 40))
    assert dispatcher.status()["ops"].waiting == 20
    gate.set()
    await until(lambda: len(sink.got) == 20)
    # Those under way went out, of the others the newest.
    assert sorted(int(key[:16], 16) for key in sink.got) == [*range(8), *range(28, 40)]
    assert dispatcher.status()["ops"].dropped == 20
    await dispatcher.stop()


async def test_a_sink_that_stays_down_while_alerts_keep_coming_holds_no_more_than_its_queue(make, until):
    """Each attempt's alert is dropped before its retry is due, behind newer ones that were never tried."""

    def enqueue_more(_event):
        first = 20 * sink.tries
        dispatcher.enqueue(Delivery(now_event(make, n), "ops") for n in range(first, first + 20))
        refuse(retryable=True)

    sink = Recorder(enqueue_more)
    retry = RetryConfig(first_s=0.0005, longest_s=0.001)
    dispatcher = Dispatcher({"ops": sink}, lambda _: None, retry=retry, most=20)
    dispatcher.start()
    dispatcher.enqueue([Delivery(now_event(make, 0), "ops")])
    await until(lambda: sink.tries > 200)
    assert dispatcher.status()["ops"].waiting == 20
    assert len(dispatcher._lanes["ops"]._due) <= 3 * 20
    await dispatcher.stop()
