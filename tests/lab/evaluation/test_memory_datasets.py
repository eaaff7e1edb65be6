"""Published layouts of questions about long videos, on small directories laid out like them."""

import builtins
import json
import shutil
import sys

import pytest

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.datasets import load_question_dataset, question_layouts
from cluster.lab.evaluation.memory.questions import Question, multiple_choice
from cluster.lab.scenes.street_clips import make_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    make_clip("street", path, seconds=4, fps=5, size=(128, 72))
    return path


def put(path, clip):
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(clip, path)


def write(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body))


def plot(**change):
    record = {
        "video": "one.mp4",
        "duration": 4,
        "question": "What colour is the car?",
        "candidates": ["Red", "Green", "Blue"],
        "answer": "Green",
        "question_type": "plotQA",
    }
    return {key: value for key, value in {**record, **change}.items() if value is not None}


def reasons(dataset):
    return [each.reason for each in dataset.skipped]


def test_mlvu_asks_at_the_end_of_each_video_and_says_what_it_left_out(tmp_path, clip):
    put(tmp_path / "video/1_plotQA/one.mp4", clip)
    (tmp_path / "video/1_plotQA/broken.mp4").write_bytes(b"no video")
    records = [
        plot(),
        plot(question="And the van?", answer="Blue"),
        plot(video="gone.mp4"),
        plot(video="broken.mp4"),
        plot(answer="Pink"),
        plot(question=None),
        plot(candidates=["Green"]),
    ]
    write(tmp_path / "json/1_plotQA.json", records)
    write(tmp_path / "json/9_summary.json", [plot(candidates=None)])
    dataset = load_question_dataset(tmp_path, "mlvu")
    (video,) = dataset.videos
    assert video.path == tmp_path / "video/1_plotQA/one.mp4"
    first, second = video.questions
    assert first == multiple_choice("plotQA", records[0]["question"], ("Red", "Green", "Blue"), 1, first.at_s)
    assert first.at_s == pytest.approx(4.0, abs=0.05)
    assert second.answers == ("C",)
    assert len(dataset.skipped) == 6
    for told in ("not on disk; 1 questions", "cannot be read", "'Pink' is not one", "has no question", "needs 2 to"):
        assert any(told in reason for reason in reasons(dataset)), told
    assert any("1 records without candidates" in reason for reason in reasons(dataset))


def mme(**change):
    record = {
        "video_id": "001",
        "videoID": "abcdefghijk",
        "url": "https://www.youtube.com/watch?v=abcdefghijk",
        "duration": "short",
        "question": "What happens?",
        "options": ["A. A fall.", "B. A fight.", "C. Nothing.", "D. Rain."],
        "answer": "C",
        "task_type": "Action Recognition",
    }
    return {key: value for key, value in {**record, **change}.items() if value is not None}


def test_videomme_strips_letters_and_reports_by_length(tmp_path, clip):
    put(tmp_path / "data/abcdefghijk.mp4", clip)
    write(tmp_path / "test.json", [mme(), mme(answer="E"), mme(videoID="nowhere0000", url="", video_id=None)])
    dataset = load_question_dataset(tmp_path, "videomme")
    ((question,),) = [video.questions for video in dataset.videos]
    assert (question.kind, question.options[2], question.answers) == ("short", "Nothing.", ("C",))
    assert any("'E' is not the letter of one of 4" in reason for reason in reasons(dataset))
    assert any("not on disk" in reason for reason in reasons(dataset))


def test_videomme_reads_the_nested_form_of_the_official_evaluation(tmp_path, clip):
    put(tmp_path / "videos/abcdefghijk.mp4", clip)
    inner = {key: mme()[key] for key in ("question", "options", "answer", "task_type")}
    outer = {"video_id": "001", "duration": "long", "url": mme()["url"], "questions": [inner, {**inner, "answer": "A"}]}
    write(tmp_path / "test.json", [outer])
    (video,) = load_question_dataset(tmp_path, "videomme").videos
    assert [(each.kind, each.answers) for each in video.questions] == [("long", ("C",)), ("long", ("A",))]


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "videomme").mkdir()
    (tmp_path / "videomme/test-00000-of-00001.parquet").write_bytes(b"PAR1")
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install pyarrow, or save the annotations as JSON"):
        load_question_dataset(tmp_path, "videomme")


