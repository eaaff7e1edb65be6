"""``memory:``, ``tiers:``, ``asking:`` — capacity, policies and storage of cameras' memory, and free questions."""

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

# Of tiers with keys of their own, fastest first.
_KINDS = ("host", "node", "redis")


class TiersConfig(Section):
    """The tiers below a replica's device, fastest first: host, node, Redis. The lowest holds everything."""

    levels: list[Annotated[str, OneOf(tiers)]] = Field(default=list(_KINDS), min_length=1)
    """Kinds of tiers from the fastest down; node and redis only where node and redis_url say so."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of tiers that have no keys of their own here, by their kind."""
    device_bytes: Size | None = Field(default=None, ge=2**20)
    """Memory on each replica's device for cameras' waiting frames, which admission counts at an eighth of memory.cap:
    bytes, or a size like 4GiB; null takes an eighth of what a GPU, or a CPU's host, has free. Their index, up to a
    quarter of memory.cap, is in the host's."""
    host_bytes: Size = Field(default=2**30, ge=2**20)
    """Host memory of each replica for remembered KV: bytes, or a size like 1GiB (the default)."""
    node: bool = True
    """Run a memory process on each node, so that memory outlives a replica."""
    node_bytes: Size = Field(default=4 * 2**30, ge=2**20)
    """Host memory of each node's process for remembered KV: bytes, or a size like 4GiB (the default, which is 64
    cameras at memory.cap = 64MiB)."""
    camera_bytes: Size | None = Field(default=None, ge=64 * 2**10)
    """Most bytes of one camera in the node's process, and in Redis, enforced there: a number or a size like 64MiB. No
    camera's memory.cap may exceed it; null leaves it to memory.cap."""
    redis_url: str | None = None
    """Redis that also keeps memories, so that they outlive a node: a redis://, rediss:// or unix:// address."""
    redis_ttl_s: Duration = Field(default=24 * 3600, ge=1)
    """Seconds, or a length of time like 24h (the default), after which Redis forgets a camera that no replica has open;
    the first half may have passed when it is closed."""
    deadline_s: float = Field(default=2.0, gt=0, le=60)
    """Timeout in seconds of one call to node or Redis, after which it counts as down."""

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
            # Where nothing runs there may be no redis-py.
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
                    f"options of {kind} have no effect: of levels, all but {', '.join(_KINDS)} have options"
                )
        if self.redis_url is not None and "redis" not in self.levels:
            raise ValueError("levels leaves out redis, so that nothing would be kept at redis_url")
        return self

    @property
    def rooms(self) -> dict[str, int]:
        """What bounds one camera's memory, by key."""
        rooms = {
            "host_bytes": self.host_bytes if "host" in self.levels else None,
            "node_bytes": self.node_bytes if self.node and "node" in self.levels else None,
            "camera_bytes": self.camera_bytes,
        }
        return {key: room for key, room in rooms.items() if room is not None}


class AskingConfig(Section):
    """Limits of free questions; windows, and with them alerts, come first."""

    share: float = Field(default=0.2, ge=0, le=1)
    """Share of a replica's time that free questions may take while windows wait, 0..1; 0 lets them wait until none
    does."""
    queue: int = Field(default=16, ge=1, le=4096)
    """Most free questions waiting at a replica."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Timeout of a free question, waiting included, seconds."""
    max_new_tokens: int = Field(default=48, ge=1, le=1024)
    """Longest answer to a free question, in tokens."""


_DEFAULTS = MemorySpec()
DEFAULT_TOKENS = 6144
"""Of the default cap: less the share of waiting frames, two windows of 40 s of a busy camera."""
BUSY_TOKENS_S = 67.0
"""Tokens a second that a busy camera keeps of 448 x 448 pixels, by the benchmark's busier clip (2,690 in 40 s)."""
_OPTIONS = "by name; missing ones have its own defaults."


