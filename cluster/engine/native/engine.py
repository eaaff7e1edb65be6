"""``NativeEngine``: torch over transformers checkpoints, with selective KV reuse."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from cluster.engine.base import Engine, completed_future
from cluster.engine.native.ask_run import NativeAskRun
from cluster.engine.native.device import PassesInFlight, Stopwatch, lost_device
from cluster.engine.native.explanations import decode_explanations
from cluster.engine.native.forward import PassResult
from cluster.engine.native.frame_retrieval import BlockWait, plan_with_past
from cluster.engine.native.graphed_decode import GraphedDecode
from cluster.engine.native.idle_windows import IdleWindows
from cluster.engine.native.kernels import choose_kernel
from cluster.engine.native.passes import ahead_rows, pass_rows, run_passes
from cluster.engine.native.plan import Prompt, WindowPlan, commit_plan, invalidate_ahead, plan_window, system_prompt
from cluster.engine.window.encode import warm_up
from cluster.engine.window.kv import MEMORY_SHARE, KVPool, StreamKV, embedding_bytes, free_bytes
from cluster.engine.window.score import check_scores, end_token_ids, make_score, why_ids
from cluster.engine.window.step import ComputedWindow, WindowWork, last_valid_answers
from cluster.engine.window.stream import Stream, StreamFrame
from cluster.errors import CapacityError, NotReadyError
from cluster.memory.bank import MemoryBank
from cluster.memory.frame_retrieval import make_frame_retrieval
from cluster.memory.head_memory import MemoryShape
from cluster.memory.writer import Window
from cluster.models.base import VisionLanguageModel
from cluster.types import (
    Answer,
    AskSpec,
    DeletedMemory,
    FrameSample,
    MemoryStatus,
    Question,
    StreamSpec,
    TokenCount,
    WindowRequest,
)

log = logging.getLogger(__name__)

# Passes are halved down to this many rows when the device runs out of memory.
FEWEST_ROWS = 256


class NativeEngine(Engine):
    """The :class:`~cluster.engine.base.Engine` over one model. Not thread-safe.

    * ``score_temperature``, ``score_bias``: calibration of the yes/no score; ``None``: the model's own, else 1 and 0
    * ``max_new_tokens``: maximum length of an explanation
    * ``kernel``: name of an attention kernel; ``None``: the fastest for the model's device and dtype
    * ``memories``: store the KV of frames that leave their window, and serve free questions; ``None``: no memory
    * ``kv_bytes``, ``host_kv_bytes``: see :class:`~cluster.engine.window.kv.KVPool`
    * ``idle_kv_share``: share of the pool for windows between their strides; the excess moves to host memory
    * ``waiting_bytes``: device memory for ``memories``; ``None``: ``MEMORY_SHARE`` of the free memory
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        score_temperature: float | None = None,
        score_bias: float | None = None,
        max_new_tokens: int = 32,
        kernel: str | None = None,
        memories: MemoryBank | None = None,
        kv_bytes: int | None = None,
        host_kv_bytes: int | None = None,
        idle_kv_share: float = 0.75,
        waiting_bytes: int | None = None,
    ) -> None:
        super().__init__(model, max_new_tokens)
        if memories is not None:
            self._kv_sink, self._kv_lost = memories.accept_chunk, memories.count_lost_frame
        self.kernel = choose_kernel(model.device, model.dtype, kernel)
        self.pass_rows = pass_rows(model.device)
        self.ahead_rows = ahead_rows(model.device)
        if model.device.type == "cuda":
            # Allocations of first calls must not count as free memory below.
            warm_up(model)
        free = free_bytes(model)
        self._waiting_bytes = int(MEMORY_SHARE * free) if waiting_bytes is None else waiting_bytes
        # The memories' waiting frames share the GPU with the pool.
        beside = 0 if memories is None else self._waiting_bytes
        self.pool = KVPool(model, kv_bytes, pass_rows=self.pass_rows, host_bytes=host_kv_bytes, beside=beside)
        self.kernel.warm_up(model.text_config.num_attention_heads, self.pool.k[0])
        self.decode = GraphedDecode(model, self.pool, self.kernel)
        self.idle = IdleWindows(self.pool, self._streams, idle_kv_share)
        # Whether launches are asynchronous, and the windows of the next step.
        self.launches_return = model.device.type == "cuda"
        self._following: list[WindowRequest] = []
        self._waited = BlockWait()
        self.memories = memories
        if memories is not None and memories.window is None:
            memories.window = self._saved_window
            layers, _, heads, size = self.pool.k.shape
            memories.shape = MemoryShape(layers, heads, size, model.dtype)
        yes, no = model.yes_no_ids()
        self._score = make_score(model, yes, no, model.device, score_temperature, score_bias)
        self._answer_score = make_score(model, yes, no, model.device, free=True)
        self._ends = end_token_ids(model)
        self._why = why_ids(model)
        self._prompt = lru_cache(maxsize=1024)(self._make_prompt)
        self._system = system_prompt(model, self.pool, self.kernel)
        # Streams that may have enough work for a pass before their window ends.
        self._ready: dict[str, None] = {}
        self._passes_ahead = PassesInFlight(model.device)

    # -- streams --------------------------------------------------------------------------------------
    @property
    def window_tokens(self) -> float:
        # Host memory holds windows together with their embeddings.
        token = self.pool.slot_bytes + embedding_bytes(self.model)
        return float(self.pool.capacity + self.pool.host_capacity // token)

    @property
    def waiting_bytes(self) -> float:
        return math.inf if self.memories is None else float(self._waiting_bytes)

    @property
    def remembers(self) -> bool:
        return self.memories is not None

    def prepare(self, spec: StreamSpec) -> None:
        if self.memories is not None:
            self.memories.prepare_stream(spec.stream, spec.own_memory)

    @lost_device()
    def admit(self, spec: StreamSpec) -> None:
        self._check(spec)
        self._admit(spec, None if self.memories is None else self.memories.open_stream(spec.stream, spec.own_memory))

    @lost_device()
    def evict(self, stream: str, *, save: bool = True) -> None:
        held = self._streams.pop(stream, None)
        if held is None:
            return
        if self.memories is not None and stream in self.memories:
            held.reset()
            self.memories.release_stream(stream, save=save)
        held.kv.clear()

    def _stream_kv(self) -> StreamKV:
        return StreamKV(self.pool)

    @lost_device()
    def hand_over(self, stream: str) -> Future[bool]:
        held, saved = self._streams.get(stream), completed_future(False)
        if held is not None and self.memories is not None and stream in self.memories:
            saved = self.memories.hand_over(stream, held.reset)
        self.evict(stream)
        return saved

    def _saved_window(self, stream: str, has_room: Callable[[int], bool]) -> Window | None:
        held = self._streams.get(stream)
        return None if held is None or not has_room(held.nbytes) else self._snapshot(stream).dump

    @lost_device()
    def push(self, sample: FrameSample) -> list[WindowRequest]:
        closed = super().push(sample)
        stream = self._stream(sample.stream)
        if self.memories is not None and sample.stream in self.memories:
            newest, (memory, _) = stream.frames[-1], self.memories.get_memory(sample.stream)
            restarts, patient = newest.slot == 0, stream.spec.patient
            newest.memory_time = memory.next_time(sample.pts, restarts=restarts, patient=patient)
        stream.waiting_rows += sample.tokens
        if stream.waiting_rows >= self.ahead_rows[0]:
            self._ready[sample.stream] = None
        if self.idle.load_ahead(stream, closed[-1].end if closed else None):
            # Frames may have been received while the window was in host memory.
            self._ready[sample.stream] = None
        return closed

    # -- windows --------------------------------------------------------------------------------------
    @lost_device()
    def step(self, requests: Sequence[WindowRequest], following: Sequence[WindowRequest] = ()) -> list[Answer]:
        self.idle.park({request.stream for request in (*requests, *following)})
        stepped = {request.stream for request in requests}
        self._following = [request for request in following if self.launches_return and request.stream not in stepped]
        with self._model_work():
            answers = super().step(requests)
        # Their next windows' refreshed tokens can be computed ahead from now on.
        self._ready.update((request.stream, None) for request in requests)
        if self.memories is not None:
            try:
                self.memories.schedule_saves()
            except torch.AcceleratorError:
                raise
            except Exception:
                # The answers are not affected; saving is scheduled again after the next step.
                log.exception("memories and windows could not be saved after a step")
        return answers

    def _model_work(self) -> AbstractContextManager[None]:
        """Pauses the memories' background writes, except while the engine waits for the device."""
        return nullcontext() if self.memories is None else self.memories.writer.engine_step()

    def _compute(self, work: Sequence[WindowWork]) -> tuple[list[ComputedWindow], tuple[float, float, float]]:
        clock = Stopwatch(self.model.device)
        self._encode(work)
        clock.lap()
        try:
            with self._batch(work, self._plan) as plans:
                clock.lap()
                results = self._run(plans)
                scores, firsts = self._read(plans, results)
                texts, decoded = decode_explanations(self.model, self.decode, plans, firsts, self._why, self._ends)
                vision_s, plan_s, llm_s = clock.stop()
                self._encode_following()
                return self._commit(plans, results, scores, texts, decoded), (vision_s, plan_s, llm_s)
        except CapacityError:
            if len(work) == 1:
                raise
        # The windows do not fit the pool together.
        half = len(work) // 2
        (first, took), (second, more) = self._compute(work[:half]), self._compute(work[half:])
        return [*first, *second], (took[0] + more[0], took[1] + more[1], took[2] + more[2])

    def _encode_following(self) -> None:
        """Launch the tower on the next step's frames, to run while the host delivers this step's answers. Called after
        the scores are read, which would wait for it otherwise. Failures are left to the next step."""
        following, self._following = self._following, []
        if not following:
            return
        work: list[WindowWork] = []
        for request in following:
            stream = self._streams.get(request.stream)
            if stream is not None and last_valid_answers(stream, request.end) is None:
                work.append(WindowWork(stream, request, stream.window_frames(request.start, request.end)))
        try:
            self._encode(work)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("frames of the next step could not be encoded ahead")

    @contextmanager
    def _batch(
        self, work: Sequence[WindowWork], plan: Callable[[WindowWork], WindowPlan]
    ) -> Iterator[list[WindowPlan]]:
        """Plan these windows and keep them in the pool meanwhile; KV written by a pass that fails is invalidated."""
        self.idle.busy = {each.request.stream for each in work}
        self._waited = BlockWait()
        plans: list[WindowPlan] = []
        try:
            plans += map(plan, work)
            yield plans
        except BaseException:
            for planned in plans if len(plans) == len(work) else ():
                planned.stream.invalidate_tokens(planned.frames, planned.computed)
            raise
        finally:
            self.idle.busy = frozenset()
            for planned in plans:
                if planned.work.past is not None:
                    planned.work.past.close()
            for each in work:
                each.stream.discard_unfinished()

    def device_bytes(self, stream: str) -> int:
        """Bytes of a stream's window on the model's device."""
        return self._stream(stream).device_nbytes

    def _commit(
        self,
        plans: Sequence[WindowPlan],
        results: Sequence[PassResult],
        scores: Sequence[Sequence[float]],
        texts: Sequence[Sequence[str | None]],
        decoded: Sequence[int],
    ) -> list[ComputedWindow]:
        done: list[ComputedWindow] = []
        for i, (plan, result) in enumerate(zip(plans, results, strict=True)):
            progress = commit_plan(plan, result)
            plan.stream.progress = None
            plan.stream.waiting_rows = 0
            tokens = TokenCount(
                full=self._full(plan.frames),
                kept=plan.visual,
                reused=progress.overlap - round(progress.refreshed),
                refreshed=round(progress.refreshed),
                new=plan.visual - progress.overlap,
                query=plan.query,
                encoded=plan.stream.encoded,
            )
            work = progress.rows, progress.attended, decoded[i], progress.reads, progress.omitted
            done.append(ComputedWindow(tokens, scores[i], texts[i], *work))
        return done

    def _plan(self, each: WindowWork) -> WindowPlan:
        self.idle.loads += each.stream.kv.on_host
        prompts = [self._prompt(question) for question in each.stream.spec.questions]
        watch = self.memories is not None and self.memories.wants_queries(each.request.stream)
        return self._plan_rows(each, prompts, watch=watch)

    def _plan_rows(self, each: WindowWork, prompts: Sequence[Prompt], *, watch: bool = False) -> WindowPlan:
        name, stream = each.request.stream, each.stream
        plan = plan_window(self.model, self.pool, self._system, stream, each.request, each.frames, prompts, watch=watch)
        policy = make_frame_retrieval(stream.spec.memory)
        if policy is None or self.memories is None or name not in self.memories:
            return plan
        return plan_with_past(self.model, self._system, self.memories.get_memory(name)[0], policy, plan, self._waited)

    def _run(self, plans: Sequence[WindowPlan]) -> list[PassResult]:
        rows, work = self.pass_rows, [plan.work for plan in plans]
        if any(len(each.embeds) for each in work):
            self._system.store(self.pool, plans)
        while True:
            try:
                return run_passes(self.model, work, self.kernel, rows)
            except torch.OutOfMemoryError as error:
                if rows <= FEWEST_ROWS:
                    raise
                rows //= 2
                # Narrowing would compare with cached KV that the first attempt has overwritten.
                work = [replace(each, narrowing=None) for each in work]
                log.warning("out of memory; the rest of this step uses passes of at most %d rows: %s", rows, error)

    def _read(
        self, plans: Sequence[WindowPlan], results: Sequence[PassResult]
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and first answer tokens of all questions; also hands the watched queries to the memories."""
        logits = self.model.logits(torch.cat([result.hidden for result in results]))
        wanted = torch.stack((self._score(logits).double(), logits.argmax(dim=1).double()))
        with nullcontext() if self.memories is None else self.memories.writer.engine_waits():
            # Scores and first tokens in one device read.
            read = np.array(wanted.tolist())
        borders = np.cumsum([len(plan.prompts) for plan in plans])[:-1]
        scores, firsts = (np.split(part, borders) for part in (read[0], read[1].astype(np.int64)))
        for plan, result, of_plan in zip(plans, results, scores, strict=True):
            if np.isnan(of_plan).any():
                invalidate_ahead(plan)
            elif result.queries and self.memories is not None:
                self.memories.observe_queries(plan.request.stream, result.queries)
        check_scores(read[0].tolist(), self.model.dtype)
        return [part.tolist() for part in scores], [part.tolist() for part in firsts]

    # -- before windows end ---------------------------------------------------------------------------
    @lost_device()
    @torch.inference_mode()
    def prefill_ahead(self) -> bool:
        work = self._work_ahead()
        if not work:
            self.idle.park()
            return False
        try:
            # Memories may be written during this wait.
            self._passes_ahead.wait()
            with self._model_work():
                self._encode(work)
                with self._batch(work, lambda each: self._plan_rows(each, ())) as plans:
                    for plan, result in zip(plans, self._run(plans), strict=True):
                        commit_plan(plan, result)
                self._passes_ahead.add()
        except BaseException:
            for each in work:
                each.stream.failed_ahead = each.request.window
            raise
        return True

    def _work_ahead(self) -> list[WindowWork]:
        """Frames to encode and prefill, from streams with enough of them; windows that end soonest come first."""
        most = self.ahead_rows[1]
        windows = {name: self._unfinished(self._streams.get(name)) for name in self._ready}
        self._ready = {name: None for name, each in windows.items() if each is not None}
        work: list[WindowWork] = []
        taken = 0
        for each in sorted(filter(None, windows.values()), key=lambda each: each.request.end - each.frames[-1].pts):
            fitting = 0
            for frame in each.frames:
                rows = self._rows(frame)
                if taken and rows and taken + rows > most:
                    break
                taken += rows
                fitting += 1
            if fitting == len(each.frames):
                each.stream.waiting_rows = 0
                del self._ready[each.request.stream]
            each.frames = each.frames[:fitting]
            if each.frames:
                work.append(each)
            if taken >= most:
                break
        return work

    def _unfinished(self, stream: Stream | None) -> WindowWork | None:
        """The next window of a stream, if there is work on it before it ends."""
        if stream is None:
            return None
        clock = stream.clock
        begun = stream.progress is not None and stream.progress.window == clock.number
        if stream.spec.patient or stream.outstanding or not stream.frames or stream.failed_ahead == clock.number:
            return None
        computed = begun and stream.frames[-1].has_kv
        # A window copied to host memory is left alone until it is loaded, once per stride.
        if stream.kv.copied or computed or last_valid_answers(stream, clock.end) is not None:
            return None
        frames = stream.window_frames(clock.start, clock.end)
        request = WindowRequest(stream.spec.stream, clock.number, clock.start, clock.end, 0.0)
        return WindowWork(stream, request, frames) if frames else None

    def _rows(self, frame: StreamFrame) -> int:
        return 0 if frame.has_kv or not frame.size else frame.size + self._frame_text(frame.grid)

    # -- asking ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec, *, prefetch: bool | None = None) -> NativeAskRun:
        """See ``Engine.ask``; all model work is in the run's ``step``. ``prefetch``: see :class:`RetrievalSession`."""
        memory, retriever = self._memories().get_memory(ask.stream)
        stream = self._streams.get(ask.stream)
        if memory.newest is None and not (stream and any(frame.has_kv for frame in stream.frames)):
            raise NotReadyError(f"camera {ask.stream!r} has no memory yet; ask after its first window")
        return NativeAskRun(
            self.model,
            self._system,
            stream,
            memory,
            retriever,
            ask,
            self._ends,
            prefetch=prefetch,
            score=self._score if ask.standing else self._answer_score,
        )

    def delete_memory(self, stream: str, ago_s: float | None = None, life: str = "") -> Future[DeletedMemory]:
        newest = self._streams[stream].newest if stream in self._streams else None
        super().delete_memory(stream, ago_s, life)
        return self._memories().delete_memory(stream, ago_s, newest=newest, life=life)

    def memory_status(self, stream: str) -> MemoryStatus:
        return self._memories().get_memory(stream)[0].status()

    def _memories(self) -> MemoryBank:
        if self.memories is None:
            raise NotReadyError("this engine keeps no memory")
        return self.memories

    # -- set-up ---------------------------------------------------------------------------------------
    def _make_prompt(self, question: Question) -> Prompt:
        ids = torch.tensor(self.model.question_ids(question.text), dtype=torch.int64)
        longest = 1 + len(self._why) + self.max_new_tokens
        return Prompt(question, self.model.embed(ids), longest if question.explain else 0)
