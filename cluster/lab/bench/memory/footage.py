"""Clips shared by the memory bench's parts: processed once per model, with questions asked along the way."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.engine.native.ask_run import NativeAskRun
from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.frames import clip_names, made_clips, prune_clip, read_clip
from cluster.lab.bench.node import DelayedArena
from cluster.lab.bench.window import QUESTION
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import head_size
from cluster.models.loading import load_model
from cluster.types import MICROSECONDS, AskSpec, FrameSample, MemorySpec, StreamSpec

IntArray = npt.NDArray[np.int64]

BENCH_S = 60.0
"""Maximum seconds of each clip for models other than ``--model``."""
_SCENE = 64
_LOOK = 16
_NOISE = 0.3


def made_chunks(
    stream: str, frames: int, *, layers: int, heads: int, rows: int, columns: int, width: int, seed: int = 0
) -> Iterator[KVChunk]:
    """Synthetic KV of ``frames`` frames, one per second, of ``rows * columns`` tokens; a new scene every 64 frames.

    Keys ``[layers, heads, t, width]`` are the sum of a constant per cell, a constant per scene, and noise, so that
    tokens keep forming new clusters.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = rows * columns
    place = torch.randn(layers, heads, tokens, width, generator=rng)
    scene, look = torch.zeros(layers, heads, 1, width), torch.zeros(_LOOK)
    for number in range(frames):
        if number % _SCENE == 0:
            scene = torch.randn(layers, heads, 1, width, generator=rng)
            look = torch.randn(_LOOK, generator=rng)
        noise = _NOISE * torch.randn(layers, heads, tokens, width, generator=rng)
        yield KVChunk(
            stream=stream,
            index=number,
            pts=number * MICROSECONDS,
            key=place + scene + noise,
            value=torch.randn(layers, heads, tokens, width, generator=rng),
            cell=torch.arange(tokens),
            rows=rows,
            columns=columns,
            mean_embedding=look + _NOISE * torch.randn(_LOOK, generator=rng),
        )


def model_chunks(model: VisionLanguageModel, frames: int, *, rows: int, columns: int) -> Iterator[KVChunk]:
    """:func:`made_chunks` of the model's shape."""
    config = model.text_config
    shape = {"layers": len(model.layers), "heads": config.num_key_value_heads, "width": head_size(config)}
    return made_chunks(CAMERA, frames, rows=rows, columns=columns, **shape)


def add_written(bank: MemoryBank, chunk: KVChunk) -> None:
    """Add a frame to a camera's memory and wait: frames arriving faster than they can be written are dropped."""
    bank.accept_chunk(chunk)
    bank.schedule_saves()
    bank.wait_written()


def run_question(engine: NativeEngine, text: str) -> NativeAskRun:
    """Ask a question about the camera's past; the answer is one token."""
    run = engine.ask(AskSpec(CAMERA, text, max_new_tokens=1))
    while run.step() is not None:
        pass
    return run


def covered_cells(box: Iterable[float], grid: tuple[int, int]) -> IntArray:
    """Cells of a ``grid`` (rows, columns) at least half inside a box (left, top, right, bottom, in cells)."""
    left, top, right, bottom = box
    down, across = (
        np.clip(np.minimum(np.arange(count) + 1, end) - np.maximum(np.arange(count), begin), 0, 1)
        for count, begin, end in zip(grid, (top, left), (bottom, right), strict=True)
    )
    return np.flatnonzero((down[:, None] * across[None]).ravel() >= 0.5)


CAMERA = "camera"
QUESTIONS = (
    "Is a person walking through the picture?",
    "What happened before the car came?",
    "Did anyone leave something behind?",
    "How many people were there?",
)
ASK_EVERY = 16
"""Number of frames that leave the window between two questions."""

_CAP = 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A question asked when ``frames`` frames had left the window. ``queries``: per layer ``[Hkv, r, D]``, before
    rotary; ``predicted``: the same for every layer but the first, as predicted by the layer before."""

    frames: int
    queries: Sequence[Tensor]
    predicted: Sequence[Tensor] = ()


@dataclass(slots=True, eq=False)
class Watched:
    """A processed clip. ``chunks``: KV that left its windows; ``encode_s``: their tokens' share of the windows' compute
    time; ``asked``: raw queries of questions asked along the way, over everything remembered so far."""

    clip: str
    samples: Sequence[FrameSample]
    chunks: list[KVChunk] = field(default_factory=list)
    encode_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens per layer and head."""
        return sum(chunk.tokens for chunk in self.chunks)


