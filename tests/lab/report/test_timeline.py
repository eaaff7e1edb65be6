"""The timelines: marks say who was right, shades what should have been said, and all of it lies inside."""

import pytest
from matplotlib.colors import to_hex
from tooltips import get_tooltips

from cluster.lab.report.charts import COLOR, svg
from cluster.lab.report.records import EventInterval
from cluster.lab.report.render import compared_timeline, live_timeline
from cluster.types import Question

MARKS = {COLOR["good"]: "right", COLOR["bad"]: "wrong", COLOR["soft"]: "open", COLOR["line"]: "plain"}


def stretches(axes, label):
    """From where to where on the axis of time, in order."""
    bars = [bar for bar in axes.patches if bar.get_label() == label]
    return sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)


def marks(axes, prefix=""):
    """By the end of the window: the score, who was right by colour and shape, and what is said of it."""
    found = {}
    for line in axes.lines:
        (text,) = get_tooltips(line) or [""]
        if text.startswith(prefix) and " at " in text and not text.startswith("alert"):
            ((at, score),) = line.get_xydata()
            judged = MARKS[to_hex(line.get_color())]
            assert line.get_marker() == ("x" if judged == "wrong" else "o")
            found[at] = (score, judged, text)
    return [found[at] for at in sorted(found)]


def line(axes, label):
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return [tuple(point) for point in found.get_xydata()]


def test_live_marks_shades_and_flags(told):
    street = told.cameras[0]
    axes, _ = live_timeline(street.live, street.questions, street.live_events).axes
    assert [judged for _, judged, _ in marks(axes)] == ["right", "open", "wrong", "right", "right", "wrong", "right"]
    assert [score for score, _, _ in marks(axes)] == [0.1, 0.9, 0.2, 0.8, 0.7, 0.3, 0.6]
    assert line(axes, "score") == [(window.end_s, window.scores["person"]) for window in street.live]
    # Windows end every 4 s from 16 to 40: each is shaded from where the one before ended.
    assert axes.get_xlim() == (12, 40)
    yes = stretches(axes, "should be yes")
    assert yes[0] == (20, 24)
    assert len(yes) == 5
    assert len(stretches(axes, "too little to tell")) == 1
    assert stretches(axes, "it happens") == [(20, 40)]
    (flag,) = [each for each in axes.lines if each.get_marker() == "v"]
    # 0.9 at 20 s has no second after it; 0.8 and 0.7 at 28 and 32 s are two in a row.
    assert get_tooltips(flag) == ["alert at 32 s: two positive windows in a row (right)"]
    assert MARKS[flag.get_color()] == "right"
    assert set(flag.get_xdata()) == {32}


def test_each_question_has_a_row_under_its_own_words_at_its_own_threshold(told):
    street = told.cameras[0]
    figure = live_timeline(street.live, street.questions, street.live_events)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [question.text for question in street.questions]
    assert [axes.get_ylabel() for axes in figure.axes] == ["score", "score"]
    for axes, question in zip(figure.axes, street.questions, strict=True):
        assert {height for _, height in line(axes, "threshold")} == {question.threshold}
    assert stretches(figure.axes[1], "it happens") == []
    assert figure.get_label() == "Scores over 7 live windows: person, vehicle"
    assert f'aria-label="{figure.get_label()}"' in svg(figure)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == len(set(texts))
    assert {"score", "right", "wrong", "not judged", "it happens", "should be yes", "threshold"} <= set(texts)


def test_both_ways_are_drawn_over_each_other(told):
    street = told.cameras[0]
    figure = compared_timeline(street.compared, street.questions, street.compared_events)
    axes = figure.axes[0]
    assert [judged for _, judged, _ in marks(axes, "in full")] == ["wrong", "right", "right"]
    assert [judged for _, judged, _ in marks(axes, "ours")] == ["right", "right", "right"]
    assert line(axes, "in full") == [(window.end_s, window.full_scores["person"]) for window in street.compared]
    assert line(axes, "ours") == [(window.end_s, window.our_scores["person"]) for window in street.compared]
    drawn = svg(figure)
    assert "<title>in full, 0.55 at 16 s: wrong</title>" in drawn
    assert "<title>ours, 0.45 at 16 s: right</title>" in drawn


def test_gated_windows_are_marked_and_unknown_truth_is_not_judged(report):
    night = next(camera for camera in report.cameras if camera.name == "night")
    for axes in live_timeline(night.live, night.questions, ()).axes:
        assert len(stretches(axes, "nothing moved")) == night.gated == 5
        assert {judged for _, judged, _ in marks(axes)} == {"plain"}
        assert stretches(axes, "should be yes") == stretches(axes, "too little to tell") == []


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("threshold", [0.02, 0.5, 0.99])
def test_everything_lies_inside(told, count, threshold):
    street = told.cameras[0]
    question = Question("person", "?", threshold)
    events = (EventInterval("person", -50.0, 5.0), EventInterval("person", 15.0, 900.0))
    (axes,) = live_timeline(street.live[:count], [question], events).axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert left < right
    points = [point for each in axes.lines if each.get_label() != "threshold" for point in each.get_xydata()]
    for bar in axes.patches:
        points += [(bar.get_x(), bar.get_y()), (bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height())]
    assert all(left <= x <= right and bottom <= y <= top for x, y in points)
    assert all(start <= end <= right for start, end in stretches(axes, "it happens"))
    assert len(marks(axes)) == count
