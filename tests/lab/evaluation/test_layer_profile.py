"""VLCache's profile: what each layer brings, measured through the live path."""

from dataclasses import replace

import numpy as np
import pytest
from evaluation_cases import QUESTIONS, SHAPE

from cluster.errors import ModelError, SightlineError
from cluster.lab.evaluation.layer_profile import layer_profile, measure_errors
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.settings import Setting


@pytest.mark.parametrize(
    ("errors", "shares"),
    [
        ([1.0, 0.4, 0.1, 0.0], (1.8, 0.9, 0.3)),
        # The first layer brings nothing of its own, and has to compute what the second does.
        ([1.0, 1.0, 0.4, 0.1, 0.0], (1.2, 1.2, 1.2, 0.4)),
        ([1.0, 0.8, 0.9, 0.0], (1.0, 1.0, 1.0)),
    ],
)
def test_shares_follow_what_layers_bring_and_never_rise(errors, shares):
    assert layer_profile(np.array(errors)) == pytest.approx(shares)


def test_without_an_error_there_is_no_profile():
    with pytest.raises(ModelError, match="nothing to measure"):
        layer_profile(np.array([2e-6, 1e-6, 0, 1e-6]))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("profile") / "work.jsonl"


@pytest.fixture(scope="module")
def errors(tiny_engine, street, work):
    broken = replace(street, path=work.with_name("missing.mp4"), name="missing")
    return measure_errors(tiny_engine.model, [broken, street], QUESTIONS, SHAPE, work=work)


def test_errors_are_the_distance_to_full_computation(tiny_engine, street, errors):
    reused, whole = (Setting(name, "none", name, shape=SHAPE) for name in ("none", "all"))
    runs = replay(tiny_engine, street, [reused, whole], QUESTIONS)
    scores = [np.array([window.scores for window in runs[each.key].windows]) for each in (reused, whole)]
    margins = [np.log(each / (1 - each)) for each in scores]
    assert len(errors) == len(tiny_engine.model.layers) + 1
    assert errors[0] == pytest.approx(np.sqrt(((margins[0] - margins[1]) ** 2).mean()), rel=1e-3)
    assert errors[-1] == pytest.approx(0, abs=1e-5)
    # KV of the first layer depends on nothing before it.
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
    assert errors[-2] > 0


def test_a_finished_pass_is_not_repeated_and_the_model_is_as_before(tiny_engine, street, errors, work, monkeypatch):
    assert tiny_engine.model.settings.layer_profile == ()
    lines, told = work.read_text(), []
    monkeypatch.setattr("cluster.lab.evaluation.run.replay", None)
    again = measure_errors(
        tiny_engine.model, [street], QUESTIONS, SHAPE, work=work, on_progress=lambda *at: told.append(at)
    )
    assert (again == errors).all()
    assert work.read_text() == lines
    assert told[-1][:2] == (len(errors) + 1, len(errors) + 1)


def test_a_pass_of_other_code_is_repeated(tiny_engine, street, errors, work, monkeypatch):
    monkeypatch.setattr("cluster.lab.evaluation.work.code_digest", lambda: "other")
    monkeypatch.setattr("cluster.lab.evaluation.run.replay", None)
    with pytest.raises(TypeError):
        measure_errors(tiny_engine.model, [street], QUESTIONS, SHAPE, work=work)


def test_no_readable_video_is_an_error(tiny_engine, street, tmp_path):
    with pytest.raises(SightlineError, match="all 1 videos were skipped"):
        measure_errors(tiny_engine.model, [replace(street, path=tmp_path / "none.mp4")], QUESTIONS, SHAPE)


def test_nor_is_there_a_profile_of_videos_without_a_window(tiny_engine, street):
    long = replace(SHAPE, window_s=600.0, stride_s=600.0)
    with pytest.raises(SightlineError, match="too short: 0 whole windows of 600 s"):
        measure_errors(tiny_engine.model, [street], QUESTIONS, long)
