"""Every figure of the issue, on results whose numbers are known by hand."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ModelError
from cluster.files import json_text
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.page import make_charts, make_page
from cluster.lab.evaluation.report import (
    check_questions,
    choose_setting,
    compute_figures,
    flops_at_f1,
    frontier,
    make_report,
    select_thresholds,
    within_bound,
)
from cluster.lab.evaluation.results import Thresholds
from cluster.lab.evaluation.settings import WindowShape, codecsight, full_computation, ours
from cluster.lab.report.charts import svg
from cluster.lab.report.page import write_page
from cluster.lab.scenes.vocabulary import SceneEvent, window_label
from cluster.models.loading import load_model
from cluster.models.settings import ModelSettings

SHAPE = WindowShape()
FULL, PUBLISHED = full_computation(SHAPE), codecsight(SHAPE)
CHEAP, MIDDLE, DEAR = ours(SHAPE, 0.0), ours(SHAPE, 0.1), ours(SHAPE, 0.4)
# Four videos with a fall and four without.
TRUTH = [True] * 4 + [False] * 4
HALF = Thresholds({"fall": 0.5})
STRATA = {
    0: frozenset({"night"}),
    2: frozenset({"noisy"}),
    3: frozenset({"night", "slow"}),
    4: frozenset({"night"}),
}


def hits(count, alarms=0):
    """Scores that find ``count`` of the four falls and raise ``alarms`` false alarms."""
    return [0.9] * count + [0.2] * (4 - count) + [0.8] * alarms + [0.1] * (4 - alarms)


@pytest.fixture
def results(make_results):
    table = {FULL: hits(4), PUBLISHED: hits(2), CHEAP: hits(1), MIDDLE: hits(3), DEAR: hits(4)}
    cost = {FULL: 100_000, PUBLISHED: 20_000, CHEAP: 5_000, MIDDLE: 7_000, DEAR: 14_000}
    return make_results(TRUTH, table, cost, STRATA)


def f1(count, alarms=0):
    return 2 * count / (2 * count + alarms + 4 - count)


def test_figures_by_hand(results):
    found = compute_figures(results, HALF)
    values = found.values
    assert values["videos"] == 8
    assert values["f1_full"] == values["f1_full_min"] == 1
    assert (found.chosen["15"], found.chosen["8"]) == (DEAR, MIDDLE)
    assert values["f1_drop_at_15"] == 0
    assert values["f1_drop_at_8"] == pytest.approx(1 - f1(3))
    assert (values["flops_share_at_15"], values["flops_share_at_8"]) == (pytest.approx(0.14), pytest.approx(0.07))
    # The published rule's F1 of 2/3 lies between CHEAP's 0.4 at 50 and MIDDLE's 6/7 at 70.
    needed = 50 + 20 * (f1(2) - f1(1)) / (f1(3) - f1(1))
    assert values["flops_vs_codecsight"] == pytest.approx(needed / 200)
    assert values["f1_drop_noisy"] == values["f1_drop_night"] == values["recall_drop_low_contrast"] == 0
    assert found.measured["f1_full"] == (1, 1, 1)


def test_strata_are_of_the_setting_chosen_at_15(make_results):
    table = {FULL: hits(4), DEAR: hits(3)}
    found = compute_figures(make_results(TRUTH, table, {FULL: 1000, DEAR: 140}, STRATA), HALF)
    # The fall that is missed is video 3: at night and slow, of two falls at night and one that is slow.
    assert found.values["f1_drop_night"] == pytest.approx(1 - 2 / 3)
    assert found.values["recall_drop_low_contrast"] == 1
    assert found.values["f1_drop_noisy"] == 0
    assert "f1_drop_at_8" not in found.values
    assert any(note.startswith("f1_drop_at_8: no setting") for note in found.notes)


def test_the_setting_is_chosen_on_validation(make_results, results):
    table = {FULL: hits(4), PUBLISHED: hits(2), CHEAP: hits(4), MIDDLE: hits(0), DEAR: hits(0)}
    validation = make_results(TRUTH, table, dict.fromkeys(table, 1000))
    assert choose_setting(results, HALF, 0.15, validation) == CHEAP
    found = compute_figures(results, HALF, validation)
    assert found.values["f1_drop_at_15"] == pytest.approx(1 - f1(1))
    assert not any("--validation" in note for note in found.notes)


def test_of_equals_what_computes_most_is_chosen_and_then_the_nearest_to_full(make_results):
    near, far = [0.85] * 4 + [0.15] * 4, [0.6] * 4 + [0.4] * 4
    table = {FULL: hits(4), CHEAP: near, MIDDLE: far}
    assert choose_setting(make_results(TRUTH, table, {FULL: 1000, CHEAP: 50, MIDDLE: 60}), HALF, 0.15) == MIDDLE
    assert choose_setting(make_results(TRUTH, table, {FULL: 1000, CHEAP: 60, MIDDLE: 60}), HALF, 0.15) == CHEAP


def test_what_validation_cannot_tell_from_the_best_is_its_equal(make_results):
    """One of 40 events missed may be chance, twelve may not: a resampling without any of twelve is one of 10^5."""
    truth = [True] * 40 + [False] * 40

    def found(count):
        return [0.9] * count + [0.1] * (80 - count)

    table = {FULL: found(40), CHEAP: found(40), MIDDLE: found(39), DEAR: found(28)}
    cost = {FULL: 1000, CHEAP: 50, MIDDLE: 60, DEAR: 70}
    assert choose_setting(make_results(truth, table, cost), HALF, 0.15) == MIDDLE
    assert choose_setting(make_results(truth, table, cost), HALF, 0.055) == CHEAP


@pytest.mark.parametrize("change", [{"shape": replace(SHAPE, stride_s=8)}, {"source": "encoded again"}])
def test_another_stride_or_video_is_not_compared(make_results, change):
    other = replace(ours(SHAPE, 0.1), **change)
    results = make_results(TRUTH, {FULL: hits(4), other: hits(4)}, {FULL: 1000, other: 100})
    assert choose_setting(results, HALF, 0.15) is None


def test_a_shorter_window_at_the_same_stride_is_not_compared_window_by_window(make_results, make_run):
    """As in a sweep over windows, where the stride is full computation's for one of them."""
    other = ours(replace(SHAPE, window_s=10), 0.1)
    results = make_results(TRUTH, {FULL: hits(4), other: hits(4)}, {FULL: 1000, other: 100})
    runs = {key: make_run([0.5] * 5) if key[1] == other.key else run for key, run in results.runs.items()}
    report = make_report("Accuracy", replace(results, runs=runs), HALF)
    assert math.isnan(report.lines[1].row["disagreement"])


