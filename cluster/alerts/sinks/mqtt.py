"""``mqtt``: one message per alert, at quality of service 1."""

import json
from dataclasses import dataclass, field

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks.mqtt_client import Message, MqttPublisher
from cluster.errors import ConfigError

_FIELDS = ("camera", "subject", "event", "severity", "kind")


@dataclass
class MqttSink:
    """Publishes the alert's JSON; delivered when the broker has acknowledged it.

    * ``url``: ``mqtt://user:password@host:1883``, or ``mqtts://`` with TLS
    * ``topic``: may contain ``{camera}``, ``{subject}``, ``{event}``, ``{severity}``, ``{kind}``
    """

    url: str = field(repr=False)
    topic: str = "sightline/{camera}/{subject}/{event}"
    client_id: str = ""
    ca_file: str = ""
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        self._broker = MqttPublisher(self.url, self.timeout_s, client_id=self.client_id, ca_file=self.ca_file)
        try:
            example = self.topic.format(**dict.fromkeys(_FIELDS, "x"))
        except (KeyError, IndexError, ValueError):
            raise ConfigError(f"topic may name {{{'}, {'.join(_FIELDS)}}}, not {self.topic!r}") from None
        if not example or any(letter in example for letter in "+#\0"):
            raise ConfigError(f"topic must be text without + and #, not {self.topic!r}")

    async def send(self, event: AlertEvent) -> None:
        incident = event.incident
        names = (incident.camera, incident.subject, event.kind, incident.severity, incident.kind)
        topic = self.topic.format(**dict(zip(_FIELDS, names, strict=True)))
        await self._broker.publish(Message(topic, json.dumps(event.body(), ensure_ascii=False)))

    async def close(self) -> None:
        await self._broker.close()
