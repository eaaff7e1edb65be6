"""Work of one step of a streaming video model: shapes, FLOPs and bytes."""

from dataclasses import dataclass
from enum import Enum

from cluster.errors import ConfigError
from cluster.registry import Registry

CLUSTER_TOKENS = 32
"""Mean members of a cluster (V-Rex, section VI.B)."""

PARTIAL = 0.3
"""Share of the key dimensions that InfiniGen's speculation reads (InfiniGen, OSDI 24, section 5)."""

HASH_BITS = 32
"""Hash bits per key: number of hyperplanes (V-Rex, section VI.E)."""

EARLY_EXIT = 0.16
"""Share of a row that early-exit sorting examines (V-Rex, section V.B)."""


class Selection(Enum):
    """How a method selects what to fetch."""

    NONE = "none"
    TOKENS = "tokens"
    FRAMES = "frames"
    CLUSTERS = "clusters"
    ENGINE = "engine"
    """Clusters, by hash-bit cluster unit and WiCSum threshold unit, in parallel with computation."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of storing and retrieving keys and values. ``frame``, ``text``: share of the cache that attention reads,
    for frames and for generated tokens (Table II); ``run``: contiguous tokens per read, 0 for one read of everything;
    ``overlapped``: the paper overlaps fetching for the next layer with computation; ``reuses``: the last step's
    selection is still on the device and not fetched again; ``offloads``: keys and values are off the device."""

    name: str
    title: str
    frame: float
    text: float
    frame_selection: Selection
    text_selection: Selection
    run: float
    overlapped: bool = False
    reuses: bool = False
    offloads: bool = True


SCATTERED_RUN = 6.0
"""Contiguous tokens per read of ReSV when tokens are stored in order of arrival; calibrated on Fig. 16's gain of
cluster-wise memory mapping (KVMU)."""

_NONE, _TOKENS, _FRAMES = Selection.NONE, Selection.TOKENS, Selection.FRAMES
_CLUSTERS, _ENGINE = Selection.CLUSTERS, Selection.ENGINE

_METHODS = (
    Method("resident", "all on the device", 1.0, 1.0, _NONE, _NONE, 0, offloads=False),
    Method("flexgen", "FlexGen", 1.0, 1.0, _NONE, _NONE, 0),
    Method("infinigen", "InfiniGen", 1.0, 0.068, _NONE, _TOKENS, 1),
    Method("infinigenp", "InfiniGenP", 0.508, 0.068, _TOKENS, _TOKENS, 1),
    Method("rekv", "ReKV", 0.584, 0.312, _FRAMES, _FRAMES, 10),
    Method("resv", "ReSV", 0.327, 0.025, _CLUSTERS, _CLUSTERS, SCATTERED_RUN, overlapped=True, reuses=True),
    Method("resv-kvpu", "ReSV + KVPU", 0.327, 0.025, _ENGINE, _ENGINE, SCATTERED_RUN, overlapped=True, reuses=True),
    Method("resv-dre", "ReSV + DRE", 0.327, 0.025, _ENGINE, _ENGINE, CLUSTER_TOKENS, overlapped=True, reuses=True),
)
methods: Registry[Method] = Registry("retrieval method", {each.name: each for each in _METHODS})


BYTES = 2
"""Bytes per number: BF16 and FP16 throughout (V-Rex, Table I)."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """A vision transformer over square patches of one picture."""

    layers: int
    width: int
    mlp: int
    patches: int

    @property
    def flops(self) -> float:
        """FLOPs per picture: 2 per weight and patch, and 4 per channel, query and key in attention."""
        weights = self.layers * (4 * self.width**2 + 2 * self.width * self.mlp)
        return 2.0 * weights * self.patches + 4.0 * self.layers * self.width * self.patches**2

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.layers * (4.0 * self.width**2 + 2.0 * self.width * self.mlp)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated MLP, and its vision tower. ``frame_tokens``: tokens per
    picture."""

    name: str
    title: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    frame_tokens: int
    vision: VisionShape

    @property
    def read_weights(self) -> float:
        """Weights that every step reads: all layers and the output head; embedding reads are negligible."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return float(self.layers * (attention + 3 * self.width * self.mlp) + self.width * self.vocabulary)

    @property
    def held_bytes(self) -> float:
        """Bytes of all weights on the device: those read per step, the embedding, the vision tower."""
        return BYTES * (self.read_weights + self.width * self.vocabulary) + self.vision.weight_bytes

    @property
    def kv_layer_bytes(self) -> float:
        """Bytes of one token's key and value in one layer."""
        return 2.0 * BYTES * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return self.layers * self.kv_layer_bytes


