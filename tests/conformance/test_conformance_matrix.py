"""THE matrix: every family x refresh policy x pruning, against the reference, a full computation, and each other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_oracle import DenseOracle
from torch import Tensor
from window_driver import FAMILIES, TOLERANCE, Driver, Recorded, camera_of, covering_cases, spec_of, take

from cluster.engine.native import NativeEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import VisionLanguageModel
from cluster.registry import refresh_policies
from cluster.types import FrameSample, Question, StreamSpec

POLICIES = refresh_policies.names()
BUDGETED = [name for name in POLICIES if refresh_policies.get(name).budgeted]
NARROWING = ("topk_deviation", "first_percent")
OTHERS = (Question("r", "Is there a fire or smoke?"), Question("s", "Did a vehicle stop on the road?"))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE)


def logits_of(records: list) -> dict[int, Tensor]:
    return {record.request.window: record.logits for record in records}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_pruned_equals_the_reference(model: VisionLanguageModel, driver: Driver, policy: str) -> None:
    """(a) The first windows, and every policy agrees with transformers' own forward on them."""
    camera = camera_of(model, kept=1.0)
    driver.engine.admit(spec_of(refresh=policy))
    records = driver.run(take(camera, 8))
    assert [len(r.plan.frames) for r in records] == [2, 4, 6, 8]
    for record in (records[0], records[-1]):
        count = len(record.plan.frames)
        batches = patch_batches([StreamFrame.of(camera.sample(index)) for index in range(count)])
        reference = model.reference_logits(batches, [float(i) for i in range(count)], spec_of().questions[0].text)
        close(record.logits[0], reference)


def test_refreshing_all_equals_a_full_computation(
    model: VisionLanguageModel, driver: Driver, camera: SyntheticCamera
) -> None:
    """(b) After any number of slides, under any masks."""
    driver.engine.admit(spec_of(refresh="all"))
    records = driver.run(take(camera, 22))
    slid = [record for record in records if record.plan.cached and record.request.start > 0]
    assert len(slid) == 7
    for record in slid:
        close(record.logits, full(model, camera, record.plan.frames, record.request.end))
        assert record.answers[0].tokens.reused == 0


def full(model: VisionLanguageModel, camera: SyntheticCamera, frames: list[StreamFrame], end: int) -> Tensor:
    """The same frames, at their times, as the first window of an empty engine."""
    driver = Driver(NativeEngine(model))
    length = (end - frames[0].pts) / 1e6
    driver.engine.admit(spec_of(window_s=length, stride_s=length))
    samples = [replace(camera.sample(frame.index), fresh=index == 0) for index, frame in enumerate(frames)]
    driver.run(samples[:1])
    stream = driver.engine._streams["cam"]
    stream.epoch, stream.frames[0].time_s = 0, samples[0].pts / 1e6
    (record,) = driver.run(samples[1:])
    return record.logits


@pytest.mark.parametrize(("model", "camera", "policy"), covering_cases(BUDGETED), indirect=["model", "camera"])
def test_a_budget_of_everything_equals_all(model: VisionLanguageModel, camera: SyntheticCamera, policy: str) -> None:
    """(c) For every pair of a family, a pruning and a policy."""
    runs = {}
    for name, budget in (("all", None), (policy, 1.0)):
        driver = Driver(NativeEngine(model))
        driver.engine.admit(spec_of(refresh=name, refresh_budget=budget))
        runs[name] = logits_of(driver.run(take(camera, 16)))
    assert runs["all"].keys() == runs[policy].keys()
    for window, logits in runs["all"].items():
        close(runs[policy][window], logits)


