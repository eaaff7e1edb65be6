"""Opens and ends incidents from answers: threshold, consecutive windows, hysteresis, cooldown (``IncidentTracker``)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.alerts.incident import Incident, Subject
from cluster.alerts.open_incidents import OpenIncidents
from cluster.config.alerts import Severity
from cluster.types import MICROSECONDS, Answer, TokenCount
from cluster.types.cameras import HEALTH_SUBJECTS

INCARNATIONS = 8
"""Number of stream incarnations per camera and question whose newest window is kept, to detect repeated answers."""

OVER_S = 10.0
"""Grace period, in seconds, between a finished video's last answer and closing its incidents: windows may be queued."""

UNKNOWN = ""
"""Question text or camera life that is not known yet."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When answers to one question open and close an incident.

    * ``consecutive``: positive windows in a row that open it (CodecSight evaluates with two, section 5, metrics)
    * ``hysteresis``: the incident continues while the score is at least :attr:`lower`
    * ``release``: windows in a row below :attr:`lower` that close it
    * ``cooldown_s``: seconds after its end, on the camera's clock, in which no other opens
    * ``update_s``: interval of update events, in seconds on the camera's clock
    * ``stale_s``: seconds without answers after which the incident is closed
    * ``text``: text of the question
    """

    threshold: float = 0.5
    consecutive: int = 2
    release: int = 2
    hysteresis: float = 0.1
    cooldown_s: float = 60.0
    update_s: float = 60.0
    stale_s: float = 300.0
    severity: Severity = "warning"
    text: str = UNKNOWN

    @property
    def lower(self) -> float:
        """Threshold less hysteresis, but at least half the threshold, so that scores can fall below a low one."""
        return max(self.threshold - self.hysteresis, self.threshold / 2)


OnWindow = Callable[[Answer, float, float], None]
"""(answer, highest threshold at which it would open an incident, Unix time)."""
Rules = Callable[[str, str], Rule | None]
"""(camera, question id) -> rule; None: the question is no longer asked."""


@dataclass(slots=True)
class Track:
    """State of one question at one camera. ``run``: positive windows in a row; ``off``: windows in a row below
    :attr:`Rule.lower` in an incident; ``last_end``: end of the newest window on the camera's clock, whose last frame
    arrived at ``last_s`` (Unix time); ``life`` of the camera and ``text`` of the question as last known; ``newest``:
    newest window by incarnation; ``recent``: scores of the last ``consecutive`` contiguous windows."""

    run: int = 0
    run_start: int = 0
    run_score: float = 0.0
    off: int = 0
    last_end: int | None = None
    last_s: float = 0.0
    told_end: int = 0
    ended_end: int | None = None
    seen_s: float = 0.0
    life: str = UNKNOWN
    text: str = UNKNOWN
    recent: list[float] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)

    def is_repeated(self, answer: Answer) -> bool:
        """Whether the answer was seen before: windows of one incarnation arrive in order."""
        return answer.incarnation in self.newest and answer.window <= self.newest[answer.incarnation]

    def remember(self, answer: Answer) -> None:
        self.newest.pop(answer.incarnation, None)
        self.newest[answer.incarnation] = answer.window
        if len(self.newest) > INCARNATIONS:
            del self.newest[next(iter(self.newest))]


