"""vLLM plugin (entry point ``vllm.general_plugins``): registers our model class in each of its processes."""

import os

from cluster.hosts import end_with_parent

ARCHITECTURE = "SightlineWindowModel"
# Set where a vLLM process is started by our engine, and nowhere else: this plugin is loaded by every vLLM here.
OWNED = "SIGHTLINE_OWNS_VLLM"


def register() -> None:
    """Register :data:`ARCHITECTURE` with vLLM; the class is imported only when that model is served."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"cluster.engine.vllm.model:{ARCHITECTURE}")
    # An engine core would survive its replica and keep the device's memory, so that the next could not start.
    if OWNED in os.environ:
        end_with_parent()
