"""Retrieval for frames: what new frames read of their camera's past beside their window.

A policy is a frozen dataclass whose fields are its options. It loads without torch, so that a configuration can be
checked by it.
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
    """ReSV (V-Rex, section IV): the frames of a stream retrieve, while they are prefilled, by hash-bit clusters and
    WiCSum.

    Per layer and key head, the rows of a new frame score the mean key of each cluster, take those that hold a share of
    the attention they expect to give (WiCSum), and attend to the tokens of all that one of them took, beside the
    window.

    * ``ratio``: that share, 0 to 1 (``Th_r-wics``, or ``ConfigError``); at 1 everything is read
    * ``deadline_s``: most seconds, above 0 (or ``ConfigError``), that windows which are computed together wait for
      blocks; later ones are counted and left out
    * ``prefetch``: load what a layer will probably read while the layer before computes

    Differences from the paper: the recent KV that is always attended to is the window and what waits to be clustered,
    and queries and keys are compared before rotary, as the clusters are made (see
    :class:`~cluster.memory.organise.resv.ReSV`).
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
        """Raises ``ConfigError`` if this organiser makes no clusters that the policy can read."""
        if organiser != "resv":
            raise ConfigError(
                f"frame_retrieval 'resv' reads the hash-bit clusters that the organiser 'resv' makes, not {organiser!r}"
            )

    def retriever(self) -> Retriever:
        """Selects the clusters that the rows of one frame read."""
        from cluster.memory.retrieve.wicsum import WiCSum

        return WiCSum(ratio=self.ratio, tokens=None)


@dataclass(slots=True)
class FrameReads:
    """What frames have read of the past.

    * ``frames``: how often the rows of a frame read, once for each pass that computes some of them
    * ``held_tokens``, ``read_tokens``: of the past, summed over these frames, layers and key heads
    * ``clusters`` read, each once for all frames of a pass; ``unavailable``: not loaded in time; ``lost``: in no tier
      any more
    * ``bytes`` of these clusters; ``waited_s`` for those that were not at hand
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
    """The policy of a memory, built once for equal settings; ``None``: frames read their window alone. ``ConfigError``
    for an unknown policy or option, or one that cannot read what the organiser makes."""
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
