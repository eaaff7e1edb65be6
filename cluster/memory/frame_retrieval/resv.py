"""ReSV (V-Rex, section IV): the frames of a stream retrieve, while they are prefilled, by hash-bit clusters and WiCSum.

Per layer and key head, the rows of a new frame score the mean key of each cluster, take those that hold a share of the
attention they expect to give (WiCSum), and attend to the tokens of all that one of them took, beside the window.

Differences from the paper: the recent KV that is always attended to is the window and what waits to be clustered, and
queries and keys are compared before rotary, as the clusters are made (see
:class:`~cluster.memory.organise.resv.ReSV`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from cluster.memory.frame_retrieval import FrameRetrieval

if TYPE_CHECKING:
    from cluster.memory.retrieve import Retriever


@dataclass(frozen=True, slots=True, kw_only=True)
class ReSVFrames(FrameRetrieval):
    """``ratio``: share of the expected attention that is read, 0 to 1 (``Th_r-wics``); at 1 everything is.

    Raises:
        ConfigError: the ratio is no share.
    """

    ratio: float = 0.3

    def __post_init__(self) -> None:
        FrameRetrieval.__post_init__(self)
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"the ratio of attention to retrieve is between 0 and 1, not {self.ratio:g}")

    def check_organiser(self, organiser: str) -> None:
        """See :class:`FrameRetrieval`."""
        if organiser != "resv":
            raise ConfigError(
                f"frame_retrieval 'resv' reads the hash-bit clusters that the organiser 'resv' makes, not {organiser!r}"
            )

    def retriever(self) -> Retriever:
        """See :class:`FrameRetrieval`."""
        from cluster.memory.retrieve.wicsum import WiCSum

        return WiCSum(ratio=self.ratio)
