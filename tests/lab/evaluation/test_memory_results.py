"""Rows, reports and curves of an evaluation of memory, against hand-computed numbers."""

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from cluster.errors import SightlineError
from cluster.files import json_text
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.memory.questions import Footage, Question
from cluster.lab.evaluation.memory.report import make_page, make_report, memory_charts
from cluster.lab.evaluation.memory.results import (
    AnswerRecord,
    GradedAnswer,
    SettingResult,
    credit,
    evidence_recall,
)
from cluster.lab.evaluation.memory.run import MemoryResults
from cluster.lab.evaluation.memory.settings import FULL, ShareSetting
from cluster.lab.report.charts import svg
from cluster.lab.report.page import write_page
from cluster.models.settings import ModelSettings

SMALL, LARGE = (ShareSetting("cords", "resv", "wicsum", share=share) for share in (1 / 8, 1 / 4))
ASKED = (
    Question("needle", ("Was there a red vehicle?",), ("yes",), 100.0, None, ((10.0, 14.0),)),
    Question("needle", ("Was there a blue vehicle?",), ("no",), 100.0),
    Question("order", ("Which came first?",), ("person",), 200.0, None, ((10.0, 14.0), (30.0, 36.0))),
    Question("counting", ("How many vehicles passed?",), ("two",), 200.0, 50.0, ((60.0, 64.0), (70.0, 74.0))),
)
RIGHT = ("yes", "no", "person", "two")


def result(setting, said, *, held=400.0):
    at = (12.0, 31.0, 90.0, 90.0)
    rows = tuple(
        AnswerRecord(
            GradedAnswer("hour", number, question.kind, credit(question, [word])),
            (word,),
            ttft_s=0.1 * (number + 1),
            history_s=question.at_s,
            retrieved=held / 4,
            held=held,
            bytes_moved=1000 * number,
            bytes_held=2**20,
            recall=evidence_recall(at, question.evidence) if question.evidence else None,
        )
        for number, (question, word) in enumerate(zip(ASKED, said, strict=True))
    )
    return SettingResult(setting, rows)


def reported(*results, **options):
    """Report of these settings about one hour of footage."""
    found = MemoryResults(results, (Footage("hour", Path("hour.mp4"), ASKED),), (), 0)
    model = SimpleNamespace(settings=ModelSettings())
    return make_report("Memory", found, model, **options)


def test_recall_of_evidence_by_hand():
    found = evidence_recall([12.0, 12.0, 31.0, 90.0], ((10.0, 14.0), (30.0, 36.0), (60.0, 61.0)))
    assert (found.inside, found.spans, found.found) == (0.75, pytest.approx(2 / 3), True)
    nothing = evidence_recall([], ((10.0, 14.0),))
    assert (nothing.inside, nothing.spans, nothing.found) == (0.0, 0.0, False)
    ends = evidence_recall([10.0, 14.0, 14.1], ((10.0, 14.0),))
    assert ends.inside == pytest.approx(2 / 3)


def test_a_row_holds_means_by_hand():
    row = result(SMALL, ("yes", "yes", "person", "three")).row()
    assert (row["compressor"], row["retriever"], row["share"], row["questions"]) == ("cords", "wicsum", 1 / 8, 4)
    assert (row["accuracy_all"], row["accuracy_needle"], row["accuracy_order"]) == (0.5, 0.5, 1.0)
    assert row["retrieval_ratio"] == 0.25
    assert row["ttft_s"] == pytest.approx(0.25)
    assert row["bytes_moved"] == 1500
    # Of the three questions with evidence: 1/4, 2/4 and 0/4 of the tokens; all, all and none of the spans.
    assert row["evidence_inside"] == pytest.approx(0.25)
    assert row["evidence_spans"] == row["evidence_found"] == pytest.approx(2 / 3)


@pytest.fixture
def report():
    return reported(
        result(FULL, RIGHT),
        result(SMALL, ("yes", "yes", "person", "three"), held=100.0),
        result(LARGE, ("yes", "no", "person", "three"), held=200.0),
        facts={"footage": "one hour"},
        skipped=[SkippedVideo(Path("gone.mp4"), "not on disk")],
    )


def test_json_is_finite_and_holds_rows_drops_and_answers(report):
    body = json.loads(json_text(report.as_json()))
    assert [row["accuracy_all"] for row in body["rows"]] == [1.0, 0.5, 0.75]
    assert "drop_all" not in body["rows"][0]
    assert [row["drop_all"] for row in body["rows"][1:]] == [0.5, 0.25]
    # One question of a kind: no interval, which JSON writes as null.
    assert body["figures"][f"drop {LARGE.name}"] == 0.25
    assert body["baseline"] == "full"
    assert body["questions"][SMALL.name][3]["said"] == ["three"]
    assert body["skipped"] == [{"path": "gone.mp4", "reason": "not on disk"}]
    assert body["notes"] == ["footage: one hour", *report.notes]


def test_markdown_tables_have_a_line_for_each_setting(report):
    text = make_page(report).markdown()
    lines = [line for line in text.splitlines() if line.startswith(f"| {SMALL.name} ")]
    assert len(lines) == 3
    accuracy, retrieval, cost = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    assert accuracy[0] == "4"
    # Of one video nobody knows what another would have shown.
    assert accuracy[1] == accuracy[-1] == "0.500"
    assert any("none is given for 1" in note for note in report.notes)
    assert retrieval == ["25.0 %", "25.0 %", "66.7 %", "66.7 %"]
    assert cost == ["250 ms", "0.0 MiB", "1.0 MiB"]
    assert "* `gone.mp4`: not on disk" in text


def test_curves_are_drawn_of_what_was_measured(report):
    charts = memory_charts(report)
    assert set(charts) == {"accuracy-budget", "ttft-history"}
    for figure in charts.values():
        ElementTree.fromstring(svg(figure))
    # Two combinations of policies; each setting stands at the tokens it held.
    (axes,) = charts["accuracy-budget"].axes
    assert f"{SMALL.name}: 0.500" in svg(charts["accuracy-budget"])
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert sorted(len(points) for points in lines.values()) == [1, 2]
    assert sorted(x for points in lines.values() for x, _ in points) == [100, 200, 400]


def test_files_are_written_and_a_folder_that_cannot_be_is_named(report, tmp_path):
    path = write_page(make_page(report), tmp_path / "out", "memory", json_text(report.as_json()))
    assert path.read_text() == make_page(report).html()
    assert path.with_suffix(".md").read_text() == make_page(report).markdown()
    names = {each.name for each in path.parent.iterdir()}
    assert {"memory.html", "memory.json", "memory.md", "accuracy-budget.svg", "ttft-history.svg"} <= names
    (tmp_path / "file").write_text("")
    with pytest.raises(SightlineError, match="cannot write the report"):
        write_page(make_page(report), tmp_path / "file", "memory")


def test_a_drop_is_of_the_same_questions_and_from_full_kv():
    full, small = result(FULL, RIGHT), result(SMALL, RIGHT)
    with pytest.raises(ValueError, match="same questions in the same order"):
        reported(full, SettingResult(SMALL, full.answered[:2]))
    assert "| drop |" in make_page(reported(full, small)).markdown()
    assert "| drop |" not in make_page(reported(small)).markdown()
