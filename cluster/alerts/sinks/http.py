"""Sinks over HTTP: ``webhook``, a signed POST per alert; and ``alertmanager``, incidents as alerts of a Prometheus
Alertmanager, which groups, routes and repeats them."""

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cluster.alerts.incident import AlertEvent, utc
from cluster.alerts.sinks import DeliveryError, check_above_0
from cluster.errors import ConfigError
from cluster.redaction import redact

if TYPE_CHECKING:
    import aiohttp

TIME_HEADER = "Sightline-Timestamp"
SIGNATURE_HEADER = "Sightline-Signature"
PATH = "/api/v2/alerts"
_CONNECTIONS = 16
_QUOTED_BYTES = 200
"""Bytes of an error response's body that are quoted."""
_MOST_AFTER_S = 900.0
"""Upper limit of an honoured ``Retry-After``."""


def check_url(url: str) -> str:
    """Return an http(s) URL unchanged. Raises ``ConfigError``: it is not one."""
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise ConfigError(f"url must be an address like https://host/path, not {redact(url)!r}")
    return url


@dataclass
class HttpSink:
    """POSTs to one URL over a connection pool, with ``headers`` added.

    408, 425, 429, 5xx and connection errors are retryable; any other status but 2xx is final: the receiver understood
    and refused the alert. Redirects are not followed, so that a signed alert reaches no other host.
    """

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_above_0(timeout_s=self.timeout_s)
        for name, value in self.headers.items():
            # HTTP clients reject such headers, e.g. a value read from a file with its newline.
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not value.isprintable():
                raise ConfigError(f"headers: {name!r} must be letters, digits and -, and its value one line")
        self._url = check_url(self.url)
        self._session: aiohttp.ClientSession | None = None

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> None:
        """POST a JSON body; returns when the receiver has confirmed it. Raises ``DeliveryError``."""
        import aiohttp

        shown = redact(self._url)
        headers = {**self.headers, "Content-Type": "application/json", **headers}
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            )
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as reply:
                if 200 <= reply.status < 300:
                    return
                detail = (await reply.content.read(_QUOTED_BYTES)).decode("utf-8", "replace").split("\n")[0].strip()
        except TimeoutError:
            raise DeliveryError(f"{shown} did not answer within {self.timeout_s:g} s", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DeliveryError(f"{shown}: {redact(str(error)) or type(error).__name__}", retryable=True) from None
        retryable = reply.status in (408, 425, 429) or reply.status >= 500
        message = f"{shown} answered {reply.status}{': ' + detail if detail else ''}"
        after = reply.headers.get("Retry-After", "")
        after_s = min(float(after), _MOST_AFTER_S) if after.isdecimal() else 0.0
        raise DeliveryError(message, retryable=retryable, after_s=after_s)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            # Closed transports are released in the next iteration of the event loop.
            await asyncio.sleep(0)


@dataclass
class WebhookSink(HttpSink):
    """POSTs the alert's JSON to ``url``; delivered when the response is 2xx.

    With a ``secret``, ``Sightline-Signature`` is ``v1=`` and the hexadecimal HMAC-SHA256 of ``TIMESTAMP.BODY``, where
    TIMESTAMP is the header ``Sightline-Timestamp`` (Unix time of this attempt). Receivers reject requests with a wrong
    signature or an old timestamp.
    """

    secret: str = field(default="", repr=False)

    async def send(self, event: AlertEvent) -> None:
        body = json.dumps(event.body(), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"Idempotency-Key": event.key}
        if self.secret:
            stamp = str(int(time.time()))
            headers |= {TIME_HEADER: stamp, SIGNATURE_HEADER: signature(self.secret, stamp, body)}
        await self._post(body, headers)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Value of the ``Sightline-Signature`` header."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


@dataclass
class AlertmanagerSink(HttpSink):
    """POSTs to ``url``'s ``/api/v2/alerts``. One incident is one alert: its labels never change.

    An open alert expires ``hold_s`` after its last update, in case the cluster vanishes; ``labels`` are added to each.
    """

    labels: dict[str, str] = field(default_factory=dict)
    hold_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_0(hold_s=self.hold_s)
        self._url = self._url.rstrip("/") + PATH

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
        await self._post(json.dumps([alert], ensure_ascii=False).encode(), {})
