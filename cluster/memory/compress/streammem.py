"""StreamMem (arXiv 2508.15717, named in papers: cords): fixed budget by proxy-query saliency, at least one token per
frame."""

import torch
from torch import Tensor

from cluster.memory.compress import AttentionCompressor, frame_slots, rank_in_frame
from cluster.memory.head_memory import LayerKV


class StreamMem(AttentionCompressor):
    """Keeps of every frame its most salient token, of more frames than fit the most salient, and then what is salient.

    The paper's proxy queries are those of the chat template. Here they are the rows that asked last, template and
    standing questions alike, so that it is less blind to the question than published (see :class:`AttentionCompressor`
    for who asks before any did, and for the missing positions). The paper also merges what it drops of a frame into one
    prototype, weighted by attention, and near-identical frames before the model sees them. A compressor only names
    tokens that stay: the most salient token of a frame takes the prototype's place, with its own key and value, and
    frames are thinned by the pruner.
    """

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        del budget
        first = rank_in_frame(attention, frame_slots(layer.frame)) == 0
        salient = attention / attention.amax(dim=1, keepdim=True)
        return torch.where(first, salient + 1, salient)
