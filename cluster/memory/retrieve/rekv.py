"""ReKV (Di et al., ICLR 2025; internal retrieval): the frames nearest to the question, shared by a layer's heads.

Follows the published code (Becomebright/ReKV, ``model/attention/kv_cache_manager.py``, ``chunk_size`` 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retriever


class ReKV(Retriever):
    """Selects one set of frames per layer: those with the largest dot product of the question's mean query and the
    frame's mean key, both before rotary and with heads concatenated (the paper says cosine; its code does not
    normalise).

    With GQA the code repeats a key head for each of its query heads. The mean over all rows of a key head gives the
    same order, since all key heads have equally many query heads. Ties go to the older frame.

    Differences: a compressor may remove a frame from a head; the head then scores it as the mean of its other frames,
    and reads no tokens of it. A cluster belongs to its newest frame, which is exact with the organisers ``frames`` and
    ``tokens``. All prompt rows are averaged (published: only the question's words). The window and waiting frames are
    always read (published: only the system prompt and the retrieved frames).

    Args:
        frames: number of frames, at least 1 (else ``ConfigError``).
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
    """Dot product of ``query [D]`` with each frame's mean key, ``[frames]`` float64; NaN for frames without tokens
    here. ``frame [c]``: each cluster's frame."""
    # In float64, a frame of a single cluster keeps exactly that cluster's product.
    product, weight = (table.mean @ query).double(), table.count.double()
    tokens = weight.new_zeros(frames).index_add_(0, frame, weight)
    return weight.new_zeros(frames).index_add_(0, frame, product * weight) / tokens
