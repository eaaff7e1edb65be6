"""``vllm:`` — how windows run on vLLM, with ``engine: vllm``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.config.base import Section


class VllmConfig(Section):
    """What vLLM computes of a window, and vLLM's own engine arguments."""

    mode: Literal["full", "pruned", "reuse"] = Field(
        default="pruned",
        description="full: every token of every window; pruned: the kept tokens of every window; reuse: kept tokens, "
        "of which the last window's are loaded through a KV connector.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Engine arguments of vLLM by their own names (tensor_parallel_size, quantization, "
        "gpu_memory_utilization, max_model_len, ...), as `vllm serve` has them.",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds vLLM may take for one batch of windows before its engine core counts as dead.",
    )
