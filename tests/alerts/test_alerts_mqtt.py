"""The MQTT sink against a real broker that is killed, frozen, and started again."""

import asyncio
import json
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from sink_parts import mosquitto, program

from cluster.alerts.sinks import DeliveryError
from cluster.alerts.sinks.mqtt import MqttSink
from cluster.errors import ConfigError
from cluster.lab.bench.processes import free_port

mqtt = pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")


class Subscriber:
    """Listens to a topic until it is closed."""

    def __init__(self, port: int, topic: str = "sightline/#") -> None:
        self.got: list[tuple[str, dict]] = []
        subscribed = threading.Event()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self._client.on_message = lambda _client, _data, message: self.got.append(
            (message.topic, json.loads(message.payload))
        )
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._client.subscribe(topic, qos=1)
        assert subscribed.wait(5)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


async def test_alerts_arrive(tmp_path, make, until):
    with mosquitto(tmp_path) as broker:
        subscriber = Subscriber(broker.port)
        sink = MqttSink(f"mqtt://127.0.0.1:{broker.port}")
        events = [make.event(number, event_kind="end" if number % 2 else "new") for number in range(20)]
        await asyncio.gather(*(sink.send(event) for event in events))
        await until(lambda: len(subscriber.got) == 20)
        assert sorted(key for _, body in subscriber.got for key in [body["key"]]) == sorted(e.key for e in events)
        assert {topic for topic, _ in subscriber.got} == {"sightline/gate/person/new", "sightline/gate/person/end"}
        assert next(body for _, body in subscriber.got if body["key"] == events[0].key) == events[0].body()
        await sink.close()
        subscriber.close()


async def test_a_broker_that_is_killed_and_returns(tmp_path, make, until):
    with mosquitto(tmp_path) as broker:
        sink = MqttSink(f"mqtt://127.0.0.1:{broker.port}", timeout_s=3.0)
        await sink.send(make.event(0))
        broker.kill()
        with pytest.raises(DeliveryError) as failure:
            await sink.send(make.event(1))
        assert failure.value.retryable
        with pytest.raises(DeliveryError, match="no MQTT broker at") as failure:
            await sink.send(make.event(1))
        await asyncio.to_thread(broker.start)
        subscriber = Subscriber(broker.port)
        await sink.send(make.event(2))
        await until(lambda: [body["key"] for _, body in subscriber.got] == [make.event(2).key])
        await sink.close()
        subscriber.close()


async def test_a_broker_that_does_not_acknowledge(tmp_path, make):
    """It is stopped, so connections stay and nothing comes back: what it did not acknowledge was not taken."""
    with mosquitto(tmp_path) as broker:
        sink = MqttSink(f"mqtt://127.0.0.1:{broker.port}", timeout_s=0.5)
        await sink.send(make.event(0))
        broker._process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeliveryError, match=r"did not acknowledge within 0\.5 s") as failure:
                await sink.send(make.event(1))
        finally:
            broker._process.send_signal(signal.SIGCONT)
        assert failure.value.retryable
        await sink.send(make.event(1))
        await sink.close()


class Client:
    """paho's client, connected to a broker that acknowledges when the test says so."""

    made: ClassVar[list] = []

    def __init__(self, *_, **__):
        self.made.append(self)
        self.published = []

    def connect(self, *_):
        self.is_connected = lambda: True

    def loop_start(self):
        self.on_connect(self, None, None, SimpleNamespace(is_failure=False), None)

    def publish(self, topic, payload, **_):
        self.published.append(payload)
        return SimpleNamespace(rc=0, mid=len(self.published))

    def acknowledge(self, mid):
        self.on_publish(self, None, mid, None, None)

    def disconnect(self):
        pass

    loop_stop = disconnect


async def test_an_acknowledgement_on_an_earlier_connection_is_not_one_of_this(make, monkeypatch, until):
    """Every connection numbers its messages from 1."""
    monkeypatch.setattr(mqtt, "Client", Client)
    sink = MqttSink("mqtt://127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(DeliveryError, match="did not acknowledge"):
        await sink.send(make.event(0))
    sending = asyncio.create_task(sink.send(make.event(1)))
    await until(lambda: [len(client.published) for client in Client.made] == [1, 1])
    early, late = Client.made
    early.acknowledge(1)
    await asyncio.sleep(0.1)
    assert not sending.done()
    late.acknowledge(1)
    await sending


async def test_a_broker_that_wants_a_password(tmp_path, make):
    users = tmp_path / "users"
    command = [program("mosquitto_passwd"), "-b", "-c", str(users), "ann", "ge:heim"]
    await asyncio.to_thread(subprocess.run, command, check=True)
    with mosquitto(tmp_path, "allow_anonymous false", f"password_file {users}") as broker:
        with pytest.raises(DeliveryError, match="refused the connection: ") as failure:
            await MqttSink(f"mqtt://127.0.0.1:{broker.port}").send(make.event(0))
        assert failure.value.retryable
        sink = MqttSink(f"mqtt://ann:ge%3Aheim@127.0.0.1:{broker.port}", client_id="sightline")
        await sink.send(make.event(0))
        await sink.close()


async def test_nobody_there(make):
    sink = MqttSink(f"mqtt://127.0.0.1:{free_port()}", timeout_s=20.0)
    began = time.monotonic()
    with pytest.raises(DeliveryError, match="no MQTT broker at 127"):
        await sink.send(make.event(0))
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("url", ["", "host", "http://host", "mqtt://", "mqtt://h:port", "mqtt://h:99999"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="url must be an address like mqtt"):
        MqttSink(url)


@pytest.mark.parametrize("topic", ["", "{where}", "a/+/b", "a/#", "{"])
def test_what_is_no_topic(topic):
    with pytest.raises(ConfigError, match="topic m"):
        MqttSink("mqtt://h", topic=topic)
