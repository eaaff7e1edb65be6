"""Windows on vLLM: the same answers as transformers and as the native engine, and what its prefix cache shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from cluster.engine.native import NativeEngine
from cluster.engine.vllm.engine import VllmEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.score import YesNoScore
from cluster.engine.window.stream import StreamFrame
from cluster.errors import ConfigError, NotReadyError
from cluster.lab.bench import harness
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_truncated
from cluster.models.qwen3_vl import Qwen3VL
from cluster.types import MICROSECONDS, AskSpec, DeletedMemory, MemorySpec, Question

# Both compute in float32, in another order of sums.
SAME = 2e-5


def scores(answers: list[Any]) -> list[float]:
    return [answer.score for answer in answers]


def test_full_windows_are_what_transformers_computes(family: Any, spec: Any) -> None:
    samples = family.frames(5, kept=1.0, anchor_every=1)
    answers = family.drive(family.engine, spec(), samples)

    yes, no = family.model.yes_no_ids()
    score = YesNoScore(yes, no, temperature=1.0, bias=0.0, device=torch.device("cpu"))
    batches = patch_batches([StreamFrame.of(sample) for sample in samples])
    expected = []
    for end in (2, 4):
        times = [sample.pts / MICROSECONDS for sample in samples[:end]]
        for question in family.questions:
            expected.append(score(family.model.reference_logits(batches[:end], times, question.text)[None]).item())
    assert scores(answers)[:4] == pytest.approx(expected, abs=SAME)


def test_pruned_windows_are_what_the_native_engine_computes(family: Any, spec: Any) -> None:
    samples = family.frames(16, kept=0.4, empty=0.3, seed=3)
    # A hole in the camera's time, as after lost packets.
    samples = [sample for sample in samples if sample.index != 9]

    ours, native = (family.drive(engine, spec(), samples) for engine in (family.engine, family.native))

    assert len(ours) == len(native) > 10
    assert scores(ours) == pytest.approx(scores(native), abs=SAME)
    assert [answer.text for answer in ours] == [answer.text for answer in native]
    assert len({answer.text for answer in ours if answer.question == "why"}) > 1
    for mine, theirs in zip(ours, native, strict=True):
        assert (mine.tokens.full, mine.tokens.kept, mine.tokens.query) == (
            theirs.tokens.full,
            theirs.tokens.kept,
            theirs.tokens.query,
        )
        assert mine.tokens.encoded == theirs.tokens.encoded


def test_a_window_of_nothing_stands_where_the_native_engine_puts_it(family: Any, spec: Any) -> None:
    # No frame keeps a thing, the first neither: the question alone, behind the room the frames would have taken.
    samples = family.frames(4, kept=0.0, anchor_every=100)[1:]
    ours, native = (family.drive(engine, spec(), samples) for engine in (family.engine, family.native))
    assert ours[0].tokens.kept == 0
    assert scores(ours) == pytest.approx(scores(native), abs=SAME)


def test_embeddings_wait_in_host_memory(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's is vLLM's: those of a camera's window are tens of MiB, and nothing counted them there."""
    monkeypatch.setattr(VllmEngine, "_start", lambda *_, **__: None)
    frames = [StreamFrame.of(sample) for sample in qwen.frames(3)]
    with FakeCuda():
        model = load_truncated("qwen2_5_vl-7b", 1, DEVICE)
        VllmEngine(model)._encode_frames(frames)
        assert [frame.tokens.embeds.device.type for frame in frames] == ["cpu"] * 3


def test_streams_of_one_step_do_not_touch_each_other(family: Any, spec: Any) -> None:
    names = [f"cam{number}" for number in range(5)]
    alone = [family.drive(family.engine, spec(name), family.frames(6, name, seed=i)) for i, name in enumerate(names)]
    for name in names:
        family.engine.admit(spec(name))
    together: list[Any] = []
    for row in zip(*(family.frames(6, name, seed=i) for i, name in enumerate(names)), strict=True):
        requests = [request for sample in row for request in family.engine.push(sample)]
        together += family.engine.step(requests)
    for name in names:
        family.engine.evict(name)

    for name, answers in zip(names, alone, strict=True):
        mine = [answer for answer in together if answer.stream == name]
        assert scores(mine) == pytest.approx(scores(answers), abs=SAME)
        assert [answer.text for answer in mine] == [answer.text for answer in answers]