class Listener(Retriever):
    """A retriever that records its calls; those of predictions separately.

    ``calls``, one per layer: query rows ``[H, r, D]``, tables, and per head a mask of the selected tokens ``[n]``.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.calls: list[tuple[Tensor, Sequence[ClusterTable], list[Tensor]]] = []
        self.predicted: Listener | None = None

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        chosen = self._retriever.select_layer(query, tables)
        # Evaluate now: clusters may be split after the question.
        named = [torch.isin(table.of_token, one) for table, one in zip(tables, chosen, strict=True)]
        self.calls.append((query.clone(), tables, named))
        return chosen

    def for_prediction(self) -> Listener:
        self.predicted = Listener(self._retriever.for_prediction())
        return self.predicted

    def queries(self) -> list[Tensor]:
        """Query rows of each call ``[H, r, D]`` in float32."""
        return [query.float() for query, _, _ in self.calls]


class ListeningBank(MemoryBank):
    """A bank that records added ``chunks`` and, if ``listen`` is set, the calls of its retriever (``listener``)."""

    def __init__(self, tiers: TierStack, *, listen: bool = False) -> None:
        super().__init__(tiers)
        self.chunks: list[KVChunk] = []
        self.listen = listen
        self.listener: Listener | None = None

    def accept_chunk(self, chunk: KVChunk) -> None:
        self.chunks.append(chunk)
        super().accept_chunk(chunk)

    def get_memory(self, stream: str) -> tuple[StreamMemory, Retriever]:
        memory, retriever = super().get_memory(stream)
        if not self.listen:
            return memory, retriever
        self.listener = Listener(retriever)
        return memory, self.listener


class Footage:
    """The clips of one run. ``directory``: folder for generated clips."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.model = cache(self._model)
        self.samples = cache(self._samples)
        self.watched = cache(self._watched)

    def spec(self, memory: MemorySpec | None = None) -> StreamSpec:
        """The camera's settings."""
        args = self.args
        return StreamSpec(CAMERA, (QUESTION,), args.window, args.stride, static_gate=False, memory=memory)

    def _model(self, name: str) -> VisionLanguageModel:
        return load_model(name, device=self.args.device, dtype=self.args.dtype)

    @cached_property
    def clips(self) -> list[Path]:
        """The named clips, else two generated ones."""
        return list(self.args.clips or made_clips(self.directory))

    def _samples(self, name: str) -> list[tuple[str, list[FrameSample]]]:
        """Samples of every clip as a decoder would send them for this model."""
        args, geometry = self.args, self.model(name).geometry
        seconds = args.seconds if name == args.model else min(args.seconds, BENCH_S)
        found = []
        for clip, path in clip_names(self.clips):
            frames = read_clip(path, geometry, fps=args.fps, at_least=seconds, at_most=seconds)
            found.append((clip, prune_clip(frames, CAMERA, args.pruner).samples))
        return found

    def _watched(self, name: str) -> list[Watched]:
        return [self.watch(name, clip, samples) for clip, samples in self.samples(name)]

    def watch(self, name: str, clip: str, samples: Sequence[FrameSample]) -> Watched:
        """Answer a clip's windows with one model and record the KV that leaves them."""
        # A DelayedArena, because queries are predicted only if blocks are remote.
        bank = ListeningBank(TierStack([DelayedArena(_CAP)]), listen=True)
        engine = NativeEngine(self.model(name), memories=bank)
        everything = MemorySpec(
            compressor="none", organiser="frames", retriever="top_k", retriever_options={"share": 1.0}, cap_bytes=_CAP
        )
        engine.admit(self.spec(everything))
        watched = Watched(clip, samples)
        for sample in samples:
            for request in engine.push(sample):
                for answer in engine.step([request]):
                    watched.encode_s += answer.timing.vision_s + answer.timing.llm_s
            if len(bank.chunks) >= ASK_EVERY * (len(watched.asked) + 1):
                text = QUESTIONS[len(watched.asked) % len(QUESTIONS)]
                bank.get_memory(CAMERA)[0].settle()
                # Force prefetching, so that every question has predictions.
                engine.ask(AskSpec(CAMERA, text, max_new_tokens=1), prefetch=True).step()
                listener = bank.listener
                assert listener is not None
                assert listener.predicted is not None
                watched.asked.append(Asked(len(bank.chunks), listener.queries(), listener.predicted.queries()))
        watched.chunks = bank.chunks
        # Exclude the last window's tokens, which were computed too but have not left.
        watched.encode_s *= watched.tokens / max(1, sum(sample.tokens for sample in samples))
        return watched
