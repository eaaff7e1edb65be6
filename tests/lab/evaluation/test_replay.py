"""One pass over a video answers what the live path answers, window by window, and full computation is full."""

import math
import time
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from av.video.frame import PictureType, VideoFrame
from evaluation_cases import QUESTIONS, SHAPE

from cluster.codec.processor import CodecOptions
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.errors import SourceError
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.evaluation.replay import SimilarityReuse, TowerCache, _source, replay
from cluster.lab.evaluation.settings import Setting, codecsight, full_computation, ours
from cluster.lab.report.compare import answer_in_full
from cluster.models.base import PatchBatch
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
        "alone",
        ASKED,
        SHAPE.window_s,
        SHAPE.stride_s,
        refresh=setting.refresh,
        refresh_budget=setting.budget,
        static_gate=False,
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
    with pytest.raises(ValueError, match="settings of one pass must share rate, anchor interval and source"):
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


def test_embeddings_that_are_kept_change_the_cost_and_nothing_else(tiny_engine, street):
    """With the tower once per frame: its FLOPs are those of frames that are new to a window, by hand."""
    full = full_computation(SHAPE)
    cached = replace(full, tower="once", role="other")
    runs = replay(tiny_engine, street, [full, cached], QUESTIONS)
    whole, kept = runs[full.key].windows, runs[cached.key].windows
    assert [w.scores for w in whole] == [pytest.approx(w.scores, abs=1e-6) for w in kept]
    assert [w.llm_flops for w in whole] == [w.llm_flops for w in kept]
    # 12 frames a window of 6 s at 2 a second, of which the stride of 2 s brings 4.
    assert [w.tower_flops * 3 for w in kept[1:]] == [w.tower_flops for w in whole[1:]]
    assert not math.isnan(whole[0].latency_s)
    assert all(math.isnan(w.latency_s) for w in whole[1:])


def test_the_published_input_is_h264_at_the_sampling_rate(street, tmp_path):
    with _source(street.path, "encoded again", 2.0, 4.0) as path, av.open(str(path)) as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate) == ("h264", 2)
        kinds = [PictureType(picture.pict_type).name for picture in video.decode(stream)]
    assert len(kinds) == 24
    assert [place for place, kind in enumerate(kinds) if kind == "I"] == [0, 8, 16]
    assert set(kinds) == {"I", "P"}
    assert not path.exists()


def test_an_odd_size_is_encoded_again_as_the_even_one_below(tmp_path):
    """As of Motion JPEG, which has them; H.264 with half the chroma has not."""
    with av.open(str(tmp_path / "odd.avi"), "w") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 161, 91, "yuvj444p"
        for grey in range(20):
            container.mux(stream.encode(VideoFrame.from_ndarray(np.full((91, 161, 3), grey, np.uint8))))
        container.mux(stream.encode(None))
    with _source(tmp_path / "odd.avi", "encoded again", 2.0, 4.0) as path, av.open(str(path)) as video:
        assert [(picture.width, picture.height) for picture in video.decode(video=0)] == [(160, 90)] * 4


def test_the_tower_is_timed_in_one_whole_window(tiny_engine, street, monkeypatch):
    """Where tokens are reused the windows before are answered, too."""
    seen = []
    tower = tiny_engine.model.encode
    monkeypatch.setattr(tiny_engine.model, "encode", lambda frames: seen.append(len(frames)) or tower(frames))
    blended = Setting("cacheblend", "none", "topk_deviation", shape=SHAPE, tower="every window")
    run = replay(tiny_engine, street, [blended], QUESTIONS)[blended.key]
    assert [math.isnan(window.latency_s) for window in run.windows] == [False, True, True, True]
    # Each of the 12 frames once, and a window's six again.
    assert sum(seen) == 12 + 6


def test_the_published_input_is_answered_window_by_window(tiny_engine, street):
    setting = replace(codecsight(SHAPE), source="encoded again")
    run = replay(tiny_engine, street, [setting], QUESTIONS)[setting.key]
    assert [(w.start_s, w.end_s) for w in run.windows] == [(0, 6), (2, 8), (4, 10), (6, 12)]
    assert all(0 < w.kept < w.full for w in run.windows)


