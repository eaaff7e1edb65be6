"""``homeassistant``: cameras and their questions as entities of Home Assistant, by MQTT discovery.

https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.alerts.incident import AlertEvent, Incident
from cluster.alerts.sinks import DeliveryError, ReadPicture
from cluster.alerts.sinks.mqtt import Message, MqttPublisher
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Between looks at the connection, which must stand for the entities to be available."""
HEALTH = "health"
"""Object of the entity that is on while anything is wrong with the camera itself."""


@dataclass
class HomeAssistantSink:
    """One device per camera, with a binary sensor per question, one for the camera's health, and a picture.

    Configuration and states are retained; what a camera or question leaves behind when it is removed is deleted. While
    this process is away the broker says that everything is unavailable. Give one cluster one ``node``.
    """

    url: str = field(repr=False)
    node: str = "sightline"
    discovery: str = "homeassistant"
    client_id: str = ""
    ca_file: str = ""
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("node", "discovery"):
            if not re.fullmatch(r"[A-Za-z0-9_-]+", getattr(self, name)):
                raise ConfigError(f"{name} must be letters, digits, _ and -, not {getattr(self, name)!r}")
        self._available = Message(f"{self.node}/availability", "online", retain=True)
        self._broker = MqttPublisher(
            self.url,
            self.timeout_s,
            client_id=self.client_id,
            ca_file=self.ca_file,
            will=Message(self._available.topic, "offline", retain=True),
            listen=(f"{self.discovery}/+/{self.node}/+/config",),
            on_message=self._found,
        )
        self._wanted: dict[str, Message] | None = None
        self._published: dict[str, Message] = {}
        self._stale: set[str] = set()
        # Open incidents, by item.
        self._open: dict[str, set[str]] = {}
        self._read_picture: ReadPicture | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._syncing = asyncio.Lock()

    def use_pictures(self, read: ReadPicture) -> None:
        self._read_picture = read

    def follow_cameras(self, cameras: Mapping[str, Mapping[str, str]], ongoing: Sequence[Incident] = ()) -> None:
        for incident in ongoing:
            self._open.setdefault(_item_of(incident), set()).add(incident.id)
            # With its configuration, a state is published again.
            self._published.pop(self._topic("binary_sensor", _item_of(incident)), None)
        messages = [each for name, questions in cameras.items() for each in self._entities(name, questions)]
        self._wanted = {each.topic: each for each in messages}
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="home assistant")

    async def send(self, event: AlertEvent) -> None:
        await self._sync()
        incident = event.incident
        ours = self._open.setdefault(_item_of(incident), set())
        if event.kind == "end":
            ours.discard(incident.id)
        else:
            ours.add(incident.id)
        attributes = json.dumps(event.body()["incident"], ensure_ascii=False)
        base, kept = f"{self.node}/{_item_of(incident)}", self._has_entity(incident)
        messages = [
            Message(f"{base}/attributes", attributes, retain=kept),
            Message(f"{base}/state", "ON" if ours else "OFF", retain=kept),
        ]
        # Before the picture, whose disk may hang.
        await self._broker.publish(*messages)
        if (picture := await self._picture(incident)) is not None:
            kept = self._has_entity(incident)
            await self._broker.publish(Message(f"{self.node}/{_slug(incident.camera)}/picture", picture, retain=kept))

    async def close(self) -> None:
        task, self._keeping = self._keeping, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._broker.connected:
            with contextlib.suppress(DeliveryError):
                await self._broker.publish(Message(self._available.topic, "offline", retain=True))
        await self._broker.close()

    # -- inside ---------------------------------------------------------------------------------
    def _has_entity(self, incident: Incident) -> bool:
        """Whether the broker may keep what is said of it: nobody would delete that of a removed camera or question."""
        return self._wanted is not None and self._topic("binary_sensor", _item_of(incident)) in self._wanted

    async def _picture(self, incident: Incident) -> bytes | None:
        if self._read_picture is None:
            return None
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._read_picture(incident), self.timeout_s)
        return None

    async def _keep(self) -> None:
        while True:
            try:
                await self._sync()
            except DeliveryError as error:
                log.warning("home assistant: %s", error)
            await asyncio.sleep(CHECK_S)

    async def _sync(self) -> None:
        """Connect if need be, and publish what has changed since."""
        async with self._syncing:
            if not self._broker.connected:
                # A broker may have lost what it kept.
                self._published = {}
                await self._broker.publish(self._available)
            wanted = self._wanted
            if wanted is None:
                return
            gone = [topic for topic in self._stale | set(self._published) if topic not in wanted]
            for topic in gone:
                await self._broker.publish(*(Message(each, "", retain=True) for each in self._leftovers(topic)))
                self._published.pop(topic, None)
                self._stale.discard(topic)
            for topic, message in wanted.items():
                if self._published.get(topic) != message:
                    await self._broker.publish(*self._first_states(topic), message)
                    self._published[topic] = message

    def _found(self, topic: str, payload: bytes) -> None:
        """A configuration that the broker keeps: ours, or of a camera that is no more."""
        if payload and (self._wanted is None or topic not in self._wanted):
            self._stale.add(topic)

    def _first_states(self, topic: str) -> list[Message]:
        """What open incidents say, so that nothing is unknown."""
        if f"{self.discovery}/binary_sensor/" not in topic:
            return []
        item = topic.split("/")[-2]
        return [Message(f"{self.node}/{item}/state", "ON" if self._open.get(item) else "OFF", retain=True)]

    def _leftovers(self, topic: str) -> list[str]:
        """Retained topics of an entity, its configuration first."""
        base = f"{self.node}/{topic.split('/')[-2]}"
        return [topic, f"{base}/state", f"{base}/attributes", f"{base}/picture"]

    def _entities(self, camera: str, questions: Mapping[str, str]) -> list[Message]:
        device = {"identifiers": [f"{self.node}_{_slug(camera)}"], "name": camera, "manufacturer": "Sightline"}
        health = {"device_class": "problem", "entity_category": "diagnostic"}
        picture = {"image_topic": f"{self.node}/{_slug(camera)}/picture", "content_type": "image/jpeg"}
        return [
            *(self._sensor(_item(camera, subject), text, device) for subject, text in questions.items()),
            self._sensor(_item(camera, HEALTH), "Camera", device, **health),
            self._entity("image", _slug(camera), {"name": "Last incident", **picture}, device),
        ]

    def _sensor(self, item: str, name: str, device: Mapping[str, Any], **more: str) -> Message:
        base = f"{self.node}/{item}"
        topics = {"state_topic": f"{base}/state", "json_attributes_topic": f"{base}/attributes"}
        return self._entity("binary_sensor", item, {"name": name, **topics, **more}, device)

    def _entity(self, component: str, item: str, told: Mapping[str, Any], device: Mapping[str, Any]) -> Message:
        body = {
            **told,
            "unique_id": f"{self.node}_{item}",
            "object_id": f"{self.node}_{item}",
            "availability_topic": self._available.topic,
            "device": device,
            "origin": {"name": "Sightline"},
        }
        return Message(self._topic(component, item), json.dumps(body, ensure_ascii=False), retain=True)

    def _topic(self, component: str, item: str) -> str:
        return f"{self.discovery}/{component}/{self.node}/{item}/config"


def _item(camera: str, subject: str) -> str:
    return f"{_slug(camera)}-{_slug(subject)}"


def _item_of(incident: Incident) -> str:
    """That of its question, or of the camera's health."""
    return _item(incident.camera, incident.subject if incident.kind == "question" else HEALTH)


def _slug(name: str) -> str:
    """A name in a topic's letters; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if plain == name else f"{plain}_{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
