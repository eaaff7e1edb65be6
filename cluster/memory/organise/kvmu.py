"""ReSV's clusters in blocks that are written once (V-Rex, section 5, KV cache management unit)."""

from typing import ClassVar

import torch
from torch import Tensor

from cluster.memory.organise import AtHand
from cluster.memory.organise.resv import ReSV


class KVMU(ReSV):
    """Clusters are made within the recent KV alone: the frames that are clustered together (``memory.block_frames``).
    A block that was written takes no more tokens, and a compression drops it whole or leaves it as it is.

    The paper has no cap: what it offloads is never compressed. Which blocks a compression drops is ours
    (:func:`~cluster.memory.eviction.whole_clusters`).
    """

    written_once: ClassVar[bool] = True

    def _from_those_at_hand(self, apart: Tensor, at_hand: AtHand) -> Tensor:
        del at_hand
        return torch.full_like(apart, self._planes.shape[1] + 1)
