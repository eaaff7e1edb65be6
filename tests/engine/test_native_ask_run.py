"""Questions about the past: with everything retrieved, what is remembered answers as the window itself would."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from kv_parts import key_of
from window_driver import FAMILIES, covering_cases

from cluster.engine.native import NativeEngine
from cluster.engine.native.ask_run import NativeAskRun, merge_moments
from cluster.engine.native.memory_attention import MemoryAttention
from cluster.engine.window.score import YesNoScore
from cluster.errors import DeviceError, NotFiniteError, NotReadyError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.retrieve.rekv import ReKV
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import INSTRUCTION
from cluster.models.loading import load_model
from cluster.registry import organisers
from cluster.types import MICROSECONDS, Answer, AskSpec, MemorySpec, Moment, Question, StreamSpec

TEXT = "Is anyone climbing the fence?"
EVERYTHING = {"retriever": "top_k", "retriever_options": {"share": 1.0}, "kv_dtype": "model"}


# Of every pair of a family, an organiser and how many frames are gone.
EVERY_PAIR = pytest.mark.parametrize(
    ("family", "gone", "organiser"), covering_cases(organisers.names(), (0, 3, 8)), indirect=["family"]
)


@functools.cache
def _asked_as_standing(name: str) -> VisionLanguageModel:
    """Asked in the very words of a standing question."""
    torch.set_num_threads(1)
    model = load_model(name)
    model.settings = dataclasses.replace(model.settings, open_instruction=INSTRUCTION)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any) -> VisionLanguageModel:
    return _asked_as_standing(request.param)


def remembering(
    model: VisionLanguageModel, host_bytes: int | None = None, **spec: Any
) -> tuple[NativeEngine, MemoryBank, StreamSpec]:
    """``host_bytes``: of a host above the tier that holds everything."""
    node = Arena(64 * 2**20, name="node")
    bank = MemoryBank(TierStack([node] if host_bytes is None else [Arena(host_bytes), node]))
    engine = NativeEngine(model, memories=bank, max_new_tokens=4)
    memory = MemorySpec(**{"compressor": "none", "organiser": "resv", "block_frames": 3, **EVERYTHING, **spec})
    return engine, bank, StreamSpec("cam", (Question("q", TEXT),), 16.0, 4.0, static_gate=False, memory=memory)


def watch(
    engine: NativeEngine, spec: StreamSpec, frames: int, *, answers: list[Answer] | None = None, **camera: Any
) -> float:
    """Drive a camera; the score of its last window. ``answers``: gets all of them."""
    size = 112 if engine.geometry.square is None else engine.geometry.square
    source = SyntheticCamera("cam", engine.geometry, width=size, height=size, anchor_every=4, **camera)
    engine.admit(spec)
    score = 0.0
    for number in range(frames):
        for request in engine.push(source.sample(number)):
            for answer in engine.step([request]):
                score = answer.score
                if answers is not None:
                    answers.append(answer)
        # Frames come as fast as they can be made: on a busy machine a memory would drop what it has no time for.
        assert engine.memories is None or engine.memories.wait_written()
    return score


def score_of(engine: NativeEngine, run: NativeAskRun) -> float:
    run.step()
    return float(engine._score(run.logits[None])[0])


@EVERY_PAIR
def test_with_everything_retrieved_memory_and_window_are_one(
    family: VisionLanguageModel, organiser: str, gone: int
) -> None:
    engine, bank, spec = remembering(family, organiser=organiser)
    wanted = watch(engine, spec, 12 if family.geometry.temporal == 2 else 24)
    stream = engine._streams["cam"]
    with_kv = sum(frame.has_kv for frame in stream.frames)
    assert with_kv >= 8
    # Frames that came after the last window have no KV and are not part of it.
    stream.drop_frames(min(gone, with_kv))
    memory, _ = bank.get_memory("cam")
    assert memory.frames == min(gone, with_kv)
    run = engine.ask(AskSpec("cam", TEXT))
    assert score_of(engine, run) == pytest.approx(wanted, abs=1e-4)
    while run.step() is not None:
        pass
    assert run.result.yes == pytest.approx(wanted, abs=1e-4)


def test_a_memory_in_eight_bits_answers_nearly_alike(family: VisionLanguageModel) -> None:
    engine, bank, spec = remembering(family, kv_dtype="int8")
    wanted = watch(engine, spec, 16)
    engine.evict("cam")
    memory, _ = bank.get_memory("cam")
    (loaded,) = memory.tiers.load([key_of(memory, 0, 0, 0)])
    assert loaded.block is not None
    assert loaded.block.key.dtype == torch.int8
    score = score_of(engine, engine.ask(AskSpec("cam", TEXT)))
    assert score != wanted
    assert score == pytest.approx(wanted, abs=5e-3)


def test_rekv_with_frames_enough_reads_all_and_with_one_the_same_in_all_heads(family: VisionLanguageModel) -> None:
    engine, bank, spec = remembering(family, organiser="frames", retriever="rekv", retriever_options={})
    wanted = watch(engine, spec, 12 if family.geometry.temporal == 2 else 24)
    engine._streams["cam"].drop_frames(8)
    assert score_of(engine, engine.ask(AskSpec("cam", TEXT))) == pytest.approx(wanted, abs=1e-4)
    memory, _ = bank.get_memory("cam")
    run = NativeAskRun(
        engine.model, engine._system, None, memory, ReKV(frames=1), AskSpec("cam", TEXT), engine._ends, prefetch=False
    )
    memory.settle()
    run.step()
    assert run.retrieval.stats.clusters == len(memory.heads) * len(memory.heads[0])
    assert run.retrieval.stats.fetched_tokens < memory.tokens


def test_a_camera_whose_source_ended_is_asked_about_its_memory_alone(family: VisionLanguageModel) -> None:
    engine, _, spec = remembering(family)
    wanted = watch(engine, spec, 16)
    engine.evict("cam")
    assert engine.memory_bytes() == 0
    assert score_of(engine, engine.ask(AskSpec("cam", TEXT))) == pytest.approx(wanted, abs=1e-4)


@EVERY_PAIR
def test_a_replayed_window_has_the_score_that_it_had(family: VisionLanguageModel, organiser: str, gone: int) -> None:
    # The window in which a camera began is the whole of its past: nothing before it was seen, then or now.
    engine, _, spec = remembering(family, organiser=organiser)
    answers: list[Answer] = []
    watch(engine, spec, 12 if family.geometry.temporal == 2 else 24, answers=answers)
    begun = [answer for answer in answers if answer.start == 0]
    assert len(begun) >= 3
    stream = engine._streams["cam"]
    stream.drop_frames(min(gone, sum(frame.has_kv for frame in stream.frames)))
    for answer in begun:
        run = engine.ask(AskSpec("cam", TEXT, span=(answer.start, answer.end), standing=True))
        while run.step() is not None:
            pass
        assert run.result.text == ""
        assert run.result.yes == pytest.approx(answer.score, abs=1e-4)


def test_a_span_reads_its_own_frames_alone(family: VisionLanguageModel) -> None:
    engine, bank, spec = remembering(family)
    watch(engine, spec, 40)
    memory, _ = bank.get_memory("cam")
    memory.settle()
    assert memory.frames > 6
    begin, end = memory.log.times[2], memory.log.times[5]
    run = engine.ask(AskSpec("cam", TEXT, span=(begin, end), standing=True))
    run.step()
    assert set(run.retrieval.stats.tokens_by_frame()) == set(memory.log.numbers[2:5])
    with pytest.raises(NotReadyError, match="nothing of that time"):
        engine.ask(AskSpec("cam", TEXT, span=(-9 * MICROSECONDS, -5 * MICROSECONDS), standing=True)).step()


def test_prefetch_changes_when_blocks_come_and_not_which() -> None:
    options = {"retriever": "top_k", "retriever_options": {"share": 0.3}}
    engine, bank, spec = remembering(load_model("tiny-qwen2_5_vl"), 16384, **options)
    watch(engine, spec, 40)
    memory, retriever = bank.get_memory("cam")
    assert memory.tokens
    found = []
    for prefetch in (True, False):
        run = NativeAskRun(
            engine.model, engine._system, None, memory, retriever, AskSpec("cam", TEXT), engine._ends, prefetch=prefetch
        )
        run.step()
        assert (run.retrieval.prefetcher.stats.predicted > 0) is prefetch
        found.append((run.logits, run.retrieval.stats.fetched_tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] < memory.tokens


def test_questions_load_ahead_while_that_is_faster() -> None:
    options = {"retriever": "top_k", "retriever_options": {"share": 0.3}}
    engine, bank, spec = remembering(load_model("tiny-qwen2_5_vl"), 16384, **options)
    watch(engine, spec, 40)
    memory, _ = bank.get_memory("cam")

    def loads_ahead() -> bool:
        run = engine.ask(AskSpec("cam", TEXT, max_new_tokens=1))
        while run.step() is not None:
            pass
        return run.retrieval.prefetcher.stats.predicted > 0

    # Each way once, whatever it takes.
    assert [loads_ahead(), loads_ahead()] == [True, False]
    for faster in (False, True):
        for _ in range(50):
            memory.tiers.load_ahead.note(faster, 0.0)
            memory.tiers.load_ahead.note(not faster, 1e6)
        # Then the faster one, every eighth time the other: questions 3 to 9, and 11 to 17 after one that is left out.
        assert [loads_ahead() for _ in range(7)] == [faster] * 5 + [not faster, faster]
        loads_ahead()


def test_blocks_in_this_process_are_neither_predicted_nor_left_to_another_thread() -> None:
    engine, bank, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 40)
    memory, retriever = bank.get_memory("cam")
    run = NativeAskRun(engine.model, engine._system, None, memory, retriever, AskSpec("cam", TEXT), engine._ends)
    run.step()
    stats = run.retrieval.prefetcher.stats
    assert stats.at_hand == run.retrieval.stats.clusters > 0
    assert (stats.predicted, stats.missed, stats.bytes) == (0, 0, 0)


def test_the_answer_is_what_greedy_decoding_of_the_whole_prompt_gives() -> None:
    engine, _, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 30)
    ask = AskSpec("cam", "What happened?", max_new_tokens=6)
    run = engine.ask(ask)
    pieces = []
    while (piece := run.step()) is not None:
        pieces.append(piece)
    assert "".join(pieces).strip() == run.result.text
    tokens = run.answer.tokens
    # Each token again, with all before it as one prompt: nothing was kept from pass to pass then.
    for count in range(1, len(tokens)):
        again = engine.ask(ask)
        ids = engine.model.ask_ids(ask.text) + tokens[:count]
        again._prompt_ids = ids
        again.step()
        assert int(again.logits.argmax()) == tokens[count]


def test_a_follow_up_sees_the_turns_before() -> None:
    engine, _, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 20)
    first, follow = AskSpec("cam", "Why?"), AskSpec("cam", "Why?", turns=(("Is there a car?", "yes"),))
    runs = [engine.ask(first), engine.ask(follow)]
    for run in runs:
        run.step()
    assert not torch.allclose(runs[0].logits, runs[1].logits)


def test_since_leaves_older_frames_out() -> None:
    engine, bank, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 60)
    memory, _ = bank.get_memory("cam")
    held = memory.tokens
    everything, recent = engine.ask(AskSpec("cam", TEXT)), engine.ask(AskSpec("cam", TEXT, since_s=25.0))
    for run in (everything, recent):
        while run.step() is not None:
            pass
    assert everything.retrieval.stats.fetched_tokens > recent.retrieval.stats.fetched_tokens > 0
    assert everything.retrieval.stats.held_tokens <= held
    newest = recent.result.newest
    assert all(moment.start >= newest - 25 * MICROSECONDS for moment in recent.result.moments)


def test_forgetting_makes_the_question_a_new_one() -> None:
    engine, bank, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 40)
    engine.delete_memory("cam")
    assert sum(bank.get_memory("cam")[0].status().tier_bytes.values()) == sum(bank.tiers.usage("cam").values()) == 0
    with pytest.raises(NotReadyError, match="has no memory yet"):
        engine.ask(AskSpec("cam", TEXT))


def test_an_answer_of_no_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 20)
    run = engine.ask(AskSpec("cam", TEXT))
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: logits(hidden).fill_(float("nan")))
    with pytest.raises(NotFiniteError, match="computes NaN"):
        run.step()


def test_a_lost_gpu_is_told_where_a_question_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, spec = remembering(load_model("tiny-qwen2_5_vl"))
    watch(engine, spec, 20)
    run = engine.ask(AskSpec("cam", TEXT))

    def fail(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.model, "logits", fail)
    with pytest.raises(DeviceError, match="lost to this process"):
        run.step()


def test_a_score_decides_between_yes_and_no_and_nothing_else() -> None:
    score = YesNoScore([3, 4], [5], temperature=2.0, bias=1.0, device=torch.device("cpu"))
    logits = torch.full((10,), -9.0)
    logits[[3, 4, 5]] = torch.tensor([0.5, -2.0, 1.0])
    yes = float(score(logits[None])[0])
    # By hand: ln(e^0.5 + e^-2) - 1 = -0.421; 1 / (1 + e^-(-0.421 / 2 + 1)).
    assert yes == pytest.approx(0.688, abs=1e-3)
    assert score.decide(logits, yes) == 3
    assert score.decide(logits, 0.49) == 5
    logits[9] = 5.0
    assert score.decide(logits, yes) == 9


@pytest.mark.parametrize(("bias", "said"), [(20.0, 0), (-20.0, 1)])
def test_free_questions_have_a_calibration_of_their_own(
    monkeypatch: pytest.MonkeyPatch, bias: float, said: int
) -> None:
    model = load_model("tiny-qwen2_5_vl")
    model.settings = dataclasses.replace(model.settings, answer_temperature=2.0, answer_bias=bias)
    engine, _, spec = remembering(model)
    watch(engine, spec, 20)
    logits = model.logits
    ids = [each for part in model.yes_no_ids() for each in part]

    def raised(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[:, ids] += 100
        return found

    monkeypatch.setattr(model, "logits", raised)
    free = engine.ask(AskSpec("cam", TEXT, max_new_tokens=1))
    while free.step() is not None:
        pass
    assert (free.result.yes < 0.5) == said
    texts = [
        {model.tokenizer.decode([each], skip_special_tokens=True).strip() for each in part}
        for part in model.yes_no_ids()
    ]
    assert free.result.text in texts[said]
    standing = engine.ask(AskSpec("cam", TEXT, standing=True))
    assert standing.step() is None
    # The model has no calibration of windows: near 1/2, as its weights are random.
    assert 0.05 < standing.result.yes < 0.95


def test_a_camera_without_memory_says_so() -> None:
    engine, _, spec = remembering(load_model("tiny-qwen2_5_vl"))
    engine.admit(dataclasses.replace(spec, memory=None))
    with pytest.raises(NotReadyError, match=r"memory\.enabled"):
        engine.ask(AskSpec("cam", TEXT))


def test_window_and_memory_come_back_after_the_process_died() -> None:
    model = load_model("tiny-qwen2_5_vl")
    tiers = TierStack([Arena(64 * 2**20)])

    def start() -> NativeEngine:
        bank = MemoryBank(tiers)
        return NativeEngine(model, memories=bank)

    engine = start()
    _, _, spec = remembering(model)
    camera = SyntheticCamera("cam", engine.geometry, anchor_every=4)
    engine.admit(spec)
    for number in range(41):
        for request in engine.push(camera.sample(number)):
            engine.step([request])
    engine.memories.save_stream("cam")  # type: ignore[union-attr]
    wanted = engine.ask(AskSpec("cam", TEXT))
    wanted.step()
    # Nothing is handed over: the old engine is simply gone.
    other = start()
    other.admit(spec)
    found = other.ask(AskSpec("cam", TEXT))
    found.step()
    assert torch.allclose(found.logits, wanted.logits, atol=1e-5)
    answers = [
        [
            answer.score
            for number in range(41, 60)
            for r in each.push(camera.sample(number))
            for answer in each.step([r])
        ]
        for each in (engine, other)
    ]
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)


@pytest.mark.parametrize(("gap", "survives"), [(6, True), (60, False)])
def test_a_restored_window_goes_on_after_the_gap(gap: int, survives: bool) -> None:
    model = load_model("tiny-qwen2_5_vl")
    tiers = TierStack([Arena(64 * 2**20)])
    _, _, spec = remembering(model)
    camera = SyntheticCamera("cam", model.geometry, anchor_every=4)
    first = NativeEngine(model, memories=MemoryBank(tiers))
    first.admit(spec)
    for number in range(20):
        for request in first.push(camera.sample(number)):
            first.step([request])
    assert first.memories is not None
    first.memories.save_stream("cam")
    second = NativeEngine(model, memories=MemoryBank(tiers))
    second.admit(spec)
    held = len(second._streams["cam"].frames)
    assert held > 4
    # Frames between were lost with the process; the sender's next one is an anchor.
    sample = dataclasses.replace(camera.sample(20 + gap - gap % 4), gap=True)
    assert sample.complete
    second.push(sample)
    assert (second._streams["cam"].frames[0].pts < sample.pts) is survives
    second.push(dataclasses.replace(camera.sample(20 + gap - gap % 4 + 4), fresh=True))
    assert len(second._streams["cam"].frames) == 1


@pytest.mark.parametrize("past", [False, True], ids=["all", "a span before the window"])
def test_moments_and_places_follow_the_sampling_rate(monkeypatch: pytest.MonkeyPatch, past: bool) -> None:
    engine, bank, spec = remembering(load_model("tiny-qwen2_vl"))
    # A frame of two samples takes eight seconds.
    watch(engine, spec, 12, fps=0.25)
    memory, _ = bank.get_memory("cam")
    times = memory.log.times[:4]
    span = (times[0], times[3] + 1) if past else None
    run = engine.ask(AskSpec("cam", TEXT, span=span, max_new_tokens=1))
    # All frames alike: one moment from the first to the end of the last.
    monkeypatch.setattr(MemoryAttention, "attention_mass", lambda self: (torch.arange(4), torch.full((4,), 0.25)))
    run.step()
    assert run._attention is None or run._attention._around.timeline.slot.tolist()[:4] == [0, 1, 2, 3]
    (moment,) = run._moments_found
    assert (moment.start, moment.end) == (times[0], times[3] + 8 * MICROSECONDS)


def test_moments_are_stretches_above_the_mean() -> None:
    second = MICROSECONDS
    time = torch.tensor([10, 0, 1, 2, 9]) * second
    mass = torch.tensor([0.2, 0.1, 0.4, 0.3, 0.0], dtype=torch.float64)
    assert merge_moments(time, mass, second) == (
        Moment(second, 3 * second, pytest.approx(0.7)),
        Moment(10 * second, 11 * second, pytest.approx(0.2)),
    )
    assert merge_moments(torch.zeros(0, dtype=torch.int64), torch.zeros(0), second) == ()