class IncidentTracker:
    """Receives every answer, cameras interleaved in any order; applies the changes to ``open_incidents``.

    Repeated answers (windows up to the newest of their incarnation) are ignored: replicas resend the last minute to
    new subscribers. So are late ones, from a replica that was unreachable until another had the camera. Any other
    answer that ends before the last one means that the camera's clock restarted. A gap between windows breaks a run and
    ends the incident, as nobody saw it. A camera removed and added again, and a reworded question, reset the state.
    """

    def __init__(
        self,
        open_incidents: OpenIncidents,
        rules: Rules,
        *,
        on_window: OnWindow = lambda *_: None,
    ) -> None:
        self._on_window = on_window
        self._open_incidents = open_incidents
        self._rules = rules
        self._tracks: dict[Subject, Track] = {}
        self._lives: Mapping[str, str] = {}

    def load(self, tracks: Mapping[Subject, Mapping[str, Any]], now_s: float) -> None:
        """Restore stored state, except of questions answered in the meantime."""
        for where, body in tracks.items():
            if where not in self._tracks and where[1] not in HEALTH_SUBJECTS:
                # Downtime of this process does not count as time without answers.
                self._tracks[where] = Track(**{**body, "seen_s": now_s, "last_s": min(body["last_s"], now_s)})

    def store_all(self) -> None:
        """Record all state for the next process, including what is not written per answer: which answers were seen."""
        for where, track in self._tracks.items():
            self._open_incidents.store_track(where, asdict(track))

    def shift(self, by_s: float) -> None:
        """Compensate a clock step of ``by_s``, so that time without answers is measured correctly."""
        for track in self._tracks.values():
            track.seen_s += by_s
            track.last_s += by_s

    def add_answer(self, answer: Answer, now_s: float) -> bool:
        """Process one answer; ``now_s``: Unix time. False: it arrived too late."""
        where = (answer.stream, answer.question)
        rule = self._rules(*where)
        if rule is None:
            return True
        track = self._tracks.setdefault(where, Track())
        self._reset_if_reworded(where, track, rule, now_s)
        track.life = track.life or self._lives.get(answer.stream, UNKNOWN)
        if track.is_repeated(answer):
            return True
        ended_s = now_s - answer.lag_s
        if track.last_end is not None and answer.end <= track.last_end and ended_s < track.last_s:
            return False
        self._open_incidents.memory_shifts[answer.stream] = answer.memory_shift
        idle = not track.run and self._open_incidents.get(*where) is None
        connected = self._connect(track, answer, now_s)
        track.remember(answer)
        track.recent = [*(track.recent if connected else ()), answer.score][-rule.consecutive :]
        level = min(track.recent) if len(track.recent) == rule.consecutive else 0.0
        self._on_window(answer, level, now_s)
        incident = self._open_incidents.get(*where)
        if incident is None:
            self._extend_run(track, rule, answer, level, now_s)
        else:
            self._continue_incident(track, rule, replace(incident, level=max(incident.level, level)), answer, now_s)
        track.last_end, track.last_s, track.seen_s = answer.end, ended_s, now_s
        if not idle or track.run or self._open_incidents.get(*where) is not None:
            self._open_incidents.store_track(where, asdict(track))
        return True

    def retain_cameras(self, lives: Mapping[str, str], now_s: float) -> None:
        """Drop the state of cameras that are missing from ``lives`` (name -> life) or have another life there."""
        self._lives = lives
        for (camera, question), track in list(self._tracks.items()):
            if camera in lives and track.life in (UNKNOWN, lives[camera]):
                track.life = lives[camera]
            else:
                self._drop((camera, question), now_s, "the camera was removed")

    def tick(self, now_s: float, ended_cameras: Collection[str] = ()) -> None:
        """End incidents without answers for the rule's ``stale_s``, or for ``OVER_S`` at cameras whose video has ended,
        and drop questions that are no longer asked."""
        for where, track in list(self._tracks.items()):
            if (rule := self._rules(*where)) is None:
                self._drop(where, now_s, "the question was removed")
            elif now_s - track.seen_s > rule.stale_s:
                self._end(where, now_s, f"no answer for {rule.stale_s:.0f} s")
            elif where[0] in ended_cameras and now_s - track.seen_s > OVER_S:
                self._end(where, now_s, "the video is over")

    def reset_camera(self, camera: str) -> None:
        """Reset runs and cooldowns of a camera whose memory is erased; repeated answers are still recognised."""
        for where, track in self._tracks.items():
            if where[0] == camera:
                track.run = track.run_start = track.off = 0
                track.run_score, track.ended_end = 0.0, None
                self._open_incidents.store_track(where, asdict(track))

    # -- inside ---------------------------------------------------------------------------------
    def _drop(self, where: Subject, now_s: float, reason: str) -> None:
        self._open_incidents.end_incident(*where, now_s, reason)
        del self._tracks[where]
        self._open_incidents.store_track(where, None)

    def _reset_if_reworded(self, where: Subject, track: Track, rule: Rule, now_s: float) -> None:
        if UNKNOWN not in (track.text, rule.text) and track.text != rule.text:
            self._end(where, now_s, "the question was changed")
            track.run, track.ended_end, track.recent = 0, None, []
        track.text = rule.text or track.text

    def _connect(self, track: Track, answer: Answer, now_s: float) -> bool:
        """Whether the window overlaps or touches the last one. If not, resets the run and ends the incident."""
        if track.last_end is None:
            return False
        where = (answer.stream, answer.question)
        if answer.end <= track.last_end:
            self._end(where, now_s, "the camera's clock restarted")
            track.run, track.ended_end = 0, None
        elif answer.start > track.last_end:
            self._end(where, now_s, "no answer in between")
            track.run = 0
        return track.last_end < answer.end and answer.start <= track.last_end

    def _extend_run(self, track: Track, rule: Rule, answer: Answer, level: float, now_s: float) -> None:
        if not answer.positive:
            track.run = 0
            return
        if not track.run:
            track.run_start, track.run_score = answer.start, 0.0
        track.run += 1
        track.run_score = max(track.run_score, answer.score)
        if track.run < rule.consecutive:
            return
        if track.ended_end is not None and answer.end - track.ended_end < rule.cooldown_s * MICROSECONDS:
            return
        track.off, track.told_end = 0, answer.end
        opening = Incident(
            id="",
            camera=answer.stream,
            kind="question",
            subject=answer.question,
            severity=rule.severity,
            start=track.run_start,
            end=answer.end,
            score=track.run_score,
            level=level,
            windows=track.run,
            opened_s=now_s,
            updated_s=now_s,
            text=answer.text,
            question=rule.text,
        )
        self._open_incidents.open_incident(opening, f"{answer.incarnation}-{answer.window}")

    def _continue_incident(self, track: Track, rule: Rule, incident: Incident, answer: Answer, now_s: float) -> None:
        if answer.positive or answer.score >= rule.lower:
            track.off = 0
            incident = replace(
                incident,
                end=answer.end,
                score=max(incident.score, answer.score),
                windows=incident.windows + 1,
                text=answer.text or incident.text,
            )
            tell = answer.end - track.told_end >= rule.update_s * MICROSECONDS
            if tell:
                track.told_end = answer.end
            self._open_incidents.extend_incident(incident, now_s, tell=tell)
            return
        track.off += 1
        if track.off >= rule.release:
            self._end((answer.stream, answer.question), now_s, "")

    def _end(self, where: Subject, now_s: float, reason: str) -> None:
        incident = self._open_incidents.get(*where)
        if incident is None:
            return
        self._open_incidents.end_incident(*where, now_s, reason)
        track = self._tracks[where]
        track.run, track.off, track.ended_end = 0, 0, incident.end
        self._open_incidents.store_track(where, asdict(track))


_NO_TOKENS = TokenCount(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """A window ``[start_s, end_s)`` on an arbitrary clock, and its score, 0..1."""

    start_s: float
    end_s: float
    score: float


def simulate_incidents(windows: Sequence[ScoredWindow], rule: Rule) -> list[Incident]:
    """Incidents, oldest first, that ``windows`` (oldest first) would have opened under ``rule``. ``start`` and ``end``
    are microseconds on the windows' clock; an incident still open at the end has no ``ended_s``."""
    kept = OpenIncidents("rehearsal")
    tracker = IncidentTracker(kept, lambda *_: rule)
    for number, window in enumerate(windows):
        answer = Answer(
            stream="rehearsed",
            window=number,
            start=round(window.start_s * MICROSECONDS),
            end=round(window.end_s * MICROSECONDS),
            question="rehearsed",
            score=window.score,
            positive=window.score >= rule.threshold,
            text="",
            gated=False,
            tokens=_NO_TOKENS,
        )
        tracker.add_answer(answer, window.end_s)
    return sorted(kept.pop_changes().incidents.values(), key=lambda incident: incident.start)
