"""Renders a demo report as ``report.html`` (self-contained) and ``report.json``, with charts of scores, truth and
alerts over time and of tokens per window."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from cluster.files import json_text
from cluster.lab.report.charts import COLOR, add_legend, new_figure, set_tooltips
from cluster.lab.report.number_format import compact, percent_text, seconds_text, times_text
from cluster.lab.report.page import Card, Chip, Page, Picture, Section, Table, write_files
from cluster.lab.report.records import (
    CameraRecord,
    ComparedWindow,
    Comparison,
    EventInterval,
    LiveWindow,
    Report,
    Tally,
    Verdict,
    alerts,
    ratio,
    verdict,
)
from cluster.types import Question

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNTRAINED = (
    "The model {} is randomly initialised: its answers mean nothing yet. Tokens, time and operations are valid: they "
    "depend on the model's shape and the video. Scores of an untrained model are near the threshold, so agreement is "
    "shown but says little."
)
_METHOD = (
    "**In full**: for each window, every patch of every frame passes through the vision tower and every token through "
    "the language model. **Ours**: only what the codec saw change is encoded, and the KV of earlier frames is reused "
    "except for what the refresh policy recomputes. Same engine, same process, same clips and windows, one after the "
    "other. Seconds cover vision, planning and the language model.",
    "The comparison covers the windows **after each camera's first whole one**, which has nothing to reuse and occurs "
    "once in a camera's life. Of {answers} answers, {agreeing} fall on the same side of their threshold both ways; "
    "their scores differ by {difference:.3f} on average.",
    "A window is **gated** when nothing moved since the last one: the last answer stands and nothing is computed. "
    "**Dropped** windows gave way to newer ones because the model could not keep up; **lost** ones went down with a "
    "process.",
)
_TRUE = (
    "**Ground truth** is what the synthetic scenes were scripted to show; none of them was used in training. A window "
    "should be answered yes if it contains enough seconds of an event, and no if it contains none of it."
)
_JUDGED = (
    "Right answers of those that can be judged: a window with too little of an event in it is not counted. "
    "An alert is two positive windows in a row."
)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write HTML and JSON; returns their paths. Raises ``SightlineError``: the folder cannot be written."""
    write_files(folder, {"report.html": make_page(report).html(), "report.json": json_text(report.as_json()) + "\n"})
    return folder / "report.html", folder / "report.json"


def make_page(report: Report) -> Page:
    """The report's page: headline, cost, correctness, cameras, and method."""
    found = report.comparison
    judged = found.our_truth.judged and not report.random_weights
    title = "What the cameras answered, and what it cost"
    if found.speedup:
        title = f"{times_text(found.speedup)} faster than computing every window in full"
        title += f", and {percent_text(found.our_truth.share)} of the answers right" if judged else ""
    sections = [Section("Cost both ways, by camera", tables=[cost_table(report)])]
    if found.our_truth.judged or report.live_truth.judged:
        sections.append(Section("Answers against ground truth", _JUDGED, tables=[_truth_table(report)]))
    sections += [_camera_section(camera) for camera in report.cameras]
    difference = found.score_difference / max(1, found.answers)
    method = [_METHOD[0], _METHOD[1].format(answers=found.answers, agreeing=found.agreeing, difference=difference)]
    method += [_METHOD[2], *([_TRUE] if found.our_truth.judged else []), *report.notes]
    model = report.model + (" (random weights)" if report.random_weights else "")
    machine = [(name, value) for name, value in report.machine.items() if value is not None]
    sections += [
        Section("How this was measured", text=method),
        Section("Settings", facts=[("model", model), *report.settings.items()]),
        Section("Machine", facts=machine),
        Section("Reproduce", text=[f"`{report.command}`"]),
    ]
    return Page(
        title,
        f"{len(report.cameras)} cameras, {report.live_windows} windows answered live in {report.live_seconds:.0f} s, "
        f"then {found.windows} windows computed both ways on the same machine. {report.created}",
        notices=[UNTRAINED.format(report.model)] if report.random_weights else (),
        cards=_cards(report),
        sections=sections,
    )


