"""Routes events to sinks, passes them cameras and snapshots, and sends test messages (``SinkRoutes``)."""

import asyncio
import io
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cluster.alerts.incident import AlertEvent, Delivery, Incident
from cluster.alerts.sinks import CameraSink, DeliveryError, PictureSink, ReadPicture, Sink
from cluster.config import CameraConfig
from cluster.config.alerts import EventKind, SinkConfig
from cluster.errors import NotFoundError, UnavailableError
from cluster.registry import sinks

log = logging.getLogger(__name__)

TEST = "test"
"""Camera and question of a test message."""
TEST_S = 40.0
"""Deadline of a test message, in seconds."""
TESTED: tuple[EventKind, ...] = ("new", "end")


class SinkRoutes:
    """The configured sinks by name."""

    def __init__(self, configured: Sequence[SinkConfig]) -> None:
        self._configured = {each.name: each for each in configured}
        self.sinks: Mapping[str, Sink] = {each.name: sinks.get(each.kind)(**each.options) for each in configured}

    @property
    def kinds(self) -> Mapping[str, str]:
        return {name: each.kind for name, each in self._configured.items()}

    def deliveries(self, event: AlertEvent) -> Iterator[Delivery]:
        """One delivery per sink that wants the event; none if it is silent."""
        for name, sink in self._configured.items():
            if (kind := _seen_kind(sink, event)) is not None:
                yield Delivery(replace(event, kind=kind), name)

    def as_seen(self, delivery: Delivery) -> Delivery:
        """Convert the recorded event of a stored delivery into the one that its sink gets."""
        sink = self._configured.get(delivery.sink)
        kind = _seen_kind(sink, delivery.event) if sink is not None else None
        return delivery if kind is None else replace(delivery, event=replace(delivery.event, kind=kind))

    def use_pictures(self, read: ReadPicture) -> None:
        """Set the snapshot reader of sinks that send snapshots."""

        async def read_or_draw(incident: Incident) -> bytes | None:
            is_test = incident.camera == TEST == incident.subject
            return await (asyncio.to_thread(_test_picture) if is_test else read(incident))

        for sink in self.sinks.values():
            if isinstance(sink, PictureSink):
                sink.use_pictures(read_or_draw)

    def follow_cameras(self, cameras: Sequence[CameraConfig], open_incidents: Sequence[Incident]) -> None:
        """Pass each sink the cameras it watches, and the open incidents whose end it is still to get."""
        for name, sink in self.sinks.items():
            if isinstance(sink, CameraSink):
                watched = [camera for camera in cameras if self._configured[name].watches(camera.name)]
                ongoing = [each for each in open_incidents if _expects_end(self._configured[name], each)]
                sink.follow_cameras({each.name: {q.id: q.text for q in each.questions} for each in watched}, ongoing)

    def check(self, name: str) -> None:
        """Raises ``NotFoundError``: there is no such sink."""
        if name not in self.sinks:
            known = f"there are: {', '.join(self.sinks)}" if self.sinks else "there are none, see alerts.sinks"
            raise NotFoundError(f"there is no sink {name!r}; {known}")

    async def test(self, name: str) -> None:
        """Send one sink a test incident: its ``new`` and ``end`` events, if the sink gets these. Raises
        ``NotFoundError``: there is no such sink; ``UnavailableError``: it was not accepted, with the reason."""
        self.check(name)
        opened = _test_incident()
        try:
            async with asyncio.timeout(TEST_S):
                for number, kind in enumerate(TESTED, 1):
                    if kind in self._configured[name].events:
                        incident = replace(opened, ended_s=time.time()) if kind == "end" else opened
                        await self.sinks[name].send(AlertEvent(f"{opened.id}-{number}", kind, time.time(), incident))
        except TimeoutError:
            raise UnavailableError(f"sink {name!r} did not finish within {TEST_S:g} s") from None
        except DeliveryError as error:
            raise UnavailableError(f"sink {name!r}: {error}") from None
        except Exception as error:
            log.exception("sink %s", name)
            raise UnavailableError(f"sink {name!r}: {type(error).__name__}: {error}") from None


def _test_incident() -> Incident:
    now_s = time.time()
    return Incident(
        id=secrets.token_hex(8),
        camera=TEST,
        kind="question",
        subject=TEST,
        severity="info",
        opened_s=now_s,
        updated_s=now_s,
        text="This is a test of Sightline's alerts; nothing has happened.",
        announced_s=now_s,
        told_s=now_s,
    )


def _seen_kind(sink: SinkConfig, event: AlertEvent) -> EventKind | None:
    """Kind of an event as one sink sees it, None: not sent. Its first is ``new``; no ``end`` without a ``new``."""
    incident, kind = event.incident, event.kind
    if event.silent or incident.announced_s is None or not sink.wants(incident.camera, incident.severity):
        return None
    quiet = sink.quiet_for(incident.severity)
    if quiet is not None:
        if event.before_s is None or event.before_s < quiet.end_after(incident.announced_s):
            if kind == "end":
                return None
            kind = "new"
        if kind != "end" and quiet.covers(event.at_s):
            return None
    return kind if kind in sink.events else None


def _expects_end(sink: SinkConfig, incident: Incident) -> bool:
    """Whether a sink would get the incident's ``end`` event."""
    end = AlertEvent("", "end", time.time(), incident, before_s=incident.told_s)
    return _seen_kind(sink, end) is not None


def _test_picture() -> bytes:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (320, 180), (64, 72, 80))
    ImageDraw.Draw(picture).text((120, 84), "Sightline test", fill=(255, 255, 255))
    data = io.BytesIO()
    picture.save(data, "JPEG")
    return data.getvalue()