def test_windows_that_full_computation_has_not_are_not_compared(make_results, make_run):
    """As where a video's clock jumps: full computation begins anew, of the copy encoded again pictures stand."""
    results = make_results(TRUTH, {FULL: hits(4), PUBLISHED: hits(4)}, {FULL: 1000, PUBLISHED: 100})
    runs = dict(results.runs)
    runs["v0", PUBLISHED.key] = make_run([0.9, 0.5, 0.0, 0.7])
    report = make_report("Accuracy", replace(results, runs=runs), HALF)
    assert report.lines[1].row["disagreement"] == round(0.4 / 24, 5)


def test_no_setting_reaches_the_published_rule(make_results):
    table = {FULL: hits(4), PUBLISHED: hits(4), CHEAP: hits(1)}
    found = compute_figures(make_results(TRUTH, table, {FULL: 1000, PUBLISHED: 200, CHEAP: 50}), HALF)
    assert "flops_vs_codecsight" not in found.values
    assert any("reaches CodecSight's F1 of 1.000" in note for note in found.notes)


def test_frontier_by_hand():
    points = frontier([(50, 0.4), (70, 0.8), (60, 0.3), (140, 0.9)])
    assert points == [(50, 0.4), (70, 0.8), (140, 0.9)]
    assert flops_at_f1(points, 0.6) == pytest.approx(60)
    assert flops_at_f1(points, 0.2) == 50
    assert flops_at_f1(points, 0.9) == 140
    assert math.isnan(flops_at_f1(points, 0.95))
    assert math.isnan(flops_at_f1([], 0.5))


