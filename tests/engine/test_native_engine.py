"""The engine's contract: counts, timing, refusals, bounded memory, explanations, failures."""

import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.engine.base import Engine
from cluster.engine.native import NativeEngine, passes
from cluster.engine.native import engine as engine_module
from cluster.engine.native.plan import window_places
from cluster.engine.window.score import YesNoScore
from cluster.errors import ConfigError, DeviceError, NotFiniteError
from cluster.models.checkpoint import PATCHES_PER_PASS
from cluster.models.loading import load_model
from cluster.types import Question, WindowRequest


def test_it_is_an_engine(engine: NativeEngine) -> None:
    promised: Engine = engine
    assert promised.geometry.temporal == 2


def test_token_counts_add_up(engine, make_camera, make_spec, run) -> None:
    camera, spec = make_camera(kept=0.3, empty=0.3), make_spec(refresh="anchors")
    engine.admit(spec)
    answers = run(engine, [camera.sample(i) for i in range(16)])
    question = len(engine.model.question_ids(spec.questions[0].text))
    for number, answer in enumerate(answers):
        tokens = answer.tokens
        assert tokens.kept == tokens.reused + tokens.refreshed + tokens.new
        assert tokens.computed == tokens.refreshed + tokens.new + question
        stride = [camera.sample(i) for i in (2 * number, 2 * number + 1)]
        assert tokens.new == tokens.encoded == sum(sample.tokens for sample in stride)
        first = max(0, answer.start // 1_000_000 // 4 * 4)
        held = [camera.sample(i) for i in range(first, answer.end // 1_000_000)]
        assert tokens.kept == sum(sample.tokens for sample in held)
        assert tokens.full == 6 * len(held)
        anchors = [sample for sample in held[:-2] if sample.anchor]
        # Once after the window's first frame has changed, which is every other window.
        assert tokens.refreshed == (6 * len(anchors) if first and answer.start // 1_000_000 == first else 0)


def test_timing_and_stats_describe_the_step(engine, make_camera, make_spec) -> None:
    camera = make_camera()
    engine.admit(make_spec())
    engine.push(camera.sample(0))
    before = time.monotonic()
    (request,) = engine.push(camera.sample(1))
    (answer,) = engine.step([request])
    spent = time.monotonic() - before
    timing = answer.timing
    parts = timing.queue_s + timing.vision_s + timing.plan_s + timing.llm_s
    assert 0 < parts <= timing.latency_s + 1e-4 <= spent + 2e-4
    (window,) = engine.stats.windows
    assert window.tokens == answer.tokens
    assert window.computed == answer.tokens.computed
    model, system = engine.model, len(engine.model.system_ids())
    computed = answer.tokens.computed
    # A first window is one causal run over everything.
    attended = sum(system + i + 1 for i in range(computed))
    # The last layer only projects all rows but the question's last one.
    assert window.omitted == (computed - 1, attended - (system + computed))
    assert engine.stats.llm_flops == model.llm_flops(computed, attended, window.omitted)
    assert engine.stats.tower_flops > 0


def test_narrowing_policies_report_the_mean_over_layers(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(anchor_every=2, kept=0.5)
    engine.admit(make_spec(refresh="topk_deviation", refresh_budget=0.25))
    answer = run(engine, [camera.sample(i) for i in range(12)])[-1]
    overlap = answer.tokens.reused + answer.tokens.refreshed
    # Three layers: the first with everything, the second projects everything, the last has a quarter.
    assert answer.tokens.refreshed == round((2 * overlap + round(0.25 * overlap)) / 3)
    window, kept = engine.stats.windows[-1], round(0.25 * overlap)
    # The last layer, too, only projects what is not read.
    last = window.computed * 3 - 2 * (overlap + answer.tokens.new + answer.tokens.query)
    assert window.omitted[0] == (overlap - kept) + last - 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"refresh": "anchor"}, "did you mean 'anchors'"),
        ({"stride_s": 9.0}, "at most window_s"),
        ({"stride_s": 0.0}, "above 0"),
        ({"window_s": float("inf"), "stride_s": 1.0}, "stride_s"),
        ({"refresh_budget": 1.5}, "0 to 1"),
        ({"questions": ()}, "at least one question"),
        ({"questions": (Question("q", "a?"), Question("q", "b?"))}, "each with a unique id"),
        ({"window_s": 80_000.0}, "the model's limit is 32768"),
    ],
)
def test_specs_that_cannot_be_served_are_refused(engine, make_spec, change, says) -> None:
    with pytest.raises(ConfigError, match=says):
        engine.admit(make_spec(**change))
    assert engine.memory_bytes() == 0
    with pytest.raises(ValueError, match="not admitted"):
        engine.flush("cam")


@pytest.mark.parametrize(
    ("anchor_every", "more"), [(1, {}), (16, {"lookback_s": 8.0}), (1, {"fps": 4.0})], ids=["fits", "anchors", "rate"]
)
def test_no_window_reaches_beyond_the_models_positions(
    make_camera, make_spec, run, monkeypatch, anchor_every, more
) -> None:
    model, reached = load_model("tiny-internvl3"), [0]
    model.text_config.max_position_embeddings = 460

    def placed(*given):
        reached.append(window_places(*given).next)
        return window_places(*given)

    monkeypatch.setattr("cluster.engine.native.plan.window_places", placed)
    engine, spec = NativeEngine(model), make_spec(window_s=10.0)
    engine.admit(spec)
    camera = make_camera(width=112, anchor_every=anchor_every, fps=more.get("fps", 2.0))
    camera = replace(camera, geometry=model.geometry)
    assert run(engine, [camera.sample(index) for index in range(60)])
    assert (max(reached) > 460) is bool(more)
    if more:
        with pytest.raises(ConfigError, match="the model's limit is 460; shorten the window"):
            engine.admit(replace(spec, **more))


def test_frames_that_do_not_fit_are_refused_and_nothing_is_lost(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    with pytest.raises(ValueError, match="not admitted"):
        engine.push(replace(camera.sample(0), stream="stranger"))
    run(engine, [camera.sample(i) for i in range(5)])
    good = camera.sample(5)
    half = good.mask.copy()
    half[0, 0] = ~half[0, 0]
    wrong = [
        (replace(good, patches=good.patches[:-1]), "uint8 patches"),
        (replace(good, patches=good.patches.astype(np.float32)), "uint8 patches"),
        (replace(good, mask=half, patches=good.patches[: half.sum()]), "whole merge groups"),
        (replace(good, mask=good.mask[:2]), "a mask of 4x6"),
        (replace(good, duration=0), "positive duration"),
        (replace(good, grid=replace(good.grid, patch=16)), "cut for another model"),
        (camera.sample(4), "not after"),
        (camera.sample(2), "send frames in order"),
    ]
    for sample, says in wrong:
        with pytest.raises(ValueError, match=says):
            engine.push(sample)
    (answer,) = run(engine, [good])
    assert answer.window == 2


def test_fresh_forgets_the_window_and_numbers_go_on(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    assert [a.window for a in run(engine, [camera.sample(i) for i in range(7)])] == [0, 1, 2]
    restarted = [replace(camera.sample(i), fresh=i == 0) for i in range(4)]
    answers = run(engine, restarted)
    assert [(a.window, a.start, a.end) for a in answers] == [(3, 0, 2_000_000), (4, 0, 4_000_000)]
    assert answers[0].tokens.reused == 0


def test_a_request_from_before_a_fresh_start_gives_no_answer(engine, make_camera, make_spec, run) -> None:
    camera = make_camera()
    engine.admit(make_spec())
    engine.push(camera.sample(0))
    (request,) = engine.push(camera.sample(1))
    engine.push(replace(camera.sample(2), fresh=True))
    assert engine.step([request]) == []
    assert engine.stats.expired == 1


def test_windows_far_behind_expire_and_memory_stays_bounded(engine, make_camera, make_spec) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    requests = []
    for index in range(400):
        requests += engine.push(camera.sample(index))
    stream = engine._streams["cam"]
    # The newest window, one window of backlog, and the way back to an anchor.
    assert len(stream.frames) <= 8 + 8 + 4
    assert engine.step([requests[0]]) == []
    (answer,) = engine.step([requests[-1]])
    assert answer.tokens.full == 6 * len(stream.window_frames(requests[-1].start, requests[-1].end))


def test_a_backlog_is_answered_in_order(engine, model, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    requests = [r for i in range(14) for r in engine.push(camera.sample(i))]
    late = [answer for request in requests[-3:] for answer in engine.step([request])]
    prompt = NativeEngine(model)
    prompt.admit(make_spec(refresh="none"))
    assert [a.window for a in late] == [4, 5, 6]
    alone = NativeEngine(model)
    alone.admit(make_spec())
    in_time = [
        answer for i in range(14) for r in alone.push(camera.sample(i)) if r.window >= 4 for answer in alone.step([r])
    ]
    assert [a.tokens for a in late] == [a.tokens for a in in_time]
    np.testing.assert_allclose([a.score for a in late], [a.score for a in in_time], atol=1e-5)


def test_one_window_per_stream_and_unknown_streams(engine, make_camera, make_spec) -> None:
    engine.admit(make_spec())
    camera = make_camera()
    requests = [r for i in range(4) for r in engine.push(camera.sample(i))]
    with pytest.raises(ValueError, match="one window per stream"):
        engine.step(requests)
    assert engine.step([WindowRequest("stranger", 0, 0, 1, 0.0)]) == []
    assert engine.stats.expired == 1
    assert engine.step([]) == []
    assert len(engine.step(requests[:1])) == 1


def test_the_end_of_a_source_closes_the_last_window(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    assert engine.flush("cam") == []
    run(engine, [camera.sample(i) for i in range(5)])
    (request,) = engine.flush("cam")
    assert (request.window, request.start, request.end) == (2, 0, 5_000_000)
    (answer,) = engine.step([request])
    assert answer.tokens.new == camera.sample(4).tokens
    assert engine.flush("cam") == []


def test_a_jump_in_time_passes_over_windows_whose_stride_has_no_video(engine, make_camera, make_spec) -> None:
    camera = make_camera(kept=1.0)
    engine.admit(make_spec())
    run = [r for i in range(5) for r in engine.push(camera.sample(i))]
    assert [r.window for r in run] == [0, 1]
    later = replace(camera.sample(5), pts=9_000_000)
    closed = engine.push(later)
    assert [(r.window, r.end // 1_000_000) for r in closed] == [(2, 6), (4, 10)]
    answers = [answer for request in [*run, *closed] for answer in engine.step([request])]
    # The first is a whole window behind the newest.
    assert [(a.window, a.tokens.new) for a in answers] == [(1, 24), (2, 6), (4, 6)]
    far = replace(camera.sample(6), pts=10**15)
    assert len(engine.push(far)) <= 1


@pytest.mark.parametrize("missing", [1, 3, 5])
def test_after_a_gap_the_window_goes_on_with_a_hole_in_it(engine, make_camera, make_spec, run, missing) -> None:
    """Frames of 1 s, windows of 8 s every 2 s; ``missing`` frames before the anchor at 12 s never come."""
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    before = run(engine, [camera.sample(i) for i in range(12 - missing)])
    computed = {frame.pts: frame.computed for frame in engine._streams["cam"].frames}
    gap = replace(camera.sample(12), gap=True)
    answers = run(engine, [gap, *(camera.sample(i) for i in range(13, 16))])
    # Those whose last two seconds are missing as a whole are passed over; the others keep their phase.
    due = [end for end in range(2, 17, 2) if not (end - 2 >= 12 - missing and end <= 12)]
    assert [a.end // 1_000_000 for a in [*before, *answers]] == due
    assert [a.window for a in [*before, *answers]] == [end // 2 - 1 for end in due]
    (last,) = [a for a in answers if a.end == 14_000_000]
    held = [i for i in range(4, 14) if not 12 - missing <= i < 12]
    opened = max(i for i in held if i <= 6 and camera.sample(i).complete)
    assert last.tokens.kept == sum(camera.sample(i).tokens for i in held if i >= opened)
    assert last.tokens.reused > 0
    stream = engine._streams["cam"]
    assert all(
        frame.computed is computed[frame.pts]
        for frame in stream.frames
        if frame.pts in computed and computed[frame.pts] is not None
    ), "KV from before is still there"


def test_a_gap_begins_anew_where_the_clock_went_back_or_the_grid_is_another(
    engine, make_camera, make_spec, run
) -> None:
    camera, other = make_camera(), make_camera(width=112)
    for sample in (replace(camera.sample(2), gap=True), replace(other.sample(12), gap=True)):
        engine.evict("cam")
        engine.admit(make_spec())
        run(engine, [camera.sample(i) for i in range(8)])
        engine.push(sample)
        assert [frame.pts for frame in engine._streams["cam"].frames] == [sample.pts]


def test_memory_is_what_is_held_and_evicting_frees_it(engine, make_camera, make_spec, run) -> None:
    for name in ("a", "b"):
        engine.admit(make_spec(name))
        camera = make_camera(stream=name, kept=0.5)
        run(engine, [camera.sample(i) for i in range(9)])
    stream = engine._streams["a"]
    tokens = sum(len(frame.tokens) for frame in stream.frames if frame.has_kv)
    layers, _, heads, size = engine.pool.k.shape
    expected = tokens * 2 * layers * heads * size * 4
    for frame in stream.frames:
        expected += frame.mask.nbytes
        expected += 0 if frame.patches is None else frame.patches.nbytes
        if frame.tokens is not None:
            # Nothing larger is kept alive behind a view.
            storages = [tensor.untyped_storage().nbytes() for tensor in (frame.tokens.embeds, frame.tokens.cells)]
            assert storages == [frame.tokens.embeds.nbytes, frame.tokens.cells.nbytes]
            expected += sum(storages)
        expected += sum(0 if part is None else part.nbytes for part in (frame.computed, frame.positions))
    assert engine.memory_bytes("a") == expected
    assert engine.memory_bytes() == engine.memory_bytes("a") + engine.memory_bytes("b")
    engine.evict("a")
    engine.evict("a")
    assert engine.memory_bytes("a") == 0
    assert engine.memory_bytes() == engine.memory_bytes("b") > 0


def test_patches_of_a_shared_buffer_are_copied(engine, make_camera, make_spec) -> None:
    sample = make_camera().sample(0)
    wire = np.frombuffer(bytearray(sample.patches.tobytes()) + bytearray(10**6), np.uint8)
    view = wire[: sample.patches.size].reshape(sample.patches.shape)
    engine.admit(make_spec())
    engine.push(replace(sample, patches=view))
    (frame,) = engine._streams["cam"].frames
    assert frame.patches.base is None
    assert (frame.patches == sample.patches).all()


def test_questions_may_change_between_windows(engine, make_camera, make_spec, run) -> None:
    camera = make_camera(kept=0.5)
    engine.admit(make_spec())
    run(engine, [camera.sample(i) for i in range(6)])
    engine.admit(
        make_spec(questions=(Question("a", "Is there a fire or smoke?"), Question("b", "Are people fighting?")))
    )
    answers = run(engine, [camera.sample(i) for i in (6, 7)])
    assert [a.question for a in answers] == ["a", "b"]
    assert answers[0].tokens.reused > 0


def test_thresholds_decide(engine, make_camera, make_spec, run) -> None:
    text = "Is anyone climbing the fence?"
    engine.admit(make_spec(questions=(Question("low", text, threshold=0.0), Question("high", text, threshold=1.0))))
    low, high = run(engine, [make_camera().sample(i) for i in range(2)])
    assert low.score == pytest.approx(high.score, abs=1e-6)
    assert (low.positive, low.text, high.positive, high.text) == (True, "yes", False, "no")


def test_explanations_are_what_greedy_decoding_without_a_cache_gives(model, make_camera, make_spec, run) -> None:
    engine = NativeEngine(model, max_new_tokens=5)
    camera = make_camera(kept=0.5)
    questions = (
        Question("a", "Is anyone climbing the fence?", explain=True),
        Question("b", "Is there a fire or smoke?"),
        Question("c", "Did a vehicle stop on the road?", explain=True),
    )
    engine.admit(make_spec(questions=questions, refresh="all"))
    answers = run(engine, [camera.sample(i) for i in range(12)])[-3:]
    assert answers[1].text in ("yes", "no")
    assert engine.stats.windows[0].decoded > 0
    for answer, question in zip(answers, questions, strict=True):
        if question.explain:
            assert answer.text == _by_prompting(model, camera, make_spec, question, answer, 5)
    # What decoding wrote is gone: the next windows equal those of an engine that never explained.
    plain = NativeEngine(model)
    plain.admit(make_spec(questions=tuple(replace(q, explain=False) for q in questions), refresh="all"))
    expected = run(plain, [camera.sample(i) for i in range(14)])[-3:]
    after = run(engine, [camera.sample(i) for i in (12, 13)])
    np.testing.assert_allclose([a.score for a in after], [a.score for a in expected], atol=1e-5)


TURN = "<|im_end|>\n<|im_start|>user\nWhy? Say in one sentence what the video shows.<|im_end|>\n<|im_start|>assistant\n"


def _by_prompting(model, camera, make_spec, question, answer, limit: int) -> str:
    """Each next token from a window computed from nothing, with the answer, the turn that asks why and the tokens so
    far as part of the question."""
    said: list[int] = []
    tokens: list[int] = []
    first = answer.start // 4_000_000 * 4
    original = model.question_ids
    try:
        while len(tokens) < limit:
            model.question_ids = lambda text: original(text) + said + tokens
            engine = NativeEngine(model)
            length = answer.end / 1e6 - first
            engine.admit(make_spec(questions=(replace(question, explain=False),), window_s=length, stride_s=length))
            logits = []
            score = engine._score
            engine._score = lambda rows, score=score, logits=logits: (logits.append(rows.clone()), score(rows))[1]
            samples = [replace(camera.sample(i), fresh=i == first) for i in range(first, answer.end // 1_000_000)]
            for sample in samples:
                for request in engine.push(sample):
                    engine.step([request])
            token = int(logits[-1][0].argmax())
            if not said:
                said.extend([token, *model.tokenizer(TURN)["input_ids"]])
            elif token == model.tokenizer.eos_token_id:
                break
            else:
                tokens.append(token)
    finally:
        del model.question_ids
    return model.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize("refresh", ["all", "anchors", "topk_deviation"])
def test_a_failed_step_costs_what_its_pass_has_written(
    engine, model, make_camera, make_spec, run, monkeypatch, refresh
) -> None:
    camera, budget = make_camera(kept=0.5), 0.3 if refresh == "topk_deviation" else None
    engine.admit(make_spec(refresh=refresh, refresh_budget=budget))
    run(engine, [camera.sample(i) for i in range(10)])
    used = engine.pool.used

    def broken(*args, **kwargs):
        forward(*args, **kwargs)
        raise RuntimeError("a kernel failed")

    forward = passes.ragged_forward
    closed = [request for i in (10, 11) for request in engine.push(camera.sample(i))]
    monkeypatch.setattr(passes, "ragged_forward", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step(closed)
    monkeypatch.setattr(passes, "ragged_forward", forward)
    assert engine.pool.used <= used, "new tokens' slots came back"
    (again,) = engine.step(closed)
    other = NativeEngine(model)
    # A narrowing policy had begun with all tokens.
    other.admit(make_spec(refresh="all" if budget else refresh))
    expected = run(other, [camera.sample(i) for i in range(12)])[-1]
    assert again.tokens == expected.tokens
    assert again.score == pytest.approx(expected.score, abs=1e-5)


def test_out_of_memory_in_a_pass_is_tried_again_in_halves(
    engine, model, make_camera, make_spec, run, monkeypatch
) -> None:
    """A device that holds the activations of 50 rows."""
    forward, sizes = passes.ragged_forward, []

    def small(model, streams, kernel):
        rows = sum(len(stream.embeds) for stream in streams)
        sizes.append(rows)
        if rows > 50:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {rows} rows")
        return forward(model, streams, kernel)

    camera = make_camera(kept=1.0)
    monkeypatch.setattr(engine_module, "FEWEST_ROWS", 16)
    engine.pass_rows = 128
    monkeypatch.setattr(passes, "ragged_forward", small)
    engine.admit(make_spec(refresh="all"))
    answers = run(engine, [camera.sample(i) for i in range(12)])
    monkeypatch.setattr(passes, "ragged_forward", forward)
    other = NativeEngine(model)
    other.admit(make_spec(refresh="all"))
    expected = run(other, [camera.sample(i) for i in range(12)])
    assert max(sizes) > 50 >= min(sizes)
    assert [a.score for a in answers] == pytest.approx([a.score for a in expected], abs=1e-5)


@pytest.mark.parametrize("refresh", ["first_percent", "topk_deviation"])
def test_what_is_tried_again_does_not_narrow(refresh, model, make_camera, make_spec, run, monkeypatch) -> None:
    """The first attempt has narrowed, and written over the KV that the next would compare with."""
    camera, run_layer = make_camera(kept=1.0), model.run_layer
    monkeypatch.setattr(engine_module, "FEWEST_ROWS", 16)

    def score(prepare) -> float:
        engine = NativeEngine(model)
        engine.admit(make_spec(refresh=refresh))
        run(engine, [camera.sample(i) for i in range(10)])
        prepare(engine)
        return run(engine, [camera.sample(i) for i in range(10, 12)])[-1].score

    def fails_once(engine) -> None:
        def failing(index, *given):
            if index == len(model.layers) - 1:
                monkeypatch.setattr(model, "run_layer", run_layer)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run_layer(index, *given)

        monkeypatch.setattr(model, "run_layer", failing)

    def whole(engine) -> None:
        plan_rows = engine._plan_rows

        def planned(*given, **options):
            plan = plan_rows(*given, **options)
            return replace(plan, work=replace(plan.work, narrowing=None))

        engine._plan_rows = planned

    assert score(fails_once) == pytest.approx(score(whole), abs=1e-5)
    assert score(whole) != pytest.approx(score(lambda _: None), abs=1e-5)


def test_a_lost_device_is_told_apart_from_a_failed_window(engine, make_camera, make_spec, run, monkeypatch) -> None:
    def lost(*args, **kwargs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(passes, "ragged_forward", lost)
    engine.admit(make_spec())
    with pytest.raises(DeviceError, match="lost to this process: CUDA error: an illegal memory access"):
        run(engine, [make_camera().sample(i) for i in range(2)])


def test_the_tower_runs_in_halves_where_memory_runs_out(engine, make_camera, make_spec, run, monkeypatch) -> None:
    camera, calls, original = make_camera(kept=1.0), [], engine.model.encode

    held: list[weakref.ref[torch.Tensor]] = []

    def small(frames):
        calls.append(len(frames))
        assert not any(each() is not None for each in held), "what the attempt before allocated is there"
        if len(frames) > 2:
            activations = torch.zeros(1)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(frames)} frames")
        return original(frames)

    other = NativeEngine(engine.model)
    for each in (engine, other):
        each.admit(make_spec(stride_s=8.0))
    expected = run(other, [camera.sample(i) for i in range(8)])
    monkeypatch.setattr(engine.model, "encode", small)
    assert [a.score for a in run(engine, [camera.sample(i) for i in range(8)])] == [a.score for a in expected]
    assert calls == [8, 4, 2, 2, 4, 2, 2]


def test_the_tower_runs_in_calls_of_bounded_size(engine, make_camera, make_spec, run, monkeypatch) -> None:
    camera, calls = make_camera(kept=1.0), []
    original = engine.model._encode_kept
    monkeypatch.setitem(PATCHES_PER_PASS, "cpu", 60)
    monkeypatch.setattr(engine.model, "_encode_kept", lambda frames: (calls.append(len(frames)), original(frames))[1])
    engine.admit(make_spec(stride_s=8.0))
    run(engine, [camera.sample(i) for i in range(8)])
    assert calls == [2, 2, 2, 2]


def test_bfloat16_stays_close_to_float32(model, make_camera, make_spec, run) -> None:
    half = NativeEngine(load_model("tiny-qwen2_5_vl", dtype="bfloat16"))
    full = NativeEngine(model)
    camera = make_camera(kept=0.3)
    scores = []
    for each in (half, full):
        each.admit(make_spec(refresh="anchors"))
        scores.append([a.score for a in run(each, [camera.sample(i) for i in range(16)])])
    np.testing.assert_allclose(scores[0], scores[1], atol=0.08)


def test_a_score_that_is_no_number_is_an_error(engine, make_camera, make_spec, run, monkeypatch) -> None:
    """As where activations overflow in float16: it would else be *no* for ever. The window can be computed again."""
    camera, other = make_camera(), NativeEngine(engine.model)
    for each in (engine, other):
        each.admit(make_spec())
        run(each, [camera.sample(0)])
    (request,) = engine.push(camera.sample(1))
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: logits(hidden).fill_(float("nan")))
    with pytest.raises(NotFiniteError, match="computes NaN in float32; its weights may be damaged"):
        engine.step([request])
    monkeypatch.undo()
    (again,) = engine.step([request])
    (wanted,) = run(other, [camera.sample(1)])
    assert again.score == pytest.approx(wanted.score, abs=1e-6)


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "cpu_flash"])
def test_numbers_that_are_none_stay_with_their_camera(
    model, make_camera, make_spec, run, monkeypatch, kernel, failed
) -> None:
    """Another camera takes the slots that they were written to, in a window or before it ended, and reserves some of
    them for an explanation's tokens."""
    questions = (Question("why", "Is it?", explain=True), Question("q", "Is anyone there?"))
    encode, scores = model._encode_kept, []
    for spoiled in (False, True):
        engine = NativeEngine(model, kernel=kernel, kv_bytes=200 * NativeEngine(model).pool.slot_bytes)
        if spoiled:
            engine.ahead_rows = 1, 100
            engine.admit(make_spec("other", window_s=16.0, stride_s=16.0))
            other = make_camera(stream="other", kept=1.0)
            *before, last = (other.sample(i) for i in range(16))
            monkeypatch.setattr(model, "_encode_kept", lambda frames: [each * float("nan") for each in encode(frames)])
            assert not run(engine, before)
            while engine.prefill_ahead():
                pass
            if failed:
                with pytest.raises(NotFiniteError, match="computes NaN"):
                    run(engine, [last])
            monkeypatch.undo()
            engine.evict("other")
            assert bool(engine.pool.k.isnan().any())
        engine.admit(make_spec(questions=questions))
        camera = make_camera()
        scores.append([a.score for a in run(engine, [camera.sample(i) for i in range(8)])])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "cpu_flash"])
def test_kernels_give_one_answer(model, make_camera, make_spec, run, kernel) -> None:
    chosen, default = NativeEngine(model, kernel=kernel), NativeEngine(model)
    camera = make_camera(kept=0.3)
    scores = []
    for each in (chosen, default):
        each.admit(make_spec(refresh="random"))
        scores.append([a.score for a in run(each, [camera.sample(i) for i in range(14)])])
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_score_formula() -> None:
    logits = torch.tensor([[0.5, 1.0, -2.0, 0.3]])
    margin = np.log(np.exp(0.5) + np.exp(1.0)) - np.log(np.exp(-2.0))
    for temperature, bias in ((1.0, 0.0), (2.5, -0.7)):
        score = YesNoScore([0, 1], [2], temperature=temperature, bias=bias, device=torch.device("cpu"))
        assert score(logits).item() == pytest.approx(1 / (1 + np.exp(-(margin / temperature + bias))), abs=1e-6)
