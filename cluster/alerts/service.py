"""Alerting: answers and camera states in, incidents and deliveries out (``AlertService``)."""

import asyncio
import logging
import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster import metrics
from cluster.alerts.dispatcher import Dispatcher, Outbox
from cluster.alerts.health import CameraStates, HealthMonitor, default_rule, question_rules
from cluster.alerts.incident import (
    AlertEvent,
    Changes,
    ClipState,
    Delivery,
    Erased,
    ErasureScope,
    Incident,
    IncidentDetail,
    IncidentQuery,
    Mute,
    Verdict,
    clip_settled,
    newest_first,
    reviewed,
    unknown_incident,
)
from cluster.alerts.journal import Journal
from cluster.alerts.open_incidents import OpenIncidents
from cluster.alerts.routing import SinkRoutes
from cluster.alerts.store import AlertStore, StoredState
from cluster.alerts.timeline_store import KEEP_S, TimelineStore
from cluster.alerts.tracker import IncidentTracker, Rule
from cluster.alerts.wall_clock import WallClock
from cluster.config import CameraConfig, SightlineConfig, camera_settings
from cluster.errors import NotReadyError, UnavailableError
from cluster.security.roles import EVERY
from cluster.types import Answer
from cluster.wire.answers import FanOut, Subscription, yielding

log = logging.getLogger(__name__)

FILE = "alerts.sqlite"
TIMELINES = "timelines.sqlite"
TICK_S = 1.0
SETTLE_S = 0.05
"""Batching delay for writes of delivery states; losing them only causes a second delivery."""
EXPIRE_S = 60.0
PROBE_S = 5.0
"""Interval of probe writes, which detect a failing disk while there are no alerts."""

EventMaker = Callable[[Incident, float], AlertEvent]
"""Makes the event of a change that is published to followers only, from the incident and the Unix time."""


