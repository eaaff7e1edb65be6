"""``mqtt``: one message per alert at QoS 1; and the client (``MqttPublisher``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks import DeliveryError, check_above_0
from cluster.errors import ConfigError
from cluster.redaction import redact

if TYPE_CHECKING:
    from paho.mqtt.client import Client

_PORTS = {"mqtt": 1883, "mqtts": 8883}
_FIELDS = ("camera", "subject", "event", "severity", "kind")


@dataclass(frozen=True, slots=True)
class Message:
    """A payload for a topic, sent at QoS 1; brokers keep ``retain``-ed messages for later subscribers."""

    topic: str
    payload: str | bytes
    retain: bool = False


class MqttPublisher:
    """Speaks MQTT 3.1.1 through paho-mqtt, the Eclipse project's client. Its queue of unacknowledged messages is not
    used: after a failure the connection is reopened, and the caller publishes again.

    Args:
        url: ``mqtt://user:password@host:1883``, or ``mqtts://`` with TLS.
        timeout_s: deadline of :meth:`publish`, including connecting.
        will: message that the broker publishes if the connection breaks.
        listen: topics to subscribe to; ``on_message`` is called on the event loop with topic and payload.

    Raises:
        ConfigError: invalid address or timeout.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        client_id: str = "",
        ca_file: str = "",
        will: Message | None = None,
        listen: tuple[str, ...] = (),
        on_message: Callable[[str, bytes], None] | None = None,
    ) -> None:
        try:
            self._address = urlsplit(url)
            self._port = self._address.port or _PORTS[self._address.scheme]
        except (ValueError, KeyError):
            self._address = urlsplit("")
        if not self._address.hostname:
            raise ConfigError(f"url must be an address like mqtt://host:1883, not {redact(url)!r}")
        check_above_0(timeout_s=timeout_s)
        self._timeout_s, self._client_id, self._ca_file = timeout_s, client_id, ca_file
        self._will, self._listen, self._on_message = will, listen, on_message
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._acknowledged: dict[int, asyncio.Future[None]] = {}

    @property
    def connected(self) -> bool:
        """Whether the last connection is still up."""
        return self._client is not None and self._client.is_connected()

    async def publish(self, *messages: Message) -> None:
        """Publish in order; returns when the broker has acknowledged all messages. Raises ``DeliveryError``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                client = await self._connected()
                for message in messages:
                    await self._publish(client, message)
        except TimeoutError:
            await self.close()
            raise DeliveryError(
                f"the broker at {self._shown} did not acknowledge within {self._timeout_s:g} s", retryable=True
            ) from None
        except DeliveryError:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect; the next message connects again."""
        client, self._client = self._client, None
        self._fail("the connection was closed")
        if client is not None:
            await asyncio.to_thread(_disconnect, client)

    # -- inside ---------------------------------------------------------------------------------
    @property
    def _shown(self) -> str:
        return f"{self._address.hostname}:{self._port}"

    async def _publish(self, client: Client, message: Message) -> None:
        acknowledged = asyncio.get_running_loop().create_future()
        # The acknowledgement arrives in a later iteration of the loop, so it cannot be missed between these lines.
        sent = client.publish(message.topic, message.payload, qos=1, retain=message.retain)
        if sent.rc:
            raise DeliveryError(f"the connection to {self._shown} was lost", retryable=True)
        self._acknowledged[sent.mid] = acknowledged
        try:
            await acknowledged
        finally:
            self._acknowledged.pop(sent.mid, None)

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is not None and self._client.is_connected():
                return self._client
            await self.close()
            self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        loop = asyncio.get_running_loop()
        answered: asyncio.Future[str] = loop.create_future()

        def post(call: Any, *arguments: Any) -> None:
            # paho calls back on its own thread, possibly after the loop has closed.
            if not loop.is_closed():
                loop.call_soon_threadsafe(call, *arguments)

        def connected(reason: Any) -> None:
            if not answered.done():
                answered.set_result(str(reason) if reason.is_failure else "")

        client = Client(CallbackAPIVersion.VERSION2, client_id=self._client_id, reconnect_on_failure=False)
        client.on_connect = lambda _client, _data, _flags, reason, _properties: post(connected, reason)
        client.on_publish = lambda _client, _data, mid, _reason, _properties: post(self._on_acknowledged, client, mid)
        client.on_disconnect = lambda *_: post(self._on_disconnected, client)
        if self._on_message is not None:
            client.on_message = lambda _client, _data, message: post(self._on_message, message.topic, message.payload)
        if self._will is not None:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=self._will.retain)
        client.connect_timeout = self._timeout_s
        if self._address.username:
            client.username_pw_set(unquote(self._address.username), unquote(self._address.password or ""))
        try:
            if self._address.scheme == "mqtts":
                client.tls_set(self._ca_file or None)
            await asyncio.to_thread(client.connect, str(self._address.hostname), self._port)
            client.loop_start()
            refused = await answered
        except (OSError, ValueError) as error:
            raise DeliveryError(f"no MQTT broker at {self._shown}: {error}", retryable=True) from None
        except BaseException:
            _disconnect(client)
            raise
        if refused:
            await asyncio.to_thread(_disconnect, client)
            raise DeliveryError(f"the MQTT broker at {self._shown} refused the connection: {refused}", retryable=True)
        for topic in self._listen:
            client.subscribe(topic, qos=1)
        return client

    def _on_acknowledged(self, client: Client, mid: int) -> None:
        # Every connection numbers its messages from 1.
        future = self._acknowledged.get(mid) if client is self._client else None
        if future is not None and not future.done():
            future.set_result(None)

    def _on_disconnected(self, client: Client) -> None:
        if client is self._client:
            self._fail("the connection broke")

    def _fail(self, why: str) -> None:
        for future in self._acknowledged.values():
            if not future.done():
                future.set_exception(DeliveryError(f"MQTT broker at {self._shown}: {why}", retryable=True))


def _disconnect(client: Client) -> None:
    client.disconnect()
    client.loop_stop()


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