def _cards(report: Report) -> list[Card]:
    found = report.comparison
    full, ours = found.full, found.ours
    seconds = f"{seconds_text(full.seconds)} in full, {seconds_text(ours.seconds)} ours, vision and language"
    tokens = f"{compact(ours.tokens)} instead of {compact(full.tokens)}"
    flops = f"{compact(ours.flops)} FLOP instead of {compact(full.flops)}"
    if report.random_weights:
        gated = sum(camera.gated for camera in report.cameras)
        lost = sum(camera.windows_dropped + camera.windows_lost for camera in report.cameras)
        free = f"{gated} of them free (nothing moved), {lost} dropped or lost"
        last = Card(str(report.live_windows), "windows answered live", free)
    elif found.our_truth.judged:
        others = f"{percent_text(found.full_truth.share)} in full; live {tally_text(report.live_truth)}"
        last = Card(percent_text(found.our_truth.share), "of the answers right", others)
    else:
        agreeing = f"{found.agreeing} of {found.answers} with full computation"
        last = Card(percent_text(ratio(found.agreeing, found.answers)), "of the answers agree", agreeing)
    return [
        Card(times_text(found.speedup), "faster", seconds),
        Card(percent_text(found.tokens_share), "of the tokens computed", tokens),
        Card(times_text(found.flops_ratio), "fewer operations", flops),
        last,
    ]


def cost_table(report: Report, title: str = "") -> Table:
    """Cost of both ways by camera and, for a trained model, how many of their answers are right."""
    heads = ["camera", "windows", "tokens in full", "computed", "time in full", "ours", "faster", "operations saved"]
    heads += ["agree"] if report.random_weights else ["agree", "right in full", "right ours"]
    rows = [
        (
            name,
            str(found.windows),
            compact(found.full.tokens),
            compact(found.ours.tokens),
            seconds_text(found.full.seconds),
            seconds_text(found.ours.seconds),
            times_text(found.speedup),
            "all of it" if found.full.flops and not found.ours.flops else times_text(found.flops_ratio),
            f"{found.agreeing} / {found.answers}",
            *([] if report.random_weights else [tally_text(found.full_truth), tally_text(found.our_truth)]),
        )
        for name, found in [*((each.name, each.comparison) for each in report.cameras), ("all", report.comparison)]
    ]
    return Table(title, heads, rows)


def _truth_table(report: Report) -> Table:
    rows: list[tuple[str, ...]] = []
    for camera in report.cameras:
        known = any(window.truth for window in camera.live) or any(window.truth for window in camera.compared)
        for question in camera.questions if known else ():
            found = Comparison.of(camera.compared, [question])
            raised = [
                Markup('<span class="{}">{:.0f} s{}</span>').format(
                    {"right": "good", "wrong": "bad", "open": "soft"}[alert.verdict],
                    alert.at_s,
                    " (false)" if alert.verdict == "wrong" else "",
                )
                for alert in camera.alerts
                if alert.question == question.id
            ]
            name = camera.name if question is camera.questions[0] else ""
            answered = tally_text(camera.live_truth_of(question))
            both = tally_text(found.full_truth), tally_text(found.our_truth), f"{found.agreeing} / {found.answers}"
            rows.append((name, question.text, answered, Markup(", ").join(raised) or "none", *both))
    found = report.comparison
    both = tally_text(found.full_truth), tally_text(found.our_truth), f"{found.agreeing} / {found.answers}"
    rows.append(("all", "", tally_text(report.live_truth), "", *both))
    return Table("", ("camera", "question", "live", "alerts", "in full", "ours", "agree"), rows)


def _camera_section(camera: CameraRecord) -> Section:
    charts = {}
    if camera.live:
        charts["live"] = live_timeline(camera.live, camera.questions, camera.live_events)
    if camera.compared:
        charts["compared"] = compared_timeline(camera.compared, camera.questions, camera.compared_events)
    if camera.live:
        charts["tokens"] = tokens_per_window(camera.live)
    pictures = [
        Picture(
            frame.jpeg,
            f"Frame of {camera.name} at {frame.time_s:.1f} s with its keep-mask",
            f"{frame.time_s:.1f} s, "
            + ("anchor: everything kept" if frame.anchor else f"{percent_text(frame.kept)} kept"),
        )
        for frame in camera.frames
    ]
    text = [] if camera.live else ["No window was answered while the cluster ran."]
    text += [] if camera.compared else ["No window was computed both ways."]
    return Section(camera.name, camera.description, _chips(camera), charts, pictures=pictures, text=text)


