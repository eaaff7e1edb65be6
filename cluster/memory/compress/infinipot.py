"""InfiniPot (papers: infinipot-v, B.3 and [21]): attention of a proxy prompt, plus the newest share."""

from torch import Tensor

from cluster.memory.compress import AttentionCompressor
from cluster.memory.head_memory import LayerKV


class InfiniPot(AttentionCompressor):
    """Keeps the newest tokens and of the others those of the highest catalyst-prompt importance.

    The catalyst prompt of the paper ("Provide a detailed description of this video.") is appended at every compression
    and its attention to the cache is summed. Here the rows that asked last are the proxy prompt, which costs no pass
    through the model (see :class:`AttentionCompressor` for who asks before any did, and for the missing positions). Its
    second measure, how improbable the model found a token (NuC), is left out: visual tokens have no probability.

    Args:
        columns: cells of one row; unused.
        recent: share of the budget for the newest tokens (a reading: InfiniPot-V's share of recent frames).
    """

    def __init__(self, columns: int, *, recent: float = 0.125) -> None:
        super().__init__(columns)
        if not 0 <= recent <= 1:
            raise ValueError(f"recent must be between 0 and 1, not {recent}")
        self.recent = recent

    def scores(self, layer: LayerKV, attention: Tensor, budget: int) -> Tensor:
        newest = int(self.recent * budget)
        # An attention is at most 1.
        attention[:, layer.tokens - newest :] = 2.0
        return attention
