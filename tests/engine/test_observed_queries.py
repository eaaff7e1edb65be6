"""What a memory is shown of the standing questions, against the model's own query projections."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.engine.native import NativeEngine
from cluster.engine.native.plan import WATCHED_ROWS, watched_rows
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.compress.attention import AttentionCompressor
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.registry import compressors
from cluster.types import FrameSample, MemorySpec, Question, StreamSpec

TEXT = "Is anyone climbing the fence?"


@pytest.fixture(scope="module", params=[name for name in PRESETS if name.startswith("tiny-")])
def family(request: Any) -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model(request.param)


def engine_of(model: VisionLanguageModel, compressor: str | None, *questions: str, **spec: Any) -> NativeEngine:
    """With a camera ``cam``: windows of 8 s every 2 s."""
    engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(64 * 2**20)])))
    memory = MemorySpec(compressor=compressor, organiser="resv", block_frames=2) if compressor else None
    asked = tuple(Question(str(number), text) for number, text in enumerate(questions))
    engine.admit(StreamSpec("cam", asked, 8.0, 2.0, static_gate=False, memory=memory, **spec))
    return engine


def samples_of(model: VisionLanguageModel, count: int) -> list[FrameSample]:
    camera = SyntheticCamera("cam", model.geometry, width=84, height=56, fps=model.geometry.temporal, anchor_every=1)
    return [camera.sample(number) for number in range(count)]


def drive(engine: NativeEngine, samples: list[FrameSample]) -> list[Tensor]:
    """What the memory was shown last."""
    for sample in samples:
        for request in engine.push(sample):
            engine.step([request])
    memory, _ = engine.memories.get_memory("cam")  # type: ignore[union-attr]
    return memory._queries


def projected(model: VisionLanguageModel, samples: list[FrameSample], text: str) -> list[Tensor]:
    """Per layer the queries ``[H, n, D]`` of a question's rows in transformers' own dense forward."""
    seen: list[Tensor] = []
    hooks = [
        getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj).register_forward_hook(
            lambda _module, _inputs, out: seen.append(out[0].flatten(1))
        )
        for layer in model.layers
    ]
    batches = patch_batches([StreamFrame.of(sample) for sample in samples])
    model.reference_logits(batches, [sample.pts / 1e6 for sample in samples], text)
    for hook in hooks:
        hook.remove()
    heads, rows = model.text_config.num_attention_heads, len(model.question_ids(text))
    return [part[-rows:].unflatten(1, (heads, -1)).transpose(0, 1) for part in seen]


def test_what_is_observed_is_the_reference_s_query_projection(family: VisionLanguageModel) -> None:
    samples = samples_of(family, 8)
    others = (TEXT, "Is there a fire or smoke?")
    shown = drive(engine_of(family, "snapkv", *others), samples)
    wanted = [projected(family, samples, text) for text in others]
    shared = family.text_config.num_key_value_heads
    group = family.text_config.num_attention_heads // shared
    assert group > 1
    assert len(shown) == len(family.layers)
    for layer, rows in enumerate(shown):
        expected = torch.cat([question[layer] for question in wanted], dim=1)
        assert rows.shape == (shared, group * expected.shape[1], expected.shape[2])
        for h in range(shared):
            by_hand = torch.cat([expected[h * group + g] for g in range(group)])
            torch.testing.assert_close(rows[h], by_hand, rtol=1e-4, atol=2e-4)


def test_rows_that_leave_the_pass_do_not_move_what_is_observed(family: VisionLanguageModel) -> None:
    """Top-k refresh drops rows between layers, which moves the question's."""
    samples = samples_of(family, 12)
    shown = {
        policy: drive(engine_of(family, "snapkv", TEXT, refresh=policy), samples)
        for policy in ("topk_deviation", "all")
    }
    assert len(shown["topk_deviation"]) == len(family.layers)
    for narrowed, whole in zip(shown["topk_deviation"], shown["all"], strict=True):
        assert narrowed.shape == whole.shape
        # Other KV is seen, so rows are not equal, but they are those of the same question.
        alike = torch.cosine_similarity(narrowed.flatten(1), whole.flatten(1), dim=1)
        assert bool((alike > 0.95).all())


@pytest.mark.parametrize("compressor", [None, *compressors.names()])
def test_only_compressors_that_go_by_queries_are_shown_any(compressor: str | None) -> None:
    model = load_model("tiny-qwen2_5_vl")
    engine = engine_of(model, compressor, TEXT)
    drawn = []
    plan = engine._plan
    engine._plan = lambda work: drawn.append(plan(work)) or drawn[-1]  # type: ignore[method-assign,func-returns-value]
    wants = compressor is not None and issubclass(compressors.get(compressor), AttentionCompressor)
    for sample in samples_of(model, 4):
        for request in engine.push(sample):
            engine.step([request])
    assert drawn
    assert all((len(each.work.watched) > 0) == wants for each in drawn)
    assert engine.memories.wants_queries("cam") == wants  # type: ignore[union-attr]


def test_a_memory_that_begins_after_the_question_knows_it() -> None:
    model = load_model("tiny-qwen2_5_vl")
    engine = engine_of(model, "snapkv", TEXT)
    shown = drive(engine, samples_of(model, 6))
    memory, _ = engine.memories.get_memory("cam")  # type: ignore[union-attr]
    assert memory.counts.frames == 0
    drive(engine, samples_of(model, 12)[6:])
    assert memory.counts.frames > 0
    assert isinstance(memory.compressor, AttentionCompressor)
    assert len(memory.compressor._queries) == len(shown)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3, 2], [0, 1, 2, 3, 4]),
        ([100], list(range(36, 100))),
        # 64 // 2 of the first, all of the second.
        ([40, 5], [*range(8, 40), *range(40, 45)]),
    ],
)
def test_the_last_rows_of_every_question_are_watched(lengths: list[int], expected: list[int]) -> None:
    assert watched_rows(lengths).tolist() == expected


def test_of_many_questions_the_ends_of_some_spread_evenly() -> None:
    rows = watched_rows([3] * 200)
    assert len(rows) == WATCHED_ROWS
    assert bool((rows % 3 == 2).all())
    assert np.diff(rows).max() <= 12
