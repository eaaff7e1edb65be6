"""The demo's charts: scores, truth and alerts over time, and tokens per window."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from cluster.lab.report.charts import COLOR, add_legend, new_figure, set_tooltips
from cluster.lab.report.number_format import compact
from cluster.lab.report.records import ComparedWindow, EventInterval, LiveWindow, Verdict, alerts, verdict
from cluster.types import Question

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW_HEIGHT, LEGEND_HEIGHT = 520, 132, 76
_SAID: dict[Verdict, str] = {"right": "right", "wrong": "wrong", "open": "nobody can tell"}
_JUDGED: dict[Verdict, str] = {"right": "right", "wrong": "wrong", "open": "not judged"}
_COLORS: dict[Verdict, str] = {"right": COLOR["good"], "wrong": COLOR["bad"], "open": COLOR["soft"]}
# y positions of events, alerts and gated windows, in units of scores.
_EVENT, _FLAG, _GATED = (1.08, 1.13), 1.22, (-0.08, -0.04)
LIMITS = (-0.1, 1.32)

_Window = LiveWindow | ComparedWindow


def live_timeline(
    windows: Sequence[LiveWindow], questions: Sequence[Question], events: Sequence[EventInterval]
) -> Figure:
    """Scores of each question live, at the end of each window."""
    figure = _background(windows, questions, events, "Answers, live", f"Scores over {len(windows)} live windows")
    for axes, question in zip(figure.axes, questions, strict=True):
        for alert in alerts(windows, question):
            color = _COLORS[alert.verdict]
            xs, ys = [alert.at_s] * 2, [_FLAG, 0]
            label = "alert: two positive windows in a row"
            (flag,) = axes.plot(xs, ys, color=color, linewidth=1, marker="v", markevery=[0], markersize=9, label=label)
            set_tooltips(flag, f"alert at {alert.at_s:.0f} s: two positive windows in a row ({_SAID[alert.verdict]})")
        _score_line(axes, [(window, window.scores) for window in windows], question, "ours", "")
    add_legend(figure, 3)
    return figure


def compared_timeline(
    windows: Sequence[ComparedWindow], questions: Sequence[Question], events: Sequence[EventInterval]
) -> Figure:
    """Scores of each question on the same windows, in full and ours."""
    name = f"Scores over {len(windows)} windows, in full and ours"
    figure = _background(windows, questions, events, "The same clip, in full and ours", name)
    for axes, question in zip(figure.axes, questions, strict=True):
        _score_line(axes, [(window, window.full_scores) for window in windows], question, "whole", "in full, ")
        _score_line(axes, [(window, window.our_scores) for window in windows], question, "ours", "ours, ")
    add_legend(figure, 3)
    return figure


def _background(
    windows: Sequence[_Window], questions: Sequence[Question], events: Sequence[EventInterval], title: str, name: str
) -> Figure:
    """Truth, threshold, events and gated windows, behind the scores."""
    ids = ", ".join(question.id for question in questions)
    figure = new_figure(f"{name}: {ids}", WIDTH, ROW_HEIGHT * len(questions) + LEGEND_HEIGHT, rows=len(questions))
    _title(figure, title)
    # A window is drawn from the previous one's end, as windows overlap.
    ends = [window.end_s for window in windows]
    stride = min((later - sooner for sooner, later in pairwise(ends)), default=ends[0] - windows[0].start_s)
    since = [max(windows[0].start_s, ends[0] - stride), *ends[:-1]]
    for axes, question in zip(figure.axes, questions, strict=True):
        axes.set_title(textwrap.fill(question.text, 76), loc="left", fontsize=12, color=COLOR["ink"])
        axes.set(xlim=(since[0], ends[-1]), ylim=LIMITS, yticks=[0, question.threshold, 1], ylabel="score")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
        axes.axhline(question.threshold, color=COLOR["soft"], linewidth=1, linestyle=":", label="threshold")
        for start, window in zip(since, windows, strict=True):
            truth = window.truth.get(question.id, False)
            if truth is not False:
                color, label = (COLOR["good"], "should be yes") if truth else (COLOR["soft"], "too little to tell")
                text = "should be yes" if truth else "too little of it in the window to tell"
                text = f"window ending at {window.end_s:.0f} s: {text}"
                _interval_bar(axes, start, window.end_s, (0, 1), color, 0.13, label, text)
            if window.gated:
                text = "nothing moved: the last answer stood, nothing was computed"
                _interval_bar(axes, start, window.end_s, _GATED, COLOR["soft"], 0.55, "nothing moved", text)
        for event in events:
            start, end = max(event.start_s, since[0]), min(event.end_s, ends[-1])
            if event.question == question.id and start < end:
                text = f"it happened from {event.start_s:.1f} to {event.end_s:.1f} s"
                _interval_bar(axes, start, end, _EVENT, COLOR["event"], 1, "it happens", text)
    return figure


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0, ha="left", fontsize=13, fontweight="bold", color=COLOR["ink"])


def _interval_bar(
    axes: Axes, start: float, end: float, between: tuple[float, float], color: str, alpha: float, label: str, text: str
) -> None:
    low, high = between
    (bar,) = axes.bar(start, high - low, end - start, low, align="edge", color=color, alpha=alpha)
    bar.set_label(label)
    set_tooltips(bar, text)


def _score_line(
    axes: Axes, scores: Sequence[tuple[_Window, dict[str, float]]], question: Question, way: str, prefix: str
) -> None:
    """Scores of one way, with a marker per window by verdict."""
    points = [(window, given[question.id]) for window, given in scores if question.id in given]
    color, dashes = (COLOR["line"], "-") if way == "ours" else (COLOR["whole"], "--")
    label = "score" if not prefix else prefix.rstrip(", ")
    xs, ys = [window.end_s for window, _ in points], [score for _, score in points]
    axes.plot(xs, ys, color=color, linestyle=dashes, linewidth=2, label=label)
    for window, score in points:
        judged = verdict(score, question.threshold, window.truth[question.id]) if question.id in window.truth else None
        (mark,) = axes.plot(
            [window.end_s],
            [score],
            linestyle="",
            label=_JUDGED[judged] if judged else None,
            marker="x" if judged == "wrong" else "o",
            markersize=8 if way == "ours" else 5,
            markeredgewidth=2,
            color=_COLORS[judged] if judged else color,
            markerfacecolor=COLOR["card"] if judged == "open" else None,
        )
        text = f"{prefix}{score:.2f} at {window.end_s:.0f} s" + (f": {_SAID[judged]}" if judged else "")
        set_tooltips(mark, text + (" (gated)" if window.gated else ""))


def tokens_per_window(windows: Sequence[LiveWindow]) -> Figure:
    """Three nested bars per window: tokens unpruned, kept by the pruner, computed by the language model."""
    figure = new_figure(f"Tokens of {len(windows)} windows: full, kept, computed", WIDTH, 240)
    _title(figure, "Tokens per window, live")
    (axes,) = figure.axes
    places = range(len(windows))
    for label, color, width in (("full", "full", 0.8), ("kept", "kept", 0.6), ("computed", "accent", 0.4)):
        counts = [getattr(window, label) for window in windows]
        name = "kept by the pruner" if label == "kept" else label
        for window, bar in zip(windows, axes.bar(places, counts, width, color=COLOR[color], label=name), strict=True):
            set_tooltips(
                bar,
                f"window ending at {window.end_s:.0f} s: {window.full} tokens in full, {window.kept} kept, "
                f"{window.computed} computed{' (gated)' if window.gated else ''}",
            )
    shown = places[:: max(1, -(-len(windows) // 8))]
    axes.set_xticks(shown, [f"{windows[place].end_s:.0f} s" for place in shown])
    axes.set(xlabel="end of window", ylabel="tokens")
    axes.yaxis.set_major_formatter(lambda value, _: compact(value))
    add_legend(figure, 3)
    return figure