def test_settings_share_the_tower_and_each_pays_for_it(tiny_engine, street):
    """Three budgets of one pruner: the tower runs for one of them, all count its operations and its time."""
    settings = [ours(SHAPE, budget) for budget in (0.0, 0.2, 0.4)]
    calls = []
    tower = tiny_engine.model.encode

    def counted(frames):
        calls.append(sum(len(frame.patches) for frame in frames))
        time.sleep(0.02 * bool(frames))
        return tower(frames)

    tiny_engine.model.encode = counted
    try:
        alone = replay(tiny_engine, street, settings[:1], QUESTIONS)[settings[0].key]
        once = sum(calls)
        calls.clear()
        runs = replay(tiny_engine, street, settings, QUESTIONS)
    finally:
        del tiny_engine.model.encode
    assert sum(calls) == once > 0
    for setting in settings:
        assert [w.tower_flops for w in runs[setting.key].windows] == [w.tower_flops for w in alone.windows]
        assert all(w.latency_s > 0.02 for w in runs[setting.key].windows)
    assert [w.scores for w in runs[settings[0].key].windows] == [w.scores for w in alone.windows]


def test_similar_patches_are_reused_and_the_others_computed(tiny_engine, street):
    """By brute force: tokens of frames whose changed groups alone were encoded, the rest as they last were."""
    model = tiny_engine.model
    frames = patch_batches([StreamFrame.of(sample) for sample in _whole(tiny_engine, street)[:6]])
    reuse, cache = SimilarityReuse(model, 0.999), TowerCache(model)
    with reuse(cache):
        found = model.encode(frames[:3]) + model.encode(frames[3:])
    mean, std = (np.array(each, np.float64)[:, None, None] for each in (model.mean, model.std))
    shown, tokens, flops = None, None, 0
    for frame, given in zip(frames, found, strict=True):
        groups = (frame.patches.numpy().reshape(len(frame.cells), -1, *frame.patches.shape[2:]) / 255 - mean) / std
        groups = groups.reshape(len(frame.cells), -1)
        if shown is None:
            changed = np.ones(len(groups), bool)
            shown, tokens = groups.copy(), [None] * len(groups)
        else:
            dot = (groups * shown).sum(1)
            changed = dot / np.linalg.norm(groups, axis=1) / np.linalg.norm(shown, axis=1) < 0.999
        if changed.any():
            rows = torch.from_numpy(changed)
            patches = frame.patches.reshape(len(frame.cells), frame.grid.merge**2, *frame.patches.shape[1:])
            part = PatchBatch(patches[rows].flatten(0, 1), frame.cells[rows], frame.grid)
            (encoded,) = cache.tower([part])
            flops += model.tower_flops([part])
            for place, token in zip(np.flatnonzero(changed), encoded.embeds, strict=True):
                shown[place], tokens[place] = groups[place], token
        assert torch.equal(given.embeds, torch.stack(tokens))
        assert torch.equal(given.cells, frame.cells)
    assert reuse.flops == flops
    assert model.tower_flops(frames[:1]) < flops < model.tower_flops(frames)


def test_similarity_of_one_is_full_computation(tiny_engine, street):
    """Nothing is as similar as itself: noise is encoded again, and scores are those of whole frames."""
    full = replace(full_computation(SHAPE), tower="once", role="other")
    setting = replace(full, similarity=1.1)
    runs = replay(tiny_engine, street, [full, setting], QUESTIONS)
    assert [w.scores for w in runs[setting.key].windows] == [
        pytest.approx(w.scores, abs=1e-6) for w in runs[full.key].windows
    ]
    assert [w.flops for w in runs[setting.key].windows] == [w.flops for w in runs[full.key].windows]
    reused = replay(tiny_engine, street, [replace(full, similarity=0.9)], QUESTIONS)
    (run,) = reused.values()
    assert 0 < sum(w.tower_flops for w in run.windows) < sum(w.tower_flops for w in runs[full.key].windows) / 2


def _whole(engine, street):
    options = CodecOptions(anchor_interval_s=4)
    found = read_clip(street.path, engine.geometry, options=options, at_least=6, at_most=6)
    return prune_clip(found, "street", "none").samples
