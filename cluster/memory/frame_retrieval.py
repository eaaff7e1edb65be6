"""Frame retrieval: policies by which new frames read their camera's memory in addition to their window.

A policy is a frozen dataclass whose fields are its options. It loads without torch, so that configurations can be
validated cheaply.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError
from cluster.registry import frame_retrievals
from cluster.types import MemorySpec

if TYPE_CHECKING:
    from cluster.memory.retrieve import Retriever


@dataclass(frozen=True, slots=True, kw_only=True)
class ReSVFrames:
    """ReSV (V-Rex, section IV): frames retrieve hash-bit clusters by WiCSum while they are prefilled.

    Per layer and key head, each row of a new frame scores the clusters' mean keys and selects those that hold a share
    of its expected attention (WiCSum). All rows then attend to the tokens of the union of the selected clusters, beside
    the window.

    * ``ratio``: that share, 0 to 1 (``Th_r-wics``; else ``ConfigError``); at 1 everything is read
    * ``deadline_s``: maximum seconds, above 0 (else ``ConfigError``), that windows computed together wait for blocks;
      later ones are counted and left out
    * ``prefetch``: load the predicted blocks of a layer while the previous one computes

    Differences from the paper: the recent KV that is always attended to is the window and the frames waiting to be
    clustered; queries and keys are compared before rotary, as for clustering
    (:class:`~cluster.memory.organise.resv.ReSV`).
    """

    deadline_s: float = 0.25
    prefetch: bool = True
    ratio: float = 0.3

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise ConfigError(f"the deadline of retrieval for frames must be positive, not {self.deadline_s:g} s")
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"the ratio of attention to retrieve is between 0 and 1, not {self.ratio:g}")

    def check_organiser(self, organiser: str) -> None:
        """Raise ``ConfigError`` if the policy cannot read this organiser's clusters."""
        if organiser != "resv":
            raise ConfigError(
                f"frame_retrieval 'resv' reads the hash-bit clusters that the organiser 'resv' makes, not {organiser!r}"
            )

    def retriever(self) -> Retriever:
        """The retriever that selects clusters for the rows of one frame."""
        from cluster.memory.retrieve.wicsum import WiCSum

        return WiCSum(ratio=self.ratio, tokens=None)


@dataclass(slots=True)
class FrameReads:
    """Statistics of frames reading the memory.

    * ``frames``: reads, one per frame and pass that computes any of its rows
    * ``held_tokens``, ``read_tokens``: tokens in memory and read, summed over these frames, layers and key heads
    * ``clusters`` read, each once per pass; ``unavailable``: not loaded in time; ``lost``: no longer in any tier
    * ``bytes`` of these clusters; ``waited_s``: time blocked on loads
    * ``flops``: of predicting queries and scoring clusters (multiply-add = 2)
    """

    frames: int = 0
    held_tokens: int = 0
    read_tokens: int = 0
    clusters: int = 0
    unavailable: int = 0
    lost: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    flops: int = 0

    def add(self, other: FrameReads) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def make_frame_retrieval(spec: MemorySpec | None) -> ReSVFrames | None:
    """A memory's policy, cached by settings; ``None`` if frames read only their window. ``ConfigError`` for an unknown
    policy or option, or an organiser that the policy cannot read."""
    if spec is None or spec.frame_retrieval is None:
        return None
    try:
        return _policy(spec.frame_retrieval, spec.organiser, tuple(spec.frame_retrieval_options.items()))
    except TypeError as error:
        raise ConfigError(f"frame_retrieval {spec.frame_retrieval!r}: {error}") from error


@lru_cache(maxsize=64)
def _policy(name: str, organiser: str, options: tuple[tuple[str, Any], ...]) -> ReSVFrames:
    policy: ReSVFrames = frame_retrievals.get(name)(**dict(options))
    policy.check_organiser(organiser)
    return policy
