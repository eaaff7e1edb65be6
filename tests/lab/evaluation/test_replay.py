"""One pass over a video answers what the live path answers, window by window, and full computation is full."""

from dataclasses import replace

import pytest
from evaluation_cases import QUESTIONS, SHAPE

from cluster.codec.processor import CodecOptions
from cluster.errors import SourceError
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.settings import codecsight, full_computation, ours
from cluster.lab.report.compare import answer_in_full
from cluster.types import Question, StreamSpec

SETTINGS = [full_computation(SHAPE), codecsight(SHAPE), ours(SHAPE, 0.3, {"margin": 2.0})]
ASKED = tuple(Question(kind, text) for kind, text in QUESTIONS.items())


@pytest.fixture(scope="module")
def runs(tiny_engine, street):
    return replay(tiny_engine, street, SETTINGS, QUESTIONS)


@pytest.fixture(scope="module")
def clip(tiny_engine, street):
    """The first round of the same clip, through the report's own loop."""
    return read_clip(
        street.path, tiny_engine.geometry, options=CodecOptions(anchor_interval_s=4), at_least=12, at_most=12
    )


def test_whole_windows_every_stride(runs):
    assert runs.keys() == {setting.key for setting in SETTINGS}
    for run in runs.values():
        assert run.kinds == ("person", "car")
        assert [(w.start_s, w.end_s) for w in run.windows] == [(0, 6), (2, 8), (4, 10), (6, 12)]
        assert all(0 <= score <= 1 for w in run.windows for score in w.scores)
        assert run.motion > 0
        assert run.change > 0


def test_full_computation_is_answer_in_full(tiny_engine, clip, runs):
    """Scores, tokens and FLOPs are those of windows computed one by one from nothing."""
    whole = prune_clip(clip, "street", "none").samples
    spec = StreamSpec("oracle", ASKED, SHAPE.window_s, SHAPE.stride_s, refresh="all", static_gate=False)
    requests = []
    tiny_engine.admit(spec)
    for sample in whole:
        requests += tiny_engine.push(replace(sample, stream="oracle"))
    found = runs[full_computation(SHAPE).key].windows
    assert len(requests) == len(found) + 2
    for request, window in zip(requests[2:], found, strict=True):
        answers, cost = answer_in_full(tiny_engine, spec, whole, request)
        assert window.scores == pytest.approx([answer.score for answer in answers], abs=1e-5)
        assert window.flops == cost.flops
        assert window.computed == cost.tokens
        assert window.full == window.kept == answers[0].tokens.full
    tiny_engine.evict("oracle")


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=lambda setting: setting.name)
def test_a_policy_is_the_engine_on_what_its_pruner_leaves(tiny_engine, clip, runs, setting):
    """The same stream alone on an engine: nothing of it depends on the settings it ran beside."""
    samples = prune_clip(clip, "alone", setting.pruner, setting.options).samples
    spec = StreamSpec(
        "alone", ASKED, SHAPE.window_s, SHAPE.stride_s, setting.refresh, setting.budget, static_gate=False
    )
    tiny_engine.admit(spec)
    found = []
    for sample in samples:
        for request in tiny_engine.push(sample):
            answers = tiny_engine.step([request])
            stats = tiny_engine.stats
            found.append((tuple(a.score for a in answers), stats.tower_flops + stats.llm_flops, answers[0].tokens))
    tiny_engine.evict("alone")
    for window, (scores, flops, tokens) in zip(runs[setting.key].windows, found[2:], strict=True):
        assert window.scores == pytest.approx(scores, abs=1e-6)
        assert (window.flops, window.computed, window.kept) == (flops, tokens.computed, tokens.kept)


def test_pruning_and_reuse_cost_less(runs):
    costs = [sum(w.flops for w in runs[setting.key].windows) for setting in SETTINGS]
    assert costs[1] < costs[0] / 2
    assert costs[2] < costs[0] / 2


def test_only_what_a_video_is_judged_on_is_asked(tiny_engine, street):
    run = replay(tiny_engine, replace(street, kinds=("car",)), SETTINGS[:1], QUESTIONS)[SETTINGS[0].key]
    assert run.kinds == ("car",)
    assert all(len(window.scores) == 1 for window in run.windows)


def test_the_cut_off_end_is_answered_as_it_is_live(tiny_engine, street):
    shape = replace(SHAPE, stride_s=2.5)
    run = replay(tiny_engine, street, [full_computation(shape)], QUESTIONS)[full_computation(shape).key]
    # 6.5 s of the last window's 6 s are there; it ends with the video.
    assert [w.end_s for w in run.windows] == [7.5, 10, 12]


def test_the_engine_keeps_nothing_of_a_video(tiny_engine, runs):
    assert tiny_engine.memory_bytes() == 0


def test_settings_of_two_anchor_intervals_take_two_passes(tiny_engine, street):
    with pytest.raises(ValueError, match="one pass has one rate"):
        replay(
            tiny_engine,
            street,
            [full_computation(SHAPE), full_computation(replace(SHAPE, anchor_interval_s=2))],
            QUESTIONS,
        )


def test_a_truncated_video_says_so_and_leaves_nothing_behind(tiny_engine, street, tmp_path):
    path = tmp_path / "cut.mp4"
    data = street.path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError):
        replay(tiny_engine, replace(street, path=path), SETTINGS, QUESTIONS)
    assert tiny_engine.memory_bytes() == 0
