"""The page is valid, needs nothing from anywhere, shows the numbers of the JSON, and fits a phone."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from tooltips import get_tooltips

from cluster.errors import SightlineError
from cluster.lab.report.charts import svg
from cluster.lab.report.number_format import compact, figure_text
from cluster.lab.report.records import ComparedWindow, Comparison, Cost
from cluster.lab.report.render import make_page, tokens_per_window, write_report
from cluster.types import Question

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Checker(HTMLParser):
    """Balanced tags, unique ids, and every address the page refers to."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.problems, self.addresses, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        if len(names) != len(set(names)):
            self.problems.append(f"<{tag}> has an attribute twice")
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "srcset", "xlink:href", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing, near line {self.getpos()}")

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    return checker


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """``report.html`` and ``report.json``."""
    return write_report(report, tmp_path_factory.mktemp("report") / "out")


def test_the_page_is_balanced_html_and_escapes_what_users_wrote(written):
    page = written[0].read_text()
    checker = check(page)
    assert page.startswith("<!DOCTYPE html>")
    assert checker.problems == []
    assert checker.open == []
    assert "<fast>" not in page
    assert "Is a vehicle moving &lt;fast&gt; &amp; loud?" in page
    assert "no &lt;such&gt; file" in page


def test_the_page_needs_nothing_from_anywhere(report, written):
    page = written[0].read_text()
    checker = check(page)
    assert len(checker.addresses) == sum(len(camera.frames) for camera in report.cameras) == 16
    assert all(address.startswith("data:image/jpeg;base64,/9j/") for address in checker.addresses)
    assert not re.search(r"https?://|@import|url\(|<script", page)


def test_page_and_json_hold_the_same_numbers(written):
    page_path, json_path = written
    text = " ".join(check(page_path.read_text()).text)
    data = json.loads(json_path.read_text())
    comparison = data["comparison"]
    # Fixture: three windows each of three busy cameras (260 of 4130 tokens) and of one gated throughout.
    assert comparison["windows"] == 12
    assert comparison["full"]["tokens"] == 12 * 4130
    assert comparison["ours"]["tokens"] == 9 * 260
    assert comparison["speedup"] == pytest.approx(12 * 1.25 / (9 * 0.125))
    assert f"{comparison['speedup']:.1f}×" in text
    assert f"Of {comparison['answers']} answers, {comparison['agreeing']} fall on the same side" in text
    assert f"{100 * comparison['tokens_share']:.1f} %" in text
    for camera in data["cameras"]:
        assert camera["name"] in text
        if camera["comparison"]["speedup"]:
            assert f"{camera['comparison']['speedup']:.1f}×" in text
    assert "jpeg" not in json_path.read_text()


def test_agreement_is_judged_at_each_questions_own_threshold():
    questions = (Question("a", "?", 0.5), Question("b", "?", 0.9))
    window = ComparedWindow(
        0.0, 1.0, Cost(10, 1.0, 5.0), Cost(5, 0.5, 1.0), False, {"a": 0.4, "b": 0.8}, {"a": 0.6, "b": 0.7}
    )
    found = Comparison.of([window], questions)
    assert (found.answers, found.agreeing) == (2, 1)
    assert found.score_difference == pytest.approx(0.3)
    assert (found.speedup, found.flops_ratio, found.tokens_share) == (2.0, 5.0, 0.5)


def test_nothing_compared_divides_by_nothing(report):
    page = make_page(dataclasses.replace(report, cameras=report.cameras[-1:])).html()
    assert "What the cameras answered, and what it cost" in page
    assert check(page).problems == []
    data = dataclasses.replace(report, cameras=()).as_json()
    assert data["comparison"]["speedup"] is None


def test_nested_bars_are_as_high_as_their_tokens(report):
    night = next(camera for camera in report.cameras if camera.name == "night")
    figure = tokens_per_window(night.live)
    (axes,) = figure.axes
    full, kept, computed = axes.containers
    assert [each.get_label() for each in axes.containers] == ["full", "kept by the pruner", "computed"]
    assert [bar.get_height() for bar in full] == [window.full for window in night.live]
    assert [bar.get_height() for bar in kept] == [window.kept for window in night.live]
    assert [bar.get_height() for bar in computed] == [window.computed for window in night.live]
    assert kept[0].get_height() / full[0].get_height() == pytest.approx(900 / 4096, abs=0.01)
    # Nested: each lies within the one behind it, and all of them inside.
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for outer, inner in ((full, kept), (kept, computed)):
        for wide, narrow in zip(outer, inner, strict=True):
            ends = wide.get_x() + wide.get_width(), narrow.get_x() + narrow.get_width()
            assert wide.get_x() < narrow.get_x() < ends[1] < ends[0]
    assert all(left <= bar.get_x() and bar.get_x() + bar.get_width() <= right for bar in full)
    assert bottom == 0
    assert top >= 4096
    assert get_tooltips(computed[2]) == ["window ending at 24 s: 4096 tokens in full, 900 kept, 0 computed (gated)"]
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"{window.end_s:.0f} s" for window in night.live]
    assert 'aria-label="Tokens of 7 windows: full, kept, computed"' in svg(figure)


