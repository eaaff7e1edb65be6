"""``alertmanager``: incidents as alerts of a Prometheus Alertmanager, which groups, routes and repeats them."""

import json
from dataclasses import dataclass, field

from cluster.alerts.incident import AlertEvent, utc
from cluster.alerts.sinks.http import HttpPoster, check_url
from cluster.errors import ConfigError

PATH = "/api/v2/alerts"


@dataclass
class AlertmanagerSink:
    """POSTs to ``url``'s ``/api/v2/alerts``. One incident is one alert: its labels never change.

    An open alert expires ``hold_s`` after its last update, should the cluster vanish; alerts.update_s must be shorter.
    ``labels`` are added, for routing.
    """

    url: str
    labels: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    hold_s: float = 3600.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or not self.hold_s > 0:
            raise ConfigError("timeout_s and hold_s must be above 0")
        self._poster = HttpPoster(check_url(self.url).rstrip("/") + PATH, self.timeout_s)

    async def send(self, event: AlertEvent) -> None:
        incident = event.incident
        ends_s = incident.ended_s if incident.ended_s is not None else event.at_s + self.hold_s
        # Alertmanager refuses an alert that starts and ends at the same moment.
        ends_s = max(ends_s, incident.opened_s + 0.001)
        alert = {
            "labels": {
                **self.labels,
                "alertname": "SightlineIncident" if incident.kind == "question" else "SightlineCameraHealth",
                "camera": incident.camera,
                "subject": incident.subject,
                "severity": incident.severity,
                "incident": incident.id,
            },
            "annotations": {
                "summary": f"{incident.subject} at camera {incident.camera}",
                "description": incident.text or f"score {incident.score:.2f} over {incident.windows} windows",
            },
            "startsAt": utc(incident.opened_s),
            "endsAt": utc(ends_s),
        }
        body = json.dumps([alert], ensure_ascii=False).encode()
        await self._poster.post(body, {**self.headers, "Content-Type": "application/json"})

    async def close(self) -> None:
        await self._poster.close()
