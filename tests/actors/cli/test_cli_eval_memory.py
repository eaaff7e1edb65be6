"""``sightline eval memory`` as a user runs it, on made scenes and on videos with questions of their own."""

import json
import shutil
from types import SimpleNamespace

import pytest

from actors.cli import evaluate, main
from cluster.lab.evaluation.memory.settings import FULL, ours
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.catalog import BUNDLED
from cluster.models.settings import ModelSettings

SMALL = ("--window", "6", "--stride", "6", "--jobs", "1", "--model", "tiny-qwen2_5_vl")
# A heavy process beside others on two cores: minutes, where seconds are the rule.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two questions about one short video, and one about a video that is not there, laid out as MLVU."""
    root = tmp_path_factory.mktemp("MLVU")
    clip = root / "clip.mp4"
    make_clip("street", clip, seconds=12, fps=4, size=(160, 96))
    (root / "video" / "1_plotQA").mkdir(parents=True)
    shutil.move(clip, root / "video" / "1_plotQA" / "one.mp4")
    (root / "json").mkdir()
    record = {"duration": 12, "candidates": ["Red", "Green"], "answer": "Green", "question_type": "plotQA"}
    records = [
        {**record, "video": "one.mp4", "question": "What colour is the car?"},
        {**record, "video": "one.mp4", "question": "What colour is the coat?"},
        {**record, "video": "gone.mp4", "question": "What colour is the bag?"},
    ]
    (root / "json" / "1_plotQA.json").write_text(json.dumps(records))
    return root


def test_videos_with_questions_end_to_end_and_again(cli, videos):
    command = ("eval", "memory", "--dataset", videos, "--layout", "mlvu", *SMALL, "--settings", "basic")
    command += ("--json", "figures.json")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    assert "novelty/resv/wicsum@1/8" in done.stdout
    assert "skipped gone.mp4: not on disk" in done.stdout
    assert "not clearly above chance" in done.stdout
    body = json.loads((cli.folder / "figures.json").read_text())
    assert {"accuracy_full", "accuracy_drop_at_eighth", "chance"} <= body["figures"].keys()
    assert body["figures"]["chance"] == 1.0
    assert body["baseline"] == "full"
    rows = {row["share"]: row for row in body["rows"] if row["compressor"] == "novelty"}
    assert rows[1.0]["bytes_held"] > rows[0.125]["bytes_held"] > 0
    out = cli.folder / "out" / "memory"
    assert {"memory.md", "memory.json", "accuracy-budget.svg"} <= {path.name for path in out.iterdir()}
    lines = (out / "work.jsonl").read_text()
    assert len(lines.splitlines()) == len(body["rows"])
    # A process of its own knows them by the same keys.
    again = cli.process(*command, timeout=300)
    assert again.returncode == 0, again.stderr
    assert (out / "work.jsonl").read_text() == lines
    assert json.loads((cli.folder / "figures.json").read_text())["rows"] == body["rows"]


def test_json_on_standard_output_is_alone_there(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cluster.lab.report.page.write_page", lambda page, out, stem, json: out / f"{stem}.html")
    report = SimpleNamespace(as_json=lambda: {"figures": {}}, notes=["something"], skipped=[])
    evaluate.finish(report, None, [], tmp_path, "accuracy", "-")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"figures": {}}
    assert "note: something" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_scenes_are_made_and_asked_about(cli, monkeypatch, small_cameras):
    """A grid is compared above."""
    monkeypatch.setattr("cluster.lab.evaluation.memory.settings.memory_grid", lambda _: [FULL, ours(1 / 8)])
    done = cli("eval", "memory", "--scenes", "1", "--seconds", "60", "--per-kind", "2", *SMALL, "--json", "f.json")
    assert done.returncode == 0, done.stderr
    body = json.loads((cli.folder / "f.json").read_text())
    assert any(note.startswith("footage: 1 scenes of 60 s") for note in body["notes"])
    assert {each["judged"]["kind"] for each in body["questions"]["full"]} >= {"needle", "counting"}
    assert [path.name for path in (cli.folder / "out/memory/footage").glob("*.mp4")] == ["past-test-000000.mp4"]


def test_a_fit_is_written_into_the_model_and_used_from_then_on(cli, monkeypatch, small_cameras):
    shutil.copytree(BUNDLED["demo"], cli.folder / "model")
    monkeypatch.setattr("cluster.lab.evaluation.calibration.fit_answers", lambda *_: (1.5, 2.25))
    monkeypatch.setattr("cluster.lab.evaluation.memory.settings.memory_grid", lambda _: [FULL, ours(1 / 8)])
    scenes = ("--scenes", "1", "--seconds", "60", "--per-kind", "1", "--window", "6", "--stride", "6", "--jobs", "1")
    done = cli("eval", "memory", *scenes, "--model", "model", "--calibrate")
    assert done.returncode == 0, done.stderr
    assert "temperature 1.500, bias 2.250" in done.stdout
    settings = ModelSettings.load(cli.folder / "model")
    assert (settings.answer_temperature, settings.answer_bias) == (1.5, 2.25)
    assert settings.score_bias == ModelSettings.load(BUNDLED["demo"]).score_bias
    # Scenes that nothing is judged on, whatever their seed.
    made = cli.folder / "out/memory/footage"
    assert [path.name for path in made.glob("*.mp4")] == ["past-validation-000000.mp4"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dataset", "here", "--scenes", "2"), "--scenes is for generated scenes"),
        (("--dataset", "here", "--seconds", "90"), "--seconds is for generated scenes"),
        (("--dataset", "here", "--calibrate"), "--calibrate is for generated scenes"),
        (("--seconds", "0"), "'--seconds': Input should be greater"),
        (("--scenes", "0"), "'--scenes' / '-n': Input should be greater"),
        (("--jobs", "0"), "'--jobs' / '-j': Input should be greater"),
        (("--model", "nobody"), "there is no model 'nobody'"),
        (("--model", "tiny-qwen2_5_vl", "--settings", "slow"), "unknown settings 'slow'"),
        (("--model", "tiny-qwen2_5_vl", "--seconds", "20"), "must last at least 60 s"),
        (("--model", "tiny-qwen2_5_vl", "--window", "4", "--stride", "8"), "must not exceed the window"),
        (("--model", "tiny-qwen2_5_vl", "--dataset", "nowhere"), "does not exist"),
        (("--model", "tiny-qwen2_5_vl", "--dataset", ".", "--layout", "films"), "layout of questions about the past"),
        (("--json", "/proc/none/x.json"), "cannot write"),
        (("--model", "tiny-qwen2_5_vl", "--calibrate"), "there is no tiny-qwen2_5_vl/sightline.json"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(arguments, reason, tmp_path, monkeypatch, capsys):
    # In this process: each on its own would load torch anew.
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "memory", *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert reason in said
    assert "Traceback" not in said
