"""Makers of answers, incidents and camera states."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sink_parts import Receiver

from cluster.alerts.incident import AlertEvent, Incident
from cluster.alerts.service import AlertService
from cluster.config import load_config
from cluster.types import Answer, CameraStatus, PictureHealth, TokenCount

STRIDE, LENGTH = 8_000_000, 40_000_000


class Make:
    """Windows of 40 s every 8 s; scores against a threshold of 0.5."""

    def answer(
        self, window: int, score: float = 0.9, *, camera: str = "gate", question: str = "person", end: int | None = None
    ) -> Answer:
        end = (window + 1) * STRIDE if end is None else end
        tokens = TokenCount(full=100, kept=40, reused=20, refreshed=5, new=15, query=12, encoded=15)
        start = max(0, end - LENGTH)
        return Answer(camera, window, start, end, question, score, score >= 0.5, "", False, tokens)

    def incident(self, number: int = 0, **fields: Any) -> Incident:
        return replace(
            Incident(
                id=f"{number:016x}",
                camera="gate",
                kind="question",
                subject="person",
                severity="warning",
                start=0,
                end=STRIDE,
                score=0.75,
                windows=2,
                opened_s=1_000.0 + number,
                updated_s=1_000.0 + number,
                events=1,
                announced_s=1_000.0 + number,
                told_s=1_000.0 + number,
            ),
            **fields,
        )

    def event(
        self, number: int = 0, *, at_s: float | None = None, event_kind: Any = "new", **fields: Any
    ) -> AlertEvent:
        incident = self.incident(number, **fields)
        return AlertEvent(f"{incident.id}-{incident.events}", event_kind, at_s or incident.opened_s, incident)

    def status(self, name: str = "gate", **fields: Any) -> CameraStatus:
        return replace(CameraStatus(name, source="rtsp://gate", state="running", frames_decoded=100), **fields)

    def picture(self, pts: int, **fields: Any) -> PictureHealth:
        healthy = PictureHealth(pts=pts, changed=0.02, still_s=0.0, luma=110.0, spread=45.0, strangeness=0.1)
        return replace(healthy, **fields)


def configuration(receiver: Receiver | None = None, questions=({"id": "person", "text": "?"},), **alerts):
    sinks = [{"name": "ops", "kind": "webhook", "options": {"url": receiver.url}}] if receiver else []
    body = {"sinks": sinks, "retry": {"first_s": 0.02, "longest_s": 0.1}, "cooldown_s": 0, **alerts}
    cameras = [{"name": "gate"}, {"name": "yard"}]
    return load_config(None, {"alerts": body, "cameras": cameras, "questions": list(questions)})


@asynccontextmanager
async def running(config, folder):
    service = AlertService(config, folder)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def bodies(receiver: Receiver) -> list[dict]:
    return [json.loads(body) for _, body in receiver.got]


def told(receiver: Receiver) -> list[tuple[str, str]]:
    return [(body["event"], body["incident"]["camera"]) for body in bodies(receiver)]
