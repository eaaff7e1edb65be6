"""``SightlineConnector``: vLLM's KV connector interface over position-free blocks.

vLLM creates one in the scheduler and one in every worker; each has only that side.

Loads are synchronous: a step waits for a layer's blocks right before its attention (``wait_for_layer_load``). On one
host a block is a mapping of shared memory, so there is no transfer to hide, while vLLM's asynchronous loads delay a
request by a step, hold paged blocks meanwhile, and cannot share them among a window's questions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.layers.rotary_embedding import get_rope

from cluster.engine.vllm.connector.paged import Rotary, paged_kv
from cluster.engine.vllm.connector.scheduling import SchedulerSide, StepJobs, StepReport
from cluster.engine.vllm.connector.store import BlockFolder, BlockStore, KVShape
from cluster.engine.vllm.connector.worker import WorkerSide
from cluster.errors import ModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


COUNTERS = {
    "loads": "Requests whose prompt began with blocks from outside.",
    "loaded_tokens": "Prompt tokens that blocks stood for instead of being computed.",
    "failed_loads": "Loads that found less than was promised; their requests end with an error and are asked again.",
    "saved_blocks": "Blocks of computed KV that were kept.",
    "lost_blocks": "Blocks that could not be kept, or must not be since their request's load failed.",
    "refused_requests": "Requests whose transfer made no sense; they end with an error.",
}


class ConnectorStats(KVConnectorStats):
    """Counts since the last report, by the names in ``COUNTERS``."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per name, beside vLLM's own: ``vllm:sightline_reuse_<name>``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:sightline_reuse_{name}", documentation=text, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)


class SightlineConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads the first tokens of a prompt from blocks and saves blocks of computed tokens.

    ``kv_connector_extra_config``: ``folder``, ``cap_bytes``, ``fingerprint``, ``shards`` (see
    :func:`~cluster.engine.vllm.connector.transfer.transfer_config`).

    Raises:
        ModelError: a model whose KV is more than one kind of full attention over one set of blocks, or whose layers
            are spread over workers.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ModelError(
                f"this model keeps KV in {len(groups)} kinds of blocks; reuse needs one kind of full attention"
            )
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages != 1:
            raise ModelError(f"reuse needs all layers in every worker, not {stages} stages; set tensor_parallel_size")
        extra = self._kv_transfer_config.kv_connector_extra_config
        folder = BlockFolder(extra["folder"], shards=int(extra["shards"]))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide()
            return
        spec = groups[0].kv_cache_spec
        layers = sorted(groups[0].layer_names, key=_layer_number)
        shape = KVShape(len(layers), spec.num_kv_heads, spec.head_size, vllm_config.model_config.dtype)
        store = BlockStore(
            folder,
            shape=shape,
            fingerprint=str(extra["fingerprint"]),
            shard=int(vllm_config.parallel_config.rank),
            cap_bytes=int(extra["cap_bytes"]) // folder.shards,
        )
        self._worker = WorkerSide(store, layers, block=spec.block_size, rotary=self._rotary)

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a block that was not saved is recomputed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """Yes: a full graph would replay a step without calling the connector per layer."""
        return True

    # -- in the worker ----------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        name, cache = next(iter(kv_caches.items()))
        layer = self._vllm_config.compilation_config.static_forward_context[name]
        self.worker.register_caches(kv_caches, paged_kv(layer, cache))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start of a step: in one that only saves, ``start_load_kv`` comes after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepJobs)
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.load_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.pop_errors()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.pop_report()

    def _rotary(self) -> Rotary:
        """The model's own rotary table; vLLM caches one per set of arguments."""
        model = self._vllm_config.model_config
        text = model.hf_text_config
        with set_current_vllm_config(self._vllm_config):
            rope = get_rope(
                model.get_head_size(),
                max_position=text.max_position_embeddings,
                rope_parameters=text.rope_parameters,
                dtype=model.dtype,
            )
        if rope.rotary_dim != rope.head_size or not rope.is_neox_style or getattr(rope, "mrope_interleaved", False):
            raise ModelError("reuse knows rotary positions of whole, half-split heads only; mode: pruned works")
        return Rotary(rope.cos_sin_cache.to(model.dtype), getattr(rope, "mrope_section", None))

    # -- in the scheduler -------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match_request(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.on_allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        scheduled = scheduler_output.num_scheduled_tokens
        computed = {
            each.req_id: each.num_computed_tokens + scheduled[each.req_id]
            for each in scheduler_output.scheduled_new_reqs
        }
        running = scheduler_output.scheduled_cached_reqs
        for name, tokens in zip(running.req_ids, running.num_computed_tokens, strict=True):
            computed[name] = tokens + scheduled[name]
        return self.scheduler.make_jobs(computed, self._blocks_of)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.scheduler.apply_report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        return False, self.scheduler.on_finished(request)

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.on_finished(request)

    def _blocks_of(self, request: str) -> list[int]:
        assert self._kv_cache_manager is not None
        return list(self._kv_cache_manager.get_block_ids(request)[0])

    # -- counters ---------------------------------------------------------------------------------
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None:
            return None
        counts = self._scheduler.pop_counts()
        return ConnectorStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorMetrics:
        return ConnectorMetrics(*args)


def _layer_number(name: str) -> tuple[int, str]:
    found = re.search(r"\d+", name)
    return (int(found.group()) if found else -1, name)
