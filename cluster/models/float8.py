"""Linear layers in float8 (e4m3): weights with one scale per output, activations with one scale per row.

Only linear layers of tower and decoder layers; embeddings, output head, norms, attention and KV keep the model's dtype.
``torch._scaled_mm`` rounds and multiplies the same way on a CPU, where it saves nothing, and on Ada and Hopper GPUs.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from cluster.errors import ConfigError
from cluster.models.fused import FLOAT8, to_float8

ALIGNED = 16
"""Matrix sides must be a multiple of this for full tensor core speed, and in float8 at all."""
CAPABILITY = (8, 9)
"""Lowest compute capability with float8 products: Ada."""


class Float8Linear(nn.Linear):
    """A linear layer with float8 products; ``weight [out, in]`` float8, ``weight_scale [1, out]``."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight, self.weight_scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        weight, scale = to_float8(linear.weight.detach())
        return cls(weight, scale.t().contiguous(), linear.bias)

    @classmethod
    def joined(cls, linears: Sequence[Self]) -> Self:
        """One layer with the concatenated outputs of these: rows are rounded once. Their weights become views of it."""
        # As bytes, because not every device concatenates float8.
        weight = torch.cat([each.weight.view(torch.uint8) for each in linears]).view(FLOAT8)
        scale = torch.cat(tuple(each.weight_scale for each in linears), 1)
        biases = tuple(each.bias for each in linears if each.bias is not None)
        sizes = [each.out_features for each in linears]
        parts = torch.split(weight, sizes), torch.split(scale, sizes, 1)
        for each, rows, of_row in zip(linears, *parts, strict=True):
            each.weight.data, each.weight_scale.data = rows, of_row
        return cls(weight, scale, torch.cat(biases) if biases else None)

    def forward(self, input: Tensor) -> Tensor:
        rows, scale = to_float8(input.reshape(-1, self.in_features))
        product = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scale, scale_b=self.weight_scale, out_dtype=torch.bfloat16
        )
        output = product.to(input.dtype).view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def use_float8(module: nn.Module) -> None:
    """Replace the linear layers in ``module``, except those whose sides are not multiples of ``ALIGNED``."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not (child.in_features % ALIGNED or child.out_features % ALIGNED):
                setattr(parent, name, Float8Linear.of(child))


def check_float8(device: torch.device) -> None:
    """Raise ``ConfigError`` for a GPU older than Ada, which has no float8 products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"model.dtype float8 needs an Ada, Hopper or newer GPU, not {name}; use bfloat16")
