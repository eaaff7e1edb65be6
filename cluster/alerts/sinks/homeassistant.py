"""``homeassistant``: cameras and questions as Home Assistant entities, by MQTT discovery.

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
"""Interval of connection checks, in seconds: entities are unavailable while the connection is down."""
HEALTH = "health"
"""Object id of the entity that is on while any health incident of the camera is open."""


@dataclass
class HomeAssistantSink:
    """One device per camera: a binary sensor per question, one for the camera's health, and an image.

    Configurations and states are retained, and deleted when their camera or question is removed. While this process is
    down, the broker reports all entities as unavailable. ``node`` must be unique per cluster.
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
            on_message=self._on_config,
        )
        self._wanted: dict[str, Message] | None = None
        self._published: dict[str, Message] = {}
        self._stale: set[str] = set()
        # Ids of open incidents by item (the object id of an entity).
        self._open: dict[str, set[str]] = {}
        self._read_picture: ReadPicture | None = None
        self._sync_task: asyncio.Task[None] | None = None
        self._syncing = asyncio.Lock()

    def use_pictures(self, read: ReadPicture) -> None:
        self._read_picture = read

    def follow_cameras(self, cameras: Mapping[str, Mapping[str, str]], ongoing: Sequence[Incident] = ()) -> None:
        for incident in ongoing:
            self._open.setdefault(_item_of(incident), set()).add(incident.id)
            # Publishing the configuration again also publishes the state.
            self._published.pop(self._topic("binary_sensor", _item_of(incident)), None)
        messages = [each for name, questions in cameras.items() for each in self._entities(name, questions)]
        self._wanted = {each.topic: each for each in messages}
        # The end of an incident may never have been delivered.
        self._open = {
            each: ids for each, ids in self._open.items() if self._topic("binary_sensor", each) in self._wanted
        }
        if self._sync_task is None or self._sync_task.done():
            self._sync_task = asyncio.get_running_loop().create_task(self._keep_synced(), name="home assistant")

    async def send(self, event: AlertEvent) -> None:
        await self._sync()
        incident, item = event.incident, _item_of(event.incident)
        open_ids = self._open.pop(item, set()) - {incident.id}
        if event.kind != "end":
            open_ids.add(incident.id)
        if open_ids:
            self._open[item] = open_ids
        attributes = json.dumps(event.body()["incident"], ensure_ascii=False)
        base, retain = f"{self.node}/{item}", self._has_entity(incident)
        messages = [
            Message(f"{base}/attributes", attributes, retain=retain),
            Message(f"{base}/state", "ON" if open_ids else "OFF", retain=retain),
        ]
        # Before the picture, since reading it may hang on the disk.
        await self._broker.publish(*messages)
        if (picture := await self._picture(incident)) is not None:
            retain = self._has_entity(incident)
            await self._broker.publish(Message(f"{self.node}/{_slug(incident.camera)}/picture", picture, retain=retain))

    async def close(self) -> None:
        task, self._sync_task = self._sync_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._broker.connected:
            with contextlib.suppress(DeliveryError):
                await self._broker.publish(Message(self._available.topic, "offline", retain=True))
        await self._broker.close()

    # -- inside ---------------------------------------------------------------------------------
    def _has_entity(self, incident: Incident) -> bool:
        """Whether its messages may be retained: those of a removed camera or question would never be deleted."""
        return self._wanted is not None and self._topic("binary_sensor", _item_of(incident)) in self._wanted

    async def _picture(self, incident: Incident) -> bytes | None:
        if self._read_picture is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                return await self._read_picture(incident)
        return None

    async def _keep_synced(self) -> None:
        while True:
            try:
                await self._sync()
            except DeliveryError as error:
                log.warning("home assistant: %s", error)
            await asyncio.sleep(CHECK_S)

    async def _sync(self) -> None:
        """Connect if necessary, and publish changed entities."""
        async with self._syncing:
            if not self._broker.connected:
                # The broker may have lost its retained messages.
                self._published = {}
                await self._broker.publish(self._available)
            wanted = self._wanted
            if wanted is None:
                return
            removed = [topic for topic in self._stale | set(self._published) if topic not in wanted]
            for topic in removed:
                await self._broker.publish(*(Message(each, "", retain=True) for each in self._retained_topics(topic)))
                self._published.pop(topic, None)
                self._stale.discard(topic)
            for topic, message in wanted.items():
                if self._published.get(topic) != message:
                    await self._broker.publish(*self._first_states(topic), message)
                    self._published[topic] = message

    def _on_config(self, topic: str, payload: bytes) -> None:
        """Note retained configurations of cameras and questions that no longer exist."""
        if payload and (self._wanted is None or topic not in self._wanted):
            self._stale.add(topic)

    def _first_states(self, topic: str) -> list[Message]:
        """Initial state message of an entity, so that none is unknown."""
        if f"{self.discovery}/binary_sensor/" not in topic:
            return []
        item = topic.split("/")[-2]
        return [Message(f"{self.node}/{item}/state", "ON" if self._open.get(item) else "OFF", retain=True)]

    def _retained_topics(self, topic: str) -> list[str]:
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

    def _entity(self, component: str, item: str, settings: Mapping[str, Any], device: Mapping[str, Any]) -> Message:
        body = {
            **settings,
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
    """Item of the incident's question, or of the camera's health."""
    return _item(incident.camera, incident.subject if incident.kind == "question" else HEALTH)


def _slug(name: str) -> str:
    """Escape a name for use in a topic; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if plain == name else f"{plain}_{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
