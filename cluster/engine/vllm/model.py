"""The model that vLLM serves: a family's language model over given embeddings at given three-axis positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMRoPE, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
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


class WindowInfo(BaseProcessingInfo):
    """Limits, from the configuration that :mod:`cluster.engine.vllm.served_model` writes."""

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
    """The largest item, to measure memory with."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        del mm_counts
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> MultiModalDataDict:
        del seq_len, mm_counts, mm_options
        return {}


class WindowProcessor(BaseMultiModalProcessor[WindowInfo]):
    """Windows come rendered (:func:`cluster.engine.vllm.prompt_items.window_prompt`): there is nothing to process."""

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
        return window_prompt([], items, [], placeholder=0)

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        del inputs, timing_ctx
        raise ValueError("this model takes rendered windows only; build them with cluster.engine.vllm.prompt_items")

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
    """vLLM's own Qwen2, the language model of every family we have; the tower runs elsewhere."""

    packed_modules_mapping = {  # noqa: RUF012 -- the name and form vLLM reads
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # Names in checkpoints of both families, as saved by transformers before and since 4.52, and in what we write
    # ourselves. Prefixes are replaced one after the other, in this order.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.visual.": None,
            "visual.": None,
            "model.vision_tower.": None,
            "vision_tower.": None,
            "model.multi_modal_projector.": None,
            "multi_modal_projector.": None,
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.": "language_model.model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        mark: Any = self._mark_language_model
        with mark(vllm_config):
            self.language_model: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                prefix=maybe_prefix(prefix, "language_model"),
                architectures=["Qwen2ForCausalLM"],
            )
        # The name vLLM looks for when layers are spread over devices.
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """``embeds``: of each item ``[n, D]``, or all of them stacked where they are of one length."""
        embeds: Any = kwargs["embeds"]
        return list(embeds)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Exactly the positions that came with the items."""
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
        hidden: Tensor | IntermediateTensors = self.language_model.model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
        )
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.language_model.compute_logits(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded
