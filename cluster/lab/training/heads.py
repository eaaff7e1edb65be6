"""Linear heads that read the dense labels off hidden states; they teach and are not exported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.lab.training.labels import LABELS
from cluster.lab.training.layout import Dense

# Most labels are set at few tokens: a set one counts this many times as much.
_POSITIVE = 4.0
# Background says little and is most of a complete frame.
_BACKGROUND = 0.25
# What is asked for in the end, among thirty labels that help to see it.
_EVENT = 2.5
# Velocities are some hundredths of the picture per second.
_VELOCITY_SCALE = 0.1
_VELOCITY_WEIGHT = 0.6


@dataclass(frozen=True, slots=True)
class DenseLoss:
    """``total`` to minimise; ``found``: share of set labels that are given more than one half (recall), for the log."""

    total: Tensor
    found: Tensor


class DenseHead(nn.Module):
    """Hidden states ``[t, D]`` of visual tokens -> what is there and how it moves."""

    emphasis: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.labels = nn.Linear(width, len(LABELS))
        self.velocity = nn.Linear(width, 2)
        nn.init.constant_(self.labels.bias, -3.0)
        emphasis = torch.tensor([_EVENT if label.startswith("event:") else 1.0 for label in LABELS])
        self.register_buffer("emphasis", emphasis, persistent=False)

    def forward(self, hidden: Tensor, dense: Dense) -> DenseLoss:
        """Loss on the labels of these tokens."""
        x = self.norm(hidden.float())
        logits = self.labels(x)
        weight = 1.0 + (_POSITIVE - 1.0) * dense.hot
        weight = weight * torch.where(dense.covered, 1.0, _BACKGROUND)[:, None] * self.emphasis
        loss = (F.binary_cross_entropy_with_logits(logits, dense.hot, reduction="none") * weight).sum(1)
        # Per covered token, so that an empty frame does not dilute a busy one; the constant keeps it of order one.
        total = loss.sum() / (_BACKGROUND * len(hidden) + dense.covered.sum()) / 4
        if bool(dense.covered.any()):
            wanted = dense.velocity[dense.covered] / _VELOCITY_SCALE
            total = total + _VELOCITY_WEIGHT * F.huber_loss(self.velocity(x[dense.covered]), wanted)
        hot = dense.hot > 0
        found = (logits[hot] > 0).float().mean() if bool(hot.any()) else logits.new_zeros(())
        return DenseLoss(total, found.detach())


class DenseHeads(nn.Module):
    """One head on the tower's output, one on the middle and one on the end of the language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = DenseHead(width)
        self.middle = DenseHead(width)
        self.last = DenseHead(width)
