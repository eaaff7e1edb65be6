"""Retrieval for frames: what new frames read of their camera's past beside their window, one policy per file.

A policy is a frozen dataclass whose fields are its options. Modules here load without torch, so that a configuration
can be checked by them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError
from cluster.registry import frame_retrievals
from cluster.types import MemorySpec

if TYPE_CHECKING:
    from cluster.memory.retrieve import Retriever


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRetrieval(ABC):
    """How frames read the past.

    * ``deadline_s``: most seconds that windows which are computed together wait for blocks; later ones are counted and
      left out
    * ``prefetch``: load what a layer will probably read while the layer before computes

    Raises:
        ConfigError: a deadline that is not positive.
    """

    deadline_s: float = 0.25
    prefetch: bool = True

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise ConfigError(f"the deadline of retrieval for frames must be positive, not {self.deadline_s:g} s")

    @abstractmethod
    def check_organiser(self, organiser: str) -> None:
        """Raises ``ConfigError`` if this organiser makes no clusters that the policy can read."""

    @abstractmethod
    def retriever(self) -> Retriever:
        """Selects the clusters that the rows of one frame read."""


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


def make_frame_retrieval(spec: MemorySpec | None) -> FrameRetrieval | None:
    """The policy of a memory, built once for equal settings; ``None``: frames read their window alone.

    Raises:
        ConfigError: an unknown policy or option, or one that cannot read what the organiser makes.
    """
    if spec is None or spec.frame_retrieval is None:
        return None
    try:
        return _policy(spec.frame_retrieval, spec.organiser, tuple(spec.frame_retrieval_options.items()))
    except TypeError as error:
        raise ConfigError(f"frame_retrieval {spec.frame_retrieval!r}: {error}") from error


@lru_cache(maxsize=64)
def _policy(name: str, organiser: str, options: tuple[tuple[str, Any], ...]) -> FrameRetrieval:
    policy: FrameRetrieval = frame_retrievals.get(name)(**dict(options))
    policy.check_organiser(organiser)
    return policy
