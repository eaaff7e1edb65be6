"""What vLLM loads in each of its processes before a model (entry point ``vllm.general_plugins``): our model's name."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

ARCHITECTURE = "SightlineWindowModel"
# Set where a vLLM process is started by our engine, and nowhere else: this plugin is loaded by every vLLM here.
OWNED = "SIGHTLINE_OWNS_VLLM"


def register() -> None:
    """Tell vLLM where the class of :data:`ARCHITECTURE` is; it is imported only where that model is served."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"cluster.engine.vllm.model:{ARCHITECTURE}")
    end_with_parent()


def end_with_parent() -> None:
    """An engine core of ours ends when the process that started it does, however that ended.

    vLLM's own would go on for ever after a kill, with all the memory of the device, and the next replica could not
    start.
    """
    parent = multiprocessing.parent_process()
    if OWNED not in os.environ or parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
