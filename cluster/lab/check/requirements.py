"""Checks of a checkpoint before loading weights: family, quantisation, completeness, memory.

Files are checked without torch; memory is computed from the model's shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ModelError
from cluster.models.catalog import INDEX, SINGLE, cached_config, check_model, is_hub_id, locate
from cluster.models.presets import PRESETS

if TYPE_CHECKING:
    import torch

    from cluster.models.base import VisionLanguageModel

POOLS = 2
"""KV pools held at once, of the engine and of its reference."""


def checkpoint_folder(name: str) -> Path | None:
    """Local folder of a checkpoint, bundled model or hub id; ``None`` for a preset. Downloads nothing; raises
    ``ModelError`` if the model is not on this machine."""
    if name in PRESETS:
        return None
    folder = Path(locate(name)).expanduser()
    if folder.is_dir() or not is_hub_id(name):
        check_model(name)
        return folder
    if (config := cached_config(name)) is None:
        raise ModelError(
            f"model {name!r} is neither a folder nor a checkpoint in the hub's local cache; "
            f"fetch it first (hf download {name}), or name its folder"
        )
    return config.parent


def check_files(folder: Path) -> None:
    """Check family, quantisation and completeness from ``config.json`` and the headers of the weight files. Raises
    ``ModelError`` with a one-sentence reason."""
    check_model(str(folder))
    if (folder / SINGLE).is_file():
        names: dict[str, set[str]] = {SINGLE: set()}
    elif (folder / INDEX).is_file():
        names = _weights_by_file(folder)
    elif any(folder.glob("pytorch_model*.bin")):
        # No headers: missing weights are found when loading.
        return
    else:
        raise ModelError(f"the checkpoint {str(folder)!r} has no weights ({SINGLE} or {INDEX}); download it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"the checkpoint {str(folder)!r} lacks {len(missing)} of {len(names)} weight files, {missing[0]} the "
            "first; download it again"
        )
    for name, tensors in names.items():
        if absent := sorted(tensors - _stored_weights(folder / name)):
            raise ModelError(f"{folder / name} lacks the weight {absent[0]} listed in {INDEX}; download it again")


def _weights_by_file(folder: Path) -> dict[str, set[str]]:
    """File -> names of its weights, according to the index."""
    found: dict[str, set[str]] = {}
    try:
        for tensor, file in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            found.setdefault(str(file), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{folder / INDEX} lists no weight files; download it again") from None
    return found


def _stored_weights(path: Path) -> set[str]:
    """Names of the weights in a file. Raises ``ModelError`` if it is no complete safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ModelError(
            f"{path} is no complete safetensors file ({error}): truncated, or a Git LFS pointer; download it again"
        ) from None


def pool_bytes(shape: VisionLanguageModel, dtype: torch.dtype, window_tokens: int) -> int:
    """Bytes of a KV pool for a window of ``window_tokens``, in full and pruned, plus text."""
    from cluster.lab.planning.model_card import HALF, kv_token_bytes

    return (2 * window_tokens + 4096) * kv_token_bytes(shape) * dtype.itemsize // HALF


def check_memory(shape: VisionLanguageModel, device: torch.device, dtype: torch.dtype, window_tokens: int) -> None:
    """Check that weights and windows fit into device memory and, while loading, host memory. Raises ``ModelError``.

    ``shape``: model on the meta device; ``dtype``: of weights and KV; ``window_tokens``: with nothing pruned.
    """
    import psutil
    import torch

    from cluster.hosts import gib, host_memory_bytes

    config = shape.text_config
    weights = sum(parameter.numel() for parameter in shape.model.parameters()) * dtype.itemsize
    # Activations of transformers' forward, which runs a window in one pass; see gpu_pool_bytes.
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
                f"{str(dtype).removeprefix('torch.')} and {gib(windows)} for windows; {name} must hold "
                f"{gib(nbytes)} of this and has {gib(free[name])} free; use --dtype bfloat16, a larger machine or a "
                "smaller model"
            )
