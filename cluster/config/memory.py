"""``memory:``, ``tiers:``, ``asking:`` — capacity, policies and storage of camera memories, and free questions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config.model import ModelConfig
from cluster.config.problems import Duration, OneOf, Section, Size, size_text
from cluster.errors import ConfigError, ModelError
from cluster.memory.tiers.redis_link import connection_pool
from cluster.models.catalog import key_heads
from cluster.registry import compressors, frame_retrievals, organisers, retrievers, tiers
from cluster.types import MemorySpec
from cluster.types.cameras import WAITING

# Tiers configured by keys of their own, fastest first.
_KINDS = ("host", "node", "redis")


class TiersConfig(Section):
    """The tiers below a replica's device, fastest first: host, node, Redis. The lowest holds everything."""

    levels: list[Annotated[str, OneOf(tiers)]] = Field(default=list(_KINDS), min_length=1)
    """Kinds of tiers, fastest first; node and redis are used only if node and redis_url are set."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options, by kind, of tiers without keys in this section."""
    device_bytes: Size | None = Field(default=None, ge=2**20)
    """Memory on each replica's device for frames not yet clustered; admission counts an eighth of memory.cap per
    camera: bytes, or a size like 4GiB; null takes an eighth of the free memory of the GPU, or of a CPU's host. Memory
    indexes, up to a quarter of memory.cap each, are in host memory."""
    host_bytes: Size = Field(default=2**30, ge=2**20)
    """Host memory of each replica for stored KV: bytes, or a size like 1GiB (the default)."""
    node: bool = True
    """Run a tier process on each node, so that memories outlive their replica."""
    node_bytes: Size = Field(default=4 * 2**30, ge=2**20)
    """Host memory of each node's tier process for stored KV: bytes, or a size like 4GiB (the default, enough for 64
    cameras at memory.cap = 64MiB)."""
    camera_bytes: Size | None = Field(default=None, ge=64 * 2**10)
    """Maximum bytes of one camera in the node's tier process and in Redis, enforced there: a number, or a size like
    64MiB. No camera's memory.cap may exceed it; null leaves the limit to memory.cap."""
    redis_url: str | None = None
    """Redis that also stores memories, so that they outlive a node: a redis://, rediss:// or unix:// address."""
    redis_ttl_s: Duration = Field(default=24 * 3600, ge=1)
    """Expiry in Redis of the memory of a camera that no replica has open: seconds, or a duration like 24h (the
    default); up to half of it may have passed when the camera is closed."""
    deadline_s: float = Field(default=2.0, gt=0, le=60)
    """Timeout, in seconds, of one call to node or Redis, after which that tier counts as down."""

    @field_validator("levels")
    @classmethod
    def _once(cls, levels: list[str]) -> list[str]:
        if len(set(levels)) < len(levels):
            raise ValueError(f"names a kind twice: {', '.join(levels)}")
        return levels

    @field_validator("redis_url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        try:
            if url is not None:
                connection_pool(url, 1.0)
        except ImportError:
            # redis-py may be missing where configurations are only checked.
            pass
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return url

    @model_validator(mode="after")
    def _kept(self) -> Self:
        ordered = [kind for kind in _KINDS if kind in self.levels]
        if [kind for kind in self.levels if kind in _KINDS] != ordered:
            raise ValueError(f"levels must name {', '.join(ordered)} in this order: the lowest keeps everything")
        for kind in self.options:
            if kind in _KINDS or kind not in self.levels:
                raise ValueError(
                    f"options of {kind} have no effect: only tiers in levels other than {', '.join(_KINDS)} have any"
                )
        if self.redis_url is not None and "redis" not in self.levels:
            raise ValueError("levels omits redis, so nothing would be stored at redis_url")
        return self

    @property
    def rooms(self) -> dict[str, int]:
        """Upper bounds of one camera's memory, in bytes, by key."""
        rooms = {
            "host_bytes": self.host_bytes if "host" in self.levels else None,
            "node_bytes": self.node_bytes if self.node and "node" in self.levels else None,
            "camera_bytes": self.camera_bytes,
        }
        return {key: room for key, room in rooms.items() if room is not None}


class AskingConfig(Section):
    """Limits of free questions; windows, and thus alerts, come first."""

    share: float = Field(default=0.2, ge=0, le=1)
    """Fraction of a replica's time that free questions may take while windows wait, 0..1; at 0 they run only when no
    window waits."""
    queue: int = Field(default=16, ge=1, le=4096)
    """Maximum free questions waiting at a replica."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Timeout of a free question, waiting included, seconds."""
    max_new_tokens: int = Field(default=48, ge=1, le=1024)
    """Maximum length of an answer to a free question, in tokens."""


_DEFAULTS = MemorySpec()
DEFAULT_TOKENS = 6144
"""Size of the default cap in tokens; without the share of waiting frames, two 40 s windows of a busy camera."""
BUSY_TOKENS_S = 67.0
"""Tokens kept per second of a busy camera at 448 x 448 pixels: the benchmark's busier clip keeps 2,690 in 40 s."""
_OPTIONS = "by name; omitted ones take its defaults."


class MemoryConfig(Section):
    """Capacity, retention and policies of a camera's memory."""

    enabled: bool = True
    """Keep the KV of frames that left the window, for questions about the past."""
    cap: Size | None = Field(default=None, ge=64 * 2**10)
    """Hard limit of one camera's memory in any tier, index and saved window included: bytes, or a size like 64MiB. null
    takes what 6,144 tokens of the model need (two windows of a busy camera, 176MiB for a 7B model), at least 64MiB, as
    far as the tiers can hold it."""
    retention: Duration | None = Field(default=_DEFAULTS.retention_s, gt=0)
    """Maximum age: seconds, or a duration like 24h; null keeps all that fits the cap."""
    keep: float = Field(default=_DEFAULTS.keep, gt=0, le=1)
    """Fraction of new frames' tokens to store, 0..1; 1 stores all, up to the cap."""
    target: float = Field(default=_DEFAULTS.target, gt=0, lt=1)
    """Fraction of the cap to compress to once it is reached, 0..1."""
    block_frames: int = Field(default=_DEFAULTS.block_frames, ge=1, le=1024)
    """Frames per stored block."""
    kv_dtype: Literal["int8", "model"] = _DEFAULTS.kv_dtype
    """Data type of stored keys and values: int8, quantised with scales per channel and token (half the size of
    bfloat16), or model, the model's own."""
    compressor: Annotated[str, OneOf(compressors)] = _DEFAULTS.compressor
    """Policy that selects the tokens to keep at the cap: novelty, infinipot_v, cords or uniform among others."""
    compressor_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the compressor {_OPTIONS}"
    )
    organiser: Annotated[str, OneOf(organisers)] = _DEFAULTS.organiser
    """Policy that groups tokens for retrieval: mosaic, resv or kvmu (V-Rex), frames (ReKV) or tokens."""
    organiser_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the organiser {_OPTIONS}"
    )
    retriever: Annotated[str, OneOf(retrievers)] = _DEFAULTS.retriever
    """Policy that selects the groups a question reads: two_stage (Mosaic), wicsum (V-Rex), rekv, top_k and others."""
    retriever_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the retriever {_OPTIONS}"
    )
    frame_retrieval: Annotated[str, OneOf(frame_retrievals)] | None = _DEFAULTS.frame_retrieval
    """Policy by which new frames read the memory while their window is computed: resv (V-Rex); null disables it."""
    frame_retrieval_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the frame retrieval {_OPTIONS}"
    )

    def spec(self) -> MemorySpec | None:
        """Memory specification for the engine; None if memory is disabled."""
        if not self.enabled:
            return None
        same = self.model_dump(exclude={"enabled", "cap", "retention"})
        return MemorySpec(cap_bytes=self.cap or _DEFAULTS.cap_bytes, retention_s=self.retention, **same)

    def token_bytes(self, model: ModelConfig) -> int | None:
        """Stored bytes of one token, all layers and heads; ``None`` if the model's shape is not known here."""
        try:
            heads, width = key_heads(model.name)
        except ModelError:
            return None
        spec = MemorySpec(kv_dtype=self.kv_dtype)
        return heads * spec.token_bytes(width, 4 if model.dtype == "float32" else 2)

    def with_cap(self, model: ModelConfig, tiers: TiersConfig) -> Self:
        """Copy of this section with the model's default cap in place of null."""
        if self.cap is not None:
            return self
        wanted = -(-DEFAULT_TOKENS * (self.token_bytes(model) or 0) // 2**20) * 2**20
        cap = min([max(_DEFAULTS.cap_bytes, wanted), *tiers.rooms.values()])
        return self.model_copy(update={"cap": cap})


def held_text(cap: int, token_bytes: int) -> str:
    """Approximate capacity of ``cap`` bytes without waiting frames; index and a saved window also take part of it."""
    tokens = (cap - cap // WAITING) // token_bytes
    minutes = tokens / BUSY_TOKENS_S / 60
    return (
        f"{size_text(cap)} per camera hold about {tokens:,} tokens, or {minutes:.1f} min of a busy camera that keeps "
        f"{BUSY_TOKENS_S:.0f} per second"
    )
