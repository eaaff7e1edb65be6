"""Streaming encode mode against the dense reference, and against masked attention written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from cluster.engine.native.streaming import StreamingEncoder
from cluster.engine.window.encode import batch_of
from cluster.engine.window.stream import HeldFrame
from cluster.errors import ConfigError, NotReadyError
from cluster.lab.bench.synthetic import SyntheticCamera
from cluster.memory.layer import KVChunk
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve.base import Retrieved, Retriever
from cluster.memory.retrieve.top_k import TopK
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models import load_model
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.models.checkpoint import INSTRUCTION
from cluster.types import AskSpec, FrameSample, MemorySpec

TEXT = "Is anyone climbing the fence?"
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
# Whether the tokens of the second frame are seen by those of the first.
Sees = Callable[[int, int], bool]


class Recording(StreamMemory):
    """Keeps what came in as it was."""

    def __init__(self, **spec: Any) -> None:
        standard: dict[str, Any] = {"compressor": "none", "organiser": "resv", "block_frames": 3}
        super().__init__("cam", MemorySpec(**standard | spec), TierStack([Arena(64 * 2**20)]))
        self.came: list[KVChunk] = []

    def add(self, chunk: KVChunk) -> None:
        self.came.append(chunk)
        super().add(chunk)


class Oldest(Retriever):
    """Always the cluster that was founded first."""

    def select(self, query: Tensor, table: ClusterTable) -> Retrieved:
        return Retrieved(torch.arange(min(1, len(table))), 0.0)


@pytest.fixture(scope="module", params=["tiny-qwen2_5_vl", "tiny-internvl3"])
def family(request: Any) -> VisionLanguageModel:
    torch.set_num_threads(1)
    model = load_model(request.param)
    # Asked in the very words of a standing question, as the reference is.
    model.settings = dataclasses.replace(model.settings, open_instruction=INSTRUCTION)
    return model


def samples_of(model: VisionLanguageModel, count: int, **options: Any) -> list[FrameSample]:
    """One frame a second."""
    camera = SyntheticCamera("cam", model.geometry, width=84, height=56, fps=model.geometry.temporal, **options)
    return [camera.sample(number) for number in range(count)]


def encoded(encoder: StreamingEncoder, samples: Sequence[FrameSample]) -> tuple[Tensor, Tensor]:
    """Raw KV ``[L, Hkv, n, d]`` of all frames, those in the memory first."""
    for sample in samples:
        encoder.push(sample)
    assert isinstance(encoder.memory, Recording)
    key, value = encoder.kv.stretch()
    gone = encoder.memory.came
    return torch.cat([*(c.key for c in gone), key], dim=2), torch.cat([*(c.value for c in gone), value], dim=2)


def asked(encoder: StreamingEncoder, **options: Any) -> Tensor:
    run = encoder.ask(AskSpec("cam", TEXT), **options)
    run.step()
    return run.logits


@contextmanager
def projections(model: VisionLanguageModel) -> Iterator[dict[str, list[Tensor]]]:
    """Raw keys and values per layer ``[n, Hkv d]`` of what the model itself computes meanwhile."""
    seen: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _m, _i, out, name=name: seen[name].append(out[0]))
        for layer in model.layers
        for name in seen
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def reference(model: VisionLanguageModel, samples: Sequence[FrameSample]) -> tuple[Tensor, Tensor, Tensor]:
    """Raw KV ``[L, Hkv, n, d]`` of the frames and the answer's logits, from transformers' own dense forward."""
    batches = [batch_of(HeldFrame.of(sample)) for sample in samples]
    with projections(model) as seen:
        logits = model.reference_logits(batches, [sample.pts / 1e6 for sample in samples], TEXT)
    heads = model.text_config.num_key_value_heads
    rows = slice(len(model.system_ids()), -len(model.question_ids(TEXT)))
    key, value = (
        torch.stack([part[rows].unflatten(1, (heads, -1)).transpose(0, 1) for part in s]) for s in seen.values()
    )
    return key, value, logits


def masked(model: VisionLanguageModel, samples: Sequence[FrameSample], sees: Sees) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one dense mask over all tokens; the question is frame ``len(samples)``."""
    frames = [model.encode([batch_of(HeldFrame.of(sample))])[0] for sample in samples]
    system, ask = model.system_ids(), model.question_ids(TEXT)
    spans = [
        FrameSpan((s.pts - samples[0].pts) / 1e6, (s.pts - samples[0].pts) // s.duration, f.cells, s.grid)
        for s, f in zip(samples, frames, strict=True)
    ]
    window = model.window_positions(len(system), spans)
    after = torch.arange(window.next, window.next + len(ask)).expand(3, -1)
    cos, sin = model.rotary(torch.cat([torch.arange(len(system)).expand(3, -1), *window.frames, after], dim=1))
    hidden = torch.cat([model.embed(torch.tensor(system)), *(f.embeds for f in frames), model.embed(torch.tensor(ask))])
    lengths = [len(system), *map(len, frames), len(ask)]
    owner = torch.repeat_interleave(torch.arange(-1, len(frames) + 1), torch.tensor(lengths))
    allowed = torch.tensor([[b == -1 or a == b or sees(a, b) for b in owner.tolist()] for a in owner.tolist()]).tril()
    config = model.text_config
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    keys, values = [], []
    for layer in model.layers:
        own = layer.self_attn
        q, k, v = (
            project(layer.input_layernorm(hidden)).unflatten(1, (count, -1)).transpose(0, 1)
            for project, count in ((own.q_proj, heads), (own.k_proj, shared), (own.v_proj, shared))
        )
        keys.append(k)
        values.append(v)
        turned_q, turned_k = (x[0] for x in apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None]))
        scores = turned_q @ turned_k.repeat_interleave(heads // shared, 0).transpose(1, 2) * own.scaling
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        mixed = (weights @ v.repeat_interleave(heads // shared, 0)).transpose(0, 1).flatten(1)
        hidden = hidden + own.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    rows = slice(len(system), -len(ask))
    return torch.stack(keys)[:, :, rows], torch.stack(values)[:, :, rows], model.logits(hidden[-1:])[0]


def close(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@torch.no_grad()
def test_a_window_that_holds_all_is_the_dense_reference(family: VisionLanguageModel) -> None:
    samples = samples_of(family, 6, anchor_every=1)
    encoder = StreamingEncoder(family, Recording(), None, local_frames=8)
    close((*encoded(encoder, samples), asked(encoder)), reference(family, samples))
    assert not encoder.memory.frames


@pytest.mark.parametrize("organiser", ["resv", "frames", "tokens"])
@pytest.mark.parametrize("prefetch", [True, False])
@torch.no_grad()
def test_with_everything_retrieved_the_window_does_not_matter(
    family: VisionLanguageModel, organiser: str, prefetch: bool
) -> None:
    samples = samples_of(family, 8, anchor_every=1)
    memory = Recording(organiser=organiser)
    encoder = StreamingEncoder(family, memory, TopK(share=1.0), local_frames=2, prefetch=prefetch)
    close((*encoded(encoder, samples), asked(encoder)), reference(family, samples))
    # Some of them in clusters that lie in the tiers, others still waiting.
    assert memory.frames == 6
    assert encoder.stats.clusters > 0
    assert encoder.stats.attended == encoder.stats.held > 0


# Beside the local window: nothing; the oldest frame.
@pytest.mark.parametrize("retriever", [None, Oldest()])
@pytest.mark.parametrize("pruning", [{"anchor_every": 1}, {"kept": 0.4, "empty": 0.4, "anchor_every": 5}])
@torch.no_grad()
def test_what_is_not_retrieved_is_not_seen(
    family: VisionLanguageModel, retriever: Retriever | None, pruning: dict[str, Any]
) -> None:
    samples = samples_of(family, 10, **pruning)
    assert (min(sample.tokens for sample in samples) == 0) == ("empty" in pruning)
    encoder = StreamingEncoder(family, Recording(organiser="frames", block_frames=1), retriever, local_frames=3)
    found = (*encoded(encoder, samples), asked(encoder))

    def sees(row: int, other: int) -> bool:
        return row - other <= 3 or (retriever is not None and other == 0)

    close(found, masked(family, samples, sees))
    assert not torch.allclose(found[0], masked(family, samples, lambda _row, _other: True)[0], **CLOSE)


@torch.no_grad()
def test_a_question_may_be_read_for_by_another_retriever_than_frames(family: VisionLanguageModel) -> None:
    samples = samples_of(family, 7, anchor_every=1)
    encoder = StreamingEncoder(family, Recording(), None, local_frames=2)
    found = encoded(encoder, samples)
    expected = masked(family, samples, lambda row, other: row == len(samples) or row - other <= 2)
    close((*found, asked(encoder, retriever=TopK(share=1.0))), expected)


def test_the_answer_is_what_is_told_of_it() -> None:
    model = load_model("tiny-qwen2_5_vl")
    encoder = StreamingEncoder(model, Recording(), TopK(share=0.5), local_frames=2)
    encoded(encoder, samples_of(model, 9, anchor_every=1))
    run = encoder.ask(AskSpec("cam", TEXT, max_new_tokens=3))
    while run.step() is not None:
        pass
    assert 0 < run.result.tokens_read < run.result.tokens_held
    assert (run.result.oldest, run.result.newest) == (0, 8_000_000)
    alone = encoder.ask(AskSpec("cam", TEXT, max_new_tokens=1, since_s=1.0))
    alone.step()
    assert {moment.start for moment in alone.result.moments} <= {7_000_000, 8_000_000}


def test_a_question_sees_the_window_as_it_is_when_it_is_answered() -> None:
    model = load_model("tiny-qwen2_5_vl")
    encoder = StreamingEncoder(model, Recording(), TopK(share=1.0), local_frames=2)
    samples = samples_of(model, 6, anchor_every=1)
    encoded(encoder, samples[:4])
    early = encoder.ask(AskSpec("cam", TEXT))
    encoded(encoder, samples[4:])
    early.step()
    assert torch.equal(early.logits, asked(encoder))


def test_the_window_is_bounded_and_nothing_is_forgotten() -> None:
    model = load_model("tiny-internvl3")
    encoder = StreamingEncoder(model, Recording(), TopK(share=0.1), local_frames=2)
    samples = samples_of(model, 60, anchor_every=1)
    capacity = 0
    for number, sample in enumerate(samples):
        encoder.push(sample)
        assert len(encoder.frames) <= 2
        if number == 10:
            capacity = encoder.kv.capacity
    assert encoder.kv.capacity == capacity
    encoder.flush()
    assert not encoder.frames
    assert encoder.kv.length == 0
    assert [chunk.index for chunk in encoder.memory.came] == list(range(60))  # type: ignore[attr-defined]
    # After the memory was squeezed into its span, questions are still answered.
    assert torch.isfinite(asked(encoder)).all()


def test_a_fresh_clock_sends_the_window_into_the_memory() -> None:
    model = load_model("tiny-qwen2_5_vl")
    encoder = StreamingEncoder(model, Recording(), TopK(share=1.0), local_frames=3)
    samples = samples_of(model, 4, anchor_every=1)
    encoded(encoder, [*samples, *samples])
    assert [frame.pts for frame in encoder.frames] == [sample.pts for sample in samples[1:]]
    assert encoder.memory.frames == 5
    assert torch.isfinite(asked(encoder)).all()


def test_what_cannot_be_encoded_is_refused() -> None:
    model = load_model("tiny-qwen2_5_vl")
    with pytest.raises(ConfigError, match="at least one frame, not 0"):
        StreamingEncoder(model, Recording(), None, local_frames=0)
    encoder = StreamingEncoder(model, Recording(), None, local_frames=2)
    with pytest.raises(NotReadyError, match="nothing to remember"):
        encoder.ask(AskSpec("cam", TEXT))
    first, second = samples_of(model, 2)
    encoder.push(first)
    encoder.push(second)
    with pytest.raises(ValueError, match=r"not after 1000000"):
        encoder.push(second)
    with pytest.raises(ValueError, match="does not belong"):
        encoder.push(dataclasses.replace(second, stream="other"))
    with pytest.raises(ValueError, match="cut for another model"):
        encoder.push(dataclasses.replace(second, grid=dataclasses.replace(second.grid, patch=7)))
