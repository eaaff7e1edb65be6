"""Where a question should look: at what shows its event, or at nothing.

From answers alone a small model takes tens of thousands of windows to find out that a question's word stands for what
some tokens show: the answer says yes or no and not where. The scenes know where. So a part of the heads of the second
half is taught to look at the event's tokens if there are any in the window, and at the system prompt otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Heads of one key head are taught; the others find their own use.
_TAUGHT_KEY_HEADS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Of ``a`` questions, in ``n`` rows: ``window`` and ``event`` ``[a, n]`` bool, the rows in the question's window
    and those of them that show its event; ``system`` ``[a, n]`` bool, the rows that show nothing; ``told`` ``[a]``."""

    window: Tensor
    event: Tensor
    system: Tensor
    told: Tensor


def pointing_loss(looks: Sequence[tuple[Tensor, Tensor]], targets: Targets, weight: Tensor) -> Tensor:
    """Mean of ``-log`` of the attention on the right rows; ``looks`` as in ``Reading``, ``weight [a]``.

    Questions whose event was pruned away, so that nothing is left to look at, count nothing.
    """
    right = torch.where(targets.told[:, None], targets.event, targets.system)
    counted = weight * right.any(1)
    open_rows = targets.window | targets.system
    # Rows that must not be seen are far below any score, yet finite: a question without a right row has no NaN.
    total = weight.new_zeros(())
    for query, key in looks:
        taught = query.shape[0] // key.shape[0] * _TAUGHT_KEY_HEADS
        heads = key[:_TAUGHT_KEY_HEADS].repeat_interleave(taught // _TAUGHT_KEY_HEADS, dim=0)
        scores = torch.bmm(query[:taught], heads[:, : right.shape[1]].mT)
        among = scores.masked_fill(~open_rows, -1e4).logsumexp(-1)
        there = scores.masked_fill(~right, -1e4).logsumexp(-1)
        total = total + ((among - there).mean(0) * counted).sum() / counted.sum().clamp(min=1e-6)
    return total / max(1, len(looks))
