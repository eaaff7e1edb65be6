"""Clips as several parts of the memory bench look at them: watched once by each model, asked now and then."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.lab.bench.frames import clip_names, made_clips, prune_clip, read_clip
from cluster.lab.bench.memory.splits import Asked
from cluster.lab.bench.node import DelayedArena
from cluster.lab.bench.window import QUESTION
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retrieved, Retriever
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.stack import TierStack
from cluster.models import load_model
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, AskSpec, FrameSample, MemorySpec, StreamSpec

_SCENE = 64
_LOOK = 16
_NOISE = 0.3


def made_chunks(
    stream: str, frames: int, *, layers: int, heads: int, rows: int, columns: int, width: int, seed: int = 0
) -> Iterator[KVChunk]:
    """``frames`` frames, one a second, of ``rows * columns`` tokens; another scene every 64 of them.

    Keys ``[layers, heads, t, width]`` are the sum of what a place always looks like, what the scene looks like, and
    noise, so that tokens form clusters, and ever new ones.
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


CAMERA = "camera"
QUESTIONS = (
    "Is a person walking through the picture?",
    "What happened before the car came?",
    "Did anyone leave something behind?",
    "How many people were there?",
)
ASK_EVERY = 16
"""Frames that leave a window between two questions."""

_ROOM = 2**30


@dataclass(slots=True, eq=False)
class Watched:
    """``chunks``: what left one clip's windows; ``encode_s``: how long its windows took to compute; ``asked``: the raw
    queries of questions asked meanwhile, over all that was remembered by then."""

    clip: str
    samples: Sequence[FrameSample]
    chunks: list[KVChunk] = field(default_factory=list)
    encode_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of one layer and head."""
        return sum(chunk.tokens for chunk in self.chunks)


class Listener(Retriever):
    """A retriever that remembers what it was asked, predictions apart.

    ``found`` by table: the query rows ``[r, D]``, and for each token whether it was among those named ``[n]``.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self.predicted: Listener | None = None

    def select(self, query: Tensor, table: ClusterTable) -> Retrieved:
        """See :class:`Retriever`."""
        return self.select_layer(query[None], [table])[0]

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Retrieved]:
        """See :class:`Retriever`."""
        chosen = self._retriever.select_layer(query, tables)
        for rows, table, one in zip(query, tables, chosen, strict=True):
            # As the table is now: a cluster may be split once the question is over.
            self.found[id(table)] = rows.float().clone(), torch.isin(table.of_token, one.clusters)
        return chosen

    def for_prediction(self) -> Listener:
        """See :class:`Retriever`."""
        self.predicted = Listener(self._retriever.for_prediction())
        return self.predicted

    def of(self, memory: StreamMemory, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """What was found for a layer's and head's own rows."""
        return self.found[id(memory.heads[layer][head].organiser.table)]


class ListeningBank(MemoryBank):
    """A bank that also keeps what comes in (``chunks``) and, where ``listen`` is set, what is asked (``listener``)."""

    def __init__(self, tiers: TierStack, *, listen: bool = False) -> None:
        super().__init__(tiers)
        self.chunks: list[KVChunk] = []
        self.listen = listen
        self.listener: Listener | None = None

    def accept_chunk(self, chunk: KVChunk) -> None:
        """See :class:`MemoryBank`."""
        self.chunks.append(chunk)
        super().accept_chunk(chunk)

    def get_memory(self, stream: str) -> tuple[StreamMemory, Retriever]:
        """See :class:`MemoryBank`."""
        memory, retriever = super().get_memory(stream)
        if not self.listen:
            return memory, retriever
        self.listener = Listener(retriever)
        return memory, self.listener

    def queries(self, stream: str) -> list[Tensor]:
        """Raw rows per layer ``[Hkv, r, D]`` of the last question."""
        assert self.listener is not None
        return self._rows(stream, self.listener)

    def predictions(self, stream: str) -> list[Tensor]:
        """Raw rows that were predicted of every layer but the first."""
        assert self.listener is not None
        assert self.listener.predicted is not None
        return self._rows(stream, self.listener.predicted, first=1)

    def _rows(self, stream: str, listener: Listener, first: int = 0) -> list[Tensor]:
        memory, _ = super().get_memory(stream)
        return [
            torch.stack([listener.of(memory, layer, h)[0] for h in range(len(memory.heads[layer]))])
            for layer in range(first, len(memory.heads))
        ]


class Footage:
    """The clips of one run. ``directory``: where made clips go."""

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

    @property
    def clips(self) -> list[Path]:
        """Those that were named, else two made ones."""
        if self.args.clips:
            return list(self.args.clips)
        made = [self.directory / "street.mp4", self.directory / "noisy.mp4"]
        return made if all(path.exists() for path in made) else made_clips(self.directory)

    def _samples(self, name: str) -> list[tuple[str, list[FrameSample]]]:
        """Every clip as a decoder would send it to this model."""
        args, geometry = self.args, self.model(name).geometry
        seconds = args.seconds if name == args.model else min(args.seconds, args.bench_seconds)
        found = []
        for clip, path in clip_names(self.clips):
            frames = read_clip(path, geometry, fps=args.fps, at_least=seconds, at_most=seconds)
            found.append((clip, prune_clip(frames, CAMERA, args.pruner).samples))
        return found

    def _watched(self, name: str) -> list[Watched]:
        return [self.watch(name, clip, samples) for clip, samples in self.samples(name)]

    def watch(self, name: str, clip: str, samples: Sequence[FrameSample]) -> Watched:
        """Answer a clip's windows with one model and keep what leaves them."""
        # Not at hand: a layer's query is predicted only where blocks have a way to go.
        bank = ListeningBank(TierStack([DelayedArena(_ROOM)]), listen=True)
        engine = NativeEngine(self.model(name), memories=bank)
        everything = MemorySpec(
            compressor="none", organiser="frames", retriever="top_k", retriever_options={"share": 1.0}, cap_bytes=_ROOM
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
                # Each with its predictions, whichever way is faster here.
                engine.ask(AskSpec(CAMERA, text, max_new_tokens=1), prefetch=True).step()
                watched.asked.append(Asked(len(bank.chunks), bank.queries(CAMERA), bank.predictions(CAMERA)))
        watched.chunks = bank.chunks
        return watched
