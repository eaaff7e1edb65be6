"""Where people are told of incidents. Each sink loads the library it needs when it first sends."""

from cluster.alerts.sinks.base import DeliveryError, Sink

__all__ = ["DeliveryError", "Sink"]
