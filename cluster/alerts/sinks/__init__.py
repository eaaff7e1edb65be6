"""Where people are told of incidents. Each sink loads the library it needs when it first sends."""

from cluster.alerts.sinks import alertmanager, kafka, log, mqtt, webhook
from cluster.alerts.sinks.base import DeliveryError, Sink, sinks

__all__ = ["DeliveryError", "Sink", "alertmanager", "kafka", "log", "mqtt", "sinks", "webhook"]
