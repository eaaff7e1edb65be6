"""Rows, reports and curves of an evaluation of memory, against hand-computed numbers."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from cluster.errors import ConfigError, SightlineError
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.memory.questions import OpenQuestion
from cluster.lab.evaluation.memory.report import compare_settings, make_page, memory_charts
from cluster.lab.evaluation.memory.results import SettingResult, evidence_recall, grade_answer, make_coverage
from cluster.lab.evaluation.memory.settings import MemorySetting
from cluster.lab.report.charts import svg
from cluster.lab.report.page import write_page

FULL = MemorySetting("full", "frames", "all")
SMALL = MemorySetting("cords", "resv", "wicsum", 256)
LARGE = MemorySetting("cords", "resv", "wicsum", 1024)
ASKED = (
    OpenQuestion("needle", ("Was there a red vehicle?",), ("yes",), 100.0, None, ((10.0, 14.0),)),
    OpenQuestion("needle", ("Was there a blue vehicle?",), ("no",), 100.0),
    OpenQuestion("order", ("Which came first?",), ("person",), 200.0, None, ((10.0, 14.0), (30.0, 36.0))),
    OpenQuestion("counting", ("How many vehicles passed?",), ("two",), 200.0, 50.0, ((60.0, 64.0), (70.0, 74.0))),
)
RIGHT = ("yes", "no", "person", "two")


def result(setting, said, *, coverage=None, at=(12.0, 31.0, 90.0, 90.0)):
    rows = tuple(
        grade_answer(
            "hour",
            number,
            question,
            [word],
            ttft_s=0.1 * (number + 1),
            retrieved=100.0,
            held=400.0,
            bytes_moved=1000 * number,
            bytes_held=2**20,
            retrieved_at=at,
        )
        for number, (question, word) in enumerate(zip(ASKED, said, strict=True))
    )
    return SettingResult(setting, rows, coverage or {})


def test_recall_of_evidence_by_hand():
    found = evidence_recall([12.0, 12.0, 31.0, 90.0], ((10.0, 14.0), (30.0, 36.0), (60.0, 61.0)))
    assert (found.inside, found.spans, found.found) == (0.75, pytest.approx(2 / 3), True)
    nothing = evidence_recall([], ((10.0, 14.0),))
    assert (nothing.inside, nothing.spans, nothing.found) == (0.0, 0.0, False)
    ends = evidence_recall([10.0, 14.0, 14.1], ((10.0, 14.0),))
    assert ends.inside == pytest.approx(2 / 3)


def test_a_row_holds_means_by_hand():
    row = result(SMALL, ("yes", "yes", "person", "three")).row()
    assert (row["compressor"], row["retriever"], row["budget"], row["questions"]) == ("cords", "wicsum", 256, 4)
    assert (row["accuracy_all"], row["accuracy_needle"], row["accuracy_order"]) == (0.5, 0.5, 1.0)
    assert row["retrieval_ratio"] == 0.25
    assert row["ttft_s"] == pytest.approx(0.25)
    assert row["bytes_moved"] == 1500
    # Of the three questions with evidence: 1/4, 2/4 and 0/4 of the tokens; all, all and none of the spans.
    assert row["evidence_inside"] == pytest.approx(0.25)
    assert row["evidence_spans"] == row["evidence_found"] == pytest.approx(2 / 3)


def test_without_tokens_known_there_is_no_recall():
    row = result(FULL, RIGHT, at=None).row()
    assert math.isnan(row["evidence_found"])
    assert row["accuracy_all"] == 1.0


def test_coverage_keeps_area_and_percentiles():
    found = make_coverage(torch.arange(101.0).reshape(1, 101).flip(1), 100.0)
    assert found.area == pytest.approx(0.5)
    assert found.percentiles == pytest.approx([float(i) for i in range(101)])
    with pytest.raises(ValueError, match="at least one"):
        make_coverage(torch.zeros(0), 1.0)


@pytest.fixture
def report():
    near, far = (make_coverage(torch.linspace(0, top, 500), 1.0) for top in (0.2, 0.9))
    results = [
        result(FULL, RIGHT, coverage={"joint": make_coverage(torch.zeros(4), 1.0)}),
        result(SMALL, ("yes", "yes", "person", "three"), coverage={"joint": far}),
        result(LARGE, ("yes", "no", "person", "three"), coverage={"joint": near, "key": near}),
    ]
    skipped = [SkippedVideo(Path("gone.mp4"), "not on disk")]
    return compare_settings(
        "Memory", results, baseline=FULL, facts={"footage": "one hour"}, notes=["one"], skipped=skipped
    )


def test_json_is_finite_and_holds_rows_drops_and_answers(report):
    body = json.loads(report.to_json())
    assert [row["accuracy_all"] for row in body["rows"]] == [1.0, 0.5, 0.75]
    assert "drop_all" not in body["rows"][0]
    assert [row["drop_all"] for row in body["rows"][1:]] == [0.5, 0.25]
    # One question of a kind: no interval, which JSON writes as null.
    assert body["rows"][1]["coverage_joint"] > 0.5
    assert body["figures"][f"drop {LARGE.name}"] == 0.25
    assert body["baseline"] == "full/frames/all@all"
    assert body["questions"][SMALL.name][3]["said"] == ["three"]
    assert body["skipped"] == [{"path": "gone.mp4", "reason": "not on disk"}]
    assert body["notes"] == ["footage: one hour", "one"]


def test_markdown_tables_have_a_line_for_each_setting(report):
    text = make_page(report).markdown()
    lines = [line for line in text.splitlines() if line.startswith(f"| {SMALL.name} ")]
    assert len(lines) == 4
    accuracy, retrieval, coverage, cost = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    assert accuracy[0] == "4"
    assert accuracy[1].startswith("0.500 [")
    assert accuracy[-1].startswith("0.500 [")
    assert retrieval == ["25.0 %", "25.0 %", "66.7 %", "66.7 %"]
    assert coverage == ["0.550", "–", "–"]
    assert cost == ["250 ms", "0.0 MiB", "1.0 MiB"]
    assert "* `gone.mp4`: not on disk" in text


def test_curves_are_drawn_of_what_was_measured(report):
    charts = memory_charts(report)
    assert set(charts) == {"accuracy-budget", "coverage-joint", "coverage-key", "ttft-history"}
    for figure in charts.values():
        ElementTree.fromstring(svg(figure))
    # Two combinations of policies; that without a bound stands at the 400 tokens it held.
    (axes,) = charts["accuracy-budget"].axes
    assert f"{SMALL.name}: 0.500" in svg(charts["accuracy-budget"])
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert sorted(len(points) for points in lines.values()) == [1, 2]
    assert 400 in [x for points in lines.values() for x, _ in points]
    # Not marked and joined: a line for each of three settings, in one space of one.
    assert len(charts["coverage-joint"].axes[0].lines) == 3
    assert len(charts["coverage-key"].axes[0].lines) == 1


def test_files_are_written_and_a_folder_that_cannot_be_is_named(report, tmp_path):
    path = write_page(make_page(report), tmp_path / "out", "memory", report.to_json())
    assert path.read_text() == make_page(report).html()
    assert path.with_suffix(".md").read_text() == make_page(report).markdown()
    names = {each.name for each in path.parent.iterdir()}
    assert {"memory.html", "memory.json", "memory.md", "accuracy-budget.svg", "ttft-history.svg"} <= names
    (tmp_path / "file").write_text("")
    with pytest.raises(SightlineError, match="cannot write the report"):
        write_page(make_page(report), tmp_path / "file", "memory")


def test_a_report_needs_each_setting_once_and_the_same_questions():
    full = result(FULL, RIGHT)
    with pytest.raises(ConfigError, match="one result for each setting"):
        compare_settings("Memory", [full, full])
    with pytest.raises(ConfigError, match="is not among the settings"):
        compare_settings("Memory", [full], baseline=SMALL)
    fewer = SettingResult(SMALL, full.answered[:2])
    with pytest.raises(ConfigError, match="same questions in the same order"):
        compare_settings("Memory", [full, fewer], baseline=FULL)
    assert "drop" not in make_page(compare_settings("Memory", [full])).markdown()
