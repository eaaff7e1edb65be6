"""Records the KV that leaves a clip's windows, once, so that every memory setting gets the same.

The clip runs through the live code path: demuxer, decoder, pruner, engine. At every instant at which questions are
asked, a copy of the stream is flushed to record its window's KV too; the stream itself continues.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.engine.native.engine import NativeEngine
from cluster.errors import SightlineError
from cluster.files import replacing
from cluster.lab.evaluation.settings import WindowShape
from cluster.lab.report.compare import video_samples
from cluster.memory.bank import MemoryBank
from cluster.memory.head_memory import KVChunk
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample, MemorySpec, Question, StreamSpec, WindowRequest
from cluster.vision import make_pruner
from cluster.vision.sampler import PatchSampler

PRUNER = "replenish"
STREAM = "past"
# Every stream needs a question; the KV does not depend on it.
_STANDING = Question("standing", "Is anyone there?")
_MANIFESTS = 8 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Instant:
    """State when a question is asked. ``at_s``: seconds from the first frame; ``left``: number of frames that have left
    the window; ``window``: frames in it; ``queries``: the standing question's latest rows, per layer ``[Hkv, r, D]``,
    which compressors may go by; empty before the first window."""

    at_s: float
    left: int
    window: tuple[KVChunk, ...]
    queries: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """``begin``: timestamp of the first frame in microseconds; ``frame_s``: seconds per frame; ``left``: frames that
    left the window, in time order; ``instants``: ascending."""

    begin: int
    frame_s: float
    left: tuple[KVChunk, ...]
    instants: tuple[Instant, ...]

    def seen(self, number: int) -> list[KVChunk]:
        """All frames up to instant ``number``, in time order."""
        instant = self.instants[number]
        return [*self.left[: instant.left], *instant.window]

    def save(self, path: Path) -> None:
        """Write to a file. Raises ``SightlineError``: the file cannot be written."""
        instants = [(each.at_s, each.left, _packed(each.window), list(each.queries)) for each in self.instants]
        body = {"begin": self.begin, "frame_s": self.frame_s, "left": _packed(self.left), "instants": instants}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                torch.save(body, part)
        except (OSError, RuntimeError) as error:
            raise SightlineError(f"cannot write the recording {path}: {error}; choose another folder") from None

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read a saved recording; None if missing or invalid."""
        try:
            body = torch.load(path, weights_only=True)
            instants = [
                Instant(at_s, left, _unpacked(window), tuple(queries))
                for at_s, left, window, queries in body["instants"]
            ]
            return cls(body["begin"], body["frame_s"], _unpacked(body["left"]), tuple(instants))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError, ValueError):
            return None


def record(model: VisionLanguageModel, path: Path, shape: WindowShape, instants: Sequence[float]) -> Recording:
    """Run a clip once. ``instants``: seconds from the first frame, in any order, clamped to the clip's end. Raises
    ``SourceError``: the video cannot be read to its end; ``SightlineError``: no window was computed."""
    recorder = _StreamRecorder(model, shape, sorted(set(instants)))
    sampler = PatchSampler("footage", make_pruner(PRUNER, {}), shape.fps)
    processor = CodecProcessor(model.geometry, CodecOptions(fps=shape.fps, anchor_interval_s=shape.anchor_interval_s))
    for frame in video_samples(path, processor):
        recorder.feed(sampler.feed(frame))
    recorder.feed(sampler.flush())
    return recorder.finish(path)


class _ChunkCollector(MemoryBank):
    """Collects the chunks that leave each stream's window, in bfloat16 as on a GPU, so that byte shares match, and the
    latest question rows of any."""

    def __init__(self) -> None:
        super().__init__(TierStack([Arena(_MANIFESTS)]))
        self.taken: dict[str, list[KVChunk]] = {}
        self.queries: tuple[Tensor, ...] = ()

    def wants_queries(self, stream: str) -> bool:
        del stream
        return True

    def observe_queries(self, stream: str, queries: Sequence[Tensor]) -> None:
        del stream
        self.queries = tuple(each.cpu() for each in queries)

    def accept_chunk(self, chunk: KVChunk) -> None:
        self.taken.setdefault(chunk.stream, []).append(chunk.to(torch.bfloat16))


class _StreamRecorder:
    """One engine stream, and copies of it that are flushed at the instants of questions."""

    def __init__(self, model: VisionLanguageModel, shape: WindowShape, instants: list[float]) -> None:
        self._collector = _ChunkCollector()
        self._engine = NativeEngine(model, memories=self._collector)
        self._frame_s = model.geometry.temporal / shape.fps
        self._spec = StreamSpec(
            stream="footage",
            questions=(_STANDING,),
            window_s=shape.window_s,
            stride_s=shape.stride_s,
            static_gate=False,
            patient=True,
            memory=MemorySpec(),
        )
        self._engine.admit(self._spec)
        self._pending = instants
        self._instants: list[Instant] = []
        self._begin: int | None = None

    def feed(self, sample: FrameSample | None) -> None:
        """Push a frame, after recording the instants before it."""
        if sample is None:
            return
        if self._begin is None:
            self._begin = sample.pts
        ends_s = (sample.pts - self._begin + sample.duration * 7 // 8) / MICROSECONDS
        while self._pending and self._pending[0] < ends_s:
            self._record_instant()
        self._step(self._engine.push(replace(sample, stream=self._spec.stream)))

    def finish(self, path: Path) -> Recording:
        while self._pending:
            self._record_instant()
        left = self._collector.taken.get(self._spec.stream, [])
        if self._begin is None or not any(instant.left or instant.window for instant in self._instants):
            raise SightlineError(f"no window of {path} was computed before its questions")
        return Recording(self._begin, self._frame_s, tuple(left), tuple(self._instants))

    def _record_instant(self) -> None:
        at_s = self._pending.pop(0)
        left = len(self._collector.taken.get(self._spec.stream, ()))
        name = f"until {at_s:.3f}"
        copy = replace(self._spec, stream=name)
        if self._begin is not None:
            self._engine.admit(copy)
            self._engine.import_stream(copy, self._engine.export_stream(self._spec.stream))
            # As if the camera ended here: computes the frames since the last window, too.
            self._step(self._engine.flush(name))
            self._engine.evict(name)
        self._instants.append(Instant(at_s, left, tuple(self._collector.taken.pop(name, ())), self._collector.queries))

    def _step(self, requests: Sequence[WindowRequest]) -> None:
        for request in requests:
            self._engine.step([request])


def _packed(chunks: Sequence[KVChunk]) -> list[dict[str, Any]]:
    """Each frame as a dict of its fields, with tensors on the host."""
    frames = ({field.name: getattr(chunk, field.name) for field in fields(chunk)} for chunk in chunks)
    return [{k: v.cpu() if isinstance(v, Tensor) else v for k, v in frame.items()} for frame in frames]


def _unpacked(frames: Sequence[dict[str, Any]]) -> tuple[KVChunk, ...]:
    return tuple(KVChunk(**frame | {"stream": STREAM}) for frame in frames)
