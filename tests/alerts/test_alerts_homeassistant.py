"""Home Assistant's discovery against a real broker: configuration that stays, states, availability, removal."""

import asyncio
import json
import threading

import pytest
from alert_parts import configuration, running
from sink_parts import mosquitto

from cluster.alerts.health import CameraStates
from cluster.alerts.sinks import DeliveryError, homeassistant
from cluster.alerts.sinks.homeassistant import HomeAssistantSink
from cluster.config import camera_settings
from cluster.errors import ConfigError

mqtt = pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")

CAMERAS = {"gate": {"person": "Is a person there?"}, "Hof/3": {"fire": "Is there fire?"}}


class House:
    """What a Home Assistant that starts now is told: retained messages first, then those that come."""

    def __init__(self, port):
        self.topics = {}
        subscribed = threading.Event()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self._client.on_message = self._take
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._client.subscribe("#", qos=1)
        assert subscribed.wait(5)

    def _take(self, _client, _data, message):
        if message.payload:
            self.topics[message.topic] = message.payload
        else:
            self.topics.pop(message.topic, None)

    @property
    def entities(self):
        """Configurations by unique id."""
        found = [json.loads(body) for topic, body in self.topics.items() if topic.endswith("/config")]
        return {each["unique_id"]: each for each in found}

    def state(self, unique_id):
        return self.topics.get(self.entities[unique_id]["state_topic"], b"").decode()

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(homeassistant, "CHECK_S", 0.05)


async def test_cameras_and_questions_are_entities(tmp_path, make, until):
    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        sink.follow_cameras(CAMERAS)
        early = House(broker.port)
        await until(lambda: len(early.entities) == 6)
        late = House(broker.port)
        await until(lambda: late.entities == early.entities)
        early.close()
        # The documented topic: <discovery>/<component>/<node>/<object>/config, of letters, digits, _ and -.
        assert "homeassistant/binary_sensor/sightline/gate-person/config" in late.topics
        person = late.entities["sightline_gate-person"]
        assert person["name"] == "Is a person there?"
        assert person["device"] == {"identifiers": ["sightline_gate"], "name": "gate", "manufacturer": "Sightline"}
        assert person["availability_topic"] == "sightline/availability"
        assert late.topics["sightline/availability"] == b"online"
        yard = next(each for name, each in late.entities.items() if "fire" in name)
        assert yard["device"]["name"] == "Hof/3"
        assert all(topic.count("/") == 4 for topic in late.topics if topic.endswith("/config"))
        assert late.state("sightline_gate-person") == "OFF"
        await sink.send(make.event())
        await until(lambda: late.state("sightline_gate-person") == "ON")
        assert late.state("sightline_gate-health") == "OFF"
        assert json.loads(late.topics[person["json_attributes_topic"]])["score"] == 0.75
        # Two incidents of one question: on until both are over.
        await sink.send(make.event(1))
        await sink.send(make.event(event_kind="end", ended_s=1_030.0))
        assert late.state("sightline_gate-person") == "ON"
        await sink.send(make.event(1, event_kind="end", ended_s=1_030.0))
        await until(lambda: late.state("sightline_gate-person") == "OFF")
        await sink.send(make.event(2, kind="health", subject="covered-lens"))
        await until(lambda: late.state("sightline_gate-health") == "ON")
        await sink.close()
        await until(lambda: late.topics["sightline/availability"] == b"offline")
        late.close()


async def test_nothing_is_kept_of_incidents_that_are_over_and_cameras_that_are_gone(tmp_path, make, until):
    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        sink.follow_cameras(CAMERAS)
        for number in range(20):
            await sink.send(make.event(number, subject=f"question-{number}"))
            await sink.send(make.event(number, subject=f"question-{number}", event_kind="end", ended_s=1_100.0))
        assert sink._open == {}
        # The end of this one is a dead letter.
        await sink.send(make.event())
        house = House(broker.port)
        await until(lambda: "sightline_gate-person" in house.entities and house.state("sightline_gate-person") == "ON")
        sink.follow_cameras({name: asked for name, asked in CAMERAS.items() if name != "gate"})
        await until(lambda: "sightline_gate-person" not in house.entities)
        sink.follow_cameras(CAMERAS)
        await until(lambda: "sightline_gate-person" in house.entities)
        await until(lambda: house.state("sightline_gate-person") == "OFF")
        await sink.close()
        house.close()


