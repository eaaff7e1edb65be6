"""``VllmEngine``: windows answered by vLLM over frames encoded by our vision tower."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.engine.base import Engine, completed_future
from cluster.engine.vllm.served_model import write_model_folder
from cluster.engine.vllm.settings import VllmSettings, engine_arguments
from cluster.engine.vllm.window_checkpoint import WindowCheckpoints
from cluster.engine.window.checks import most_frames
from cluster.engine.window.score import answer_text, check_scores, end_token_ids, make_score, why_ids
from cluster.engine.window.step import ComputedWindow, WindowWork
from cluster.engine.window.stream import StreamFrame, encoded_tokens, token_counts
from cluster.errors import ConfigError
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.types import Answer, DeletedMemory, StreamSpec, TokenCount, WindowRequest

if TYPE_CHECKING:
    from cluster.engine.vllm.core import PromptReply, PromptRequest
    from cluster.memory.tiers.stack import TierStack


class VllmEngine(Engine):
    """The :class:`~cluster.engine.base.Engine` on vLLM. Not thread-safe.

    Our vision tower encodes each frame once, in this process; embeddings and positions go to vLLM's engine core in its
    own processes. A step sends all questions of all its windows together, and raises ``UnavailableError`` when the core
    died or timed out; the next step restarts it.

    * ``settings``: vLLM settings
    * ``score_temperature``, ``score_bias``, ``max_new_tokens``: as of ``NativeEngine``
    * ``release``: free the model's decoder layers in this process; nothing else may use the model then
    * ``tiers``: storage for windows beyond this process; not closed with the engine

    Raises:
        ConfigError: vLLM is not installed, of an untested version, or does not know an argument.
        ModelError: it cannot serve the model.
    """

    no_memory = (
        "camera {!r} cannot be asked: engine vllm keeps no memory of what left the window; take engine native to ask "
        "about the past"
    )

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        settings: VllmSettings | None = None,
        score_temperature: float | None = None,
        score_bias: float | None = None,
        max_new_tokens: int = 32,
        release: bool = False,
        tiers: TierStack | None = None,
    ) -> None:
        super().__init__(model, max_new_tokens)
        self._tiers = tiers
        self._keeper = None if tiers is None else WindowCheckpoints(tiers)
        self.settings = (settings or VllmSettings()).validated()
        yes, no = model.yes_no_ids()
        self._watched = [*yes, *no]
        # Scores are read off the watched tokens' log-probabilities: the normalisation they share cancels out.
        places = range(len(self._watched))
        device = torch.device("cpu")
        self._score = make_score(model, places[: len(yes)], places[len(yes) :], device, score_temperature, score_bias)
        self._ends = sorted(end_token_ids(model))
        self._system = model.system_ids()
        self._folder = tempfile.TemporaryDirectory(prefix="sightline-vllm-")
        try:
            self._start(release=release)
        except BaseException:
            if self._keeper is not None:
                self._keeper.close()
            self._folder.cleanup()
            raise

    # -- streams --------------------------------------------------------------------------------------
    def admit(self, spec: StreamSpec) -> None:
        """See ``Engine.admit``. For a stream with a memory, continues a window that another process saved."""
        self._check(spec)
        keeper, held = self._keeper, spec.stream in self._streams
        if self._tiers is not None and spec.memory is not None:
            self._tiers.set_cap(spec.stream, spec.memory.cap_bytes)
        found = None if held or spec.memory is None or keeper is None else keeper.find_window(spec)
        new = self._admit(spec, found)
        if keeper is not None and new:
            keeper.discard_stale(spec.stream)
        elif keeper is not None and held and spec.memory is None:
            keeper.queue_clear(spec.stream)

    def evict(self, stream: str, *, save: bool = True) -> None:  # noqa: ARG002
        # Nothing is in flight in vLLM, as a step ends with all its requests.
        if self._streams.pop(stream, None) is not None and self._keeper is not None:
            self._keeper.cancel_window(stream)

    # -- moving ---------------------------------------------------------------------------------------
    def hand_over(self, stream: str) -> Future[bool]:
        keeper = self._checkpoints_of(stream)
        saved = keeper is not None and keeper.hand_over(stream, self._snapshot(stream))
        self.evict(stream)
        return completed_future(saved)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``; replaces a stream of that name. A native engine's KV is discarded."""
        super().import_stream(spec, state)
        self._streams[spec.stream].invalidate_kv()

    def _checkpoints_of(self, stream: str) -> WindowCheckpoints | None:
        held = self._streams.get(stream)
        return None if held is None or held.spec.memory is None else self._keeper

    # -- windows --------------------------------------------------------------------------------------
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:
        answers = super().step(requests, following)
        for request in requests:
            keeper = self._checkpoints_of(request.stream)
            if keeper is not None:
                keeper.queue_window(request.stream, self._snapshot(request.stream))
        return answers

    def _encode_frames(self, frames: Sequence[StreamFrame]) -> Sequence[PatchBatch]:
        """As every engine, to host memory: from there they go to vLLM, whose KV cache leaves a GPU no room for them."""
        batches = super()._encode_frames(frames)
        for frame in frames:
            tokens = encoded_tokens(frame)
            frame.tokens = replace(tokens, embeds=tokens.embeds.cpu())
        return batches

    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        began = time.perf_counter()
        self._encode(work)
        encoded = time.perf_counter()
        asks = [self.layout.make_prompts(each.frames, each.stream.spec.questions) for each in work]
        planned = time.perf_counter()
        replies = self._ask(asks)
        whys = self._ask([self._ask_why(each, mine) for each, mine in zip(work, replies, strict=True)])
        seconds = (encoded - began, planned - encoded, time.perf_counter() - planned)
        done = [self._read(*each) for each in zip(work, replies, whys, strict=True)]
        return done, seconds

    def _ask(self, asks: Sequence[Sequence[PromptRequest]]) -> list[list[PromptReply]]:
        together = [ask for of_window in asks for ask in of_window]
        replies = iter(self.core.answer(together) if together else ())
        return [list(islice(replies, len(of_window))) for of_window in asks]

    def _ask_why(self, each: WindowWork, replies: Sequence[PromptReply]) -> list[PromptRequest]:
        """For an explanation of each answer that wants one."""
        said = [
            (question, reply.tokens)
            for question, reply in zip(each.stream.spec.questions, replies, strict=True)
            if question.explain
        ]
        return self.layout.make_prompts(each.frames, [ask for ask, _ in said], [answer for _, answer in said])

    def _read(self, each: WindowWork, replies: Sequence[PromptReply], whys: Sequence[PromptReply]) -> ComputedWindow:
        """What the replies to a window's questions, and their explanations, say and cost."""
        visual = sum(token_counts(each.frames))
        # What is cached at every question, the first one too, stems from an earlier window.
        reused = min(max(0, min(reply.cached for reply in replies) - len(self._system)), visual)
        questions = each.stream.spec.questions
        tokens = TokenCount(
            full=self._full(each.frames),
            kept=visual,
            reused=reused,
            refreshed=0,
            new=visual - reused,
            query=sum(len(self.layout.question_ids(question.text)) for question in questions),
            encoded=each.stream.encoded,
        )
        scores = self._score(torch.tensor([reply.scores for reply in replies])).tolist()
        check_scores(scores, self.model.dtype)
        said = iter(whys)
        texts = [answer_text(self.model, next(said).tokens) if question.explain else None for question in questions]
        # Each token that is not cached attends to itself and its predecessors.
        asked = [*replies, *whys]
        rows = sum(reply.prompt - reply.cached for reply in asked)
        attended = sum(_triangle(reply.prompt) - _triangle(reply.cached) for reply in asked)
        return ComputedWindow(tokens, scores, texts, rows, attended, sum(max(0, len(r.tokens) - 1) for r in whys))

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        forgotten = super().delete_memory(stream, ago_s, life)
        # Everything: the rest of the window is saved again with its next step.
        if self._keeper is not None:
            self._keeper.delete_stream(stream, life)
        return forgotten

    # -- vLLM -----------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop vLLM's processes; the engine is then unusable."""
        self.core.close()
        if self._keeper is not None:
            self._keeper.close()
        self._folder.cleanup()

    def _start(self, *, release: bool) -> None:
        from vllm.platforms import current_platform

        from cluster.engine.vllm import plugin
        from cluster.engine.vllm.core import VllmCore
        from cluster.engine.vllm.prompt_layout import TimeOrderLayout

        plugin.register()
        cpu = current_platform.is_cpu()
        served = write_model_folder(self.model, Path(self._folder.name), _cpu_head_sizes() if cpu else None)
        self.layout = TimeOrderLayout(self.model, served, self.max_new_tokens)
        if release:
            # Before its weights are gone, and before vLLM measures free memory.
            _ = self.fingerprint
            for layer in self.model.layers:
                layer.to("meta")
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        arguments = engine_arguments(served, self.model.dtype, self.settings.arguments, cpu=cpu)
        self.core = VllmCore(arguments, self._watched, self._ends, self.settings)

    # -- set-up ---------------------------------------------------------------------------------------
    def _check(self, spec: StreamSpec) -> None:
        super()._check(spec)
        frames = most_frames(spec, self.geometry) + 1
        questions = max(len(self.model.question_ids(question.text)) for question in spec.questions)
        grid = self.geometry.largest
        longest = len(self._system) + frames * (grid.tokens + self._frame_text(grid)) + questions
        most = self.core.max_tokens - 1
        if any(question.explain for question in spec.questions):
            # The turn that asks for it, behind the answer, and the explanation.
            most -= len(why_ids(self.model)) + self.max_new_tokens
        if longest > most:
            raise ConfigError(
                f"{spec.stream}: a window of {spec.window_s:g} s at {spec.fps:g} samples a second may have {longest} "
                f"tokens and vLLM takes {most} with the memory it has; shorten it, sample less often, let anchors come "
                "more often (a window opens up to their interval earlier), or raise max_model_len and the memory of "
                "its KV cache under vllm.arguments"
            )


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _cpu_head_sizes() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return sorted(CPUAttentionBackend.get_supported_head_sizes())
