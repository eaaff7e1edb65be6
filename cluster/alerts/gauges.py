"""Metrics of alerting, measured once a second (``AlertGauges``)."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cluster import metrics
from cluster.alerts.dispatcher import SinkStatus
from cluster.alerts.incident import Incident
from cluster.alerts.journal import Journal


class AlertGauges:
    """Publishes totals; counters by what was added since the last time."""

    def __init__(self) -> None:
        self._counted = {"lost": 0, "trimmed": 0}

    def publish(
        self, sinks: Mapping[str, SinkStatus], journal: Journal, open_incidents: Iterable[Incident], lost: int
    ) -> None:
        """``lost``: alerts that were neither written nor delivered, in total."""
        for name, status in sinks.items():
            metrics.alerts_waiting.labels(name).set(status.waiting)
        metrics.alerts_unwritten.set(journal.pending_events)
        kinds = Counter(incident.kind for incident in open_incidents)
        for kind in ("question", "health"):
            metrics.incidents_open.labels(kind).set(kinds[kind])
        for name, counter, value in (
            ("lost", metrics.alerts_lost, lost),
            ("trimmed", metrics.alerts_trimmed, journal.trimmed),
        ):
            counter.inc(max(0, value - self._counted[name]))
            self._counted[name] = value
