"""How an engine on vLLM is told to use the connector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError

if TYPE_CHECKING:
    pass


def transfer_config(folder: str | Path, *, cap_bytes: int, fingerprint: str, shards: int = 1) -> dict[str, Any]:
    """``kv_transfer_config`` of vLLM's engine arguments, as a mapping.

    A load that fails ends its request with an error, and whoever asked asks again with nothing loaded. vLLM's own way,
    ``kv_load_failure_policy: recompute``, cannot be had for prompts that hold embeddings: vLLM 0.32 sends its workers
    items under a loaded prefix without their content (``strip_covered_mm_data``), and when the load then fails and the
    prefix is to be computed, the worker ends for want of it. It would also let a window's other questions read blocks
    that are computed anew only in a later step.

    Args:
        folder: where blocks lie; one per engine, on a file system in memory (``/dev/shm/...``).
        cap_bytes: most bytes there, of all workers together.
        fingerprint: of the model; blocks of another are never used.
        shards: workers, vLLM's ``tensor_parallel_size``, each with its part of the heads.

    Raises:
        ConfigError: no fingerprint.
    """
    if not fingerprint:
        raise ConfigError("blocks of KV need the fingerprint of the model they belong to")
    return {
        "kv_connector": "SightlineConnector",
        "kv_connector_module_path": "cluster.engine.vllm.connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "folder": str(folder),
            "cap_bytes": cap_bytes,
            "fingerprint": fingerprint,
            "shards": shards,
        },
    }
