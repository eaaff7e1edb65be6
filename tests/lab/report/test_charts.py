"""Charts as SVG: the same each time, and complete in themselves."""

import math
import xml.etree.ElementTree as ET

from tooltips import get_tooltips

from cluster.lab.report.charts import COLOR, THEME, Axis, Point, Series, Span, chart, inline, svg

TITLE = "Cost & <benefit>"


def figure():
    points = [Point(3.0, 30.0, 20.0, 40.0, "at $3 & $4"), Point(1.0, 10.0), Point(2.0, math.nan), Point(math.inf, 1.0)]
    series = [
        Series("marked", points),
        Series("line", points, marked=False),
        Series("none", [Point(1.0, math.nan)]),
        Series("ours", [Point(2.0, 25.0)], joined=False, color=0),
    ]
    spans = [Span(2.0, math.inf, "fault", "killed"), Span(5.0, 6.0, "later", "after the end")]
    return chart(TITLE, series, Axis("seconds", low=0.0), Axis("share", percent=True), spans)


def test_a_chart_draws_what_it_was_given():
    (axes,) = figure().axes
    marked, line, ours = axes.lines
    assert marked.get_xydata().tolist() == [[1, 10], [3, 30]]
    assert get_tooltips(marked) == ["", "at $3 & $4"]
    # What is not a number leaves a gap in a line.
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert math.isnan(line.get_ydata()[1])
    assert ours.get_color() == marked.get_color()
    (interval,) = [path.vertices.tolist() for path in axes.collections[0].get_paths()]
    assert interval == [[3, 20], [3, 40]]
    assert axes.get_xlim()[0] == 0
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (2, axes.get_xlim()[1])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds", "share")
    assert axes.yaxis.get_major_formatter()(0.25) == "25 %"
    assert [text.get_text() for text in figure().legends[0].get_texts()] == ["marked", "line", "ours"]


def test_a_logarithmic_axis_ends_at_round_numbers_around_its_data():
    series = [Series("one", [Point(0.3, 1.0), Point(35.0, 2.0)])]
    (axes,) = chart("", series, Axis("x", log=True), Axis("y")).axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlim() == (0.2, 50)
    assert list(axes.get_xticks()) == [0.2, 0.5, 1, 2, 5, 10, 20, 50]
    (axes,) = chart("", [Series("one", [Point(5.0, 1.0)])], Axis("x", log=True), Axis("y")).axes
    assert axes.get_xlim() == (2.5, 10)


def test_an_svg_is_the_same_each_time_and_refers_to_nothing():
    drawn = svg(figure())
    assert drawn == svg(figure())
    assert drawn.replace('xmlns="http://www.w3.org/2000/svg"', "", 1).count("http") == 0
    assert not any(word in drawn for word in ("href", "url(", " id=", "<metadata", "<!DOCTYPE"))
    root = ET.fromstring(drawn)
    assert (root.get("role"), root.get("aria-label")) == ("img", TITLE)
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert {TITLE, "seconds", "share", "marked", "fault"} <= set(texts)
    assert [e.text for e in root.iter() if e.tag.endswith("title")].count("at $3 & $4") == 1
    assert "after the end" not in drawn


def test_an_svg_follows_the_page_or_its_own_light_and_dark():
    drawn, alone = inline(figure()), svg(figure())
    assert not any(color in drawn for color in COLOR.values())
    assert "var(--ink)" in drawn
    assert "xmlns" not in drawn
    assert "<style>" not in drawn
    assert all(f"--{name}:{light};" in alone and f"--{name}:{dark};" in alone for name, (light, dark) in THEME.items())
