"""The model class served by vLLM: a family's language model over given embeddings and three-axis positions.

The layers are vLLM's own; the first ones add DeepStack embeddings to visual tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchFeature
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMRoPE, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptUpdate,
    TimingContext,
)
from vllm.sequence import IntermediateTensors

from cluster.engine.vllm.positions import feature_positions
from cluster.engine.vllm.prompt_items import MODALITY, WindowItem, window_prompt

# Token dimension of each input. LlamaModel declares one-axis positions, but ours have three axes.
_TOKENS = {"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}


class WindowDecoder:
    """Forward pass of a vLLM language model over embeddings ``[n, W]`` (see ``VisionLanguageModel.embed``).

    Like vLLM's ``Qwen3LLMModel`` (whose module imports torchvision), but DeepStack embeddings are part of the input.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    start_layer: int
    end_layer: int

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[n]`` -> embeddings ``[n, W]``; the part that layers add is zero for text."""
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
"""Keyed by ``model_type`` of the configuration that :mod:`cluster.engine.vllm.served_model` writes."""


class WindowInfo(BaseProcessingInfo):
    """Item limits, from the configuration written by :mod:`cluster.engine.vllm.served_model`."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        del seq_len, mm_counts
        return {MODALITY: self.largest}

    @property
    def largest(self) -> int:
        """Tokens of the largest frame."""
        return int(self.ctx.model_config.hf_config.sightline_largest_item)


class WindowDummies(BaseDummyInputsBuilder[WindowInfo]):
    """Dummy inputs of the largest size, for memory profiling."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        del mm_counts
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> MultiModalDataDict:
        del seq_len, mm_counts, mm_options
        return {}


class WindowProcessor(BaseMultiModalProcessor[WindowInfo]):
    """Pass-through processor: windows are rendered by :func:`cluster.engine.vllm.prompt_items.window_prompt`."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: Any = None, scheduler_config: Any = None
    ) -> MultiModalInput:
        del cache, scheduler_config
        config = self.info.ctx.model_config
        count = self.info.largest
        embeds = torch.zeros(count, config.get_inputs_embeds_size(), dtype=config.dtype)
        positions = torch.arange(count).expand(3, -1)
        items = [
            WindowItem.of(embeds, positions, f"dummy {number}", after=count)
            for number in range(mm_counts.get(MODALITY, 0))
        ]
        return window_prompt([], items, [])

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        del inputs, timing_ctx
        raise ValueError("this model accepts only windows rendered by cluster.engine.vllm.prompt_items")

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        raise NotImplementedError

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        raise NotImplementedError


@MULTIMODAL_REGISTRY.register_processor(WindowProcessor, info=WindowInfo, dummy_inputs=WindowDummies)
class SightlineWindowModel(nn.Module, SupportsMultiModal, SupportsPP, SupportsMRoPE):
    """A family's language model on vLLM's layers; its vision tower runs in the replica."""

    packed_modules_mapping = {  # noqa: RUF012 -- name and type are vLLM's
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # Weight names in checkpoints of all families, as saved by transformers before and since 4.52. Files that we write
    # use the model's own names. Prefixes are replaced in this order.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "model.",
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            **{
                f"{prefix}{part}": None
                for prefix in ("model.", "")
                for part in ("visual.", "vision_tower.", "multi_modal_projector.", "image_newline")
            },
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        mark: Any = self._mark_language_model
        with mark(vllm_config):
            self.model: Any = DECODERS[config.model_type](vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: Any = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        # vLLM looks up this name for pipeline parallelism.
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Embeddings ``[n, W]`` per item; vLLM stacks them if all have the same length."""
        embeds: Any = kwargs["embeds"]
        return list(embeds)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """The positions sent with the items."""
        return feature_positions(len(input_tokens), mm_features)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors:
        del kwargs
        if intermediate_tensors is not None:
            inputs_embeds = None
        hidden: Tensor | IntermediateTensors = self.model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
        )
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded
