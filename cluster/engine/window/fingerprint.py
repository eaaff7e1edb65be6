"""What makes two loaded models the same, so that KV computed by one means the same to the other."""

from __future__ import annotations

import hashlib

import torch

from cluster.models.base import VisionLanguageModel

# Elements looked at of each parameter: enough to tell seeds, fine-tunes and checkpoints apart, in milliseconds.
SAMPLES = 32


def fingerprint(model: VisionLanguageModel) -> str:
    """Digest of the family, dtype, every parameter's name and shape, and samples of its values."""
    hasher = hashlib.blake2b(f"{model.family}:{model.dtype}".encode(), digest_size=16)
    for name, parameter in sorted(model.model.named_parameters()):
        hasher.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
        hasher.update(flat[places.to(flat.device)].float().cpu().numpy().tobytes())
    return hasher.hexdigest()
