"""Top-k clusters of each head up to a token budget; over single tokens this is InfiniGen-P."""

from __future__ import annotations

from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.organise.table import ClusterTable
from cluster.memory.retrieve import Retrieved, Retriever, best_scores


class TopK(Retriever):
    """Highest-scoring clusters until their tokens reach a budget; the one that reaches it is included.

    A cluster's score is the largest dot product of any row with its mean; of equal scores the lower number comes first.

    Args:
        share: of all tokens, 0 to 1.
        tokens: a number of tokens instead of a share.

    Raises:
        ConfigError: the share is none, or the number is negative.
    """

    def __init__(self, *, share: float = 0.1, tokens: int | None = None) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of tokens to retrieve is between 0 and 1, not {share:g}")
        if tokens is not None and tokens < 0:
            raise ConfigError(f"the number of tokens to retrieve is 0 or more, not {tokens}")
        self.share, self.tokens = share, tokens

    def select(self, query: Tensor, table: ClusterTable) -> Retrieved:
        if not len(table) or not len(query):
            return Retrieved.nothing(table.mean.device)
        order = best_scores(query, table.mean).argsort(descending=True, stable=True)
        count = table.count[order]
        budget = self.share * table.tokens if self.tokens is None else self.tokens
        taken = count.cumsum(0) - count < budget
        return Retrieved(order[taken].sort().values, 1.0)

    def for_prediction(self) -> TopK:
        """With twice the budget."""
        return TopK(share=min(1.0, 2 * self.share), tokens=None if self.tokens is None else 2 * self.tokens)
