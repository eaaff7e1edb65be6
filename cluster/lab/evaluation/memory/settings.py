"""Memory settings to compare, and grids of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from cluster.errors import ConfigError
from cluster.registry import compressors, organisers, retrievers
from cluster.types import MemorySpec

SHARES = (1 / 4, 1 / 8, 1 / 16)
GRIDS = ("basic", "quick", "standard")

# Production defaults: "ours".
_OURS = MemorySpec()
# Retriever that an organiser was published with; ours for others.
_NATURAL = {"frames": "rekv", "tokens": "top_k", "resv": "wicsum", "mosaic": "two_stage"}
# Minimum number of blocks that fill a memory, so that short scenes are compressed as often as long ones.
_BLOCKS = 4


def thinning_compressors() -> list[str]:
    """Names of the compressors that drop tokens."""
    return [name for name in compressors.names() if name != "none"]


@dataclass(frozen=True, slots=True)
class ShareSetting:
    """Policies by name, and a memory cap as a ``share`` of the bytes of all KV at the time of the question.
    ``everything``: questions read everything held instead of the retriever's choice. Raises ``ConfigError``: unknown
    policy, or an invalid share."""

    compressor: str
    organiser: str
    retriever: str
    share: float = 1.0
    everything: bool = False

    def __post_init__(self) -> None:
        for registry, name in (
            (compressors, self.compressor),
            (organisers, self.organiser),
            (retrievers, self.retriever),
        ):
            registry.get(name)
        if not 0 < self.share <= 1:
            raise ConfigError(f"a memory's share must be above 0 and at most 1, not {self.share:g}")
        if self.everything and self.retriever != "top_k":
            raise ConfigError(f"only the retriever top_k can read everything, not {self.retriever}")

    @property
    def name(self) -> str:
        """``full``, or a name such as ``infinipot_v/mosaic/top_k@1/8``."""
        if self == FULL:
            return "full"
        reads = ":all" if self.everything else ""
        share = Fraction(self.share).limit_denominator(1024)
        return f"{self.compressor}/{self.organiser}/{self.retriever}{reads}@{share}"

    def spec(self, *, frames: int, full_bytes: int, tier_bytes: int) -> MemorySpec:
        """Memory specification for a scene of ``frames`` frames. ``full_bytes``: of all their KV, frame numbers and
        cells; ``tier_bytes``: size of the tier, the cap of an unbounded memory."""
        options: Mapping[str, Any] = {"share": 1.0} if self.everything else {}
        block = min(_OURS.block_frames, max(1, int(self.share * frames / _BLOCKS)))
        return MemorySpec(
            compressor=self.compressor,
            organiser=self.organiser,
            retriever=self.retriever,
            cap_bytes=max(1, int(self.share * full_bytes)) if self.share < 1 else tier_bytes,
            block_frames=block,
            kv_dtype="model" if self == FULL else _OURS.kv_dtype,
            retriever_options=options,
        )


FULL = ShareSetting("none", "frames", "top_k", everything=True)
"""Upper bound: everything is held and read. The organiser then makes no difference, and whole frames are cheapest."""


def ours(share: float) -> ShareSetting:
    """The production defaults, capped at a share."""
    return ShareSetting(_OURS.compressor, _OURS.organiser, _OURS.retriever, share=share)


def memory_grid(name: str) -> list[ShareSetting]:
    """Settings of a grid, full KV first, without duplicates.

    * ``basic``: ours at all shares and unbounded
    * ``quick``: the same, and at 1/8 every compressor with our organiser and retriever, and every organiser with our
      compressor and the retriever it was published with
    * ``standard``: every compressor, organiser and retriever at every share, and every organiser and retriever
      unbounded

    Raises:
        ConfigError: unknown grid.
    """
    if name not in GRIDS:
        raise ConfigError(f"unknown settings {name!r}; there are: {', '.join(GRIDS)}")
    found = [FULL, ours(1.0), *map(ours, SHARES)]
    if name == "quick":
        found += [ShareSetting(each, _OURS.organiser, _OURS.retriever, share=1 / 8) for each in thinning_compressors()]
        found += [
            ShareSetting(_OURS.compressor, each, _NATURAL.get(each, _OURS.retriever), share=1 / 8)
            for each in organisers.names()
        ]
    elif name == "standard":
        ways = list(product(organisers.names(), retrievers.names()))
        found += [ShareSetting("none", *way) for way in ways]
        found += [
            ShareSetting(each, *way, share=share) for share in SHARES for each in thinning_compressors() for way in ways
        ]
    return list(dict.fromkeys(found))
