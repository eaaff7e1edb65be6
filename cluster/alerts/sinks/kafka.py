"""``kafka``: one record per alert, keyed by incident."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks import DeliveryError, check_above_0
from cluster.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from confluent_kafka import Producer

log = logging.getLogger(__name__)

_MISSING = "the kafka sink needs confluent-kafka, which is not installed: " + install_hint("kafka")
_POLL_S = 0.2
_OURS = ("bootstrap.servers", "message.timeout.ms", "enable.idempotence", "acks")


def check_installed() -> None:
    """Raises ``ConfigError``: confluent-kafka is not."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise ConfigError(_MISSING)


@dataclass
class KafkaSink:
    """Produces the alert's JSON to ``topic``; delivered when all in-sync replicas have it.

    The record's key is the incident's id, which keeps an incident in one partition and in order; the header
    ``idempotency-key`` is the alert's key. ``settings`` are passed to librdkafka (``security.protocol``,
    ``sasl.username`` …). Needs the extra ``kafka``: confluent-kafka, whose librdkafka is maintained by Kafka's vendor
    and releases the GIL while it waits.
    """

    brokers: str
    topic: str = "sightline.alerts"
    settings: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.brokers.strip():
            raise ConfigError("brokers must be addresses like host:9092,host:9092")
        if not self.topic or not all(letter.isalnum() or letter in "._-" for letter in self.topic):
            raise ConfigError(f"topic must be letters, digits, . _ and -, not {self.topic!r}")
        if ours := [name for name in _OURS if name in self.settings]:
            raise ConfigError(f"settings must leave {ours[0]} alone; it follows from brokers and timeout_s")
        check_above_0(timeout_s=self.timeout_s)
        self._producer: Producer | None = None
        self._polling: threading.Thread | None = None
        self._closed = threading.Event()
        self._starting = threading.Lock()

    async def send(self, event: AlertEvent) -> None:
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[None] = loop.create_future()

        def settle(error: DeliveryError | None) -> None:
            if taken.done():
                return
            if error is None:
                taken.set_result(None)
            else:
                taken.set_exception(error)

        def delivered(error: Any, _message: Any) -> None:
            # Called on the polling thread, possibly after the loop has closed.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, None if error is None else _refusal(error))

        producer = await asyncio.to_thread(self._started)
        from confluent_kafka import KafkaError, KafkaException

        try:
            producer.produce(
                self.topic,
                key=event.incident.id,
                value=json.dumps(event.body(), ensure_ascii=False).encode(),
                headers=[("idempotency-key", event.key.encode())],
                on_delivery=delivered,
            )
        except BufferError:
            raise DeliveryError("kafka: the client's queue is full", retryable=True) from None
        except KafkaException as error:
            refused = error.args[0]
            if refused.code() == KafkaError._FATAL:
                # It takes nothing any more: the next alert gets another one.
                await self.close()
            raise _refusal(refused) from None
        await taken

    async def close(self) -> None:
        with self._starting:
            producer, self._producer = self._producer, None
            polling, self._polling = self._polling, None
            closed = self._closed
        if producer is not None and polling is not None:
            producer.purge()
            closed.set()
            await asyncio.to_thread(polling.join)

    # -- inside ---------------------------------------------------------------------------------
    def _started(self) -> Producer:
        with self._starting:
            if self._producer is None:
                self._producer = self._make()
                self._closed = threading.Event()
                self._polling = threading.Thread(
                    target=_poll, args=(self._producer, self._closed), name="kafka", daemon=True
                )
                self._polling.start()
            return self._producer

    def _make(self) -> Producer:
        try:
            from confluent_kafka import KafkaException, Producer
        except ImportError:
            raise DeliveryError(_MISSING, retryable=False) from None
        settings = {
            "bootstrap.servers": self.brokers,
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": round(1000 * self.timeout_s),
            "linger.ms": 0,
            **self.settings,
        }
        try:
            return Producer(settings, logger=log)
        except (KafkaException, ValueError) as error:
            raise DeliveryError(f"kafka settings: {error}", retryable=False) from None


def _poll(producer: Producer, closed: threading.Event) -> None:
    """Poll for delivery reports; ``poll`` releases the GIL while it waits."""
    while not closed.is_set():
        producer.poll(_POLL_S)
    producer.flush(0)


def _refusal(error: Any) -> DeliveryError:
    from confluent_kafka import KafkaError

    final = (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_RECORD,
        KafkaError.TOPIC_EXCEPTION,
    )
    return DeliveryError(f"kafka: {error.str()}", retryable=error.code() not in final)
