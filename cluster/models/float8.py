"""Linear layers in float8 (e4m3): weights with a scale for each output, activations with one for each row.

Towers' and decoder layers' linear layers alone; embeddings, output head, norms, attention and KV keep the model's
dtype.
``torch._scaled_mm`` rounds and multiplies alike on a CPU, where it saves nothing, and on Ada and Hopper GPUs.
"""

import torch
from torch import Tensor, nn

from cluster.errors import ConfigError

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# Sides of the products that GPUs take.
MULTIPLE = 16
CAPABILITY = (8, 9)


class Float8Linear(nn.Linear):
    """A linear layer whose products are float8; ``weight`` float8 ``[out, in]``, ``weight_scale`` ``[1, out]``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        weight, scale = to_float8(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        rows, scale = to_float8(input.reshape(-1, self.in_features))
        product = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scale, scale_b=self.weight_scale, out_dtype=torch.bfloat16
        )
        output = product.to(input.dtype).view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows [n, k]`` in float8, each divided by its ``scale [n, 1]`` float32: its largest value becomes the type's."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def use_float8(module: nn.Module) -> None:
    """Replace the linear layers within ``module``; those whose sides are no multiple of 16 stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not (child.in_features % MULTIPLE or child.out_features % MULTIPLE):
                setattr(parent, name, Float8Linear(child))


def check_float8(device: torch.device) -> None:
    """Check that a device has float8 products.

    Raises:
        ConfigError: a GPU older than Ada.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"model.dtype float8 needs an Ada or Hopper GPU or a newer one, not {name}; take bfloat16")
