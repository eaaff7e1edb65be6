"""``kafka``: one record per alert, keyed by incident."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks import DeliveryError, check_above_0
from cluster.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from confluent_kafka import Producer

log = logging.getLogger(__name__)

_MISSING = "the kafka sink needs confluent-kafka, which is not installed: " + install_hint("kafka")
_AT_ONCE = 8
"""Threads: the dispatcher's concurrent sends to one sink."""
_POLL_S = 0.05
"""Poll interval, in seconds: another thread's ``poll`` may have served this one's delivery report."""
_OURS = ("bootstrap.servers", "message.timeout.ms", "enable.idempotence", "acks")


def check_installed() -> None:
    """Raises ``ConfigError``: confluent-kafka is not installed."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise ConfigError(_MISSING)


@dataclass
class KafkaSink:
    """Produces the alert's JSON to ``topic``; delivered when all in-sync replicas have it.

    The record key is the incident id, which keeps an incident's alerts in one partition and in order; the header
    ``idempotency-key`` is the alert's key. ``settings`` are passed to librdkafka (``security.protocol``,
    ``sasl.username`` …). Needs the extra ``kafka``: confluent-kafka, maintained by Kafka's vendor, which releases the
    GIL while it waits.
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
            raise ConfigError(f"settings must leave {ours[0]} alone; the sink sets it")
        check_above_0(timeout_s=self.timeout_s)
        self._producer: Producer | None = None
        self._starting = threading.Lock()
        # A separate pool: a broker that is down would block the default executor.
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kafka")

    async def send(self, event: AlertEvent) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._deliver, event)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._drop()
        await asyncio.to_thread(self._threads.shutdown)

    # -- inside ---------------------------------------------------------------------------------
    def _deliver(self, event: AlertEvent) -> None:
        """Produce the record and wait for its delivery report; ``poll`` releases the GIL."""
        producer = self._started()
        from confluent_kafka import KafkaError, KafkaException

        reports: list[Any] = []
        try:
            producer.produce(
                self.topic,
                key=event.incident.id,
                value=json.dumps(event.body(), ensure_ascii=False).encode(),
                headers=[("idempotency-key", event.key.encode())],
                on_delivery=lambda error, _message: reports.append(error),
            )
        except BufferError:
            raise DeliveryError("kafka: the client's queue is full", retryable=True) from None
        except KafkaException as error:
            refused = error.args[0]
            if refused.code() == KafkaError._FATAL:
                # The producer is unusable: the next alert creates another.
                self._drop()
            raise _refusal(refused) from None
        while not reports:
            producer.poll(_POLL_S)
        if reports[0] is not None:
            raise _refusal(reports[0])

    def _started(self) -> Producer:
        with self._starting:
            if self._producer is None:
                self._producer = self._make()
            return self._producer

    def _drop(self) -> None:
        """Discard the producer; messages in flight are reported as failed."""
        with self._starting:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()

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


def _refusal(error: Any) -> DeliveryError:
    from confluent_kafka import KafkaError

    final = (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_RECORD,
        KafkaError.TOPIC_EXCEPTION,
    )
    return DeliveryError(f"kafka: {error.str()}", retryable=error.code() not in final)