def test_the_frontier_is_of_validation_and_its_prices_of_the_test_videos(make_results):
    """MIDDLE reaches the rule's F1 for 70 on the test videos alone; on validation it is no better than CHEAP."""
    table = {FULL: hits(4), PUBLISHED: hits(3), CHEAP: hits(1), MIDDLE: hits(4), DEAR: hits(4)}
    cost = {FULL: 100_000, PUBLISHED: 20_000, CHEAP: 5_000, MIDDLE: 7_000, DEAR: 14_000}
    test = make_results(TRUTH, table, cost)
    validation = make_results(TRUTH, {**table, CHEAP: hits(2), MIDDLE: hits(1)}, cost)
    found = compute_figures(test, HALF, validation).values["flops_vs_codecsight"]
    assert found == pytest.approx((50 + 90 * (f1(3) - f1(1)) / (f1(4) - f1(1))) / 200)


def test_a_lucky_cheap_setting_does_not_set_the_price_of_equal_f1(make_results):
    """CHEAP reaches the rule's F1 on the test videos; MIDDLE and DEAR, better on validation, do not."""
    table = {FULL: hits(4), PUBLISHED: hits(3), CHEAP: hits(3), MIDDLE: hits(1), DEAR: hits(2)}
    cost = {FULL: 100_000, PUBLISHED: 20_000, CHEAP: 5_000, MIDDLE: 7_000, DEAR: 14_000}
    validation = make_results(TRUTH, {**table, CHEAP: hits(1), MIDDLE: hits(2), DEAR: hits(3)}, cost)
    found = compute_figures(make_results(TRUTH, table, cost), HALF, validation)
    assert "flops_vs_codecsight" not in found.values
    # With DEAR as good as in full, the way up begins at the mean of the other two.
    test = make_results(TRUTH, {**table, DEAR: hits(4)}, cost)
    level = (f1(3) + f1(1)) / 2
    needed = 70 + 70 * (f1(3) - level) / (f1(4) - level)
    assert compute_figures(test, HALF, validation).values["flops_vs_codecsight"] == pytest.approx(needed / 200)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=8), st.floats(0, 1))
def test_frontier_is_never_dearer_than_a_setting_that_is_good_enough(points, wanted):
    found = flops_at_f1(frontier(points), wanted)
    enough = [flops for flops, value in points if value >= wanted - 1e-9]
    assert math.isnan(found) == (not enough)
    if enough:
        assert min(flops for flops, _ in points) <= found <= min(enough) + 1e-9
    assert math.isnan(flops_at_f1(frontier(points), 1.1))


def test_window_label():
    events = [SceneEvent("fall", 10.0, 20.0, ()), SceneEvent("Fighting", 5.0, 7.0, ())]
    assert window_label(events, "fall", 0, 20) is True
    assert window_label(events, "fall", 0, 11) is None
    assert window_label(events, "fall", 20, 40) is False
    assert window_label(events, "Fighting", 0, 6.5) is True
    assert window_label(events, "Fighting", 0, 5.5) is None
    assert window_label(events, "Fighting", 7, 20) is False


def test_calibration_takes_the_windows_whose_truth_is_clear(results):
    scores, labels = results.window_scores(FULL)
    # Three windows of each video, all of which hold or lack the event clearly.
    assert len(scores) == len(labels) == 24
    assert labels.sum() == 12
    assert sorted(np.unique(scores[labels])) == [0.0, 0.9]