SIGLIP_L_384 = VisionShape(layers=24, width=1024, mlp=4096, patches=576)
"""SigLIP ViT-L/16 at 384 pixels (V-Rex, section VI.A): 24 × 24 patches."""

SIGLIP_SO_384 = VisionShape(layers=27, width=1152, mlp=4304, patches=729)

_MODELS = (
    # V-Rex, section VI.A. Ten tokens per frame (one for the picture and 3 × 3 for its parts) is from VideoLLM-Online,
    # on which the paper builds (its Fig. 4a and Table II); the paper itself does not state the number.
    ModelShape("llama3-8b", "Llama-3 8B + SigLIP-L-384", 32, 4096, 32, 8, 128, 14336, 128256, 10, SIGLIP_L_384),
    # LLaVA-OneVision's published shape, 14 × 14 pooled tokens per frame; not in the paper.
    ModelShape("qwen2-7b", "Qwen2 7B + SigLIP-SO-384", 28, 3584, 28, 4, 128, 18944, 152064, 196, SIGLIP_SO_384),
)
models: Registry[ModelShape] = Registry("model", {each.name: each for each in _MODELS})


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: ``queries`` new tokens per sequence against ``cache`` older ones, for ``batch`` sequences.
    ``picture``: the vision tower runs for each sequence. ``text``: a generated token, whose retrieval ratios differ
    from those of a frame or question. Raises ``ConfigError`` if a length or the batch is below one."""

    model: ModelShape
    cache: int
    batch: int
    queries: int
    picture: bool
    text: bool

    def __post_init__(self) -> None:
        for what, value in (("cache", self.cache), ("batch", self.batch), ("frame-tokens", self.queries)):
            if value < 1:
                raise ConfigError(f"{what} must be a whole number of at least 1, not {value}")

    @property
    def linear_flops(self) -> float:
        return 2.0 * self.model.read_weights * self.queries * self.batch

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.model.read_weights

    @property
    def vision_flops(self) -> float:
        return self.model.vision.flops * self.batch if self.picture else 0.0

    @property
    def cache_bytes(self) -> float:
        """Bytes of the whole cache over all sequences."""
        return self.model.kv_bytes * self.cache * self.batch

    def scores(self, keys: float) -> float:
        """Query-key pairs over all layers and heads when each query attends to ``keys`` keys."""
        return keys * self.queries * self.batch * self.model.layers * self.model.heads

    def attention_flops(self, keys: float) -> float:
        """FLOPs of scores and weighted values, 2 per multiply-add."""
        return 4.0 * self.model.head_dim * self.scores(keys)


def frame(model: ModelShape, cache: int, batch: int = 1, tokens: int | None = None) -> Step:
    """A video frame: vision tower, then its tokens through the language model."""
    return Step(model, cache, batch, model.frame_tokens if tokens is None else tokens, picture=True, text=False)


def question(model: ModelShape, cache: int, batch: int, tokens: int) -> Step:
    """A question's tokens in one prefill: no picture, and retrieval as for a frame (V-Rex, section II.A)."""
    return Step(model, cache, batch, tokens, picture=False, text=False)


def token(model: ModelShape, cache: int, batch: int = 1) -> Step:
    """One generated token."""
    return Step(model, cache, batch, queries=1, picture=False, text=True)
