"""``model:``, ``vllm:``, ``simulated:`` — the model and its inference engine."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from cluster.config.problems import Section, Size


class SimulatedConfig(Section):
    """Step times and answers of the simulated engine, which stands in for ``model.name``."""

    costs: str | None = None
    """Cost model for step times, measured with model.name: the name of one shipped with Sightline, or a file written by
    `sightline bench cost`."""
    scores: str | None = None
    """JSON file of `sightline eval accuracy` from whose scores answers are drawn; null takes recorded scores of the
    bundled model."""
    seed: int = Field(default=0, ge=0)
    """Seed for answers and the variation of step times."""


class VllmConfig(Section):
    """Engine arguments of vLLM, and its timeout."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments by their names in vLLM (tensor_parallel_size, quantization, gpu_memory_utilization,
    max_model_len, ...), as `vllm serve` takes them."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds vLLM may take for one batch of windows before its engine core counts as dead."""


_DEVICE = re.compile(r"cpu|cuda(:0)?")


class ModelConfig(Section):
    """The model every replica loads."""

    name: str = Field(default="demo", min_length=1)
    """The bundled model (demo), a preset with random weights (`sightline models list`), the path of a checkpoint
    folder, or a hub id."""
    device: str = "cpu"
    """Device the model runs on: cpu, cuda (one GPU per replica, or per vLLM rank) or cuda:0 (the first GPU in
    CUDA_VISIBLE_DEVICES, shared by a node's replicas)."""
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"
    """Data type of weights and KV; float8 applies to linear layers only, on Ada and Hopper GPUs."""
    max_pixels: int | None = Field(default=None, ge=56 * 56, le=4096 * 2160)
    """Maximum pixels of a frame for families with native resolution (Qwen); larger pictures are scaled down. Tokens, KV
    and time grow with it. null takes the model's own, or 200704 (448 x 448). Families with square frames refuse it."""
    seed: int = Field(default=0, ge=0)
    """Seed of a preset's random weights; checkpoints ignore it."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of one replica's engine; 0 divides the machine's (or container's) cores by its number of replicas: as
    many as the node offers of the Ray resource placement.replica, or cluster.replicas if that is null."""
    kv_bytes: Size | None = Field(default=None, ge=1 << 20)
    """Size of a replica's KV pool for windows, on its device: bytes, or a size like 16GiB; null takes half of the
    host's (or container's) memory, or what a GPU has free besides embeddings and activations of a pass. A window that
    does not fit fails, stating both sizes."""
    host_kv_bytes: Size | None = Field(default=None, ge=0)
    """Host memory of each replica for idle windows swapped out of a full GPU pool: bytes, or a size like 16GiB; null
    takes half of the host's (or container's) memory with a GPU, too much if several replicas share it, and none on a
    CPU."""
    idle_kv_share: float = Field(default=0.75, ge=0, le=1)
    """Fraction of the KV pool that idle windows (between strides) may fill; others are swapped out to host memory and
    back in before they end. 0 keeps none in the pool; 1 swaps them out only when it is full."""
    max_new_tokens: int = Field(default=32, ge=1, le=1024)
    """Maximum length of an explanation, in tokens."""
    score_temperature: float | None = Field(default=None, gt=0)
    """Divides the yes/no logit difference before it becomes a score; null takes the model's own, or 1."""
    score_bias: float | None = None
    """Added to the divided yes/no logit difference; null takes the model's own, or 0."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"must be cpu, cuda or cuda:0 (CUDA_VISIBLE_DEVICES chooses the card), not {device!r}")
        return device
