"""vLLM plugin (entry point ``vllm.general_plugins``): registers our model class in each of vLLM's processes."""

import os

from cluster.hosts import end_with_parent

ARCHITECTURE = "SightlineWindowModel"
# Set only for vLLM processes started by our engine: every vLLM in this environment loads this plugin.
OWNED = "SIGHTLINE_OWNS_VLLM"


def register() -> None:
    """Register :data:`ARCHITECTURE` with vLLM; the class is imported only when that model is served."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"cluster.engine.vllm.model:{ARCHITECTURE}")
    # Otherwise an engine core outlives its replica and keeps the device's memory, so the next one cannot start.
    if OWNED in os.environ:
        end_with_parent()
