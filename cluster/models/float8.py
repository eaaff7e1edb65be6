"""Linear layers in float8 (e4m3): weights with a scale for each output, activations with one for each row.

Towers' and decoder layers' linear layers alone; embeddings, output head, norms, attention and KV keep the model's
dtype.
``torch._scaled_mm`` rounds and multiplies alike on a CPU, where it saves nothing, and on Ada and Hopper GPUs.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from cluster.errors import ConfigError
from cluster.models.fused import FLOAT8, to_float8

ALIGNED = 16
"""Multiple of a product's sides that tensor cores take at full speed, and in float8 at all."""
CAPABILITY = (8, 9)


class Float8Linear(nn.Linear):
    """A linear layer whose products are float8; ``weight`` float8 ``[out, in]``, ``weight_scale`` ``[1, out]``."""

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
        """Outputs of these layers side by side: rows are rounded once for all of them. Their weights become views."""
        # Bytes, as not every device joins float8.
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
    """Replace the linear layers within ``module``; those whose sides are no multiple of 16 stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not (child.in_features % ALIGNED or child.out_features % ALIGNED):
                setattr(parent, name, Float8Linear.of(child))


def check_float8(device: torch.device) -> None:
    """Raises ``ConfigError`` for a GPU older than Ada, which has no float8 products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"model.dtype float8 needs an Ada or Hopper GPU or a newer one, not {name}; take bfloat16")
