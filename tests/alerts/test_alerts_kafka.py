"""The Kafka sink against a broker of its protocol (kafka_broker.py) that goes away, freezes, dies and returns."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.alerts.sinks import DeliveryError
from cluster.alerts.sinks.kafka import KafkaSink
from cluster.errors import ConfigError

kafka = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")


class Broker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = process.stdout.readline().strip()

    def obey(self, order: str) -> None:
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == order

    def records(self, count: int, topic: str = "sightline.alerts") -> list[tuple[str, str, dict]]:
        """(key, idempotency key, body) of the first ``count`` records of all partitions."""
        consumer = kafka.Consumer({"bootstrap.servers": self.address, "group.id": "test", "enable.auto.commit": False})
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([kafka.TopicPartition(topic, number, 0) for number in partitions])
        found = []
        while len(found) < count:
            message = consumer.poll(10)
            assert message is not None, f"only {len(found)} of {count} records"
            assert message.error() is None
            headers = dict(message.headers() or [])
            found.append((message.key().decode(), headers["idempotency-key"].decode(), json.loads(message.value())))
        consumer.close()
        return found


@pytest.fixture
def broker():
    with serving() as broker:
        yield broker


@contextmanager
def serving():
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "kafka_broker.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Broker(process)
        finally:
            process.kill()


async def test_records_arrive_with_their_keys(broker, make):
    sink = KafkaSink(broker.address)
    events = [make.event(number % 3, events=number) for number in range(12)]
    await asyncio.gather(*(sink.send(event) for event in events))
    await sink.close()
    records = await asyncio.to_thread(broker.records, 12)
    assert sorted(key for _, key, _ in records) == sorted(event.key for event in events)
    for incident, key, body in records:
        assert (body["incident"]["id"], body["key"]) == (incident, key)


async def delivered(sink, event):
    """As the dispatcher does it: a machine that is busy may not have a connection within the first second."""
    for _ in range(20):
        with contextlib.suppress(DeliveryError):
            return await sink.send(event)
        await asyncio.sleep(0.1)
    raise AssertionError("the broker took nothing")


async def test_a_broker_that_goes_away_and_returns(broker, make):
    sink = KafkaSink(broker.address, timeout_s=1.0)
    await delivered(sink, make.event(0))
    broker.obey("down")
    with pytest.raises(DeliveryError, match="kafka: ") as failure:
        await sink.send(make.event(1))
    assert failure.value.retryable
    broker.obey("up")
    await delivered(sink, make.event(1))
    await sink.close()
    keys = {key for _, key, _ in await asyncio.to_thread(broker.records, 2)}
    assert keys == {make.event(0).key, make.event(1).key}


async def test_a_frozen_broker_costs_its_timeout_and_no_more(broker, make):
    sink = KafkaSink(broker.address, timeout_s=1.0)
    await delivered(sink, make.event(0))
    broker.process.send_signal(signal.SIGSTOP)
    # Returns once all its threads have stopped; until then it may still answer.
    await asyncio.to_thread(os.waitpid, broker.process.pid, os.WUNTRACED)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(DeliveryError) as failure:
                await sink.send(make.event(1))
            await sink.close()
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert failure.value.retryable


async def test_a_broker_that_died(broker, make):
    sink = KafkaSink(broker.address, timeout_s=1.0)
    await delivered(sink, make.event(0))
    broker.process.kill()
    with pytest.raises(DeliveryError) as failure:
        await sink.send(make.event(1))
    assert failure.value.retryable
    await sink.close()
    # Another cluster under another address, as after a restored backup: the sink is made anew.
    with serving() as other:
        again = KafkaSink(other.address)
        await again.send(make.event(1))
        await again.close()


class Fatal:
    """A producer after a fatal error, as when the brokers lost records it had sent: it takes nothing any more."""

    def produce(self, *_, **__):
        raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._FATAL))

    def poll(self, timeout_s):
        time.sleep(timeout_s)

    def purge(self): ...
    def flush(self, timeout_s): ...


async def test_a_producer_that_can_never_send_again_is_replaced(broker, make, monkeypatch):
    sink = KafkaSink(broker.address)
    with monkeypatch.context() as patch:
        patch.setattr(sink, "_make", Fatal)
        with pytest.raises(DeliveryError, match="kafka: ") as failure:
            await sink.send(make.event(0))
    assert failure.value.retryable
    await delivered(sink, make.event(0))
    await sink.close()


async def test_an_alert_that_is_too_large_is_refused_for_good(broker, make):
    sink = KafkaSink(broker.address, settings={"message.max.bytes": "1000"})
    with pytest.raises(DeliveryError, match="too large") as failure:
        await sink.send(make.event(0, text="x" * 2000))
    assert not failure.value.retryable
    await delivered(sink, make.event(1))
    await sink.close()


async def test_settings_that_librdkafka_does_not_know(make):
    sink = KafkaSink("127.0.0.1:9", settings={"no.such.key": "1"})
    with pytest.raises(DeliveryError, match="kafka settings: ") as failure:
        await sink.send(make.event(0))
    assert not failure.value.retryable
    await sink.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"brokers": " "}, "brokers must be addresses"),
        ({"brokers": "h:1", "topic": "a/b"}, "topic must be letters"),
        ({"brokers": "h:1", "settings": {"acks": "0"}}, "leave acks alone"),
        ({"brokers": "h:1", "timeout_s": 0.0}, "timeout_s must be above 0"),
    ],
)
def test_what_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        KafkaSink(**options)