def _chips(camera: CameraRecord) -> list[Chip]:
    size = f" {camera.width}×{camera.height}" if camera.width else ""
    lost = camera.windows_dropped + camera.windows_lost
    broken = f"{camera.packets_dropped} packets dropped, {camera.decode_errors} decode errors, {camera.gaps} gaps"
    found = (
        (True, Chip(f"fed by **{camera.fed_by}**")),
        (camera.codec, Chip(f"**{camera.codec}**{size}")),
        (camera.cue, Chip(f"cue **{camera.cue}**")),
        (True, Chip(f"{len(camera.live)} windows, **{camera.gated}** gated")),
        (True, Chip(f"**{camera.windows_dropped}** dropped, **{camera.windows_lost}** lost", "bad" if lost else "")),
        (camera.packets_dropped or camera.decode_errors or camera.gaps, Chip(broken, "bad")),
        (
            camera.state not in ("running", "ended", "paused"),
            Chip(camera.state + (f": {camera.reason}" if camera.reason else ""), "bad"),
        ),
        (
            camera.comparison.speedup,
            Chip(f"**{times_text(camera.comparison.speedup)}** faster than in full", "good"),
        ),
    )
    return [chip for shown, chip in found if shown]


def tally_text(value: Tally) -> str:
    """``18 of 20`` right; a dash if nothing was judged."""
    return f"{value.right} of {value.judged}" if value.judged else "–"


# -- charts ---------------------------------------------------------------------------------------
WIDTH, ROW_HEIGHT, LEGEND_HEIGHT = 520, 132, 76
_SAID: dict[Verdict, str] = {"right": "right", "wrong": "wrong", "open": "cannot be judged"}
_LEGEND: dict[Verdict, str] = {"right": "right", "wrong": "wrong", "open": "not judged"}
_COLORS: dict[Verdict, str] = {"right": COLOR["good"], "wrong": COLOR["bad"], "open": COLOR["soft"]}
# y positions of events, alerts and gated windows, on the axis of scores.
_EVENT, _FLAG, _GATED = (1.08, 1.13), 1.22, (-0.08, -0.04)
LIMITS = (-0.1, 1.32)

_Window = LiveWindow | ComparedWindow


def live_timeline(
    windows: Sequence[LiveWindow], questions: Sequence[Question], events: Sequence[EventInterval]
) -> Figure:
    """Live scores of each question, drawn at the end of each window."""
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
    """Scores of each question on the same windows, both in full and ours."""
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
    """Figure with truth, threshold, events and gated windows, to be drawn behind the scores."""
    ids = ", ".join(question.id for question in questions)
    figure = new_figure(f"{name}: {ids}", WIDTH, ROW_HEIGHT * len(questions) + LEGEND_HEIGHT, rows=len(questions))
    _title(figure, title)
    # Windows overlap, so each is drawn from the end of the previous one.
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
    """Draw the scores of one way, with a marker per window that shows the verdict."""
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
            label=_LEGEND[judged] if judged else None,
            marker="x" if judged == "wrong" else "o",
            markersize=8 if way == "ours" else 5,
            markeredgewidth=2,
            color=_COLORS[judged] if judged else color,
            markerfacecolor=COLOR["card"] if judged == "open" else None,
        )
        text = f"{prefix}{score:.2f} at {window.end_s:.0f} s" + (f": {_SAID[judged]}" if judged else "")
        set_tooltips(mark, text + (" (gated)" if window.gated else ""))


def tokens_per_window(windows: Sequence[LiveWindow]) -> Figure:
    """Three nested bars per window: tokens without pruning, kept by the pruner, and computed by the language model."""
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
