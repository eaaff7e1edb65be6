"""Compares our logits with references for the same windows: transformers', and those of a fresh engine.

Used by ``sightline bench families`` on tiny presets and synthetic pictures, and by ``sightline models check`` on a
checkpoint and a clip.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.engine.native.engine import NativeEngine
from cluster.engine.window.encode import patch_batches
from cluster.engine.window.stream import StreamFrame
from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample, StreamSpec, WindowRequest


class LogitPair(NamedTuple):
    """Logits of the same window in float32: ``ours`` and ``reference``, both ``[questions, vocab]``."""

    ours: Tensor
    reference: Tensor

    @property
    def largest(self) -> float:
        return float((self.ours - self.reference).abs().max())

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the mean-centred reference: 0 for equal logits, about 1.4 for
        unrelated ones; NaN if either contains a non-finite number."""
        centred = self.reference - self.reference.mean(dim=1, keepdim=True)
        return float((self.ours - self.reference).norm() / centred.norm())


def against_library(
    model: VisionLanguageModel, spec: StreamSpec, whole: Sequence[FrameSample], kv_bytes: int | None = None
) -> Iterator[LogitPair]:
    """Compare every window that ``whole`` closes before the first slide with transformers' own forward pass.

    Asks the first question of ``spec``. ``whole``: unpruned frames; ``kv_bytes``: size of the engine's pool, ``None``
    for all available memory.
    """
    engine = _RecordingEngine(model, kv_bytes)
    engine.admit(replace(spec, questions=spec.questions[:1]))
    first = whole[0].pts
    for index, sample in enumerate(whole):
        for request in engine.push(sample):
            if request.start > first:
                return
            ours = engine.answer(request)
            seen = whole[: index + 1]
            times_s = [(each.pts - first) / MICROSECONDS for each in seen]
            batches = patch_batches([StreamFrame.of(each, time_s=t) for each, t in zip(seen, times_s, strict=True)])
            reference = model.reference_logits(batches, times_s, spec.questions[0].text)
            yield LogitPair(ours, reference[None].float())


def against_fresh(
    model: VisionLanguageModel, spec: StreamSpec, samples: Sequence[FrameSample], kv_bytes: int | None = None
) -> Iterator[LogitPair]:
    """Compare every window after a slide with the same window computed from scratch by a fresh engine.

    Both are equal if ``spec`` refreshes all tokens; see :func:`against_library` for the parameters.
    """
    engine = _RecordingEngine(model, kv_bytes)
    engine.admit(spec)
    for index, sample in enumerate(samples):
        for request in engine.push(sample):
            ours = engine.answer(request)
            if request.start > samples[0].pts:
                yield LogitPair(ours, _from_scratch(model, spec, samples[: index + 1], kv_bytes))


def _from_scratch(
    model: VisionLanguageModel, spec: StreamSpec, samples: Sequence[FrameSample], kv_bytes: int | None
) -> Tensor:
    """Logits of the last window that these frames close, computed from scratch."""
    engine = _RecordingEngine(model, kv_bytes)
    engine.admit(spec)
    last: list[WindowRequest] = []
    for sample in samples:
        last = engine.push(sample) or last
    return engine.answer(last[-1])


class _RecordingEngine(NativeEngine):
    """An engine that records the logits it scores."""

    def __init__(self, model: VisionLanguageModel, kv_bytes: int | None) -> None:
        super().__init__(model, kv_bytes=kv_bytes)
        self._seen: list[Tensor] = []
        score = self._score

        def recording(logits: Tensor) -> Tensor:
            self._seen.append(logits.to(torch.float32, copy=True))
            return score(logits)

        self._score = recording  # type: ignore[assignment]

    def answer(self, request: WindowRequest) -> Tensor:
        """Logits ``[questions, vocab]`` of this window, in float32."""
        self._seen.clear()
        self.step([request])
        return torch.cat(self._seen)
