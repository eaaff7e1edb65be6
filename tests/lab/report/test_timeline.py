"""The timelines: marks say who was right, shades what should have been said, and all of it lies inside."""

import re

import pytest

from cluster.lab.report import EventInterval
from cluster.lab.report.charts import LEFT, RIGHT, WIDTH
from cluster.lab.report.timeline import HEIGHT, compared_timeline, live_timeline
from cluster.types import Question


def stretches(svg, name):
    found = re.findall(rf'<rect class="{name}" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    return [(float(left), float(left) + float(width)) for left, width in found]


def across(second, low, high):
    return LEFT + (second - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def test_live_marks_shades_and_flags(told):
    street = told.cameras[0]
    svg = str(live_timeline(street.live, street.questions[0], street.live_events))
    marks = [name.split()[-1] for name in re.findall(r'class="mark ([\w ]+)"', svg)]
    assert marks == ["right", "open", "wrong", "right", "right", "wrong", "right"]
    # Windows end every 4 s from 16 to 40: each is shaded from where the one before ended.
    yes = stretches(svg, "truth yes")
    assert yes[0] == pytest.approx((across(20, 12, 40), across(24, 12, 40)), abs=0.2)
    assert len(yes) == 5
    assert len(stretches(svg, "truth open")) == 1
    assert stretches(svg, "event") == [pytest.approx((across(20, 12, 40), across(40, 12, 40)), abs=0.2)]
    (flag,) = re.findall(r'<g class="alert (\w+)"><line x1="([\d.]+)"', svg)
    # 0.9 at 20 s has no second after it; 0.8 and 0.7 at 28 and 32 s are two in a row.
    assert flag[0] == "right"
    assert float(flag[1]) == pytest.approx(across(32, 12, 40), abs=0.2)


def test_both_ways_are_drawn_over_each_other(told):
    street = told.cameras[0]
    svg = str(compared_timeline(street.compared, street.questions[0], street.compared_events))
    marks = re.findall(r'class="mark (\w+) (\w+)"', svg)
    assert [judged for way, judged in marks if way == "whole"] == ["wrong", "right", "right"]
    assert [judged for way, judged in marks if way == "ours"] == ["right", "right", "right"]
    assert "in full, 0.55 at 16 s: wrong" in svg
    assert "ours, 0.45 at 16 s: right" in svg


def test_gated_windows_are_marked_and_unknown_truth_is_not_judged(report):
    night = next(camera for camera in report.cameras if camera.name == "night")
    svg = str(live_timeline(night.live, night.questions[0], ()))
    assert len(stretches(svg, "gated")) == night.gated == 5
    assert set(re.findall(r'class="mark ours (\w+)"', svg)) == {"plain"}
    assert "truth" not in svg


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("threshold", [0.02, 0.5, 0.99])
def test_everything_lies_inside(told, count, threshold):
    street = told.cameras[0]
    question = Question("person", "?", threshold)
    events = (EventInterval("person", -50.0, 5.0), EventInterval("person", 15.0, 900.0))
    svg = str(live_timeline(street.live[:count], question, events))
    for x in re.findall(r'\b(?:x|x1|x2|cx)="(-?[\d.]+)"', svg):
        assert 0 <= float(x) <= WIDTH
    for y in re.findall(r'\b(?:y|y1|y2|cy)="(-?[\d.]+)"', svg):
        assert 0 <= float(y) <= HEIGHT
    assert all(left <= right <= WIDTH for left, right in stretches(svg, "event"))
    assert svg.count("<circle") + svg.count('<path class="mark') == count