# -- thresholds and questions ---------------------------------------------------------------------


@pytest.fixture
def model():
    return load_model("tiny-qwen2_5_vl")


def test_without_validation_thresholds_are_the_models_or_a_half(model, results):
    assert select_thresholds(model, results) == (Thresholds({"fall": 0.5}), "the default")
    model.settings = ModelSettings(threshold=0.4, thresholds={"fight": 0.3})
    assert select_thresholds(model, results) == (Thresholds({"fall": 0.4}), "the model's own")


def test_every_setting_has_the_threshold_that_validation_gives_it(model, make_results):
    """Two settings that rank alike, one scored 0.3 lower: a common threshold would cost it two falls."""
    high, low = [0.9, 0.9, 0.8, 0.8, 0.2, 0.2, 0.2, 0.2], [0.6, 0.6, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]
    table, cost = {FULL: high, MIDDLE: low}, {FULL: 1000, MIDDLE: 100}
    results = make_results(TRUTH, table, cost)
    model.settings = ModelSettings(threshold=0.55)
    chosen, origin = select_thresholds(model, results, results)
    assert "validation" in origin
    # In the middle, in logits, of what separates the videos: with four events the common one is each kind's.
    assert chosen.of(FULL)["fall"] == pytest.approx(1 / (1 + math.exp(0)), abs=1e-3)
    assert chosen.of(MIDDLE)["fall"] == pytest.approx(0.25, abs=1e-3)
    found = compute_figures(results, chosen, results)
    assert found.values["f1_drop_at_15"] == 0
    (row,) = [line.row for line in make_report("x", results, chosen).lines if line.setting == MIDDLE]
    assert row["f1"] == 1
    assert row["f1_model_thresholds"] == pytest.approx(f1(2), abs=1e-5)


def test_the_gain_over_the_published_rule_is_paired(make_results):
    """At its price: MIDDLE, which finds one more fall than the published rule. DEAR finds all and costs more."""
    table = {FULL: hits(4), PUBLISHED: hits(2), MIDDLE: hits(3), DEAR: hits(4)}
    cost = {FULL: 1000, PUBLISHED: 100, MIDDLE: 90, DEAR: 140}
    found = compute_figures(make_results(TRUTH, table, cost), HALF)
    assert found.chosen["codecsight"] == MIDDLE
    assert found.values["f1_gain_over_codecsight"] == pytest.approx(f1(3) - f1(2))
    # What both find and both miss is the same in every resampling: it is never worse.
    assert found.values["f1_gain_over_codecsight_low"] == 0
    assert found.values["f1_drop_at_15_high"] == 0


def test_a_checkpoint_of_other_questions_is_refused(model):
    asked = {"fall": "Is someone lying on the ground?"}
    with pytest.raises(ModelError, match="does not say which questions"):
        check_questions(model, "mine", asked)
    model.settings = ModelSettings(questions={"fight": "Are people fighting?"})
    with pytest.raises(ModelError, match="was not trained on 'fall'; it knows: fight"):
        check_questions(model, "mine", asked)
    model.settings = ModelSettings(questions={"fall": "Has anybody fallen?"})
    with pytest.raises(ModelError, match="was trained on 'Has anybody fallen"):
        check_questions(model, "mine", asked)
    model.settings = ModelSettings(questions=asked)
    check_questions(model, "mine", asked)


# -- the report -----------------------------------------------------------------------------------


@pytest.fixture
def report(results):
    swept = [
        replace(each, sweep=("stride", place))
        for each, place in ((FULL, 0.2), (PUBLISHED, 0.2), (MIDDLE, 0.2), (DEAR, 0.4))
    ]
    results = replace(results, settings=(*results.settings, *(replace(s, name=f"{s.name} sweep") for s in swept)))
    skipped = [SkippedVideo(results.videos[0].path.with_name("bad <video>.mp4"), "holds no | picture")]
    return make_report("Accuracy", results, HALF, skipped=skipped, facts={"model": "tiny & random"})