class MemoryConfig(Section):
    """Capacity, retention and policies of a camera's memory."""

    enabled: bool = True
    """Keep the KV of frames that left the window, for questions about the past."""
    cap: Size | None = Field(default=None, ge=64 * 2**10)
    """Most bytes one camera's memory takes in any tier, index and saved window included: a number, or a size like
    64MiB; never exceeded. Null takes what 6,144 tokens of the model need, two windows of a busy camera, 64MiB or more,
    if the tiers can hold it: 176MiB of a 7B model."""
    retention: Duration | None = Field(default=_DEFAULTS.retention_s, gt=0)
    """Maximum age: seconds, or a duration like 24h; null keeps all that fits the cap."""
    keep: float = Field(default=_DEFAULTS.keep, gt=0, le=1)
    """Share of new frames' tokens that is stored, 0..1; 1 stores all, up to the cap."""
    target: float = Field(default=_DEFAULTS.target, gt=0, lt=1)
    """Share of the cap to compress to once it is reached, 0..1."""
    block_frames: int = Field(default=_DEFAULTS.block_frames, ge=1, le=1024)
    """Frames per stored block."""
    kv_dtype: Literal["int8", "model"] = _DEFAULTS.kv_dtype
    """Type of stored keys and values: int8, half of bfloat16, rounded with scales per channel and token; or the
    model's own."""
    compressor: Annotated[str, OneOf(compressors)] = _DEFAULTS.compressor
    """Policy that selects tokens at the cap: novelty, infinipot_v, cords or uniform among others."""
    compressor_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the compressor {_OPTIONS}"
    )
    organiser: Annotated[str, OneOf(organisers)] = _DEFAULTS.organiser
    """How tokens are grouped for retrieval: mosaic, resv or kvmu (V-Rex), frames (ReKV) or tokens."""
    organiser_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the organiser {_OPTIONS}"
    )
    retriever: Annotated[str, OneOf(retrievers)] = _DEFAULTS.retriever
    """Which groups a question reads: two_stage (Mosaic), wicsum (V-Rex), rekv or top_k among others."""
    retriever_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the retriever {_OPTIONS}"
    )
    frame_retrieval: Annotated[str, OneOf(frame_retrievals)] | None = _DEFAULTS.frame_retrieval
    """How new frames read the memory while their window is computed: resv (V-Rex); null: not at all."""
    frame_retrieval_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Parameters of the retrieval for frames {_OPTIONS}"
    )

    def spec(self) -> MemorySpec | None:
        """Memory specification for the engine; None where memory is disabled."""
        if not self.enabled:
            return None
        same = self.model_dump(exclude={"enabled", "cap", "retention"})
        return MemorySpec(cap_bytes=self.cap or _DEFAULTS.cap_bytes, retention_s=self.retention, **same)

    def token_bytes(self, model: ModelConfig) -> int | None:
        """Stored bytes of one token, all layers and heads; ``None`` where the model's shape is not known here."""
        try:
            heads, width = key_heads(model.name)
        except ModelError:
            return None
        spec = MemorySpec(kv_dtype=self.kv_dtype)
        return heads * spec.token_bytes(width, 4 if model.dtype == "float32" else 2)

    def with_cap(self, model: ModelConfig, tiers: TiersConfig) -> Self:
        """With the default cap of the model in place of null."""
        if self.cap is not None:
            return self
        wanted = -(-DEFAULT_TOKENS * (self.token_bytes(model) or 0) // 2**20) * 2**20
        cap = min([max(_DEFAULTS.cap_bytes, wanted), *tiers.rooms.values()])
        return self.model_copy(update={"cap": cap})


def held_text(cap: int, token_bytes: int) -> str:
    """What a cap holds beside waiting frames, about: index and a saved window take of it too."""
    tokens = (cap - cap // WAITING) // token_bytes
    minutes = tokens / BUSY_TOKENS_S / 60
    return (
        f"{size_text(cap)} a camera hold about {tokens:,} tokens, {minutes:.1f} min of a busy one's kept patches at "
        f"{BUSY_TOKENS_S:.0f} a second"
    )
