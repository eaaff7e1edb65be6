"""``VllmEngine``: answers windows with vLLM, over frames encoded by our vision tower."""

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
from cluster.errors import ConfigError, NotReadyError
from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.types import Answer, AskSpec, DeletedMemory, StreamSpec, TokenCount, WindowRequest

if TYPE_CHECKING:
    from cluster.engine.vllm.ask_run import VllmAskRun
    from cluster.engine.vllm.core import PromptReply, PromptRequest
    from cluster.memory.tiers.stack import TierStack


class VllmEngine(Engine):
    """The :class:`~cluster.engine.base.Engine` on vLLM. Not thread-safe.

    Our vision tower encodes each frame once, in this process; embeddings and positions go to vLLM's engine core in its
    own processes. A step sends the questions of all its windows together. It raises ``UnavailableError`` if the core
    died or timed out; the next step restarts the core.

    * ``settings``: vLLM settings
    * ``score_temperature``, ``score_bias``, ``max_new_tokens``: as in ``NativeEngine``
    * ``release``: free the model's decoder layers in this process; nothing else may use the model afterwards
    * ``tiers``: storage for windows that outlive this process; not closed with the engine

    Raises:
        ConfigError: vLLM is not installed or of an untested version, or does not know an argument.
        ModelError: vLLM cannot serve the model.
    """

    no_memory = (
        "camera {!r} has no memory: engine vllm keeps nothing of what has left the window; use engine native to ask "
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
        self._checkpoints = None if tiers is None else WindowCheckpoints(tiers)
        self.settings = (settings or VllmSettings()).validated()
        yes, no = model.yes_no_ids()
        self._watched = [*yes, *no]
        # Log-probabilities of the watched tokens serve as logits: their shared normalisation cancels out.
        places = range(len(self._watched))
        sides = (places[: len(yes)], places[len(yes) :], torch.device("cpu"))
        self._score = make_score(model, *sides, score_temperature, score_bias)
        self._answer_score = make_score(model, *sides, free=True)
        self._ends = sorted(end_token_ids(model))
        self._system, self._why = model.system_ids(), why_ids(model)
        self._folder = tempfile.TemporaryDirectory(prefix="sightline-vllm-")
        try:
            self._start(release=release)
        except BaseException:
            if self._checkpoints is not None:
                self._checkpoints.close()
            self._folder.cleanup()
            raise

    # -- streams --------------------------------------------------------------------------------------
    def admit(self, spec: StreamSpec) -> None:
        """See ``Engine.admit``. A stream with a memory continues the window that another process saved."""
        self._check(spec)
        checkpoints, held = self._checkpoints, spec.stream in self._streams
        if self._tiers is not None and spec.memory is not None:
            self._tiers.set_cap(spec.stream, spec.memory.cap_bytes)
        found = None if held or spec.memory is None or checkpoints is None else checkpoints.find_window(spec)
        new = self._admit(spec, found)
        if checkpoints is not None and (new or (held and spec.memory is None)):
            checkpoints.queue_clear(spec.stream)

    def evict(self, stream: str, *, save: bool = True) -> None:  # noqa: ARG002
        # Nothing is in flight in vLLM: a step returns only once all its requests have ended.
        if self._streams.pop(stream, None) is not None and self._checkpoints is not None:
            self._checkpoints.cancel_window(stream)

    # -- migration ------------------------------------------------------------------------------------
    def hand_over(self, stream: str) -> Future[bool]:
        checkpoints = self._checkpoints_for(stream)
        saved = checkpoints is not None and checkpoints.hand_over(stream, self._snapshot(stream))
        self.evict(stream)
        return completed_future(saved)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``. A native engine's KV is discarded."""
        super().import_stream(spec, state)
        self._streams[spec.stream].invalidate_kv()

    def _checkpoints_for(self, stream: str) -> WindowCheckpoints | None:
        held = self._streams.get(stream)
        return None if held is None or held.spec.memory is None else self._checkpoints

    # -- windows --------------------------------------------------------------------------------------
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:
        answers = super().step(requests, following)
        for request in requests:
            checkpoints = self._checkpoints_for(request.stream)
            if checkpoints is not None:
                checkpoints.queue_window(request.stream, self._snapshot(request.stream))
        return answers

    def _encode_frames(self, frames: Sequence[StreamFrame]) -> Sequence[PatchBatch]:
        """Encode to host memory, from where embeddings go to vLLM: its KV cache leaves them no room on a GPU."""
        batches = super()._encode_frames(frames)
        for frame in frames:
            tokens = encoded_tokens(frame)
            frame.tokens = replace(tokens, embeds=tokens.embeds.cpu())
        return batches

    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        began = time.perf_counter()
        self._encode(work)
        encoded = time.perf_counter()
        requests = [self.layout.make_prompts(each.frames, self._question_ids(each.stream.spec)) for each in work]
        planned = time.perf_counter()
        replies = self._ask(requests)
        whys = self._ask([self._explanation_requests(*each) for each in zip(work, replies, strict=True)])
        seconds = (encoded - began, planned - encoded, time.perf_counter() - planned)
        done = [self._read(*each) for each in zip(work, replies, whys, strict=True)]
        return done, seconds

    def _ask(self, requests: Sequence[Sequence[PromptRequest]]) -> list[list[PromptReply]]:
        together = [ask for of_window in requests for ask in of_window]
        replies = iter(self.core.answer(together) if together else ())
        return [list(islice(replies, len(of_window))) for of_window in requests]

    def _explanation_requests(self, each: WindowWork, replies: Sequence[PromptReply]) -> list[PromptRequest]:
        """Requests for the explanations of answers whose question asks for one."""
        asked = [
            [*ids, *reply.tokens, *self._why]
            for question, ids, reply in zip(
                each.stream.spec.questions, self._question_ids(each.stream.spec), replies, strict=True
            )
            if question.explain
        ]
        return self.layout.make_prompts(each.frames, asked, self.max_new_tokens)

    def _question_ids(self, spec: StreamSpec) -> list[list[int]]:
        return [self.layout.question_ids(question.text) for question in spec.questions]

    def _read(self, each: WindowWork, replies: Sequence[PromptReply], whys: Sequence[PromptReply]) -> ComputedWindow:
        """Scores, texts and costs of a window, from the replies to its questions and to requests for explanations."""
        visual = sum(token_counts(each.frames))
        # Tokens cached for every question, including the first, come from an earlier window.
        reused = min(max(0, min(reply.cached for reply in replies) - len(self._system)), visual)
        questions = each.stream.spec.questions
        tokens = TokenCount(
            full=self._full(each.frames),
            kept=visual,
            reused=reused,
            refreshed=0,
            new=visual - reused,
            query=sum(map(len, self._question_ids(each.stream.spec))),
            encoded=each.stream.encoded,
        )
        scores = self._score(torch.tensor([reply.scores for reply in replies])).tolist()
        check_scores(scores, self.model.dtype)
        why = iter(whys)
        texts = [answer_text(self.model, next(why).tokens) if question.explain else None for question in questions]
        # Each token that is not cached attends to itself and its predecessors.
        asked = [*replies, *whys]
        rows = sum(reply.prompt - reply.cached for reply in asked)
        attended = sum(_triangle(reply.prompt) - _triangle(reply.cached) for reply in asked)
        return ComputedWindow(tokens, scores, texts, rows, attended, sum(max(0, len(r.tokens) - 1) for r in whys))

    # -- asking ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec) -> VllmAskRun:
        """See ``Engine.ask``; answered from the window alone."""
        held = self._streams.get(ask.stream)
        if held is None or held.spec.memory is None:
            raise NotReadyError(f"camera {ask.stream!r} has no window here, or memory.enabled is off for it")
        if not any(frame.tokens is not None for frame in held.frames):
            raise NotReadyError(f"camera {ask.stream!r} has seen nothing yet; ask after its first window")
        from cluster.engine.vllm.ask_run import VllmAskRun

        score = self._score if ask.standing else self._answer_score
        return VllmAskRun(self.core, self.layout, held, ask, self._watched, score)

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        deleted = super().delete_memory(stream, ago_s, life)
        # Deletes the whole checkpoint: the next step saves what is left of the window.
        if self._checkpoints is not None:
            self._checkpoints.delete_stream(stream, life)
            if stream not in self._streams:
                self._checkpoints.tiers.set_cap(stream, None)
        return deleted

    # -- vLLM -----------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop vLLM's processes; the engine is unusable afterwards."""
        self.core.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._folder.cleanup()

    def _start(self, *, release: bool) -> None:
        from vllm.platforms import current_platform

        from cluster.engine.vllm import plugin
        from cluster.engine.vllm.core import VllmCore
        from cluster.engine.vllm.prompt_layout import TimeOrderLayout

        plugin.register()
        cpu = current_platform.is_cpu()
        served = write_model_folder(self.model, Path(self._folder.name), _cpu_head_sizes() if cpu else None)
        self.layout = TimeOrderLayout(self.model, served)
        if release:
            # The fingerprint needs the weights; they are freed before vLLM measures free memory.
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
            # The turn after the answer that asks why, and the explanation.
            most -= len(self._why) + self.max_new_tokens
        if longest > most:
            raise ConfigError(
                f"{spec.stream}: a window of {spec.window_s:g} s at {spec.fps:g} samples a second may have {longest} "
                f"tokens, but vLLM takes at most {most} with its memory; shorten the window, sample less often, "
                "shorten the anchor interval (a window may open that much earlier), or raise max_model_len and the KV "
                "cache memory under vllm.arguments"
            )


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _cpu_head_sizes() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return sorted(CPUAttentionBackend.get_supported_head_sizes())
