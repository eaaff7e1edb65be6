"""``webhook``: a signed HTTP POST per alert."""

import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks.http import HttpPoster, check_url
from cluster.errors import ConfigError

KEY_HEADER = "Idempotency-Key"
TIME_HEADER = "Sightline-Timestamp"
SIGNATURE_HEADER = "Sightline-Signature"


@dataclass
class WebhookSink:
    """POSTs the alert's JSON to ``url``; taken when the reply is 2xx.

    With a ``secret``, ``Sightline-Signature`` is ``v1=`` and the hexadecimal HMAC-SHA256 of ``TIMESTAMP.BODY``, where
    TIMESTAMP is the header ``Sightline-Timestamp`` (seconds since 1970, of this attempt): a receiver refuses what is
    not signed so, or is old. ``headers`` are sent as well, for receivers that want a token.
    """

    url: str
    secret: str = field(default="", repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, not {self.timeout_s:g}")
        self._poster = HttpPoster(check_url(self.url), self.timeout_s)

    async def send(self, event: AlertEvent) -> None:
        body = json.dumps(event.body(), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {**self.headers, "Content-Type": "application/json", KEY_HEADER: event.key}
        if self.secret:
            stamp = str(int(time.time()))
            headers |= {TIME_HEADER: stamp, SIGNATURE_HEADER: signature(self.secret, stamp, body)}
        await self._poster.post(body, headers)

    async def close(self) -> None:
        await self._poster.close()


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Value of the header ``Sightline-Signature``."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"v1={digest}"


def is_genuine(
    secret: str, headers: Mapping[str, str], body: bytes, now_s: float, *, tolerance_s: float = 300.0
) -> bool:
    """Receiver-side check: signed with ``secret``, and at most ``tolerance_s`` old."""
    stamp = headers.get(TIME_HEADER, "")
    if not stamp.isascii() or not stamp.isdigit() or abs(now_s - int(stamp)) > tolerance_s:
        return False
    return hmac.compare_digest(signature(secret, stamp, body), headers.get(SIGNATURE_HEADER, ""))
