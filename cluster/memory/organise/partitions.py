"""Visual partitions (Mosaic, section V): frames sorted by what they show, as they come."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cluster.errors import ConfigError


class VisualPartitions:
    """Online k-means by cosine over one embedding per frame.

    A frame joins the partition whose centre is most like it; one that is like none of them founds a partition, as long
    as there are not too many. Centres are means of unit vectors.

    Args:
        width: of an embedding.
        limit: most partitions there ever are.
        similarity: cosine from which on a frame is like a centre.

    Raises:
        ConfigError: no partitions, or a similarity that is no cosine.
    """

    def __init__(self, width: int, *, limit: int = 16, similarity: float = 0.6) -> None:
        if limit < 1 or not -1 <= similarity <= 1:
            raise ConfigError(
                f"there is one visual partition or more, and likeness is a cosine, not {limit} and {similarity:g}"
            )
        self.limit, self.similarity = limit, similarity
        self.summed = torch.zeros(0, width)
        self.count = torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.count)

    def add(self, embedding: Tensor) -> int:
        """Number of the partition that a frame of this ``embedding [D]`` belongs to, 0 or more."""
        unit = normalize(embedding.float().to(self.summed.device), dim=0)
        likeness = normalize(self.summed, dim=1) @ unit
        if not len(self) or (len(self) < self.limit and float(likeness.amax()) < self.similarity):
            self.summed = torch.cat([self.summed, unit[None]])
            self.count = torch.cat([self.count, self.count.new_ones(1)])
            return len(self) - 1
        number = int(likeness.argmax())
        self.summed[number] += unit
        self.count[number] += 1
        return number

    def state(self) -> dict[str, Tensor]:
        """Everything, options too; copies."""
        return {
            "summed": self.summed.clone(),
            "count": self.count.clone(),
            "limit": torch.tensor(self.limit),
            "similarity": torch.tensor(self.similarity, dtype=torch.float64),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor]) -> VisualPartitions:
        """The partitions whose ``state()`` this is."""
        made = cls(state["summed"].shape[1], limit=int(state["limit"]), similarity=float(state["similarity"]))
        made.summed, made.count = state["summed"].clone(), state["count"].clone()
        return made
