"""Checks camera sources: their schemes, and which files on the decoders' machines they may open."""

from __future__ import annotations

import os
import unicodedata
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cluster.config.problems import InvalidConfigError, Problem
from cluster.hosts import is_below
from cluster.models.catalog import BUNDLED
from cluster.models.settings import ModelSettings
from cluster.redaction import SourceAddress
from cluster.registry import near

if TYPE_CHECKING:
    from cluster.config.camera import CameraConfig, CameraEntry
    from cluster.config.root import SightlineConfig

NETWORK_SCHEMES = ("rtsp", "rtsps", "http", "https", "rtmp", "rtmps")
DEVICE_SCHEME = "v4l2"
DEMO_SCHEME = "demo"
_LOCAL_SCHEMES = ("", "file", DEVICE_SCHEME)


def check_address(source: SourceAddress) -> SourceAddress:
    """Check an address's syntax. Raises ``ValueError``: an unknown scheme, no host or path, or a control character,
    which FFmpeg would write into its request."""
    schemes = (*NETWORK_SCHEMES, "file", DEVICE_SCHEME, DEMO_SCHEME)
    if source.scheme and source.scheme not in schemes:
        known = ", ".join(schemes)
        raise ValueError(f"{source} has an unknown scheme{near(source.scheme, schemes) or ';'} there are: {known}")
    if source.scheme and not source.reveal().partition("://")[2].strip("/"):
        raise ValueError(f"{source} names no {'path' if source.scheme in _LOCAL_SCHEMES else 'host'}")
    if source.scheme and any(unicodedata.category(letter) == "Cc" for letter in source.reveal()):
        raise ValueError("the address holds a control character, like a line break")
    return source


def local_path(source: SourceAddress) -> Path | None:
    """Path of a file or device; None for bundled clips, network cameras and pushing cameras."""
    if not source or source.scheme not in _LOCAL_SCHEMES:
        return None
    return Path(unquote(urlsplit(source.reveal()).path) if source.scheme else source.reveal())


def bundled_remark(config: SightlineConfig, camera: CameraConfig) -> str:
    """Warning that the bundled model was not trained on a camera's pictures or questions; empty if it was, and for
    other models. A file counts as a synthetic scene if its ground truth is beside it; pushed video may be one."""
    if config.engine == "simulated" or config.model.name not in BUNDLED:
        return ""
    taught, path = _taught(config.model.name), local_path(camera.source)
    drawn = path is None and camera.source.scheme in ("", DEMO_SCHEME)
    if path is not None:
        # An unreadable folder, a name that is too long, or "/".
        with suppress(OSError, ValueError):
            drawn = path.with_suffix(".json").exists()
    unknown = [repr(each.text) for each in camera.questions if each.text not in taught]
    if drawn and not unknown:
        return ""
    beyond = " and ".join(filter(None, ("" if drawn else "real pictures", ", ".join(unknown))))
    return (
        f"answers mean little: the bundled model ({config.model.name}) knows drawn scenes and {len(taught)} questions, "
        f"not {beyond}; name a checkpoint in model.name"
    )


@cache
def _taught(model: str) -> frozenset[str]:
    return frozenset(ModelSettings.load(BUNDLED[model]).questions.values())


def decoder_roots(config: SightlineConfig) -> list[str]:
    """``security.file_roots`` for a decoder: the folders for added cameras, and the files of the configuration's
    cameras, which a decoder does not know."""
    written = [path for entry in config.cameras if (path := local_path(entry.source)) is not None]
    return [str(path) for path in (*_added_roots(config), *written)]


def file_roots(config: SightlineConfig, source: SourceAddress) -> tuple[Path, ...] | None:
    """Folders one of which must hold a camera's file or device; None if it may be anywhere, as a bundled clip or a
    source in the configuration may."""
    if source.scheme == DEMO_SCHEME or any(entry.source == source for entry in config.cameras):
        return None
    return _added_roots(config)


def _added_roots(config: SightlineConfig) -> tuple[Path, ...]:
    """Folders for files that are named outside the configuration."""
    roots = config.security.file_roots
    if roots is None:
        roots = ["."] if config.cluster.ray_address is None else []
    return tuple(Path(root) for root in roots)


def check_files(config: SightlineConfig, entry: CameraEntry) -> None:
    """Check that a file or device source, and the ``ca_file``, may be opened and, if decoders run on this machine,
    that the source exists. Errors never reveal whether a forbidden file exists. Raises ``InvalidConfigError``."""
    written = {config.source.ca_file, *(each.source_options.ca_file for each in config.cameras if each.source_options)}
    ca_file = entry.source_options.ca_file if entry.source_options is not None else None
    if ca_file is not None and ca_file not in written and not is_below(Path(ca_file), _added_roots(config)):
        message = f"{ca_file} is not below a folder of security.file_roots, and not in the configuration"
        raise InvalidConfigError([Problem(("source_options", "ca_file"), message)], where=f"camera {entry.name}")
    path, roots = local_path(entry.source), file_roots(config, entry.source)
    message = ""
    if entry.source.scheme == DEMO_SCHEME:
        from cluster.codec import CLIPS

        if (name := entry.source.reveal().partition("://")[2]) not in CLIPS:
            message = f"there is no bundled clip {name!r}; there are: {', '.join(CLIPS)}"
    elif path is None:
        return
    elif roots is not None and not is_below(path, roots):
        below = ", ".join(str(root.resolve()) for root in roots)
        message = f"{entry.source} is not below {below}" if below else "files are not allowed as sources"
        message += " (security.file_roots)"
    elif config.cluster.ray_address is None and not os.access(path, os.F_OK):
        message = f"there is no file {entry.source}; name a video file or an address like rtsp://10.0.0.11/stream1"
    if message:
        raise InvalidConfigError([Problem(("source",), message)], where=f"camera {entry.name}")
