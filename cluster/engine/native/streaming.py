"""Streaming encode mode: every new frame attends to a local window and to what it retrieves of its camera's memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.asking import Asking
from cluster.engine.native.attention import install
from cluster.engine.native.kernels import kernel_for
from cluster.engine.native.plan import SystemPrompt, system_prompt
from cluster.engine.native.recall import RecallAttention, Surroundings, surroundings
from cluster.engine.window.encode import encode_pending
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.score import end_tokens
from cluster.engine.window.stream import HeldFrame, chunks_of, tokens_of
from cluster.engine.window.windowed import check_sample
from cluster.errors import ConfigError, NotReadyError
from cluster.memory.recollection import RecallStats, Recollection
from cluster.memory.retrieve.base import Retriever
from cluster.memory.stream import StreamMemory
from cluster.models.base import VisionLanguageModel
from cluster.types import AskSpec, FrameSample


class StreamingEncoder:
    """Encodes one camera frame by frame, as the papers on retrieved KV do (V-Rex, section II: iterative prefill;
    Mosaic, section V-A: frame encoding; ReKV by a sliding window, which is this without a retriever).

    A frame's tokens attend, in every layer and head, to the system prompt, to what the retriever names for their raw
    queries, to the local window, and to the frame's tokens before them. The engine's default mode differs: it computes
    whole windows for standing questions, and a memory is fed by the frames that leave them. Both hand a
    :class:`StreamMemory` the same chunks. The local window stands behind the memory as it does for a question (see
    :func:`surroundings`), so a memory longer than the span is squeezed at every frame anew. One thread makes all calls.

    Args:
        model: loaded; the engine's attention is installed in it.
        memory: takes the frames that leave the local window.
        retriever: which clusters a frame's queries need; without, a frame sees the local window alone.
        local_frames: frames of the local window, those that keep nothing among them.
        system: the model's system prompt where it is computed already.
        prefetch: see :class:`Recollection`.

    Raises:
        ConfigError: a local window of no frame.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        memory: StreamMemory,
        retriever: Retriever | None,
        *,
        local_frames: int,
        system: SystemPrompt | None = None,
        prefetch: bool = True,
    ) -> None:
        if local_frames < 1:
            raise ConfigError(f"a local window holds at least one frame, not {local_frames}")
        install(model)
        self.model, self.memory, self.retriever, self.local_frames = model, memory, retriever, local_frames
        self.frames: list[HeldFrame] = []
        self.kv = KVSlab.of(model)
        # What the last frame that was pushed read of the memory.
        self.stats = RecallStats()
        if system is None:
            system = system_prompt(model, kernel_for(model.device, model.dtype, None))
        self._system = system
        self._ends = end_tokens(model)
        self._prefetch = prefetch

    @torch.inference_mode()
    def push(self, sample: FrameSample) -> None:
        """Encode one frame; the oldest one beyond the local window goes into the memory.

        A fresh frame begins a clock anew: all frames before it leave the window.

        Raises:
            ValueError: it is of another camera, does not follow the frame before, or was not cut for this model.
        """
        if sample.stream != self.memory.stream:
            raise ValueError(f"a frame of {sample.stream!r} does not belong to the memory of {self.memory.stream!r}")
        check_sample(sample, self.model.geometry)
        if sample.fresh:
            self.flush()
        elif self.frames and sample.pts <= self.frames[-1].pts:
            raise ValueError(
                f"frame {sample.index} of {sample.stream} has pts {sample.pts}, not after {self.frames[-1].pts}; "
                "send frames in order, or mark the first one of a restarted clock as fresh"
            )
        frame = HeldFrame.of(sample)
        encode_pending(self.model, [frame])
        self.stats = RecallStats()
        if len(tokens_of(frame)):
            self._compute(frame)
        frame.computed = np.zeros((3, len(tokens_of(frame))), np.int64)
        self.kv.length += len(tokens_of(frame))
        self.frames.append(frame)
        self._leave(len(self.frames) - self.local_frames)

    def flush(self) -> None:
        """All frames leave the local window, as when the source ended."""
        self._leave(len(self.frames))

    def ask(self, ask: AskSpec, retriever: Retriever | None = None) -> Asking:
        """A question over the local window and the memory; the work is done by the answer's ``step``.

        Args:
            ask: the question.
            retriever: reads the memory for it, by default the one that reads it for frames.

        Raises:
            NotReadyError: nothing was encoded yet.
        """
        if self.memory.newest is None and not self.frames:
            raise NotReadyError(f"camera {self.memory.stream!r} has nothing to remember yet; ask after its first frame")
        read = self.retriever if retriever is None else retriever
        return Asking(self.model, self._system, self, self.memory, read, ask, self._ends, prefetch=self._prefetch)

    def _compute(self, frame: HeldFrame) -> None:
        """The frame's rows through all layers; their raw KV lies behind that of the local window afterwards."""
        tokens = tokens_of(frame)
        around = surroundings(self.model, self._system, self.memory, [*self.frames, frame], self.kv.stretch())
        self.kv.reserve(0, self.kv.length + len(tokens))
        if self.retriever is None:
            self._run(around, None, tokens.embeds)
            return
        with Recollection(
            self.memory, self.retriever, prefetch=self._prefetch, device=self.model.device, dtype=self.model.dtype
        ) as recollection:
            self._run(around, recollection, tokens.embeds)
        self.stats = recollection.stats

    def _run(self, around: Surroundings, recollection: Recollection | None, embeds: Tensor) -> None:
        first = self.kv.start + self.kv.length
        slots = slice(first, first + len(embeds))

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            self.kv.k[layer, :, slots], self.kv.v[layer, :, slots] = key, value

        RecallAttention(self.model, around, recollection, keep=keep).run(embeds, around.fresh)

    def _leave(self, count: int) -> None:
        gone = self.frames[: max(0, count)]
        for chunk in chunks_of(self.memory.stream, gone, self.kv):
            self.memory.add(chunk)
        self.kv.drop(sum(len(tokens_of(frame)) for frame in gone))
        del self.frames[: len(gone)]
