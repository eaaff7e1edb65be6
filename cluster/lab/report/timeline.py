"""One question over time, as inline SVG: the scores, what would have been right, what happened, and the alerts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from markupsafe import Markup

from cluster.lab.report.charts import LEFT, RIGHT, WIDTH, Scale, label, svg, ticks
from cluster.lab.report.model import ComparedWindow, LiveWindow
from cluster.lab.report.truth import Alert, EventInterval, Verdict, alerts, verdict
from cluster.types import Question

HEIGHT, TOP, BOTTOM = 132, 24, 22
_EVENT_TOP, _EVENT_HEIGHT = TOP - 7, 4
_SAID: dict[Verdict, str] = {"right": "right", "wrong": "wrong", "open": "nobody can tell"}

_Window = LiveWindow | ComparedWindow


def live_timeline(windows: Sequence[LiveWindow], question: Question, events: Sequence[EventInterval]) -> Markup:
    """Answers to ``question`` while the cluster ran; a point stands at the end of its window."""
    plot = _Plot(windows, question, events)
    parts = [*plot.ground(), *plot.alerts(alerts(windows, question))]
    parts += plot.line([(window, window.scores) for window in windows], "ours", "")
    return plot.finish(parts, f"Scores of {question.id} over {len(windows)} live windows")


def compared_timeline(windows: Sequence[ComparedWindow], question: Question, events: Sequence[EventInterval]) -> Markup:
    """Answers to ``question`` on the same windows, in full and ours."""
    plot = _Plot(windows, question, events)
    parts = plot.ground()
    parts += plot.line([(window, window.full_scores) for window in windows], "whole", "in full, ")
    parts += plot.line([(window, window.our_scores) for window in windows], "ours", "ours, ")
    return plot.finish(parts, f"Scores of {question.id} over {len(windows)} windows, in full and ours")


class _Plot:
    """Both charts' ground and lines; ``windows`` is not empty."""

    def __init__(self, windows: Sequence[_Window], question: Question, events: Sequence[EventInterval]) -> None:
        self.windows, self.question = windows, question
        self.events = [event for event in events if event.question == question.id]
        # Each window speaks for the stretch since the one before ended; windows overlap too much to draw whole.
        ends = [window.end_s for window in windows]
        stride = min((later - sooner for sooner, later in pairwise(ends)), default=ends[0] - windows[0].start_s)
        self.since = [max(windows[0].start_s, ends[0] - stride), *ends[:-1]]
        self.x = Scale(self.since[0], ends[-1], LEFT, WIDTH - RIGHT)
        self.y = Scale(0, 1, HEIGHT - BOTTOM, TOP)

    def ground(self) -> list[str]:
        """What lies behind the scores: truth, threshold, what happened, and where nothing was computed."""
        parts = self._truth()
        for value in (0, 1):
            parts.append(self._level("grid", self.y(value)))
            parts.append(label(LEFT - 6, self.y(value) + 4, str(value), "end"))
        level = self.y(self.question.threshold)
        parts.append(self._level("threshold", level))
        if 0.2 < self.question.threshold < 0.8:
            parts.append(label(LEFT - 6, level + 4, f"{self.question.threshold:.2g}", "end"))
        for event in self.events:
            start, end = max(event.start_s, self.x.low), min(event.end_s, self.x.high)
            if start < end:
                text = f"it happened from {event.start_s:.1f} to {event.end_s:.1f} s"
                parts.append(self._stretch("event", start, end, _EVENT_TOP, _EVENT_HEIGHT, text))
        for since, window in zip(self.since, self.windows, strict=True):
            if window.gated:
                text = "nothing moved: the last answer stood, nothing was computed"
                parts.append(self._stretch("gated", since, window.end_s, HEIGHT - BOTTOM, 3, text))
        return parts

    def _truth(self) -> list[str]:
        parts = []
        for since, window in zip(self.since, self.windows, strict=True):
            told = window.truth.get(self.question.id, False)
            if told is not False:
                text = "should be yes" if told else "too little of it in the window to tell"
                text = f"window ending at {window.end_s:.0f} s: {text}"
                name = "truth yes" if told else "truth open"
                parts.append(self._stretch(name, since, window.end_s, TOP, HEIGHT - TOP - BOTTOM, text))
        return parts

    def alerts(self, raised: Sequence[Alert]) -> list[str]:
        """A flag at each."""
        parts = []
        for alert in raised:
            at = self.x(alert.at_s)
            text = f"alert at {alert.at_s:.0f} s: two positive windows in a row ({_SAID[alert.verdict]})"
            parts.append(
                f'<g class="alert {alert.verdict}"><line x1="{at}" x2="{at}" y1="{TOP - 10}" y2="{HEIGHT - BOTTOM}"/>'
                f'<path d="M{at - 5:.1f},{TOP - 20} h10 l-5,10 z"/><title>{escape(text)}</title></g>'
            )
        return parts

    def line(self, scores: Sequence[tuple[_Window, dict[str, float]]], name: str, prefix: str) -> list[str]:
        """One way's scores with a mark per window: a dot where it is right, a cross where wrong, hollow where open."""
        id = self.question.id
        points = [(window, given[id]) for window, given in scores if id in given]
        path = " ".join(f"{self.x(window.end_s)},{self.y(score)}" for window, score in points)
        parts = [f'<polyline class="line {name}" points="{path}"/>']
        for window, score in points:
            judged = verdict(score, self.question.threshold, window.truth[id]) if id in window.truth else None
            text = f"{prefix}{score:.2f} at {window.end_s:.0f} s" + (f": {_SAID[judged]}" if judged else "")
            text += " (gated)" if window.gated else ""
            parts.append(_mark(self.x(window.end_s), self.y(score), name, judged, text))
        return parts

    def finish(self, parts: list[str], title: str) -> Markup:
        """With the axis of time."""
        below = HEIGHT - BOTTOM + 15
        marks = [label(self.x(tick), below, f"{tick:.0f} s") for tick in ticks(self.x.low, self.x.high)]
        return svg([*parts, *marks], title, HEIGHT)

    def _level(self, name: str, y: float) -> str:
        return f'<line class="{name}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'

    def _stretch(self, name: str, start: float, end: float, top: float, height: float, text: str) -> str:
        left = self.x(start)
        return (
            f'<rect class="{name}" x="{left}" y="{top}" width="{round(self.x(end) - left, 1)}" height="{height}">'
            f"<title>{escape(text)}</title></rect>"
        )


def _mark(x: float, y: float, name: str, judged: Verdict | None, text: str) -> str:
    title = f"<title>{escape(text)}</title>"
    if judged == "wrong":
        cross = f"M{x - 4.5:.1f},{y - 4.5:.1f} l9,9 m0,-9 l-9,9"
        return f'<path class="mark {name} wrong" d="{cross}">{title}</path>'
    radius = 4 if name == "ours" else 2.5
    return f'<circle class="mark {name} {judged or "plain"}" cx="{x}" cy="{y}" r="{radius}">{title}</circle>'
