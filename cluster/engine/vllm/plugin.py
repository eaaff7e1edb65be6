"""vLLM plugin (entry point ``vllm.general_plugins``): registers our model class in each of its processes."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

ARCHITECTURE = "SightlineWindowModel"
# Set where a vLLM process is started by our engine, and nowhere else: this plugin is loaded by every vLLM here.
OWNED = "SIGHTLINE_OWNS_VLLM"


def register() -> None:
    """Register :data:`ARCHITECTURE` with vLLM; the class is imported only when that model is served."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"cluster.engine.vllm.model:{ARCHITECTURE}")
    end_with_parent()


def end_with_parent() -> None:
    """End an engine core of ours when its parent process ends, however it ended.

    vLLM's own would survive a kill and keep the device's memory, so the next replica could not start.
    """
    parent = multiprocessing.parent_process()
    if OWNED not in os.environ or parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
