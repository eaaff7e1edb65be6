"""The evaluation as a whole: resumed, in processes, and with videos that cannot be used."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluation_cases import QUESTIONS, SHAPE
from pydantic import TypeAdapter

import cluster.memory.head_memory
import cluster.vision.sampler
from cluster.errors import ConfigError, SightlineError
from cluster.lab.evaluation import replay as one_pass
from cluster.lab.evaluation import run as runner
from cluster.lab.evaluation import work as working
from cluster.lab.evaluation.results import VideoRun
from cluster.lab.evaluation.run import evaluate
from cluster.lab.evaluation.settings import codecsight, full_computation, ours
from cluster.lab.evaluation.work import ModelSpec, ResultCache, model_digest, video_digest
from cluster.lab.scenes.street_clips import make_clip
from cluster.models.loading import load_model

SETTINGS = [full_computation(SHAPE), codecsight(SHAPE), ours(replace(SHAPE, anchor_interval_s=2), 0.2)]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-qwen2_5_vl")


@pytest.fixture(scope="module")
def videos(street, tmp_path_factory):
    path = tmp_path_factory.mktemp("noisy") / "noisy.mp4"
    make_clip("noisy", path, seconds=9, fps=10, size=(256, 144))
    return [street, replace(street, path=path, name="noisy", events=(), strata=frozenset(), motion=None)]


@pytest.fixture
def passes(monkeypatch):
    """The (video, number of settings) of every pass that is really computed."""
    seen = []
    replay = runner.replay

    def counted(engine, video, settings, questions):
        seen.append((video.name, len(settings)))
        return replay(engine, video, settings, questions)

    monkeypatch.setattr(runner, "replay", counted)
    return seen


def scores(results):
    return {key: [window.scores for window in run.windows] for key, run in results.runs.items()}


def test_one_pass_per_anchor_interval_and_progress_to_the_end(model, videos, passes):
    told = []
    results = evaluate(videos, model, SETTINGS, QUESTIONS, on_progress=lambda *at: told.append(at))
    assert sorted(passes) == [("noisy", 1), ("noisy", 2), ("street", 1), ("street", 2)]
    assert [done for done, _, _ in told] == [0, 2, 3, 5, 6]
    assert {total for _, total, _ in told} == {6}
    assert [video.name for video in results.videos] == ["street", "noisy"]
    assert results.kinds == ("person", "car")
    assert results.truth.tolist() == [[True, False], [False, False]]
    assert results.flops_share(SETTINGS[0]) == pytest.approx(1)
    assert 0 < results.flops_share(SETTINGS[1]) < 0.9
    assert results.disagreement(SETTINGS[0]) == 0
    assert results.disagreement(SETTINGS[1]) > 0


def test_it_goes_on_where_it_was(model, videos, passes, tmp_path):
    work = tmp_path / "deep" / "work.jsonl"
    first = evaluate(videos[:1], model, SETTINGS[:2], QUESTIONS, work=work)
    assert passes == [("street", 2)]
    # Interrupted in the middle of a line.
    work.write_text(work.read_text() + '{"video": "00", "mod')
    told = []
    both = evaluate(videos, model, SETTINGS, QUESTIONS, work=work, on_progress=lambda *at: told.append(at))
    assert passes[1:] == [("street", 1), ("noisy", 2), ("noisy", 1)]
    assert told[0][:2] == (2, 6)
    assert {key: found for key, found in scores(both).items() if key in scores(first)} == scores(first)
    del passes[:]
    again = evaluate(videos, model, SETTINGS, QUESTIONS, work=work)
    assert passes == []
    assert scores(again) == scores(both)
    assert again.mean(SETTINGS[1], "flops") == both.mean(SETTINGS[1], "flops")


def test_another_model_question_or_file_is_another_result(model, videos, passes, tmp_path):
    work = tmp_path / "work.jsonl"
    evaluate(videos[:1], model, SETTINGS[:1], QUESTIONS, work=work)
    evaluate(videos[:1], load_model("tiny-qwen2_5_vl", seed=1), SETTINGS[:1], QUESTIONS, work=work)
    evaluate(videos[:1], model, SETTINGS[:1], QUESTIONS | {"car": "Is there a truck?"}, work=work)
    renamed = replace(videos[0], kinds=("car",))
    evaluate([renamed], model, SETTINGS[:1], QUESTIONS, work=work)
    assert len(passes) == 4
    moved = tmp_path / "moved.mp4"
    moved.write_bytes(videos[0].path.read_bytes())
    evaluate([replace(videos[0], path=moved)], model, SETTINGS[:1], QUESTIONS | {"car": "Is there a truck?"}, work=work)
    assert len(passes) == 4


def test_processes_find_what_one_finds(model, videos, tmp_path):
    spec = ModelSpec("tiny-qwen2_5_vl")
    alone = evaluate(videos, model, SETTINGS[1:2], QUESTIONS)
    beside = evaluate(videos, spec, SETTINGS[1:2], QUESTIONS, jobs=2, work=tmp_path / "work.jsonl")
    for key, found in scores(alone).items():
        for ours_, theirs in zip(found, scores(beside)[key], strict=True):
            assert ours_ == pytest.approx(theirs, abs=1e-5)
    assert len((tmp_path / "work.jsonl").read_text().splitlines()) == 4


def test_what_cannot_be_used_is_listed_with_its_reason(model, videos, tmp_path):
    broken, short = tmp_path / "broken.mp4", tmp_path / "short.mp4"
    broken.write_bytes(videos[0].path.read_bytes()[:2000])
    make_clip("street", short, seconds=5, fps=10, size=(256, 144))
    more = [
        replace(videos[0], path=broken, name="broken"),
        replace(videos[0], path=short, name="short"),
        replace(videos[0], path=tmp_path / "gone.mp4", name="gone"),
    ]
    results = evaluate([*videos, *more], model, SETTINGS[:1], QUESTIONS)
    assert [video.name for video in results.videos] == ["street", "noisy"]
    reasons = {skipped.path.name: skipped.reason for skipped in results.skipped}
    assert reasons.keys() == {"broken.mp4", "short.mp4", "gone.mp4"}
    assert "No such file" in reasons["gone.mp4"]
    assert "broken.mp4" in reasons["broken.mp4"]
    assert reasons["short.mp4"] == "too short: 0 whole windows of 6 s, 2 are needed"
    with pytest.raises(SightlineError, match=r"all 1 videos were skipped.*broken"):
        evaluate(more[:1], model, SETTINGS[:1], QUESTIONS)


def test_a_video_of_too_few_windows_is_skipped(model, videos):
    shape = replace(SHAPE, window_s=9, stride_s=3)
    results = evaluate(videos, model, [full_computation(shape)], QUESTIONS)
    assert [video.name for video in results.videos] == ["street"]
    assert results.skipped[0].reason == "too short: 1 whole windows of 9 s, 2 are needed"


def test_full_computation_is_always_among_the_settings(model, videos):
    results = evaluate(videos[:1], model, SETTINGS[1:2], QUESTIONS)
    assert results.full == full_computation(SHAPE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"videos": []}, "no videos"),
        ({"settings": []}, "no settings"),
        ({"questions": {"person": "?"}}, "no question for car"),
        ({"jobs": 2}, "give a ModelSpec"),
        ({"settings": [replace(full_computation(SHAPE), refresh="most")]}, "unknown refresh policy 'most'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(model, videos, change, reason):
    given = {"videos": videos, "model": model, "settings": SETTINGS, "questions": QUESTIONS} | change
    with pytest.raises(ConfigError, match=reason):
        evaluate(given["videos"], given["model"], given["settings"], given["questions"], jobs=given.get("jobs", 1))


def test_two_videos_of_one_name_are_refused(model, videos):
    with pytest.raises(ConfigError, match="video names must be unique"):
        evaluate([videos[0], videos[0]], model, SETTINGS, QUESTIONS)


def test_a_work_file_that_is_none(make_run, tmp_path, tiny_engine, street):
    path = tmp_path / "work.jsonl"
    path.write_bytes(b'not json\n{"video": 1}\n\xff\n')
    key = (video_digest(street.path), model_digest(tiny_engine, QUESTIONS), SETTINGS[0].key)
    run = make_run([0.25, 0.75])
    with ResultCache(path) as file:
        assert file.get(key, TypeAdapter(VideoRun).validate_python) is None
        file.add(key, run)
    with ResultCache(path) as file:
        assert file.get(key, TypeAdapter(VideoRun).validate_python) == run
    assert json.loads(path.read_bytes().splitlines()[-1])["setting"] == SETTINGS[0].key
    with pytest.raises(SightlineError, match="cannot be used"), ResultCache(tmp_path):
        pass


def test_a_digest_has_every_weight_and_setting(tiny_engine):
    before, model = model_digest(tiny_engine, QUESTIONS), tiny_engine.model
    row = model.model.get_input_embeddings().weight[model.question_ids(QUESTIONS["car"])[0]]
    kept, settings = row.detach().clone(), model.settings
    try:
        with torch.no_grad():
            row += 1
        assert model_digest(tiny_engine, QUESTIONS) != before
        with torch.no_grad():
            row.copy_(kept)
        assert model_digest(tiny_engine, QUESTIONS) == before
        model.settings = replace(settings, memory_s=5.0)
        assert model_digest(tiny_engine, QUESTIONS) != before
        model.settings, model.mean = settings, (0.1, 0.2, 0.3)
        assert model_digest(tiny_engine, QUESTIONS) != before
        # Latencies are of a device.
        model.mean, model.device = model.pixel_mean, torch.device("cuda:0")
        assert model_digest(tiny_engine, QUESTIONS) != before
    finally:
        model.settings, model.mean, model.device = settings, model.pixel_mean, torch.device("cpu")
        with torch.no_grad():
            row.copy_(kept)


@pytest.mark.parametrize("module", [one_pass, cluster.memory.head_memory, cluster.vision.sampler], ids=str)
def test_results_of_other_code_are_not_reused(model, videos, tmp_path, monkeypatch, passes, module):
    work, changed, read = tmp_path / "work.jsonl", Path(module.__file__), Path.read_bytes
    evaluate(videos[:1], model, SETTINGS[:1], QUESTIONS, work=work)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"pass\n" * (path == changed))
    working.code_digest.cache_clear()
    try:
        evaluate(videos[:1], model, SETTINGS[:1], QUESTIONS, work=work)
    finally:
        working.code_digest.cache_clear()
    assert len(passes) == 2
