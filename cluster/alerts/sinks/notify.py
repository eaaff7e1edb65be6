"""``notify``: messages to people over e-mail, Telegram, Slack, web push, ntfy and other services of Apprise."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cluster.alerts.incident import AlertEvent
from cluster.alerts.sinks import DeliveryError, ReadPicture
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from apprise import Apprise

_LOOK_EVERY_S, _READ_S = 0.25, 1.0
"""Poll interval for the snapshot, and the minimum timeout of reading it, in seconds."""
_TYPES = {"info": "info", "warning": "warning", "critical": "failure"}


@dataclass
class NotifySink:
    """Sends to one Apprise URL, whose scheme selects the service, with the snapshot attached if the service supports
    it; delivered when the service has accepted the message.

    * ``url``: ``mailtos://user:password@host?to=…``, ``tgram://token/chat``, ``slack://xoxb-…/#channel``, ``vapid://…``
    * ``picture``: attach the snapshot; a ``new`` event waits up to ``picture_wait_s`` for it
    """

    url: str = field(repr=False)
    picture: bool = True
    picture_wait_s: float = 5.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.timeout_s > self.picture_wait_s >= 0:
            raise ConfigError("timeout_s must be above picture_wait_s, and that at least 0")
        self._target = _target(self.url)
        self._read_picture: ReadPicture | None = None

    def use_pictures(self, read: ReadPicture) -> None:
        self._read_picture = read

    async def send(self, event: AlertEvent) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._send(event)
        except TimeoutError:
            raise DeliveryError(f"the service did not answer within {self.timeout_s:g} s", retryable=True) from None

    async def close(self) -> None:
        """Nothing to close: every message opens its own connection."""

    # -- inside ---------------------------------------------------------------------------------
    async def _send(self, event: AlertEvent) -> None:
        from apprise.attachment.memory import AttachMemory

        snapshot = await self._snapshot(event) if self.picture else None
        attached: Any = None
        if snapshot is not None:
            attached = AttachMemory(content=snapshot, name=f"{event.incident.id}.jpg", mimetype="image/jpeg")
        logged: list[str] = []
        result = await self._target.async_notify(
            body=text_of(event),
            title=title_of(event),
            notify_type=_TYPES[event.incident.severity],
            body_format="text",
            attach=attached,
            # Apprise logs the service's answer, without URLs and tokens.
            log_callback=lambda entry, _plugin: logged.append(str(entry.message)),
            log_level="WARNING",
        )
        if not result:
            raise DeliveryError(_reason(logged, self.url), retryable=True)

    async def _snapshot(self, event: AlertEvent) -> bytes | None:
        if self._read_picture is None:
            return None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (self.picture_wait_s if event.kind == "new" else 0.0)
        while True:
            rest_s = until_s - loop.time()
            try:
                async with asyncio.timeout(max(rest_s, _READ_S)):
                    found = await self._read_picture(event.incident)
            except TimeoutError:
                # Rather send the message without its picture than not at all.
                return None
            if found is not None or rest_s <= 0:
                return found
            await asyncio.sleep(min(_LOOK_EVERY_S, rest_s))


def title_of(event: AlertEvent) -> str:
    """Title, like ``gate: fence (critical)`` or ``gate: fence is over``."""
    incident = event.incident
    state = "is over" if event.kind == "end" else f"({incident.severity})"
    return f"{incident.camera}: {incident.subject} {state}"


def text_of(event: AlertEvent) -> str:
    """Body: question, answer, time, reason of the end, links."""
    incident = event.incident
    lines = [incident.question, incident.text, _when(event), incident.reason]
    lines += [each for each in (incident.snapshot_url, incident.clip_url) if each.startswith("http")]
    return "\n".join(line for line in lines if line)


def _when(event: AlertEvent) -> str:
    incident = event.incident
    since = datetime.fromtimestamp(incident.opened_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    score = f", score {incident.score:.2f}" if incident.kind == "question" and incident.windows > 0 else ""
    ended = "" if incident.ended_s is None else f", for {incident.ended_s - incident.opened_s:.0f} s"
    return f"Since {since}{ended}{score}"


def _target(url: str) -> Apprise:
    import apprise

    # At debug level they log requests with the tokens in them.
    for name in ("apprise", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # No plugins or configuration files: everything comes from the URL.
    asset = apprise.AppriseAsset(app_id="Sightline", app_desc="Sightline", app_url="", secure_logging=True)
    target = apprise.Apprise(asset=asset)
    scheme = url.partition("://")[0]
    if "://" not in url or not target.add(url) or len(target) != 1:
        known = scheme if scheme.isalnum() and len(scheme) <= 20 else "…"
        raise ConfigError(f"url must be one Apprise URL, like mailtos:// or tgram://, not {known}://…")
    return target


def _reason(logged: list[str], url: str) -> str:
    """The service's answer in one line, with all parts of the URL removed."""
    line = next((each.split("\n")[0].strip() for each in logged if each.strip()), "the service did not accept it")
    for secret in sorted({part for part in _parts(url) if len(part) >= 4}, key=len, reverse=True):
        line = line.replace(secret, "***")
    return f"{url.partition('://')[0]}: {line[:200]}"


def _parts(url: str) -> list[str]:
    rest = url.partition("://")[2]
    return [part for each in re.split(r"[/?&=@,:#]", rest) for part in (each, unquote(each))]
