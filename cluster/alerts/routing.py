"""Which sinks get which events and as what, what sinks are told besides, and test messages (``SinkRoutes``)."""

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
"""Longest that a sink may take for it."""
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
        """An event as each sink gets it; a muted one goes to none."""
        for name, sink in self._configured.items():
            if (kind := _told_as(sink, event)) is not None:
                yield Delivery(replace(event, kind=kind), name)

    def as_told(self, delivery: Delivery) -> Delivery:
        """A stored delivery, whose event is the recorded one, as its sink gets it."""
        sink = self._configured.get(delivery.sink)
        kind = _told_as(sink, delivery.event) if sink is not None else None
        return delivery if kind is None else replace(delivery, event=replace(delivery.event, kind=kind))

    def use_pictures(self, read: ReadPicture) -> None:
        """Where sinks that send snapshots read them."""

        async def read_or_draw(incident: Incident) -> bytes | None:
            made_up = incident.camera == TEST == incident.subject
            return await (asyncio.to_thread(_drawn) if made_up else read(incident))

        for sink in self.sinks.values():
            if isinstance(sink, PictureSink):
                sink.use_pictures(read_or_draw)

    def follow_cameras(self, cameras: Sequence[CameraConfig], open_incidents: Sequence[Incident]) -> None:
        """Tell sinks which cameras there are, those that are for them, and which incidents they have not seen end."""
        for name, sink in self.sinks.items():
            if isinstance(sink, CameraSink):
                mine = [camera for camera in cameras if self._configured[name].watches(camera.name)]
                ongoing = [each for each in open_incidents if _was_told(self._configured[name], each)]
                sink.follow_cameras({each.name: {q.id: q.text for q in each.questions} for each in mine}, ongoing)

    def check(self, name: str) -> None:
        """Raises ``NotFoundError``: there is no such sink."""
        if name not in self.sinks:
            known = f"there are: {', '.join(self.sinks)}" if self.sinks else "there are none, see alerts.sinks"
            raise NotFoundError(f"there is no sink {name!r}; {known}")

    async def test(self, name: str) -> None:
        """Send a made-up incident to one sink: its beginning and its end, as far as the sink wants these. Raises
        ``NotFoundError``: there is no such sink; ``UnavailableError``: it was not accepted; the message says why."""
        self.check(name)
        made = _test_incident()
        try:
            async with asyncio.timeout(TEST_S):
                for number, kind in enumerate(TESTED, 1):
                    if kind in self._configured[name].events:
                        incident = replace(made, ended_s=time.time()) if kind == "end" else made
                        await self.sinks[name].send(AlertEvent(f"{made.id}-{number}", kind, time.time(), incident))
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


def _told_as(sink: SinkConfig, event: AlertEvent) -> EventKind | None:
    """What an event is for one sink: ``new`` at first, no ``end`` of what it never heard of; None: nothing."""
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


def _was_told(sink: SinkConfig, incident: Incident) -> bool:
    """Whether a sink would be told of the incident's end."""
    end = AlertEvent("", "end", time.time(), incident, before_s=incident.told_s)
    return _told_as(sink, end) is not None


def _drawn() -> bytes:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (320, 180), (64, 72, 80))
    ImageDraw.Draw(picture).text((120, 84), "Sightline test", fill=(255, 255, 255))
    data = io.BytesIO()
    picture.save(data, "JPEG")
    return data.getvalue()
