"""What can be said of a checkpoint before anything is loaded: family, quantisation, completeness, memory.

Files are checked without torch; memory is worked out from the model's shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ModelError
from cluster.models.catalog import check_model, is_hub_id, locate
from cluster.models.presets import PRESETS

if TYPE_CHECKING:
    import torch

    from cluster.models.base import VisionLanguageModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
POOLS = 2
"""KV pools held at once: of the engine, and of the one that it is compared with."""


def checkpoint_folder(name: str) -> Path | None:
    """Folder of a checkpoint, a bundled model, or a hub id that this machine has; ``None`` of a preset. Raises
    ``ModelError``: there is no such model here. Nothing is fetched."""
    if name in PRESETS:
        return None
    folder = Path(locate(name)).expanduser()
    if folder.is_dir() or not is_hub_id(name):
        check_model(name)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ModelError(
            f"model {name!r} is neither a folder nor a checkpoint that the hub's cache has here; "
            f"fetch it first (hf download {name}), or name its folder"
        ) from None


def check_files(folder: Path) -> None:
    """Check family, quantisation and completeness from ``config.json`` and the headers of the weights' files. Raises
    ``ModelError``: one sentence."""
    check_model(str(folder))
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    if (folder / SINGLE).is_file():
        names: dict[str, set[str]] = {SINGLE: set()}
    elif (folder / INDEX).is_file():
        names = _indexed(folder)
    elif any(folder.glob("pytorch_model*.bin")):
        # Without headers: what is missing shows as it is loaded.
        return
    else:
        raise ModelError(f"the checkpoint {str(folder)!r} has no weights ({SINGLE} or {INDEX}); get it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"the checkpoint {str(folder)!r} lacks {len(missing)} of {len(names)} files of weights, {missing[0]} the "
            "first; get it again"
        )
    for name, tensors in names.items():
        if absent := sorted(tensors - _stored(folder / name)):
            raise ModelError(f"{folder / name} lacks the weight {absent[0]}, which {INDEX} names; get it again")


def _indexed(folder: Path) -> dict[str, set[str]]:
    """File -> the weights that the index says are in it."""
    found: dict[str, set[str]] = {}
    try:
        for tensor, file in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            found.setdefault(str(file), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{folder / INDEX} names no files of weights; get it again") from None
    return found


def _stored(path: Path) -> set[str]:
    """Names of a file's weights. Raises ``ModelError``: it is no safetensors file, or not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ModelError(
            f"{path} is no whole safetensors file ({error}): it was cut off, or is a pointer of Git LFS; get it again"
        ) from None


def pool_bytes(shape: VisionLanguageModel, dtype: torch.dtype, window_tokens: int) -> int:
    """Bytes of a KV pool for a window of ``window_tokens``, in full and pruned, and its text."""
    from cluster.lab.planning.model_card import HALF, kv_token_bytes

    return (2 * window_tokens + 4096) * kv_token_bytes(shape) * dtype.itemsize // HALF


def check_memory(shape: VisionLanguageModel, device: torch.device, dtype: torch.dtype, window_tokens: int) -> None:
    """Check that weights and windows fit the device and, while it is loaded, the host.

    ``shape``: model on the meta device; ``dtype``: of weights and KV; ``window_tokens``: with nothing pruned. Raises
    ``ModelError``: they do not.
    """
    import psutil
    import torch

    from cluster.hosts import gib, host_memory_bytes

    config = shape.text_config
    weights = sum(parameter.numel() for parameter in shape.model.parameters()) * dtype.itemsize
    # Of transformers' own forward, which takes a window in one pass; see gpu_pool_bytes.
    activations = window_tokens * (3 * config.intermediate_size + 8 * config.hidden_size) * dtype.itemsize
    windows = POOLS * pool_bytes(shape, dtype, window_tokens) + activations
    free = {"cpu": min(psutil.virtual_memory().available, host_memory_bytes())}
    needed = {"cpu": weights}
    if device.type == "cuda":
        free[str(device)] = torch.cuda.mem_get_info(device)[0]
    needed[str(device)] = weights + windows
    for name, nbytes in needed.items():
        if nbytes > free[name]:
            raise ModelError(
                f"the model is too large for this machine: {gib(weights)} of weights in "
                f"{str(dtype).removeprefix('torch.')} and {gib(windows)} for windows, of which {name} must hold "
                f"{gib(nbytes)} and has {gib(free[name])} free; take --dtype bfloat16, a larger machine or a smaller "
                "model"
            )