def test_questions_of_one_window_share_it(qwen: Any, spec: Any) -> None:
    # 12 groups a frame, the largest this model takes: several of vLLM's blocks.
    samples = qwen.frames(4, "wide", width=168, height=112, kept=1.0, anchor_every=1, seed=11)
    questions = tuple(Question(str(number), f"Question {number}: is a door open?") for number in range(4))
    qwen.engine.admit(spec("wide", questions=questions))
    last = [request for sample in samples for request in qwen.engine.push(sample)][-1]
    before = qwen.engine.core.stats.hits
    answers = qwen.engine.step([last])
    hits = qwen.engine.core.stats.hits - before
    (window,) = qwen.engine.stats.windows
    qwen.engine.evict("wide")

    assert answers[0].tokens.kept == 4 * 12
    # Three questions find whole blocks of the window that the first one's pass wrote.
    assert hits >= 3 * 64
    total = 4 * (len(qwen.model.system_ids()) + 4 * 12) + answers[0].tokens.query
    assert window.computed == total - hits
    assert window.llm_flops > 0
    assert window.tower_flops > 0


def test_a_window_that_slid_finds_nothing_of_the_one_before(qwen: Any, spec: Any) -> None:
    samples = qwen.frames(12, "slide", width=168, height=112, kept=1.0, anchor_every=1)
    answers = qwen.drive(qwen.engine, spec("slide", questions=qwen.questions[:1]), samples)
    growing = [answer.tokens.reused for answer in answers if answer.end <= 8 * MICROSECONDS]
    sliding = [answer.tokens.reused for answer in answers if answer.end > 8 * MICROSECONDS]
    # While it grows, every window begins as the one before did (in whole blocks); once it slides, none does.
    assert growing[-1] >= 32
    assert len(sliding) >= 1
    assert not any(sliding)


def test_a_still_camera_costs_vllm_nothing(qwen: Any, spec: Any) -> None:
    qwen.engine.admit(spec("still", static_gate=True))
    counted: list[int] = []
    gated: list[bool] = []
    for sample in qwen.frames(9, "still", still=True):
        for request in qwen.engine.push(sample):
            before = qwen.engine.core.stats.queries
            gated.append(all(answer.gated for answer in qwen.engine.step([request])))
            counted.append(qwen.engine.core.stats.queries - before)
    qwen.engine.evict("still")
    assert gated == [False, False, True, True]
    assert counted[2:] == [0, 0]


def test_a_stream_moves_between_the_engines(family: Any, spec: Any) -> None:
    samples = family.frames(10, "moved", seed=5)
    expected = family.drive(family.native, spec("moved"), samples)

    family.native.admit(spec("moved"))
    first = [a for sample in samples[:7] for r in family.native.push(sample) for a in family.native.step([r])]
    family.engine.import_stream(spec("moved"), family.native.export_stream("moved"))
    then = [a for sample in samples[7:] for r in family.engine.push(sample) for a in family.engine.step([r])]
    # And back.
    family.native.import_stream(spec("moved"), family.engine.export_stream("moved"))
    for engine in (family.native, family.engine):
        engine.evict("moved")

    assert scores([*first, *then]) == pytest.approx(scores(expected), abs=SAME)
    assert all(answer.tokens.encoded < answer.tokens.kept for answer in then)


def test_what_it_refuses(qwen: Any, spec: Any) -> None:
    engine = qwen.engine
    for longer in ({"window_s": 2000.0}, {"fps": 500.0}):
        with pytest.raises(ConfigError, match=r"may have \d+ tokens, but vLLM takes at most"):
            engine.admit(spec("long", **longer))
    with pytest.raises(ValueError, match="not admitted"):
        engine.push(qwen.frames(1, "unknown")[0])
    assert engine.delete_memory("cam").result() == DeletedMemory(0, 0)
    with pytest.raises(NotReadyError, match="no memory"):
        engine.memory_status("cam")
    assert engine.memory_bytes() == 0


