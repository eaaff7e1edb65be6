"""``VllmEngine``: windows answered by vLLM, over frames that our own tower encoded."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cluster.engine.base import AskRun, finished
from cluster.engine.vllm.served import Served, serve_folder
from cluster.engine.vllm.settings import VllmSettings
from cluster.engine.window import export
from cluster.engine.window.export import fingerprint
from cluster.engine.window.kv import KVSlab
from cluster.engine.window.score import YesNoScore, answer_of, end_tokens
from cluster.engine.window.stream import HeldFrame, Stream, spans_of
from cluster.engine.window.windowed import (
    NOMINAL_FPS,
    WindowedEngine,
    WindowStats,
    Work,
    check_spec,
    first_set,
    shape_of,
)
from cluster.engine.window.windows import WindowClock
from cluster.errors import ConfigError, NotReadyError, UnavailableError
from cluster.models.base import VisionLanguageModel
from cluster.types import (
    MICROSECONDS,
    Answer,
    AskSpec,
    Forgotten,
    MemoryStatus,
    StreamSpec,
    Timing,
    TokenCount,
    WindowRequest,
)

if TYPE_CHECKING:
    from cluster.engine.vllm.connector.keeping import WindowKeeper
    from cluster.engine.vllm.core import Ask, Reply
    from cluster.engine.vllm.layout import Layout, Window
    from cluster.memory.tiers.stack import TierStack


Mode = Literal["full", "pruned", "reuse"]


class VllmEngine(WindowedEngine):
    """The :class:`~cluster.engine.base.Engine` on vLLM. Not thread-safe: one thread makes all calls.

    Frames go through our tower once, in this process, and their embeddings to vLLM's engine core, in processes of its
    own, with the window's positions. A step sends all questions of all its windows together, and raises
    ``UnavailableError`` when the core has died or did not answer in time; the next one starts it anew.

    * ``mode``: ``pruned`` and ``full`` differ in the frames they are sent (``full``: decoders prune nothing) and in
      nothing else; ``reuse`` loads what it can through a KV connector
    * ``settings``: how vLLM is run
    * ``score_temperature``, ``score_bias``, ``max_new_tokens``: as of ``NativeEngine``
    * ``release``: the model's decoder layers leave this process's memory; nothing else may use the model then
    * ``tiers``: where windows outlive this process, and with ``reuse`` their KV; not closed with the engine

    Raises:
        ConfigError: vLLM is not there, of an untested version, or does not know an argument.
        ModelError: it cannot serve the model.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        mode: Mode = "pruned",
        settings: VllmSettings | None = None,
        score_temperature: float | None = None,
        score_bias: float | None = None,
        max_new_tokens: int = 32,
        release: bool = False,
        tiers: TierStack | None = None,
    ) -> None:
        super().__init__(model, max_new_tokens)
        self.mode = mode
        self._tiers = tiers
        self._keeper: WindowKeeper | None = None
        self.settings = (settings or VllmSettings()).checked()
        yes, no = model.yes_no_ids()
        self._watched = [*yes, *no]
        # Scores are read off the watched tokens' log-probabilities: the normalisation they share cancels out.
        self._score = YesNoScore(
            range(len(yes)),
            range(len(yes), len(self._watched)),
            temperature=first_set(score_temperature, model.settings.score_temperature, 1.0),
            bias=first_set(score_bias, model.settings.score_bias, 0.0),
            device=torch.device("cpu"),
        )
        self._ends = sorted(end_tokens(model))
        self._system = model.system_ids()
        self._fingerprint = fingerprint(model)
        self._folder = tempfile.TemporaryDirectory(prefix="sightline-vllm-")
        try:
            self._start(release=release)
        except BaseException:
            self._folder.cleanup()
            raise

    # -- streams --------------------------------------------------------------------------------------
    def prepare(self, spec: StreamSpec) -> None:
        """See ``Engine.prepare``: what another process left is fetched block by block, when a window needs it."""

    def admit(self, spec: StreamSpec) -> None:
        """See ``Engine.admit``. A window that another process left in the tiers goes on, where the stream has a memory:
        nothing of one without it is written there."""
        self._check(spec)
        if self._tiers is not None and spec.memory is not None:
            self._tiers.set_cap(spec.stream, spec.memory.cap_bytes)
        window, stride = shape_of(spec)
        held = self._streams.get(spec.stream)
        new = held is None and not (spec.memory is not None and self._resumed(spec))
        if new and self._keeper is not None:
            self._keeper.begin(spec.stream)
        if held is not None:
            if spec.memory is None and self._keeper is not None:
                self._keeper.clear(spec.stream)
            held.spec = spec
            held.clock.reshape(window, stride)
        elif new:
            self._streams[spec.stream] = Stream(spec, KVSlab.of(self.model), WindowClock(window, stride))

    def evict(self, stream: str, *, save: bool = True) -> None:  # noqa: ARG002
        """See ``Engine.evict``. Nothing of it is under way in vLLM: a step ends with all its requests."""
        if self._streams.pop(stream, None) is not None:
            self.layout.forget(stream)

    # -- moving ---------------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> str:
        """What another engine's model must have to take over a stream of this one."""
        return self._fingerprint

    def hand_over(self, stream: str) -> Future[bool]:
        """See ``Engine.hand_over``: the window goes through the tiers, and with mode reuse its KV."""
        keeper = self._keeper_of(stream)
        saved = keeper is not None and keeper.hand_over(stream, self._snapshot(stream))
        self.evict(stream)
        return finished(saved)

    def export_stream(self, stream: str) -> bytes:
        """See ``Engine.export_stream``: frames and their embeddings, in the form that the native engine reads too."""
        return self._snapshot(stream).dump()

    def _snapshot(self, stream: str) -> export.Snapshot:
        return export.snapshot(self._stream(stream), self._fingerprint)

    def import_stream(self, spec: StreamSpec, state: bytes) -> None:
        """See ``Engine.import_stream``; a stream of that name is replaced. KV of a native engine is let go of."""
        self._check(spec)
        taken = export.load(state, spec, KVSlab.of(self.model), self._fingerprint)
        taken.lose_kv()
        taken.kv = KVSlab.of(self.model)
        taken.clock.reshape(*shape_of(spec))
        self.layout.forget(spec.stream)
        self._streams[spec.stream] = taken

    def _keeper_of(self, stream: str) -> WindowKeeper | None:
        held = self._streams.get(stream)
        return None if held is None or held.spec.memory is None else self._keeper

    def _resumed(self, spec: StreamSpec) -> bool:
        """Go on with a window that another process left; false where there is none, or none of use."""
        state = None if self._keeper is None else self._keeper.found(spec.stream)
        return state is not None and self._resume(spec, state)

    # -- windows --------------------------------------------------------------------------------------
    def step(self, requests: Sequence[WindowRequest]) -> list[Answer]:
        """See ``Engine.step``."""
        answers = super().step(requests)
        for request in requests:
            keeper = self._keeper_of(request.stream)
            if keeper is not None:
                keeper.note(request.stream, self._snapshot(request.stream))
        return answers

    def _compute(self, work: Sequence[Work], started: float, answers: dict[str, list[Answer]]) -> list[WindowStats]:
        from cluster.engine.vllm.layout import Window

        began = time.perf_counter()
        self._encode(work)
        encoded = time.perf_counter()
        windows = [
            Window(
                each.stream,
                each.request,
                each.frames,
                self.model.window_positions(len(self._system), spans_of(each.frames)),
                each.stream.spec.questions,
                [self.max_new_tokens if question.explain else 1 for question in each.stream.spec.questions],
            )
            for each in work
        ]
        asks = [self.layout.asks(window) for window in windows]
        planned = time.perf_counter()
        replies = self._ask(windows, asks)
        spent = (encoded - began, planned - encoded, time.perf_counter() - planned)
        now = time.monotonic()
        done: list[WindowStats] = []
        for each, window, mine, given in zip(work, windows, asks, replies, strict=True):
            counted = self.layout.done(window, given)
            query = sum(ask.query for ask in mine)
            tokens = TokenCount(
                full=self._full(each.frames),
                kept=window.visual,
                reused=counted.reused,
                refreshed=counted.refreshed,
                new=counted.new,
                query=query,
                encoded=each.encoded,
            )
            timing = Timing(max(0.0, started - each.request.arrived_s), *spent, max(0.0, now - each.request.arrived_s))
            scores = self._score(torch.tensor([reply.scores for reply in given])).tolist()
            said = [
                answer_of(
                    each.request,
                    question,
                    score,
                    self._text(reply.tokens) if question.explain else None,
                    tokens,
                    timing,
                )
                for question, score, reply in zip(window.questions, scores, given, strict=True)
            ]
            self._answered(each, said, answers)
            done.append(
                WindowStats(
                    stream=each.request.stream,
                    window=each.request.window,
                    tokens=tokens,
                    timing=timing,
                    computed=counted.rows,
                    attended=counted.attended,
                    tower_flops=each.tower_flops,
                    llm_flops=self.model.llm_flops(counted.rows, counted.attended),
                    decoded=sum(max(0, len(reply.tokens) - 1) for reply in given),
                )
            )
        return done

    def _ask(self, windows: Sequence[Window], asks: Sequence[Sequence[Ask]]) -> list[list[Reply]]:
        """The replies to all questions of each window; a window of which vLLM let a question fail is asked again."""
        replies = _in_turn(self.host.ask([ask for mine in asks for ask in mine]), asks)
        failed = [number for number, given in enumerate(replies) if any(reply.failed for reply in given)]
        if failed:
            retried = [self.layout.again(windows[number]) for number in failed]
            given_now = _in_turn(self.host.ask([ask for mine in retried for ask in mine]), retried)
            for number, given in zip(failed, given_now, strict=True):
                if any(reply.failed for reply in given):
                    raise UnavailableError(
                        f"vLLM ended window {windows[number].request.window} of {windows[number].request.stream!r} "
                        "twice without an answer; its log says why"
                    )
                replies[number] = given
        return replies

    def _encode_frames(self, frames: Sequence[HeldFrame]) -> Mapping[int, int]:
        return self.layout.encode(frames)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    # -- asking ---------------------------------------------------------------------------------------
    def ask(self, ask: AskSpec) -> AskRun:
        """See ``Engine.ask``.

        Raises:
            NotReadyError: always; this engine keeps no memory.
        """
        raise NotReadyError(
            f"camera {ask.stream!r} cannot be asked: engine vllm keeps no memory of what left the window; "
            "take engine native to ask about the past"
        )

    def forget(self, stream: str, ago_s: float | None = None) -> Forgotten:
        """See ``Engine.forget``: frames of the window go, here and in the tiers; there is no memory behind it."""
        held = self._streams.get(stream)
        frames = nbytes = 0
        if held is not None:
            frames, nbytes, newest = len(held.frames), held.nbytes, held.newest
            held.forget_before(None if ago_s is None or newest is None else newest - round(ago_s * MICROSECONDS))
            frames, nbytes = frames - len(held.frames), nbytes - held.nbytes
        # All of it: what is left of the window is written anew with its next step.
        self.layout.forget(stream, everywhere=True)
        return Forgotten(frames, nbytes)

    def describe(self, stream: str) -> MemoryStatus:
        """See ``Engine.describe``.

        Raises:
            NotReadyError: always; this engine keeps no memory.
        """
        raise NotReadyError(f"camera {stream!r} has no memory: engine vllm keeps none")

    # -- vLLM -----------------------------------------------------------------------------------------
    @property
    def vllm_stats(self) -> Any:
        """What vLLM did (:class:`~cluster.engine.vllm.stats.VllmStats`); begins anew with its engine core."""
        return self.host.stats

    def processes(self) -> list[int]:
        """Ids of vLLM's engine core processes."""
        return self.host.processes()

    def check(self) -> None:
        """Whether the engine can answer, or will start its core anew when it is next asked.

        Raises:
            UnavailableError: its engine cores failed too often in a row.
        """
        self.host.check()

    def close(self) -> None:
        """End vLLM's processes; the engine answers nothing any more."""
        self.host.close()
        self.layout.close()
        self._folder.cleanup()

    def _start(self, *, release: bool) -> None:
        from vllm.platforms import current_platform

        from cluster.engine.vllm import plugin
        from cluster.engine.vllm.connector.keeping import WindowKeeper
        from cluster.engine.vllm.host import VllmHost, engine_arguments

        plugin.register()
        cpu = current_platform.is_cpu()
        self.layout, self.served, needed = self._make_layout(
            Path(self._folder.name), _cpu_head_sizes() if cpu else None
        )
        if release:
            # Before vLLM looks how much memory is free.
            for layer in self.model.layers:
                layer.to("meta")
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        try:
            arguments = engine_arguments(self.served, self.model.dtype, self.settings.arguments, needed, cpu=cpu)
            self.host = VllmHost(arguments, self._watched, self._ends, self.settings, self.layout.lost)
        except BaseException:
            self.layout.close()
            raise
        if self._tiers is not None and self.layout.post is not None:
            self._keeper = WindowKeeper(self._tiers, self.layout.post, self.layout.held)

    def _make_layout(self, folder: Path, head_sizes: Sequence[int] | None) -> tuple[Layout, Served, Mapping[str, Any]]:
        """How windows become prompts, what vLLM serves for it, and the engine arguments that takes."""
        served = serve_folder(self.model, folder, head_sizes)
        if self.mode == "reuse":
            from cluster.engine.vllm.reuse import reuse_layout

            given = self.settings.arguments
            shards = int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1))
            layout, needed = reuse_layout(self.model, served, tier=self._tiers, shards=shards)
            return layout, served, needed
        from cluster.engine.vllm.connector.courier import Post
        from cluster.engine.vllm.layout import TimeOrder

        return TimeOrder(self.model, served, None if self._tiers is None else Post(self._tiers)), served, {}

    # -- set-up ---------------------------------------------------------------------------------------
    def _check(self, spec: StreamSpec) -> None:
        check_spec(spec, self.model)
        side = self.geometry.square or math.isqrt(self.geometry.max_pixels)
        frames = math.ceil(spec.window_s * NOMINAL_FPS / self.geometry.temporal) + 1
        questions = max(len(self.model.question_ids(question.text)) for question in spec.questions)
        longest = len(self._system) + frames * (self.geometry.grid(side, side).tokens + 16) + questions
        room = self.host.max_tokens - self.max_new_tokens
        if longest > room:
            raise ConfigError(
                f"{spec.stream}: a window of {spec.window_s:g} s may have {longest} tokens and vLLM takes {room} with "
                "the memory it has; shorten window_s, or raise max_model_len and the memory of its KV cache under "
                "vllm.arguments"
            )


def _in_turn(replies: Sequence[Reply], asks: Sequence[Sequence[Ask]]) -> list[list[Reply]]:
    """Replies in one row, as the asks were -> as many to each as it has asks."""
    rest = iter(replies)
    return [list(islice(rest, len(mine))) for mine in asks]


def _cpu_head_sizes() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return sorted(CPUAttentionBackend.get_supported_head_sizes())