def test_parquet_is_read_where_pyarrow_is_there(tmp_path, clip):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    put(tmp_path / "data/abcdefghijk.mp4", clip)
    (tmp_path / "videomme").mkdir()
    table = tmp_path / "videomme/test-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([mme()]), table)
    assert load_question_dataset(tmp_path, "videomme").videos[0].questions[0].answers == ("C",)
    table.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot read"):
        load_question_dataset(tmp_path, "videomme")


def turn(**change):
    asked = {"question": "What is on the table?", "answer": "A red cup", "start_time": 1, "end_time": 3}
    return {key: value for key, value in {**asked, **change}.items() if value is not None}


def test_rvs_as_rekv_keeps_it(tmp_path, clip):
    put(tmp_path / "ego/videos/v1.mp4", clip)
    turns = [
        turn(end_time=3.5, choices=["A red cup", "A book"]),
        turn(),
        turn(end_time=60),
        turn(start_time=3),
        turn(end_time="shot_0012"),
        turn(answer=None),
        turn(choices=["A book", "A pen"]),
        "no question",
    ]
    videos = [
        {"video_id": "v1", "video_path": "data/rvs/ego/videos/v1.mp4", "conversations": turns},
        {"video_id": "v2", "conversations": [turn()]},
        {"conversations": [turn()]},
    ]
    write(tmp_path / "ego/ego4d_oe.json", videos)
    dataset = load_question_dataset(tmp_path, "rvs")
    (video,) = dataset.videos
    opened, chosen = video.questions
    assert opened == Question("open", ("What is on the table?",), ("A red cup",), 3.0, None, ((1.0, 3.0),))
    assert (chosen.at_s, chosen.options, chosen.answers) == (3.5, ("A red cup", "A book"), ("A",))
    assert len(dataset.skipped) == 8
    for told in (
        "is after the video's end",
        "not an interval",
        "'shot_0012'",
        "no answer",
        "one of the choices",
        "no question",
    ):
        assert any(told in reason for reason in reasons(dataset)), told


def test_rvs_as_published_counts_from_where_its_clip_begins(tmp_path, clip):
    put(tmp_path / "videos/v1.mp4", clip)
    write(tmp_path / "rvs_ego.json", [{"video_id": "v1", "start_time": 600, "end_time": 604}])
    asked = turn(video_id="v1", start_time=601, end_time=603, answer_type="Yes/No", answer="Yes", id="1")
    write(tmp_path / "test_qa_ego4d.json", [asked])
    ((question,),) = [video.questions for video in load_question_dataset(tmp_path, "rvs").videos]
    assert (question.kind, question.at_s, question.evidence) == ("Yes/No", 3.0, ((1.0, 3.0),))


@pytest.mark.parametrize("layout", ["mlvu", "rvs", "videomme"])
def test_a_directory_of_another_layout_is_refused(tmp_path, layout):
    assert layout in question_layouts
    with pytest.raises(ConfigError, match=r"is not in .* layout"):
        load_question_dataset(tmp_path, layout)
    with pytest.raises(ConfigError, match="does not exist"):
        load_question_dataset(tmp_path / "nowhere", layout)


def test_an_unknown_layout_names_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match="there are: mlvu, rvs, videomme"):
        load_question_dataset(tmp_path, "egoschema")


@pytest.mark.parametrize("body", ["[1, 2", "[1, 2]", '{"a": 1}'])
def test_annotations_that_are_none_are_named(tmp_path, body):
    (tmp_path / "json").mkdir()
    (tmp_path / "json/1_plotQA.json").write_text(body)
    with pytest.raises(ConfigError, match=r"1_plotQA.json is not"):
        load_question_dataset(tmp_path, "mlvu")


def test_nothing_left_says_why(tmp_path):
    write(tmp_path / "json/1_plotQA.json", [plot(video=f"{i}.mp4") for i in range(5)])
    with pytest.raises(ConfigError, match=r"no questions left in .* 0.mp4: not on disk.*; and 2 more"):
        load_question_dataset(tmp_path, "mlvu")