def test_a_free_question_is_answered_from_the_window(family: Any, spec: Any) -> None:
    """As by the native engine before anything has left its window."""
    remembered = spec("asked", memory=MemorySpec())
    samples = family.frames(7, "asked", kept=0.6, seed=7)
    native = NativeEngine(family.model, memories=MemoryBank(TierStack([Arena(2**24)])))
    asks = [
        AskSpec("asked", "What is to be seen?", max_new_tokens=21),
        AskSpec("asked", "And now?", turns=(("Is a car there?", "yes"),), max_new_tokens=3),
        AskSpec("asked", "Is a car there?", standing=True),
    ]
    answered = []
    for engine in (native, family.engine):
        engine.admit(remembered)
        for sample in samples:
            engine.step(engine.push(sample))
        for ask in asks:
            run, pieces = engine.ask(ask), []
            while (piece := run.step()) is not None:
                pieces.append(piece)
            assert "".join(pieces).strip() == run.result.text
            answered.append(run.result)
        engine.evict("asked")

    for theirs, ours in zip(answered[: len(asks)], answered[len(asks) :], strict=True):
        assert (ours.text, ours.prompt_tokens, ours.answer_tokens) == (
            theirs.text,
            theirs.prompt_tokens,
            theirs.answer_tokens,
        )
        assert ours.yes == pytest.approx(theirs.yes, abs=SAME)
        assert (ours.oldest, ours.newest) == (theirs.oldest, theirs.newest)
    assert [ours.answer_tokens for ours in answered[-3:]] == [21, 3, 0]


def test_a_question_about_a_time_sees_its_frames_alone(family: Any, spec: Any) -> None:
    samples = family.frames(6, "asked", kept=1.0, anchor_every=1)
    family.engine.admit(spec("asked", memory=MemorySpec()))
    for sample in samples:
        family.engine.step(family.engine.push(sample))
    text = family.questions[0].text
    span = (2 * MICROSECONDS, 5 * MICROSECONDS)
    run = family.engine.ask(AskSpec("asked", text, span=span, standing=True))
    assert run.step() is None
    newest = family.engine.ask(AskSpec("asked", text, since_s=3.0, max_new_tokens=1))
    newest.step()
    family.engine.evict("asked")

    yes, no = family.model.yes_no_ids()
    score = YesNoScore(yes, no, temperature=1.0, bias=0.0, device=torch.device("cpu"))
    shown = patch_batches([StreamFrame.of(sample) for sample in samples[2:5]])
    # Only a timestamp written before the frame still shows the stream's time.
    first_s = 2.0 if isinstance(family.model, Qwen3VL) else 0.0
    expected = score(family.model.reference_logits(shown, [first_s + more for more in range(3)], text)[None]).item()
    assert run.result.yes == pytest.approx(expected, abs=SAME)
    assert (run.result.oldest, run.result.newest) == (2 * MICROSECONDS, 4 * MICROSECONDS)
    assert newest.result.oldest == 2 * MICROSECONDS
    assert newest.result.newest == 5 * MICROSECONDS


def test_questions_that_the_window_cannot_answer(qwen: Any, spec: Any) -> None:
    engine = qwen.engine
    engine.admit(spec("asked", memory=MemorySpec()))
    engine.admit(spec("private"))
    try:
        with pytest.raises(NotReadyError, match="seen nothing yet"):
            engine.ask(AskSpec("asked", "What happened?"))
        for stream in ("private", "unknown"):
            with pytest.raises(NotReadyError, match=r"no window here, or memory.enabled is off"):
                engine.ask(AskSpec(stream, "What happened?"))
        for sample in qwen.frames(2, "asked"):
            engine.step(engine.push(sample))
        with pytest.raises(NotReadyError, match="holds nothing of that time"):
            engine.ask(AskSpec("asked", "What happened?", span=(2**40, 2**41))).step()
        with pytest.raises(ConfigError, match=r"may have \d+ tokens, but vLLM takes at most 4096"):
            engine.ask(AskSpec("asked", "What happened?", turns=(("Who?", "nobody " * 4096),))).step()
    finally:
        for stream in ("asked", "private"):
            engine.evict(stream)


def test_its_metrics_are_there_under_vllms_own_names(qwen: Any, spec: Any) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from cluster.engine.vllm.core import VllmCollector

    qwen.drive(qwen.engine, spec("metrics"), qwen.frames(3, "metrics"))
    registry = CollectorRegistry()
    registry.register(VllmCollector())
    text = generate_latest(registry).decode()
    for name in ("vllm:prefix_cache_queries_total", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        assert name in text
    assert "python_info" not in text


def test_the_bench_measures_vllm_beside_ours(tmp_path, capsys) -> None:
    file = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--model", "tiny-qwen2_5_vl", "--part", "vllm", "--json", str(file)]
    assert harness.main(["gpu", *options]) == 0
    shown = capsys.readouterr().out
    assert "vLLM, full" in shown
    assert "speedup_over_vllm = " in shown