@pytest.mark.parametrize(
    ("model", "policy"),
    [(FAMILIES[n % len(FAMILIES)], name) for n, name in enumerate(BUDGETED) if name not in NARROWING],
    indirect=["model"],
)
def test_what_is_not_computed_again_would_have_stayed_as_it_is(
    model: VisionLanguageModel, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(k) Against the same selection computed whole. Every other window opens with the same frame as the one before."""
    camera, runs = camera_of(model, kept=0.4, empty=0.2), []
    for budgeted in (True, False):
        monkeypatch.setattr(refresh_policies.get(policy), "budgeted", budgeted)
        driver = Driver(NativeEngine(model))
        driver.engine.admit(spec_of(refresh=policy))
        runs.append(driver.run(take(camera, 20)))
    ours, whole = map(logits_of, runs)
    for window, logits in whole.items():
        close(ours[window], logits)
    refreshed, selected = ([each.answers[0].tokens.refreshed for each in records] for records in runs)
    assert all(few <= many for few, many in zip(refreshed, selected, strict=True))
    assert min(selected[5:]) > 0
    if policy == "anchors":
        assert [tokens > 0 for tokens in refreshed[5:]] == [True, False, True, False, True]


def test_streams_together_equal_streams_alone(model: VisionLanguageModel) -> None:
    """(d) Different policies, masks, questions and phases in one pass."""
    settings = list(zip(POLICIES, np.linspace(0.0, 1.0, len(POLICIES)), strict=True))
    cameras = [
        camera_of(model, stream=name, kept=float(kept), empty=0.3, seed=number, start=number * 1_000_000)
        for number, (name, kept) in enumerate(settings)
    ]
    specs = {
        name: spec_of(name, refresh=name, questions=(*spec_of().questions, *OTHERS)[: 1 + number % 3])
        for number, (name, _) in enumerate(settings)
    }
    together = Driver(NativeEngine(model))
    for spec in specs.values():
        together.engine.admit(spec)
    joint: dict[str, dict[int, Tensor]] = {name: {} for name in specs}
    for index in range(16):
        requests = [r for camera in cameras for r in together.engine.push(camera.sample(index))]
        for record in together.step(requests) if requests else []:
            joint[record.request.stream][record.request.window] = record.logits
    for camera in cameras:
        alone = Driver(NativeEngine(model))
        alone.engine.admit(specs[camera.stream])
        single = logits_of(alone.run(take(camera, 16)))
        assert len(single) == 8
        assert single.keys() == joint[camera.stream].keys()
        for window, logits in single.items():
            close(joint[camera.stream][window], logits)


def test_questions_together_equal_questions_alone(model: VisionLanguageModel, camera: SyntheticCamera) -> None:
    """(e) No question sees another."""
    questions = (*spec_of().questions, *OTHERS)
    driver = Driver(NativeEngine(model))
    driver.engine.admit(spec_of(questions=questions))
    together = logits_of(driver.run(take(camera, 14)))
    for number, question in enumerate(questions):
        alone = Driver(NativeEngine(model))
        alone.engine.admit(spec_of(questions=(question,)))
        for window, logits in logits_of(alone.run(take(camera, 14))).items():
            close(together[window][number], logits[0])


def test_skipping_windows_changes_nothing_when_all_is_refreshed(
    model: VisionLanguageModel, camera: SyntheticCamera
) -> None:
    """(g) Late frames are encoded and computed by the next window that is stepped."""
    runs = []
    for skip in ((), (1, 4, 5, 7)):
        driver = Driver(NativeEngine(model))
        driver.engine.admit(spec_of(refresh="all"))
        runs.append(logits_of(driver.run(take(camera, 20), skip=skip)))
    assert len(runs[1]) == len(runs[0]) - 4
    for window, logits in runs[1].items():
        close(logits, runs[0][window])


@pytest.mark.parametrize(
    ("model", "policy"),
    [(FAMILIES[number % len(FAMILIES)], policy) for number, policy in enumerate(POLICIES)],
    indirect=["model"],
)
def test_windows_in_host_memory_between_strides_change_nothing(model: VisionLanguageModel, policy: str) -> None:
    """(j) Three cameras, and room for one and a half windows and a question. What is moved depends on neither family
    nor policy: every one of them runs once or more."""
    names = ("first", "second", "third")
    answered: list[dict[tuple[str, int], float]] = []
    engine = NativeEngine(model)
    for room in (None, 0.5):
        if room is not None:
            slots = round(room * engine.pool.used) + 40
            engine = NativeEngine(model, kv_bytes=slots * engine.pool.slot_bytes, host_kv_bytes=2**30)
        scores = {}
        for name in names:
            engine.admit(spec_of(name, refresh=policy))
        cameras = [camera_of(model, stream=name, kept=0.5, seed=seed) for seed, name in enumerate(names)]
        for index in range(20):
            requests = [request for camera in cameras for request in engine.push(camera.sample(index))]
            scores |= {(answer.stream, answer.window): answer.score for answer in engine.step(requests)}
        answered.append(scores)
    assert engine.pool.host_used > 0
    assert answered[1] == pytest.approx(answered[0], abs=1e-5)
    assert len(answered[0]) == 30


@pytest.mark.parametrize(
    ("model", "camera", "policy"), covering_cases(POLICIES), indirect=["model", "camera"], scope="class"
)
class TestOneCameraOfEveryKind:
    """For every pair of a family, a pruning and a policy; what windows computed at their end give is computed once for
    the tests that compare with it."""

    @pytest.fixture(scope="class")
    def spec(self, policy: str) -> StreamSpec:
        return spec_of(refresh=policy, questions=(*spec_of().questions, OTHERS[0]))

    @pytest.fixture(scope="class")
    def samples(self, camera: SyntheticCamera, policy: str) -> list[FrameSample]:
        if policy == "topk_deviation":
            # While a window opens where the last one did, nothing below the probe deviates, and top-k would rank noise.
            camera = replace(camera, anchor_every=2)
        return take(camera, 20)

    @pytest.fixture(scope="class")
    def at_end(self, model: VisionLanguageModel, spec: StreamSpec, samples: list[FrameSample]) -> list[Recorded]:
        driver = Driver(NativeEngine(model))
        driver.engine.admit(spec)
        records = driver.run(samples)
        assert len(records) == 10
        return records

    def test_moving_a_stream_changes_nothing(
        self, model: VisionLanguageModel, spec: StreamSpec, samples: list[FrameSample], at_end: list[Recorded]
    ) -> None:
        """(f) Mid-window, with frames not yet encoded on board."""
        before, after = Driver(NativeEngine(model)), Driver(NativeEngine(model))
        before.engine.admit(spec)
        moved = logits_of(before.run(samples[:13]))
        after.engine.import_stream(spec, before.engine.export_stream("cam"))
        moved |= logits_of(after.run(samples[13:]))
        expected = logits_of(at_end)
        assert moved.keys() == expected.keys()
        for window, logits in expected.items():
            close(moved[window], logits)

    def test_stale_kv_is_exactly_what_it_claims_to_be(
        self, model: VisionLanguageModel, policy: str, samples: list[FrameSample], at_end: list[Recorded]
    ) -> None:
        """(h) The dense oracle, window after window, drift and all."""
        oracle = DenseOracle(model)
        for record in at_end:
            plan = record.plan
            narrowing = plan.work.narrowing is not None
            thin = _thin(policy, plan) if narrowing else None
            questions = [question.text for question in plan.stream.spec.questions]
            shown = [samples[frame.index] for frame in plan.frames]
            expected = oracle.window(shown, plan.computed, questions, thin)
            for got, wanted in zip(record.logits, expected, strict=True):
                close(got, wanted)
        assert any(record.plan.work.narrowing is not None for record in at_end) == (policy in NARROWING)

    def test_computing_before_a_window_ends_changes_nothing(
        self, model: VisionLanguageModel, spec: StreamSpec, samples: list[FrameSample], at_end: list[Recorded]
    ) -> None:
        """(i) Refreshed once the window before is answered, and prefilled frame by frame: same results, same counts."""
        driver = Driver(NativeEngine(model))
        driver.engine.admit(spec)
        for expected, got in zip(at_end, driver.run(samples, ahead=True), strict=True):
            close(got.logits, expected.logits)
            assert got.answers[0].tokens == expected.answers[0].tokens
            assert got.stats.computed == pytest.approx(expected.stats.computed)
            assert got.stats.attended == pytest.approx(expected.stats.attended)
            assert got.stats.tower_flops == expected.stats.tower_flops
            # Only its last frame and the questions were left.
            assert got.plan.computed.sum() == len(got.plan.frames[-1].tokens)


def _thin(policy: str, plan):
    """CacheBlend's and VLCache's narrowing, spelled out once more."""
    if policy == "topk_deviation":
        wanted = round(0.15 * plan.cached)

        def topk(layer: int, computed: np.ndarray, new: Tensor, old: Tensor) -> np.ndarray:
            if layer != 1:
                return computed
            deviation = ((new - old) ** 2).sum(dim=(0, 2, 3))
            chosen = np.zeros(len(computed), dtype=bool)
            chosen[sorted(range(len(computed)), key=lambda i: -float(deviation[i]))[:wanted]] = True
            return chosen

        return topk
    lengths = [len(frame.tokens) for frame in plan.frames]
    amounts = plan.work.narrowing.amounts

    def leading(layer: int, computed: np.ndarray, new: Tensor, old: Tensor) -> np.ndarray:
        places = [(i + 0.5) / length for length in lengths for i in range(length)][: len(computed)]
        order = sorted(range(len(computed)), key=lambda token: places[token])
        chosen = np.zeros(len(computed), dtype=bool)
        chosen[order[: amounts[layer]]] = True
        return chosen

    return leading


@pytest.mark.parametrize("policy", ["none", "anchors"])
def test_what_is_computed_follows_the_definition(
    model: VisionLanguageModel, driver: Driver, camera: SyntheticCamera, policy: str
) -> None:
    """The oracle above trusts the plan's choice of tokens; here it is worked out from the samples."""
    driver.engine.admit(spec_of(refresh=policy))
    seen = opened = 0
    for record in driver.run(take(camera, 20)):
        # With the opening of the last window, KV is what computing it again would give.
        sliding = record.plan.frames[0].index != opened
        expected = []
        for frame in record.plan.frames:
            old = frame.index < seen
            wanted = not old or (policy == "anchors" and sliding and frame.index % 4 == 0)
            expected += [wanted] * len(frame.tokens)
        assert record.plan.computed.tolist() == expected
        seen, opened = record.plan.frames[-1].index + 1, record.plan.frames[0].index
