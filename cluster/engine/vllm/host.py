"""Keeps one vLLM engine core answering: its arguments, its first start, and another one when it has died."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.inputs import tokens_input

from cluster.engine.vllm.core import WARM_UP_S, Ask, Reply, VllmCore
from cluster.engine.vllm.served import Served
from cluster.engine.vllm.settings import (
    CPU_KV_BYTES,
    VllmSettings,
)
from cluster.engine.vllm.stats import VllmStats
from cluster.errors import ConfigError, ModelError, UnavailableError

log = logging.getLogger(__name__)


class VllmHost:
    """A :class:`VllmCore` that is ended when it fails, and started anew when it is asked again.

    ``max_tokens``: longest prompt with its answer.

    Args:
        arguments: complete engine arguments (:func:`engine_arguments`).
        watched, ends: see :class:`VllmCore`.
        settings: how long an answer may take, and how often a core may fail.
        lost: called when all that a core held is gone.

    Raises:
        ModelError: vLLM refuses an argument, or its core does not start.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        watched: Sequence[int],
        ends: Sequence[int],
        settings: VllmSettings,
        lost: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._arguments, self._watched, self._ends, self._lost = arguments, watched, ends, lost
        self._failures = 0
        self._closed = False
        self._core: VllmCore | None = None
        self.max_tokens = self._begin()

    @property
    def stats(self) -> VllmStats:
        """What the engine core there is now did."""
        return VllmStats() if self._core is None else self._core.stats

    def processes(self) -> list[int]:
        """Ids of vLLM's engine core processes."""
        return [] if self._core is None else self._core.processes()

    def check(self) -> None:
        """Whether it can answer, or will start its core anew when it is next asked.

        Raises:
            UnavailableError: its cores failed too often in a row, or it was closed.
        """
        if self._closed:
            raise UnavailableError("this engine was closed")
        if self._failures > self.settings.restarts:
            raise UnavailableError(
                f"vLLM's engine core died or hung {self._failures} times in a row; the replica must be replaced, and "
                "its log says why they did"
            )

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """All prompts at once.

        Raises:
            UnavailableError: the core died, or did not answer in time; the next call starts another, while
                :meth:`check` allows it.
            ValueError: vLLM refuses a prompt.
        """
        self.check()
        if self._core is None:
            self._revive()
        assert self._core is not None
        try:
            replies = self._core.answer(asks, self.settings.timeout_s)
        except UnavailableError as error:
            log.error("%s", error)
            self._failures += 1
            # Now, so that its memory is free for whoever comes after it.
            self._end()
            self._lost()
            raise
        self._failures = 0
        return replies

    def close(self) -> None:
        """End vLLM's processes."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _revive(self) -> None:
        log.warning("starting another vLLM engine core")
        try:
            self.max_tokens = self._begin()
        except (ModelError, UnavailableError) as error:
            self._failures += 1
            raise UnavailableError(f"vLLM's engine core could not be started anew: {error}") from error

    def _begin(self) -> int:
        core = VllmCore(self._arguments, self._watched, self._ends)
        try:
            # What vLLM compiles on its first request must not count against the first window's time.
            core.answer([Ask(tokens_input(list(self._watched[:1])), 1)], WARM_UP_S)
        except BaseException:
            core.close()
            raise
        self._core = core
        return core.max_tokens


def engine_arguments(
    served: Served, dtype: torch.dtype, given: Mapping[str, Any], needed: Mapping[str, Any], *, cpu: bool
) -> dict[str, Any]:
    """All of vLLM's engine arguments: ``given`` by the operator, ``needed`` by how windows are laid out, and ours.

    Raises:
        ConfigError: an argument is both given and needed, or the KV cache cannot hold one prompt.
    """
    clash = sorted(set(needed) & set(given))
    if clash:
        raise ConfigError(f"vllm: this mode sets the engine argument {clash[0]!r} itself; leave it out")
    defaults: dict[str, Any] = {"max_model_len": -1}
    if cpu:
        defaults |= {"enforce_eager": True, "block_size": 32}
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(given):
            defaults["kv_cache_memory_bytes"] = CPU_KV_BYTES
    ours = {
        "model": served.weights,
        "hf_config_path": str(served.config),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        "enable_log_requests": False,
        "disable_log_stats": False,
    }
    complete = {**defaults, **needed, **given, **ours}
    _check_memory(complete, served.kv_bytes)
    return complete


def _check_memory(arguments: Mapping[str, Any], token_bytes: int) -> None:
    """Where both the KV cache's memory and the longest prompt are given, whether one fits into the other."""
    memory, longest = arguments.get("kv_cache_memory_bytes"), arguments.get("max_model_len")
    if not isinstance(memory, int) or not isinstance(longest, int):
        return
    # In whole blocks, of which vLLM keeps one for itself.
    block = int(arguments.get("block_size") or 16)
    needed = (math.ceil(max(longest, 1) / block) + 1) * block * token_bytes
    if needed > memory:
        raise ConfigError(
            f"vllm: a KV cache of {memory / 2**20:.0f} MiB is too small for one prompt of {max(longest, 1)} tokens, "
            f"which takes {needed / 2**20:.1f} MiB; raise kv_cache_memory_bytes or lower max_model_len"
        )
