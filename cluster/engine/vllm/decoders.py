"""vLLM's language models over our embeddings: its decoder layers, with what the first of them add to visual tokens."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.sequence import IntermediateTensors

# Dimension of the tokens. LlamaModel's own is that of positions on one axis, and ours have three.
_TOKENS = {"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}


class WindowDecoder:
    """Forward of a vLLM language model over embeddings ``[n, W]`` (see ``VisionLanguageModel.embed``).

    As vLLM's ``Qwen3LLMModel``, whose module imports torchvision, with the added embeddings beside the first ones.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    start_layer: int
    end_layer: int

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[n]`` -> embeddings ``[n, W]``: to text, layers add nothing."""
        return F.pad(self.embed_tokens(input_ids), (0, self.config.projection_size - self.config.hidden_size))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        added: list[Tensor] = []
        residual: Tensor | None = None
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            hidden, *added = torch.split(inputs_embeds, self.config.hidden_size, dim=-1)
        else:
            assert intermediate_tensors is not None
            hidden, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        for index, layer in islice(enumerate(self.layers), self.start_layer, self.end_layer):
            hidden, residual = layer(positions, hidden, residual)
            if index < len(added):
                hidden = hidden + added[index]
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden, "residual": residual})
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


@support_torch_compile(dynamic_arg_dims=_TOKENS)
class LlamaDecoder(WindowDecoder, LlamaModel):
    """Llama and Vicuna."""


@support_torch_compile(dynamic_arg_dims=_TOKENS)
class Qwen2Decoder(WindowDecoder, Qwen2Model):
    """Qwen2 and Qwen2.5."""


@support_torch_compile(dynamic_arg_dims=_TOKENS)
class Qwen3Decoder(WindowDecoder, Qwen3Model):
    """Qwen3."""


DECODERS: Mapping[str, type[Any]] = {"llama": LlamaDecoder, "qwen2": Qwen2Decoder, "qwen3": Qwen3Decoder}
"""By ``model_type`` of the configuration that :mod:`cluster.engine.vllm.served_model` writes."""
