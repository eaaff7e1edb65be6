"""``model:``, ``vllm:``, ``simulated:`` — the model and its inference engine."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from cluster.config.problems import Section, Size


class SimulatedConfig(Section):
    """Step times and answers of the simulated engine; it stands in for the model ``model.name``."""

    costs: str | None = None
    """Cost model that says how long a step takes: one that comes with Sightline, by name, or a file written by
    `sightline bench cost`. It must be of model.name."""
    scores: str | None = None
    """JSON of `sightline eval accuracy` whose scores are drawn as answers; null takes recorded ones of the bundled
    model."""
    seed: int = Field(default=0, ge=0)
    """Seed of the answers and of the variation of steps."""


class VllmConfig(Section):
    """vLLM's own engine arguments, and its timeout."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments of vLLM by their own names (tensor_parallel_size, quantization, gpu_memory_utilization,
    max_model_len, ...), as `vllm serve` has them."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds vLLM may take for one batch of windows before its engine core counts as dead."""


_DEVICE = re.compile(r"cpu|cuda(:0)?")


class ModelConfig(Section):
    """The model every replica loads."""

    name: str = Field(default="demo", min_length=1)
    """The bundled model (demo), a preset with random weights (`sightline models list`), the path of a checkpoint
    folder, or a hub id."""
    device: str = "cpu"
    """Where it runs: cpu; cuda, a GPU of each replica's own; or cuda:0, which a node's replicas share: the first of
    those that CUDA_VISIBLE_DEVICES names."""
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"
    """Number format of weights and KV; float8: linear layers alone, on Ada and Hopper GPUs."""
    max_pixels: int | None = Field(default=None, ge=56 * 56, le=4096 * 2160)
    """Largest frame of a family of native resolution (Qwen), pixels; larger pictures are shrunk to it. Tokens, KV and
    time grow with it. Null takes the model's own, or 200704 (448 x 448). Families of square frames refuse it."""
    seed: int = Field(default=0, ge=0)
    """Seed of a preset's random weights; checkpoints ignore it."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of one replica's engine; 0 takes its machine's (or container's) cores over the replicas there: as
    many as its node offers of the Ray resource placement.replica, or cluster.replicas where none is named."""
    kv_bytes: Size | None = Field(default=None, ge=1 << 20)
    """A replica's windows' KV, on its device: bytes, or a size like 16GiB; null takes half of the host's (or
    container's) memory, or what a GPU has free beside embeddings and a pass's activations. A window that does not fit
    fails with the numbers."""
    host_kv_bytes: Size | None = Field(default=None, ge=0)
    """Host memory of each replica for windows that a full GPU pool has no room for between their strides: bytes, or a
    size like 16GiB; null takes half of the host's (or container's) memory beside a GPU, too much where several replicas
    share it, and none on a CPU."""
    idle_kv_share: float = Field(default=0.75, ge=0, le=1)
    """Share of the KV pool that windows may fill between their strides; further ones wait in host memory and come back
    before they end. 0: none stays in the pool; 1: they leave only when it is full."""
    max_new_tokens: int = Field(default=32, ge=1, le=1024)
    """Longest explanation, in tokens."""
    score_temperature: float | None = Field(default=None, gt=0)
    """Divides the yes/no logit difference before it becomes a score; null takes the model's own, or 1."""
    score_bias: float | None = None
    """Added to the divided yes/no logit difference before it becomes a score; null takes the model's own, or 0."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"must be cpu, cuda or cuda:0 (CUDA_VISIBLE_DEVICES chooses the card), not {device!r}")
        return device
