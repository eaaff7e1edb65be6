"""The simulated engine counts what the native engine counts, and takes the time that it is told."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from cluster.engine.native import NativeEngine
from cluster.engine.simulated import DEMO_SCORES, ScoreStatistics, SimulatedEngine
from cluster.errors import ConfigError, ModelError, NotReadyError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.loading import load_shape
from cluster.registry import refresh_policies
from cluster.types import AskSpec, Question

# They thin out layer by layer; the simulated engine counts their first layer.
NARROWING = {"topk_deviation", "first_percent"}


class Costs:
    """A second for every window."""

    def __init__(self) -> None:
        self.steps = []

    def __call__(self, windows) -> float:
        self.steps.append(list(windows))
        return float(len(windows))


@pytest.fixture(scope="module")
def shape():
    return load_shape("tiny-qwen2_5_vl")


@pytest.fixture
def slept():
    return []


@pytest.fixture
def simulated(shape, slept):
    return SimulatedEngine(shape, Costs(), sleep=slept.append)


def same_counts(ours, theirs) -> bool:
    fields = ("stream", "window", "start", "end", "question", "gated", "tokens")
    return [[getattr(a, f) for f in fields] for a in ours] == [[getattr(a, f) for f in fields] for a in theirs]


@pytest.mark.parametrize("policy", sorted(set(refresh_policies.names()) - NARROWING))
def test_its_windows_and_tokens_are_the_native_engines(
    policy, engine: NativeEngine, simulated, make_camera, make_spec, run
):
    """Growing and sliding windows, frames without a token, a fresh start in the middle."""
    camera = make_camera(kept=0.3, empty=0.2)
    samples = [replace(camera.sample(i), fresh=i in (0, 15)) for i in range(34)]
    answers = []
    for each in (engine, simulated):
        each.admit(make_spec(refresh=policy))
        answers.append(run(each, samples))
    assert len(answers[0]) == 16
    assert same_counts(*answers)
    assert any(answer.tokens.reused for answer in answers[1]) == (policy != "all")


def test_the_static_gate_is_the_native_engines(engine: NativeEngine, simulated, make_camera, make_spec, run) -> None:
    night = make_camera(still=True)
    samples = [replace(night.sample(i), activity=0.1 if i == 17 else night.sample(i).activity) for i in range(24)]
    answers = []
    for each in (engine, simulated):
        each.admit(make_spec(static_gate=True, max_idle_s=6.0))
        answers.append(run(each, samples))
    assert same_counts(*answers)
    assert {answer.gated for answer in answers[1]} == {True, False}


def test_a_step_takes_what_its_computed_windows_cost(simulated, slept, make_camera, make_spec) -> None:
    cameras = [make_camera(stream=name, still=name == "night") for name in ("day", "night")]
    for camera in cameras:
        simulated.admit(make_spec(camera.stream, static_gate=True))
    begun = time.monotonic()
    for index in range(6):
        requests = [r for camera in cameras for r in simulated.push(camera.sample(index))]
        if requests:
            answers = simulated.step(requests)
            assert [answer.stream for answer in answers] == ["day", "night"]
    # Two windows, two windows, then one: the quiet camera's third stands, and costs nothing.
    assert [len(step) for step in simulated._costs.steps] == [2, 2, 1]
    spent = time.monotonic() - begun
    assert all(wanted - spent < told <= wanted for told, wanted in zip(slept, (2, 2, 1), strict=True))


def test_the_spread_has_a_mean_of_one(shape, make_camera, make_spec) -> None:
    slept: list[float] = []
    engine = SimulatedEngine(shape, Costs(), spread=0.5, sleep=slept.append, seed=1)
    engine.admit(make_spec(window_s=2.0))
    camera = make_camera()
    for index in range(800):
        for request in engine.push(camera.sample(index)):
            engine.step([request])
    # Mean and log-spread of 400 log-normal draws, each within four standard errors.
    assert np.mean(slept) == pytest.approx(1.0, abs=4 * math.sqrt(math.exp(0.25) - 1) / 20)
    assert np.std(np.log(slept)) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(800))


def test_every_answer_says_what_it_is(simulated, make_camera, make_spec, run) -> None:
    night = make_camera(still=True)
    simulated.admit(make_spec(static_gate=True, questions=(Question("q", "Is it?", 0.0), Question("r", "Is it?", 1.0))))
    answers = run(simulated, [night.sample(i) for i in range(10)])
    assert all(answer.text.startswith("simulated: ") for answer in answers)
    assert {answer.gated for answer in answers} == {True, False}
    assert [answer.positive for answer in answers[:2]] == [True, False]


def test_a_stream_moves_between_engines_with_its_counts(shape, simulated, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.4)
    samples = [camera.sample(i) for i in range(24)]
    stayed = SimulatedEngine(shape, Costs(), sleep=lambda _: None)
    for engine in (stayed, simulated):
        engine.admit(make_spec())
    expected = run(stayed, samples)
    answers = run(simulated, samples[:13])
    taker = SimulatedEngine(shape, Costs(), sleep=lambda _: None)
    taker.import_stream(make_spec(), simulated.export_stream("cam"))
    simulated.evict("cam")
    assert simulated.memory_bytes() == 0
    assert same_counts(answers + run(taker, samples[13:]), expected)


def test_a_simulated_stream_is_refused_by_a_real_engine(
    engine: NativeEngine, simulated, make_camera, make_spec, run
) -> None:
    simulated.admit(make_spec())
    run(simulated, [make_camera().sample(i) for i in range(4)])
    with pytest.raises(ModelError, match="another model"):
        engine.import_stream(make_spec(), simulated.export_stream("cam"))


def test_it_keeps_no_pictures(simulated, make_camera, make_spec, run) -> None:
    camera = make_camera()
    simulated.admit(make_spec())
    most = 0
    for index in range(60):
        run(simulated, [camera.sample(index)])
        most = max(most, simulated.memory_bytes("cam"))
    assert most < camera.sample(0).patches.nbytes


def test_there_is_nothing_to_ask(simulated, make_camera, make_spec, run) -> None:
    simulated.admit(make_spec())
    run(simulated, [make_camera().sample(i) for i in range(4)])
    for call in (
        lambda: simulated.ask(AskSpec("cam", "What?")),
        lambda: simulated.memory_status("cam"),
        lambda: simulated.delete_memory("cam"),
    ):
        with pytest.raises(NotReadyError, match="engine: native"):
            call()
    assert simulated._streams["cam"].frames == []


def test_what_no_engine_takes(simulated, make_camera, make_spec) -> None:
    camera = make_camera()
    with pytest.raises(ValueError, match="not admitted"):
        simulated.push(camera.sample(0))
    with pytest.raises(ConfigError, match="refresh policy"):
        simulated.admit(make_spec(refresh="everything"))
    simulated.admit(make_spec())
    [*_, request] = [r for i in range(6) for r in simulated.push(camera.sample(i))]
    with pytest.raises(ValueError, match="at most one window"):
        simulated.step([request, request])
    assert simulated.step([request])
    assert simulated.step([request]) == [], "a window is answered once"


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct", "internvl3-8b", "demo", "demo-internvl3"]
)
def test_a_shape_has_the_geometry_and_no_weights(name) -> None:
    shape = load_shape(name)
    assert all(parameter.is_meta for parameter in shape.model.parameters())
    assert shape.geometry.grid(640, 360).tokens > 0
    assert len(shape.system_ids()) > 0


def test_the_bundled_models_shape_is_its_own() -> None:
    from cluster.models.loading import load_model

    shape, model = load_shape("demo"), load_model("demo")
    assert shape.geometry == model.geometry
    assert shape.question_ids("Is anyone there?") == model.question_ids("Is anyone there?")


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'qwen9'.*qwen2_5_vl-7b"):
        load_shape("qwen9")


def test_scores_follow_their_histogram(tmp_path) -> None:
    random = np.random.default_rng(0)
    drawn = np.array([DEMO_SCORES.draw(random) for _ in range(4000)])
    shares = np.histogram(drawn, DEMO_SCORES.edges)[0] / 4000
    expected = np.array(DEMO_SCORES.windows) / sum(DEMO_SCORES.windows)
    assert np.abs(shares - expected).max() < 4 * math.sqrt(0.25 / 4000)
    bins = [{"low": 0.0, "high": 0.5, "windows": 1}, {"low": 0.5, "high": 1.0, "windows": 0}]
    recorded = tmp_path / "accuracy.json"
    recorded.write_text(json.dumps({"calibration": {"bins": bins}}))
    scores = ScoreStatistics.load(recorded)
    assert (scores.edges, scores.windows) == ((0.0, 0.5, 1.0), (1, 0))
    assert max(scores.draw(random) for _ in range(100)) < 0.5


@pytest.mark.parametrize("text", ["", "{}", '{"calibration": {"bins": []}}', '{"calibration": {"bins": [{"low": 0}]}}'])
def test_a_file_without_scores_is_refused_with_how_to_make_one(tmp_path, text) -> None:
    path = tmp_path / "accuracy.json"
    path.write_text(text)
    for wrong in (path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match="eval accuracy --json"):
            ScoreStatistics.load(wrong)
    with pytest.raises(ConfigError, match="ascending"):
        ScoreStatistics((0.0, 0.0), (1,), "by hand")


def test_streams_share_a_camera_only_by_name(simulated, make_spec, shape) -> None:
    two = [
        SyntheticCamera(geometry=shape.geometry, stream=n, width=84, height=56, anchor_every=4, fps=2.0) for n in "ab"
    ]
    for camera in two:
        simulated.admit(make_spec(camera.stream))
        simulated.push(camera.sample(0))
    simulated.evict("a")
    assert simulated.memory_bytes("a") == 0 < simulated.memory_bytes("b")
