"""What vLLM asks of a multimodal model before it is loaded: how large an item may be, and one to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptUpdate,
    TimingContext,
)

from cluster.engine.vllm.items import MODALITY, WindowItem, window_prompt


class WindowInfo(BaseProcessingInfo):
    """Limits, from the configuration that :mod:`cluster.engine.vllm.served` writes."""

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
    """Windows come rendered (:func:`cluster.engine.vllm.items.window_prompt`): there is nothing to process."""

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
        raise ValueError("this model takes rendered windows only; build them with cluster.engine.vllm.items")

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
