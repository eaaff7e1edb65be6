"""vLLM's engine core in its own processes: start, deadline, shutdown, restart after failures, and statistics.

Uses ``AsyncLLM``, because ``LLMEngine`` waits for its core without a timeout, even after the core was killed. The event
loop belongs to this object and runs only inside its calls.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from cluster.engine.vllm.plugin import OWNED
from cluster.engine.vllm.settings import VllmSettings
from cluster.errors import ModelError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Grace period before a core's processes are killed, and timeout for cancelled requests.
SHUTDOWN_S = 2.0
# Timeout of the first request, which includes vLLM's compilation.
WARM_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A rendered prompt with one question (see :mod:`cluster.engine.vllm.prompt_items`); ``max_tokens``: maximum length
    of the answer, at least 1."""

    prompt: Any
    max_tokens: int = 1


@dataclass(frozen=True, slots=True)
class PromptReply:
    """``scores``: log-probabilities of the watched ids for the first token; ``tokens``: the answer, without its end
    token; ``prompt``: tokens of the prompt, ``cached`` of which were not computed."""

    scores: list[float]
    tokens: list[int]
    prompt: int
    cached: int


@dataclass(slots=True)
class VllmStats:
    """Tokens looked up and found in vLLM's prefix cache since its engine core started."""

    queries: int = 0
    hits: int = 0


class StatsRecorder(StatLoggerBase):
    """Accumulates scheduler statistics into ``stats``; see ``AsyncLLM(stat_loggers=...)``."""

    def __init__(self, vllm_config: Any, engine_index: int = 0, *, stats: VllmStats) -> None:
        del vllm_config, engine_index
        self.stats = stats

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del iteration_stats, mm_cache_stats, engine_idx
        prefix = None if scheduler_stats is None else scheduler_stats.prefix_cache_stats
        if prefix is not None:
            self.stats.queries += prefix.queries
            self.stats.hits += prefix.hits

    def log_engine_initialized(self) -> None:
        return


class VllmCollector(Collector):
    """Exports this process's vLLM metrics to Prometheus under vLLM's names; register it next to our collectors."""

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name.startswith("vllm:"):
                yield metric


class VllmCore:
    """vLLM's engine core, stopped when it fails and restarted at the next request. Not thread-safe.

    ``stats``: of the current core; ``max_tokens``: maximum length of a prompt and its answer.

    Args:
        arguments: complete engine arguments (:class:`AsyncEngineArgs`).
        watched: token ids whose log-probabilities every reply includes.
        ends: token ids that end an answer.
        settings: timeout and maximum restarts.

    Raises:
        ModelError: vLLM refuses an argument, or the core does not start.
    """

    def __init__(
        self, arguments: Mapping[str, Any], watched: Sequence[int], ends: Sequence[int], settings: VllmSettings
    ) -> None:
        self.settings = settings
        self._arguments, self._watched, self._ends = arguments, list(watched), list(ends)
        self._failures = 0
        self._closed = False
        self._numbers = count()
        self._llm: AsyncLLM | None = None
        self._start()

    def check(self) -> None:
        """Raise ``UnavailableError`` if this object was closed, or its core failed too often in a row to restart it
        again."""
        if self._closed:
            raise UnavailableError("this engine was closed")
        if self._failures > self.settings.restarts:
            raise UnavailableError(
                f"vLLM's engine core died or hung {self._failures} times in a row; the replica must be replaced; see "
                "its log for the cause"
            )

    def answer(self, requests: Sequence[PromptRequest]) -> list[PromptReply]:
        """Run all prompts in one batch. Raises ``UnavailableError``: the core died or did not answer in time (the next
        call restarts it, while :meth:`check` allows that); ``ValueError``: vLLM refuses a prompt."""
        self.check()
        if self._llm is None:
            log.warning("restarting vLLM's engine core")
            try:
                self._start()
            except (ModelError, UnavailableError) as error:
                self._failures += 1
                raise UnavailableError(f"vLLM's engine core could not be restarted: {error}") from error
        try:
            replies = self._run(requests, self.settings.timeout_s)
        except UnavailableError as error:
            log.error("%s", error)
            self._failures += 1
            # Stopped now, to free its memory for the next core.
            self._stop()
            raise
        self._failures = 0
        return replies

    def close(self) -> None:
        """Stop vLLM's processes, waiting a few seconds at most."""
        self._closed = True
        self._stop()

    # -- one core ---------------------------------------------------------------------------------
    def _start(self) -> None:
        self.stats = VllmStats()
        self._loop = asyncio.new_event_loop()
        try:
            self._llm = self._make()
            self.max_tokens = int(self._llm.model_config.max_model_len)
            # Warm up, so that compilation does not count against the first window's timeout.
            self._run([PromptRequest(tokens_input(self._watched[:1]))], WARM_UP_S)
        except BaseException:
            self._stop()
            raise

    def _make(self) -> AsyncLLM:
        recorder = partial(StatsRecorder, stats=self.stats)

        async def make() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), stat_loggers=[recorder])

        try:
            with _environment():
                return self._loop.run_until_complete(make())
        except Exception as error:
            raise ModelError(_refusal(error)) from error

    def _stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_S)
        if not self._loop.is_closed():
            # Let the loop's remaining tasks finish.
            self._loop.run_until_complete(_settle())
            self._loop.close()

    def _run(self, requests: Sequence[PromptRequest], timeout_s: float) -> list[PromptReply]:
        assert self._llm is not None
        try:
            if not self._llm.errored:
                return self._loop.run_until_complete(self._answer(self._llm, requests, timeout_s))
            why = "has died"
        except TimeoutError:
            why = f"did not answer {len(requests)} prompts within {timeout_s:g} s"
        except EngineDeadError:
            why = "has died"
        raise UnavailableError(f"vLLM's engine core {why}; it must be restarted")

    # -- on the loop ------------------------------------------------------------------------------
    async def _answer(self, llm: AsyncLLM, requests: Sequence[PromptRequest], timeout_s: float) -> list[PromptReply]:
        tasks = [asyncio.create_task(self._generate(llm, request)) for request in requests]
        try:
            done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((task.exception() for task in done if task.exception() is not None), None)
            if failed is not None:
                raise failed
            if pending:
                raise TimeoutError
            return [task.result() for task in tasks]
        finally:
            await _cancelled(tasks)

    async def _generate(self, llm: AsyncLLM, request: PromptRequest) -> PromptReply:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            logprob_token_ids=self._watched,
            stop_token_ids=self._ends,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last: RequestOutput | None = None
        try:
            async for output in llm.generate(request.prompt, params, f"window-{next(self._numbers)}"):
                last = output
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses a window: {_first_line(error)}") from error
        if last is None or not last.outputs or not last.outputs[0].logprobs:
            raise UnavailableError("vLLM ended a request without an answer; try again")
        answer = last.outputs[0]
        first: Any = answer.logprobs[0]
        tokens = list(answer.token_ids)
        if tokens and tokens[-1] in self._ends:
            del tokens[-1]
        return PromptReply(
            scores=[float(first[number].logprob) for number in self._watched],
            tokens=tokens,
            prompt=len(last.prompt_token_ids or ()),
            cached=last.num_cached_tokens or 0,
        )


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel running requests, without waiting long for a core that does not react."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=SHUTDOWN_S)
    for task in done:
        if not task.cancelled():
            # Retrieve the exception, or asyncio logs that it never was.
            task.exception()


async def _settle() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        await _cancelled(others)
    await asyncio.sleep(0)


@contextmanager
def _environment() -> Iterator[None]:
    """Environment of vLLM's processes; variables set by the operator take precedence.

    Processes are spawned, since a fork hangs once this process has used its OpenMP threads. On a CPU they get as many
    threads as this process, unbound: tower and language model run alternately.
    """
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        OWNED: "1",
    }
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        yield
    finally:
        for name in (*wanted, "OMP_NUM_THREADS"):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _refusal(error: Exception) -> str:
    if isinstance(error, RuntimeError) and "initialization failed" in str(error):
        return (
            "vLLM's engine core did not start; see its log for the cause, most often too little memory for the KV "
            "cache: lower max_model_len, or raise gpu_memory_utilization or kv_cache_memory_bytes under vllm.arguments"
        )
    return f"vLLM cannot serve this model with these arguments: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic puts the cause on the line after the field.
    said = next((line for line in lines if ("rror" in line and ":" in line) or "should be" in line), None)
    return (said or (lines[0] if lines else type(error).__name__)).rstrip(".")