def test_json_is_as_every_bench_writes_it(report):
    body = json.loads(json_text(report.as_json()))
    assert body["bench"] == "accuracy"
    assert body["figures"]["f1_drop_at_15"] == 0
    assert {"cpu", "cores", "torch"} <= body["machine"].keys()
    row = next(row for row in body["rows"] if row["setting"] == PUBLISHED.name)
    assert (row["flops_share"], row["f1"], row["recall"]) == (0.2, pytest.approx(f1(2), abs=1e-5), 0.5)
    assert row["f1_low"] <= row["f1"] <= row["f1_high"]
    assert (row["tokens_full"], row["kept"], row["computed"], row["questions"]) == (100, 60, 35, 5)
    assert body["groups"]["night"][FULL.name]["events"] == 2
    assert {"low motion", "medium motion", "high motion"} <= body["groups"].keys()
    assert body["chosen"] == {"15": DEAR.name, "8": MIDDLE.name, "codecsight": DEAR.name}
    assert sum(each["windows"] for each in body["calibration"]["bins"]) == 24
    assert body["skipped"][0]["reason"] == "holds no | picture"


def test_bounds_say_what_is_reached():
    assert within_bound("f1_full", 0.9)
    assert not within_bound("f1_full", 0.899)
    assert within_bound("f1_drop_at_15", -0.5)
    assert not within_bound("flops_vs_codecsight", 0.71)
    assert within_bound("flops_share_at_15", 0.1) is None


def test_markdown_has_every_table(report):
    text = make_page(report).markdown()
    for title in ("# Accuracy", "## Figures", "## Settings", "## F1 by kind of event", "## Calibration", "## Skipped"):
        assert title in text
    assert "| f1_drop_at_8 | 0.143" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6
    assert "## Sweeps" in text
    for lines in tables:
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_charts_are_documents_of_their_own(report, tmp_path):
    drawn = make_charts(report)
    assert {"f1-tokens", "f1-flops", "calibration", "f1-motion", "f1-stride", "flops-stride"} == drawn.keys()
    for figure in drawn.values():
        assert ET.fromstring(svg(figure)).tag.endswith("svg")
        (axes,) = figure.axes
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        points = [point for line in axes.lines for point in line.get_xydata()]
        points += [point for lines in axes.collections for path in lines.get_paths() for point in path.vertices]
        assert points
        assert all(left <= x <= right and bottom <= y <= top for x, y in points)
    stride = drawn["f1-stride"]
    joined = [line for line in stride.axes[0].lines if len(line.get_xydata()) > 1 and line.get_linewidth()]
    (line,) = joined
    assert line.get_label() == "ours"
    assert [tuple(point) for point in line.get_xydata()] == [(0.2, pytest.approx(f1(3))), (0.4, 1.0)]
    titles = [e.text for e in ET.fromstring(svg(stride)).iter() if e.tag.endswith("title")]
    assert sorted(titles) == [
        "CodecSight at 0.2: F1 0.667",
        "full computation at 0.2: F1 1.000",
        "ours at 0.2: F1 0.857",
        "ours at 0.4: F1 1.000",
    ]


def test_the_page_stands_alone(report, tmp_path):
    written = write_page(make_page(report), tmp_path / "out", "accuracy", json_text(report.as_json()))
    text = (written.parent / "accuracy.html").read_text()
    assert "tiny &amp; random" in text
    assert "bad &lt;video&gt;.mp4" in text
    assert text.count("<svg") == len(make_charts(report))
    assert not any(word in text for word in ("src=", "href=", "@import", "url(", "http"))
    names = {path.name for path in written.parent.iterdir()}
    assert {"accuracy.html", "accuracy.md", "accuracy.json", "f1-tokens.svg", "calibration.svg"} <= names