async def test_the_snapshot_is_a_picture_entity(tmp_path, make, until):
    async def read(_incident):
        return b"\xff\xd8picture"

    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        sink.use_pictures(read)
        sink.follow_cameras(CAMERAS)
        house = House(broker.port)
        await sink.send(make.event())
        await until(lambda: "sightline/gate/picture" in house.topics)
        assert house.topics["sightline/gate/picture"] == b"\xff\xd8picture"
        assert house.entities["sightline_gate"]["image_topic"] == "sightline/gate/picture"
        await sink.close()
        house.close()


async def test_the_state_does_not_wait_for_the_picture(tmp_path, make, until):
    """Its disk may hang: the state is there meanwhile, and the next event follows."""

    async def hangs(_incident):
        await asyncio.Event().wait()

    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}", timeout_s=2.0)
        sink.use_pictures(hangs)
        sink.follow_cameras(CAMERAS)
        house = House(broker.port)
        sending = asyncio.create_task(sink.send(make.event()))
        await until(lambda: house.topics.get("sightline/gate-person/state") == b"ON")
        assert not sending.done()
        await sending
        sink.timeout_s = 0.1
        await sink.send(make.event(event_kind="end", ended_s=1_030.0))
        await until(lambda: house.state("sightline_gate-person") == "OFF")
        await sink.close()
        house.close()


async def test_an_incident_goes_on_over_a_restart_of_alerting(tmp_path, make, until):
    """The second process finds it in its folder; the broker keeps nothing that would say so."""
    sinks = [{"name": "home", "kind": "homeassistant"}, {"name": "deaf", "kind": "homeassistant"}]
    with mosquitto(tmp_path) as broker:
        for each, limits in zip(sinks, ({}, {"min_severity": "critical"}), strict=True):
            options = {"url": f"mqtt://127.0.0.1:{broker.port}", "node": each["name"], "client_id": each["name"]}
            each |= {"options": options, **limits}
        config = configuration(sinks=sinks)
        settings = tuple(camera_settings(config, each) for each in config.cameras)
        watched = CameraStates(1, settings, tuple(make.status(each.name) for each in settings), {})
        async with running(config, tmp_path / "box") as service:
            await service.update_cameras(watched)
            for window in (0, 1):
                service.accept_answer(make.answer(window))
            await until(lambda: service._dispatcher.status()["home"].delivered == 1)
        broker.kill()
        (tmp_path / "mosquitto.db").unlink(missing_ok=True)
        await asyncio.to_thread(broker.start)
        house, states = House(broker.port), []
        heard = house._client.on_message
        house._client.on_message = lambda *told: (states.append((told[2].topic, told[2].payload)), heard(*told))
        async with running(config, tmp_path / "box") as service:
            await service.update_cameras(watched)
            await until(lambda: len(house.entities) == 12)
            assert house.state("home_gate-person") == "ON"
            assert ("home/gate-person/state", b"OFF") not in states
            # Neither another camera's, nor that of a sink which was not told.
            assert house.state("home_yard-person") == house.state("deaf_gate-person") == "OFF"
            for window in (2, 3):
                service.accept_answer(make.answer(window, 0.0))
            await until(lambda: house.state("home_gate-person") == "OFF")
        house.close()


