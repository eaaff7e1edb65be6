"""The KV of the system prompt, computed once per model: the same for every stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cluster.engine.native.forward import StreamPass, ragged_forward
from cluster.engine.native.kernels import Kernel
from cluster.engine.native.plan import SystemPrompt
from cluster.engine.window.kv import KVSlab
from cluster.models.base import VisionLanguageModel


@torch.inference_mode()
def system_prompt(model: VisionLanguageModel, kernel: Kernel[Any]) -> SystemPrompt:
    """Run a model's system prompt; the engine's attention must be installed."""
    ids = torch.tensor(model.system_ids(), dtype=torch.int64)
    count = len(ids)
    kv = KVSlab.of(model)
    kv.reserve(0, count)
    cos, sin = model.rotary(torch.arange(count, device=model.device).expand(3, -1))
    work = StreamPass(
        kv=kv,
        base=0,
        slots=np.arange(count),
        tail_slots=np.zeros(0, np.int64),
        tail_runs=(),
        embeds=model.embed(ids),
        cos=cos.to(model.dtype),
        sin=sin.to(model.dtype),
    )
    ragged_forward(model, [work], kernel)
    return SystemPrompt(kv.k[:, :, :count].clone(), kv.v[:, :, :count].clone())