def words(page):
    return re.sub(r"\s+", " ", " ".join(check(page).text))


def test_who_was_right_is_told_where_the_truth_is_known(told, tmp_path):
    page_path, json_path = write_report(dataclasses.replace(told, cameras=told.cameras[:2]), tmp_path)
    page = page_path.read_text()
    assert check(page).problems == []
    text, data = words(page), json.loads(json_path.read_text())
    # Compared: in full, person is right in two windows of three; ours in all three; vehicle is right both ways.
    comparison = data["cameras"][0]["comparison"]
    assert comparison["full_truth"] == {"judged": 6, "right": 5}
    assert comparison["our_truth"] == {"judged": 6, "right": 6}
    assert data["comparison"]["our_right"] == 1.0
    assert data["cameras"][0]["live_truth"] == data["live_truth"] == {"judged": 13, "right": 11}
    assert "and 100 % of the answers right" in text
    assert "83 % in full; live 11 of 13" in text
    assert "Is there a person in the scene? 4 of 6 32 s 2 of 3 3 of 3 2 / 3" in text
    assert "Is a vehicle moving <fast> & loud? 7 of 7 none 3 of 3 3 of 3 3 / 3" in text
    assert [(each["question"], each["at_s"]) for each in data["cameras"][0]["alerts"]] == [("person", 32.0)]
    # Cameras whose truth nobody knows stay out of the table and out of the counts.
    assert text.count("Is there a person in the scene? ") == 1 + 2 * 2


def test_nothing_is_said_of_truth_where_it_is_unknown_or_the_model_untrained(report, told):
    unknown, known = report.cameras[:1], told.cameras[:1]
    untrained = words(make_page(dataclasses.replace(told, random_weights=True, cameras=known)).html())
    assert "randomly initialised: its answers mean nothing yet" in untrained
    assert "of the answers right" not in untrained
    trained = words(make_page(dataclasses.replace(report, random_weights=False, cameras=unknown)).html())
    assert "Answers against ground truth" not in trained
    assert "of the answers agree" in trained
    assert "randomly initialised" not in trained


def test_compact_numbers():
    assert [compact(v) for v in (0, 999, 1000, 1234, 2.5e6, 1e12)] == ["0", "999", "1k", "1.2k", "2.5M", "1T"]


def test_figures_keep_every_digit_before_the_point():
    numbers = (0.963412, 185.21, 9999.4, 9999.5, 15795.0, -130000.0, float("nan"), float("inf"))
    texts = ["0.9634", "185.2", "9999", "10000", "15795", "-130000", "nan", "inf"]
    assert [figure_text(number) for number in numbers] == texts


def test_a_folder_that_cannot_be_written_is_one_sentence(report, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SightlineError, match=r"cannot write the report to .*/file: "):
        write_report(dataclasses.replace(report, cameras=()), blocked)


def test_a_browser_lays_it_out_without_sideways_scrolling(written, tmp_path):
    assert shutil.which("chromium"), "this test needs a browser: apt-get install chromium (make test does)"
    # Headless Chromium does not go below 500 pixels by itself: a frame of the wanted width does.
    widths = (390, 1200)
    frames = (
        f'<iframe src="{written[0].as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in widths
    )
    (tmp_path / "frames.html").write_text(
        f"<body>{''.join(frames)}<script>onload = () => {{ document.body.dataset.measured ="
        "[...document.querySelectorAll('iframe')].map(f => { const d = f.contentDocument.documentElement;"
        "return [d.scrollWidth, d.querySelectorAll('img').length,"
        "[...d.querySelectorAll('img')].every(i => i.naturalWidth == 320)] }).join(';') }</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "frames.html").as_uri()], capture_output=True, text=True, timeout=90
    )
    measured = re.findall(r"(\d+),(\d+),(\w+)(?=[;\"])", done.stdout)
    assert len(measured) == len(widths), done.stderr[-2000:]
    for width, (wanted, pictures, loaded) in zip(widths, measured, strict=True):
        assert int(wanted) <= width
        assert (int(pictures), loaded) == (16, "true")
