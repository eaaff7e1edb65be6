"""ReKV (Di et al., ICLR 2025; internal retrieval): the frames nearest to the question, the same for a layer's heads.

As its published code does it (Becomebright/ReKV, ``model/attention/kv_cache_manager.py``, ``chunk_size`` 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retriever


class ReKV(Retriever):
    """One set of frames per layer: those with the largest dot product of the question's mean query and the frame's
    mean key, both before rotary, with their heads concatenated (the paper writes cosine, its code divides by no norm).

    With GQA the code repeats a key head for each of its query heads. The mean over all rows of a key head gives the
    same order, since every key head has equally many query heads. Of equal scores the older frame comes first.

    Differences: a compressor may leave a head without a frame; that head counts the frame like the average of those it
    has, and has none of its tokens to read. A cluster belongs to its newest frame, which is exact with the organisers
    ``frames`` and ``tokens``. All rows of the prompt are averaged (published: the question's words alone). Window and
    waiting frames are always read (published: the system prompt and the retrieved frames alone).

    Args:
        frames: how many, 1 or more (or ``ConfigError``); all, where there are fewer.
    """

    def __init__(self, *, frames: int = 64) -> None:
        if frames < 1:
            raise ConfigError(f"the number of frames to retrieve is 1 or more, not {frames}")
        self.frames = frames

    def select_layer(self, query: Tensor, tables: Sequence[ClusterTable]) -> list[Tensor]:
        if not query.shape[1]:
            return [torch.zeros(0, dtype=torch.int64)] * len(tables)
        numbers, place = torch.unique(torch.cat([table.latest for table in tables]), return_inverse=True)
        frame = place.split([len(table) for table in tables])
        scores = torch.stack(
            [
                _frame_scores(rows.float().mean(0), table, at, len(numbers))
                for rows, table, at in zip(query, tables, frame, strict=True)
            ]
        )
        absent = scores.isnan()
        scores = torch.where(absent, scores.nanmean(1, keepdim=True).nan_to_num(), scores)
        chosen = torch.zeros_like(numbers, dtype=torch.bool)
        chosen[scores.sum(0).argsort(descending=True, stable=True)[: self.frames]] = True
        return [chosen[at].nonzero()[:, 0] for at in frame]


def _frame_scores(query: Tensor, table: ClusterTable, frame: Tensor, frames: int) -> Tensor:
    """Dot product of ``query [D]`` with each frame's mean key ``[frames]`` float64; NaN for those with no token here.
    ``frame [c]``: of each cluster."""
    # In float64, a frame that is one cluster keeps exactly that cluster's product.
    product, weight = (table.mean @ query).double(), table.count.double()
    tokens = weight.new_zeros(frames).index_add_(0, frame, weight)
    return weight.new_zeros(frames).index_add_(0, frame, product * weight) / tokens