async def test_a_camera_that_is_removed_leaves_nothing(tmp_path, make, until):
    async def read(_incident):
        return b"\xff\xd8picture"

    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        sink.follow_cameras(CAMERAS)
        house = House(broker.port)
        await sink.send(make.event())
        await until(lambda: len(house.entities) == 6)
        sink.follow_cameras({"gate": {"car": "Is a car there?"}})
        await until(lambda: set(house.entities) == {"sightline_gate-car", "sightline_gate-health", "sightline_gate"})
        assert not [topic for topic in house.topics if "person" in topic or "fire" in topic]
        # The ends of their incidents come after that, with a snapshot that is there still.
        sink.use_pictures(read)
        await sink.send(make.event(event_kind="end", ended_s=1_030.0))
        await sink.send(make.event(1, camera="Hof/3", subject="fire", event_kind="end", ended_s=1_030.0))
        late = House(broker.port)
        await until(lambda: len(late.entities) == 3)
        assert not [topic for topic in late.topics if "person" in topic or "fire" in topic or "Hof" in topic]
        late.close()
        # Removed while this process was away: a new one finds what the broker kept.
        await sink.close()
        again = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        again.follow_cameras({"yard": {}})
        await until(lambda: set(house.entities) == {"sightline_yard-health", "sightline_yard"})
        await again.close()
        house.close()


async def test_when_this_process_dies_everything_is_unavailable(tmp_path, until):
    """The broker tells it, by the will of a connection that broke."""
    with mosquitto(tmp_path) as broker:
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        sink.follow_cameras(CAMERAS)
        house = House(broker.port)
        await until(lambda: house.topics.get("sightline/availability") == b"online" and len(house.entities) == 6)
        sink._sync_task.cancel()
        # As a killed process: no goodbye.
        sink._broker._client._sock.close()
        await until(lambda: house.topics["sightline/availability"] == b"offline")
        await sink._broker.close()
        house.close()


async def test_a_broker_that_was_down_gets_all_of_it(tmp_path, make, until):
    with mosquitto(tmp_path) as broker:
        broker.kill()
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}", timeout_s=2.0)
        sink.follow_cameras(CAMERAS)
        with pytest.raises(DeliveryError) as failure:
            await sink.send(make.event())
        assert failure.value.retryable
        await asyncio.to_thread(broker.start)
        house = House(broker.port)
        await until(lambda: len(house.entities) == 6)
        await sink.send(make.event())
        await until(lambda: house.state("sightline_gate-person") == "ON")
        # It forgets everything, as one without a disk does, while an incident goes on.
        broker.kill()
        (tmp_path / "mosquitto.db").unlink(missing_ok=True)
        house.close()
        await asyncio.to_thread(broker.start)
        house = House(broker.port)
        await until(lambda: len(house.entities) == 6)
        await sink.close()
        house.close()


async def test_a_restarted_process_tells_a_broker_that_lost_everything_what_goes_on(tmp_path, make, until):
    """It delivers what an earlier one had not before it knows the cameras, of which the broker has configurations."""
    with mosquitto(tmp_path) as broker:
        earlier = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        earlier.follow_cameras(CAMERAS)
        house = House(broker.port)
        await until(lambda: len(house.entities) == 6)
        await earlier.close()
        sink = HomeAssistantSink(f"mqtt://127.0.0.1:{broker.port}")
        await sink.send(make.event())
        await until(lambda: len(sink._stale) == 6)
        sink.follow_cameras(CAMERAS)
        await until(lambda: len(sink._published) == 6)
        broker.kill()
        (tmp_path / "mosquitto.db").unlink(missing_ok=True)
        house.close()
        await asyncio.to_thread(broker.start)
        house = House(broker.port)
        await until(lambda: len(house.entities) == 6)
        await until(lambda: house.state("sightline_gate-person") == "ON")
        assert house.state("sightline_gate-health") == "OFF"
        await sink.close()
        house.close()


@pytest.mark.parametrize("options", [{"node": "a/b"}, {"discovery": ""}, {"node": "#"}])
def test_what_is_no_topic(options):
    with pytest.raises(ConfigError, match="must be letters, digits"):
        HomeAssistantSink("mqtt://h", **options)
