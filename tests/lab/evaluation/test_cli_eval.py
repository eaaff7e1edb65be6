"""``sightline eval accuracy`` as a user runs it, on made scenes and on footage laid out as UCF-Crime."""

import json

import pytest

from actors.cli import main
from cluster.lab.scenes.dataset import SceneSet, make_scenes
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.street_clips import make_clip
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.models.loading import load_model
from cluster.models.settings import FILE

WINDOW = ("--window", "8", "--stride", "4", "--settings", "quick", "--jobs", "1")
EVAL = ("eval", "accuracy")
# Heavy work beside more of it on two cores: minutes, where seconds are the rule.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model = load_model("tiny-qwen2_5_vl", seed=5)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    questions = {kind: standing_question(kind) for kind in EVENT_KINDS}
    (folder / FILE).write_text(json.dumps({"max_pixels": 84 * 84, "threshold": 0.5, "questions": questions}))
    return folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory, small_cameras):
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder, SceneSet("test", 2, seconds=24, events=("fall", "none")))
    (folder / "test-000009.mp4").write_bytes(b"no video")
    return folder


@pytest.fixture(scope="module")
def validation(tmp_path_factory, small_cameras):
    folder = tmp_path_factory.mktemp("validation")
    make_scenes(folder, SceneSet("validation", 2, seconds=24, events=("fall", "none")))
    return folder


def test_scenes_end_to_end_and_again(cli, tmp_path, checkpoint, scenes, validation):
    command = ("--scenes", scenes, "--validation", validation, "--model", checkpoint, *WINDOW, "--stride", "8")
    command += ("--json", "figures.json")
    done = cli(*EVAL, *command)
    assert done.returncode == 0, done.stderr
    assert "skipped test-000009.mp4: its ground truth test-000009.json is missing" in done.stdout
    assert "codecsight pruning alone" in done.stdout
    body = json.loads((tmp_path / "figures.json").read_text())
    assert {"f1_full", "f1_full_min", "flops_share_codecsight"} <= body["figures"].keys()
    assert 0 < body["figures"]["flops_share_codecsight"] < 1
    assert all(body["thresholds"][name].keys() == set(EVENT_KINDS) for name in ("full", "codecsight"))
    assert any("chosen on: 2 validation videos" in note for note in body["notes"])
    out = tmp_path / "out" / "accuracy"
    assert {"accuracy.html", "accuracy.md", "work.jsonl", "f1-tokens.svg"} <= {path.name for path in out.iterdir()}
    # One run's results are the next one's.
    lines = (out / "work.jsonl").read_text()
    # Anchors of this window cannot be rarer: two pairs of the twelve settings are the same.
    assert len(lines.splitlines()) == 4 * 10
    again = cli(*EVAL, *command)
    assert again.returncode == 0, again.stderr
    assert (out / "work.jsonl").read_text() == lines
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == body["figures"]


def test_nothing_is_fitted_on_what_is_judged(cli, checkpoint, scenes, validation):
    before = (checkpoint / FILE).read_text()
    for command, reason in (
        (("accuracy", "--scenes", validation, "--validation", validation / "."), "is also a test video"),
        (("accuracy", "--scenes", validation, "--validation", scenes), "scenes of the test split (test-000000)"),
        (("calibrate", checkpoint, "--scenes", scenes), "scenes of the test split (test-000000)"),
        (("profile", checkpoint, "--scenes", scenes), "scenes of the test split (test-000000)"),
    ):
        model = ("--model", checkpoint, *WINDOW) if command[0] == "accuracy" else ()
        done = cli("eval", *command, *model)
        assert done.returncode == 2
        assert reason in " ".join(done.stderr.split())
    assert (checkpoint / FILE).read_text() == before


@pytest.fixture(scope="module")
def footage(tmp_path_factory):
    """Two fights and two normal videos of 14 s, the last too short to be one."""
    root = tmp_path_factory.mktemp("UCF_Crimes")
    fights = ["Fighting/Fighting003_x264.mp4", "Fighting/Fighting047_x264.mp4"]
    normal = ["Testing_Normal_Videos_Anomaly/Normal_Videos_003_x264.mp4"]
    short = "Testing_Normal_Videos_Anomaly/Normal_Videos_006_x264.mp4"
    for number, name in enumerate([*fights, *normal, short]):
        (root / name).parent.mkdir(exist_ok=True)
        seconds = 4 if name == short else 14
        make_clip("street" if number % 2 else "noisy", root / name, seconds=seconds, fps=10, size=(160, 96))
    (root / "Anomaly_Test.txt").write_text("\n".join([*fights, *normal, short]) + "\n")
    (root / "Temporal_Anomaly_Annotation_for_Testing_Videos.txt").write_text(
        "Fighting003_x264.mp4  Fighting  20  90  -1  -1  \n"
        "Fighting047_x264.mp4  Fighting  40  100  -1  -1  \n"
        "Normal_Videos_003_x264.mp4  Normal  -1  -1  -1  -1  \n"
        "Normal_Videos_006_x264.mp4  Normal  -1  -1  -1  -1  \n"
    )
    return root


def test_footage_in_ucf_crimes_layout_brings_its_own_questions(cli, tmp_path, footage):
    """A model that was trained on no scenes will do."""
    command = ("--dataset", footage, "--layout", "ucf-crime", "--model", "tiny-qwen2_5_vl", *WINDOW)
    done = cli(*EVAL, *command, "--json", "ucf.json")
    assert done.returncode == 0, done.stderr
    assert "skipped Normal_Videos_006_x264.mp4" in done.stdout
    body = json.loads((tmp_path / "ucf.json").read_text())
    assert "Fighting" in body["by_kind"]["full"]
    assert any("3 of layout ucf-crime, 2 events" in note for note in body["notes"])


def test_nothing_left_is_a_failure(cli, footage):
    done = cli(*EVAL, "--dataset", footage, "--model", "tiny-qwen2_5_vl", "--window", "60", "--jobs", "1")
    assert done.returncode != 0
    assert "is left in" in done.stderr
    assert "shorter than a window" in done.stderr


def test_a_checkpoint_of_other_questions_ends_before_the_first_window(cli, tmp_path, scenes):
    done = cli(*EVAL, "--scenes", scenes, "--model", "tiny-qwen2_5_vl", *WINDOW)
    assert done.returncode == 2
    assert "does not say which questions it was trained on" in done.stderr
    assert not (tmp_path / "out" / "accuracy" / "work.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--scenes", "here", "--dataset", "there"), "not both"),
        (("--model", "nobody"), "there is no model 'nobody'"),
        (("--model", "tiny-qwen2_5_vl", "--settings", "slow"), "unknown settings 'slow'"),
        (("--model", "tiny-qwen2_5_vl", "--window", "4", "--stride", "8"), "must not exceed the window"),
        (("--model", "tiny-qwen2_5_vl", "--window", "0", "--dataset", "nowhere"), "must be above 0"),
        (("--count", "0"), "'--count' / '-n': Input should be greater than or equal to 1"),
        (("--model", "tiny-qwen2_5_vl", "--dataset", "nowhere"), "does not exist"),
        (("--jobs", "0"), "Input should be greater than or equal to 1"),
        (("--json", "/proc/none/x.json"), "cannot write"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, reason):
    # In this process: each on its own would load torch anew.
    monkeypatch.chdir(tmp_path)
    assert main([*EVAL, *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert reason in said
    assert "Traceback" not in said
