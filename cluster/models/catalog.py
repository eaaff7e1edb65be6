"""Catalogue of loadable models. Does not import torch, so that a wrong name fails before the cluster starts."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cluster.errors import ModelError, first_line
from cluster.models.presets import PRESETS, PUBLISHED, SHAPES
from cluster.registry import families

# Trained models shipped with this package: name -> folder of the checkpoint.
BUNDLED = {"demo": Path(__file__).parent / "demo"}

_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
_DEFAULTS = {"llama": _LLAMA, "mistral": _LLAMA | {"num_key_value_heads": 8}}
"""Entries that the published LLaVA-NeXT-Video leaves out of its ``text_config``, as they are transformers' defaults."""

LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text")
"""``model_type`` of transformers' language models whose layers a ``DecoderLayer`` computes."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Weights of a checkpoint in one file, and the list of its files if there are several."""

HUB_S = 5.0
"""Timeout for checking whether the hub is reachable."""


def locate(name: str) -> str:
    """Folder of a bundled model; other names are returned unchanged."""
    return str(BUNDLED[name]) if name in BUNDLED else name


def is_hub_id(name: str) -> bool:
    """Whether the name has the form of a hub id, not of a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def cached_config(hub_id: str) -> Path | None:
    """``config.json`` of a checkpoint in the local hub cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def cached_checkpoint(hub_id: str) -> Path | None:
    """Folder of a checkpoint in the local hub cache; None unless all of its weights are there."""
    if (config := cached_config(hub_id)) is None:
        return None
    folder, names = config.parent, {SINGLE}
    if (index := folder / INDEX).is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return folder if all((folder / name).is_file() for name in names) else None


@cache
def key_heads(name: str) -> tuple[int, int]:
    """Number of key heads in all layers of a model, and head size. Raises ``ModelError`` (not cached): this machine has
    no ``config.json`` of it (yet), or one without these entries."""
    name = PUBLISHED.get(name, name)
    if shape := SHAPES.get(name) or PRESETS.get(name):
        text: Mapping[str, Any] = shape.text
    else:
        folder = Path(locate(name)).expanduser()
        config = folder / "config.json" if folder.is_dir() else cached_config(name)
        body = _read(name, config or folder)[0]
        text = body.get("text_config") or body
        text = {**_DEFAULTS.get(str(text.get("model_type")), {}), **text}
    try:
        heads = text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // heads
        return text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads), width
    except (KeyError, TypeError) as error:
        raise ModelError(f"the config.json of model {name!r} does not give its key heads: {error}") from None


def check_model(name: str, *, quantised: bool = False) -> None:
    """Raise ``ModelError`` unless ``name`` is a preset, a bundled model, or has a ``config.json`` of a known family.
    Looks in the file system and, for a hub id, on the hub; weights are neither read nor downloaded. ``quantised``:
    accept quantised weights."""
    if name in PRESETS:
        return
    if hubs := [hub for hub, shape in PUBLISHED.items() if shape == name]:
        raise ModelError(
            f"{name!r} is a shape without weights, for `models show` and benchmarks; name the checkpoint, {hubs[0]}, "
            "or its folder"
        )
    folder = Path(locate(name)).expanduser()
    if name in BUNDLED and not (folder / "config.json").is_file():
        raise ModelError(
            f"this installation lacks the bundled model {name!r} ({folder} holds no checkpoint); "
            f"install the package again, or name a preset ({', '.join(sorted(PRESETS))})"
        )
    if folder.is_dir():
        config = folder / "config.json"
        if not config.is_file():
            raise ModelError(f"model {name!r} is a folder without config.json; name the folder of a checkpoint")
    elif folder.is_file() or not is_hub_id(name):
        raise ModelError(
            f"there is no model {name!r}; name a bundled model ({', '.join(BUNDLED)}), "
            f"a preset ({', '.join(sorted(PRESETS))}), the folder of a checkpoint, or a hub id"
        )
    else:
        config = _from_hub(name)
    body, family = _read(name, config)
    if family not in families:
        raise ModelError(f"model {name!r} is of family {family!r}; supported families: {', '.join(families)}")
    text = body.get("text_config")
    # Without an entry, it is the family's default, which is supported.
    if isinstance(text, dict) and (kind := text.get("model_type", "llama")) not in LANGUAGE_MODELS:
        raise ModelError(
            f"the language model of {name!r} is of type {kind!r}; supported types: {', '.join(LANGUAGE_MODELS)}"
        )
    if not quantised:
        check_unquantised(name, body)


def check_unquantised(name: str, config: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` if a checkpoint's configuration declares quantised weights."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if quantised := part.get("quantization_config"):
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise ModelError(
                f"model {name!r} is quantised (method {method}), which is not supported; use the checkpoint "
                "it was made from, with --dtype float8 if memory is short"
            )


def _read(name: str, config: Path) -> tuple[Mapping[str, Any], str]:
    """A configuration and its ``model_type``."""
    try:
        body = json.loads(config.read_text(encoding="utf-8"))
        return body, str(body["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"the config.json of model {name!r} has no model_type, so it is not a transformers checkpoint"
        ) from None


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, get_session, hf_hub_download

    if cached := cached_config(name):
        return cached
    # huggingface_hub retries for half a minute if the hub is unreachable.
    try:
        get_session().head(f"{constants.ENDPOINT}/{name}", timeout=HUB_S)
    except Exception as error:
        raise ModelError(
            f"model {name!r} is not a local folder, and the hub {constants.ENDPOINT} is unreachable: {error}; "
            "name the folder of a checkpoint"
        ) from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        reason = first_line(error)
        raise ModelError(f"model {name!r} is neither a local folder nor available on the hub: {reason}") from None