class AlertService:
    """Runs on one event loop, between :meth:`start` and :meth:`stop`.

    :meth:`accept_answer` never waits. An event is on disk before any sink gets it; if the disk fails it is sent from
    memory (:class:`~cluster.alerts.journal.Journal`).

    ``folder``: holds the database files. ``on_event``: called with every event, muted ones included; must not wait.
    """

    def __init__(
        self, config: SightlineConfig, folder: Path, *, on_event: Callable[[AlertEvent], None] = lambda _: None
    ) -> None:
        self._on_event = on_event
        self._footage_url = config.clips.url if config.clips.enabled else None
        alerts = self._config = config.alerts
        self._rules = {each.name: question_rules(camera_settings(config, each), alerts) for each in config.cameras}
        self._default = default_rule(alerts)
        self._informed = False
        self._cameras: dict[str, CameraConfig] = {}
        self._lives: dict[str, str] = {}
        self._ended_cameras: set[str] = set()
        self.version, self.answers_missed = -1, 0
        self._journal = Journal(
            lambda: AlertStore(folder / FILE, max_events=alerts.max_events, max_bytes=alerts.max_bytes),
            on_late=self._load,
            on_recreated=lambda: self._open_incidents.store_all(),
        )
        self.timelines = TimelineStore(folder / TIMELINES, keep_s=min(KEEP_S, alerts.retention))
        self.routes = SinkRoutes(alerts.sinks)
        self._dispatcher = Dispatcher(self.routes.sinks, self._settle, retry=alerts.retry, most=2 * alerts.max_events)
        self._feed = FanOut[AlertEvent](lambda event: event.incident.camera)
        self._settled: dict[tuple[str, str], Delivery] = {}
        self._revised: list[tuple[str, EventMaker]] = []
        self._clock = WallClock(self._shift)
        self._expired, self._newest_s = 0, 0.0
        self._expire_s = self._probe_s = 0.0
        self._changed = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._counted = {"lost": 0, "trimmed": 0}

    async def start(self, lives: Mapping[str, str] | None = None) -> None:
        """Restore stored state and start sending. ``lives``: cameras that the previous process knew, name -> life."""
        self._lives, self._began_s = dict(lives or {}), time.time()
        kept = await self._journal.start() or StoredState({}, [], [], [])
        self._open_incidents = OpenIncidents(self._journal.salt or uuid.uuid4().hex, self._footage_url)
        self._tracker = IncidentTracker(self._open_incidents, self._rule, on_window=self._add_window)
        self._health = HealthMonitor(self._open_incidents, self._config.health, self._config.update_s)
        self._load(kept)
        self._tasks = [*self._dispatcher.start(), self.timelines.start()]
        self._tasks += [asyncio.create_task(self._write_changes()), asyncio.create_task(self._tick())]

    async def run(self) -> None:
        """Wait until a background task fails, and raise its exception."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Stop sending and write pending changes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._feed.close()
        await self._dispatcher.stop()
        self._tracker.store_all()
        await self._flush()
        await self._journal.stop()
        await self.timelines.stop()

    # -- inputs ---------------------------------------------------------------------------------
    def accept_answer(self, answer: Answer, missed: int = 0) -> None:
        """Process one answer; ``missed``: number of answers lost before it."""
        if not self._tracker.add_answer(answer, self._clock.now()):
            missed += 1
        self.answers_missed += missed
        metrics.answers_missed.inc(missed)
        self._changed.set()

    async def update_cameras(self, watched: CameraStates) -> None:
        """Process the status of all cameras, about once a second; yields to the event loop in between."""
        now_s = self._clock.now()
        if watched.version != self.version:
            self.version, self._informed = watched.version, True
            present = {status.name for status in watched.statuses}
            self._cameras |= {each.name: each for each in watched.settings}
            self._cameras = {name: each for name, each in self._cameras.items() if name in present}
            self._rules |= {each.name: question_rules(each, self._config) for each in watched.settings}
            self._rules = {name: self._rules[name] for name in self._cameras}
            self.routes.follow_cameras(tuple(self._cameras.values()), self.open_incidents())
        lives = watched.lives
        removed = {name for name, life in self._lives.items() if lives.get(name) != life}
        for name in removed:
            self._open_incidents.forget_camera(name)
        self._lives = lives
        self.timelines.add_statuses(watched.statuses, now_s, removed)
        self._ended_cameras = {status.name for status in watched.statuses if status.state == "ended"}
        self._tracker.retain_cameras(lives, now_s)
        self._health.retain_cameras(lives.keys() - removed, now_s)
        async for status in yielding(watched.statuses):
            picture, camera = watched.pictures.get(status.name), self._cameras.get(status.name)
            patient, stride_s = (camera.is_patient, camera.window.stride_s) if camera is not None else (False, 0.0)
            self._health.update(status, picture, now_s, patient=patient, stride_s=stride_s)
        self._changed.set()

    # -- operations -----------------------------------------------------------------------------
    async def incidents(self, query: IncidentQuery = IncidentQuery()) -> list[Incident]:
        """Matching incidents, newest first; only those in memory while the store cannot be read."""
        found = {incident.id: incident for incident in self._open_incidents.oldest_first if query.matches(incident)}
        if not query.only_open:
            kept = await self._journal.incidents(query)
            # Memory is newer than the disk for open incidents.
            found = {incident.id: incident for incident in kept if not incident.open} | found
        return sorted(found.values(), key=newest_first)[: query.limit]

    async def incident(self, incident_id: str) -> IncidentDetail:
        """One incident. Raises ``NotFoundError``; ``UnavailableError``: it is not in memory, and the store cannot be
        read."""
        found = await self._journal.incident(incident_id, self._open_incidents.find(incident_id))
        if found is None:
            raise unknown_incident(incident_id)
        return found

    async def acknowledge(self, incident_id: str, by: str) -> Incident:
        """Acknowledge an open incident; idempotent. Raises ``NotReadyError``: it ended unacknowledged."""
        try:
            incident = self._open_incidents.acknowledge(incident_id, by, time.time())
        except NotReadyError:
            ended = await self._ended(incident_id)
            if ended is None or ended.acknowledged_s is None:
                raise
            return ended
        await self._flush()
        return incident

    async def set_clip_state(self, incident_id: str, clip: ClipState, note: str) -> None:
        """Record the state of an incident's clip and notify followers. Raises ``UnavailableError``: the store."""
        await self._revise(incident_id, lambda incident: replace(incident, clip=clip, footage_note=note), clip_settled)

    async def review(self, incident_id: str, verdict: Verdict, by: str) -> Incident:
        """Record a verdict on an open or ended incident and notify followers; an empty one withdraws it. Raises
        ``NotFoundError``: unknown id; ``UnavailableError``: the record cannot be read."""
        now_s = time.time()
        incident = await self._revise(
            incident_id, lambda each: replace(each, verdict=verdict, reviewed_by=by, reviewed_s=now_s), reviewed
        )
        if incident is None:
            raise unknown_incident(incident_id)
        return incident

    async def pending_clips(self, since_s: float) -> list[Incident]:
        """Incidents opened since ``since_s`` whose clip was in progress when this process started.

        Clips of older ones are recorded as missing: their packets are no longer buffered. Raises ``UnavailableError``.
        """
        query = IncidentQuery(clip="waiting", limit=sys.maxsize)
        kept = await self._journal.read(lambda store: store.incidents(query))
        # One from the future is of a previous process as well: the clock was set back.
        now_s = time.time()
        waiting = [incident for incident in kept if not self._began_s <= incident.opened_s <= now_s]
        for incident in waiting:
            if incident.opened_s < since_s:
                await self.set_clip_state(incident.id, "none", "no clip: alerting was not running")
        return [incident for incident in waiting if incident.opened_s >= since_s]

    async def mute(self, camera: str, subject: str, for_s: float, by: str) -> list[Mute]:
        """Mute for ``for_s`` seconds; returns the active mutes. Raises ``CapacityError``: too many."""
        now_s = self._clock.now()
        self._open_incidents.mute(Mute(camera or "*", subject or "*", now_s + for_s, by), now_s)
        await self._flush()
        return self._open_incidents.mutes(now_s)

    async def unmute(self, camera: str, subject: str) -> list[Mute]:
        """Remove a mute; returns the active mutes. Idempotent."""
        self._open_incidents.unmute(camera or "*", subject or "*")
        await self._flush()
        return self.mutes()

    def mutes(self) -> list[Mute]:
        return self._open_incidents.mutes(self._clock.now())

    def follow(self) -> Subscription[AlertEvent]:
        return self._feed.subscribe()

    def open_incidents(self) -> list[Incident]:
        return self._open_incidents.oldest_first

    @property
    def cooldown_s(self) -> float:
        return self._default.cooldown_s

    async def outbox(self, dead: int = 0, scope: Sequence[str] = EVERY) -> Outbox:
        """Status of the outbox; ``dead``: maximum number of dead letters to return, of cameras in ``scope``."""
        letters: list[Delivery] = []
        if dead:
            letters = await self._journal.read(lambda store: store.dead(limit=dead, scope=scope))
        kinds = self.routes.kinds
        lanes = {name: replace(status, kind=kinds[name]) for name, status in self._dispatcher.status().items()}
        journal = self._journal
        waiting, free = journal.pending_events, journal.free_bytes
        return Outbox(
            lanes, journal.trouble, waiting, journal.trimmed, self._lost, self.answers_missed, letters, free_bytes=free
        )

    async def resend(self, sink: str = "", key: str = "", scope: Sequence[str] = EVERY) -> int:
        """Retry dead letters of cameras in ``scope``; returns how many."""
        async with self._flushing:
            most = self._config.max_events
            letters = await self._journal.read(lambda store: store.dead(sink=sink, key=key, limit=most, scope=scope))
            chosen = [self.routes.as_seen(Delivery(letter.event, letter.sink)) for letter in letters]
            # Enqueued before the write: if the caller is cancelled in it, they must not stay pending but unsent.
            self._dispatcher.enqueue(chosen)
            await self._journal.write(Changes(deliveries={(each.event.key, each.sink): each for each in chosen}))
            return len(chosen)

    async def erase_camera(self, camera: str, before_s: float = 0.0) -> Erased:
        """Erase a camera's incidents and pending alerts older than ``before_s`` seconds; 0: all of them, ending those
        that are open (:class:`~cluster.alerts.incident.ErasureScope`). Raises ``UnavailableError``: not yet on disk;
        the next successful write erases them."""
        # "All" includes records made while the clock was ahead.
        now_s = time.time() if before_s else max(time.time(), self._newest_s)
        scope = ErasureScope(camera, now_s - before_s if before_s else math.nextafter(now_s, math.inf))
        if not before_s:
            self._open_incidents.end_camera_incidents(camera, now_s)
            self._tracker.reset_camera(camera)
        return await self._erase(scope)

    async def erase_removed_camera(self, camera: str, removed_s: float) -> None:
        """Erase a removed camera's records and mutes, not those of a later camera of the same name. Raises as above."""
        if self._informed and camera not in self._lives:
            self._open_incidents.forget_camera(camera)
        if self._newest_s > time.time():
            # Include records made while the clock was ahead.
            removed_s = self._newest_s
        self._open_incidents.end_camera_incidents(camera, removed_s)
        await self._erase(ErasureScope(camera, math.nextafter(removed_s, math.inf)))

    async def _erase(self, scope: ErasureScope) -> Erased:
        camera = scope.camera
        self._open_incidents.redact(scope)
        await self._flush()
        async with self._flushing:
            trouble = ""
            try:
                found = await self._journal.read(lambda store: store.preview_erasure(scope))
            except UnavailableError as error:
                found, trouble = Erased(), str(error)
            self._cancel_deliveries(scope)
            if not await self._journal.write(scope.changes()) or trouble:
                reason = trouble or self._journal.trouble
                raise UnavailableError(f"the incidents of camera {camera!r} are not erased yet: {reason}")
            if any(left := await self._journal.read(lambda store: store.preview_erasure(scope))):
                raise UnavailableError(
                    f"{left.incidents} incidents and {left.alerts} alerts of camera {camera!r} could not be erased"
                )
        await self.timelines.delete(camera, scope.before_s)
        log.info("camera %s: erased %d incidents and %d alerts", camera, found.incidents, found.alerts)
        return found

    # -- inside ---------------------------------------------------------------------------------
    def _shift(self, by_s: float) -> None:
        """Keep running durations correct when the clock is stepped."""
        for each in (self._tracker, self._health, self._open_incidents):
            each.shift(by_s)

    def _add_window(self, answer: Answer, level: float, now_s: float) -> None:
        at_s = now_s - answer.lag_s
        self.timelines.add_window(answer.stream, answer.question, at_s, answer.score, level, answer.positive)

    def _rule(self, camera: str, question: str) -> Rule | None:
        if (rules := self._rules.get(camera)) is not None:
            return rules.get(question)
        # Answers of cameras whose settings are not known yet, or that are left out for now, must not be lost.
        return None if self._informed and camera not in self._lives else self._default

    async def _revise(
        self, incident_id: str, change: Callable[[Incident], Incident], make_event: EventMaker
    ) -> Incident | None:
        """Change an open or ended incident without an event for sinks; None: unknown id."""
        if (incident := self._open_incidents.revise(incident_id, change)) is not None:
            self._revised.append((incident_id, make_event))
            await self._flush()
            return incident
        # It has ended: write and publish its end first.
        await self._flush()
        async with self._flushing:
            # An erasure between this read and the write would be undone.
            if (ended := await self._ended(incident_id)) is None:
                return None
            ended = change(ended)
            await self._journal.write(Changes(incidents={incident_id: ended}))
            self._feed.publish([make_event(ended, time.time())])
            return ended

    async def _ended(self, incident_id: str) -> Incident | None:
        found = await self._journal.incident(incident_id)
        return None if found is None else found.incident

    def _load(self, kept: StoredState) -> None:
        """Resume from stored state, at start or once the store can be read again."""
        now_s = time.time()
        self._newest_s = max(self._newest_s, kept.newest_s)
        self._open_incidents.load(kept.incidents, kept.mutes, now_s, kept.tracks)
        self._tracker.load(kept.tracks, now_s)
        self._health.load(kept.tracks)
        if self._cameras:
            self.routes.follow_cameras(tuple(self._cameras.values()), self.open_incidents())
        if kept.pending:
            log.info("resuming delivery of %d alerts", len(kept.pending))
        self._dispatcher.enqueue(map(self.routes.as_seen, kept.pending))
        self._changed.set()

    def _settle(self, delivery: Delivery) -> None:
        result = {"delivered": "delivered", "dead": "dead"}.get(delivery.state, "failed")
        metrics.alert_deliveries.labels(delivery.sink, result).inc()
        if not self._settled:
            asyncio.get_running_loop().call_later(SETTLE_S, self._changed.set)
        self._settled[(delivery.event.key, delivery.sink)] = delivery

    async def _write_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Write and send pending changes. Shielded from cancellation, since the batch holds other callers' alerts."""
        await asyncio.shield(asyncio.create_task(self._write_and_send(), name="write alerts"))

    async def _write_and_send(self) -> None:
        async with self._flushing:
            changes = self._open_incidents.pop_changes()
            settled, self._settled = self._settled, {}
            revised, self._revised = self._revised, []
            routed = [each for event in changes.events.values() for each in self.routes.deliveries(event)]
            changes.deliveries = settled | {(each.event.key, each.sink): each for each in routed}
            if not changes:
                return
            await self._journal.write(changes)
            self._dispatcher.enqueue(routed)
            self._feed.publish(changes.events.values())
            # Last and with the current state, to not roll back earlier events of the batch; erased ones have no state.
            now_s, kept = time.time(), changes.incidents
            self._feed.publish(make_event(kept[each], now_s) for each, make_event in revised if each in kept)
            for event in changes.events.values():
                self._newest_s = max(self._newest_s, event.at_s)
                metrics.incident_events.labels(event.incident.kind, event.kind).inc()
                self._on_event(event)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tracker.tick(self._clock.now(), self._ended_cameras)
            self._changed.set()
            if self._journal.pending_events or time.monotonic() >= self._probe_s:
                self._probe_s = time.monotonic() + PROBE_S
                await self._journal.probe()
            if time.monotonic() >= self._expire_s:
                self._expire_s = time.monotonic() + EXPIRE_S
                await self._expire()
            self._publish_metrics()

    def _publish_metrics(self) -> None:
        for name, status in self._dispatcher.status().items():
            metrics.alerts_waiting.labels(name).set(status.waiting)
        metrics.alerts_unwritten.set(self._journal.pending_events)
        kinds = Counter(incident.kind for incident in self.open_incidents())
        for kind in ("question", "health"):
            metrics.incidents_open.labels(kind).set(kinds[kind])
        totals = ("lost", metrics.alerts_lost, self._lost), ("trimmed", metrics.alerts_trimmed, self._journal.trimmed)
        for name, counter, total in totals:
            counter.inc(max(0, total - self._counted[name]))
            self._counted[name] = total

    async def _expire(self) -> None:
        """Erase records past their retention, delivered or not."""
        scope = ErasureScope("", time.time() - self._config.retention)
        self._open_incidents.redact(scope)
        await self._flush()
        async with self._flushing:
            self._expired += self._cancel_deliveries(scope)
            await self._journal.write(scope.changes())

    def _cancel_deliveries(self, scope: ErasureScope) -> int:
        return self._dispatcher.revise_pending(lambda event: scope.redact_event(event, pending=True))

    @property
    def _lost(self) -> int:
        return self._journal.lost + self._expired
