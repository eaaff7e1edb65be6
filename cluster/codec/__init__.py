"""Packets to frames and motion: sources, their supervision, and the codec processor (steps 1 and 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.codec.file import FileSource
from cluster.codec.push import PushSource
from cluster.codec.rtsp import RtspSource
from cluster.codec.source import Source, StreamHeader
from cluster.codec.state import CameraState, SourceStatus
from cluster.codec.supervisor import Backoff, SourceSupervisor
from cluster.errors import ConfigError
from cluster.redaction import redact

__all__ = [
    "Backoff",
    "CameraState",
    "FileSource",
    "PushSource",
    "RtspSource",
    "Source",
    "SourceStatus",
    "SourceSupervisor",
    "StreamHeader",
    "open_source",
]


def open_source(uri: str, **options: Any) -> Source:
    """The source for a camera's address: ``rtsp://`` or ``rtsps://``, a path or ``file://``, "" or "push" for push.

    ``options`` are the source's keyword arguments. Nothing is opened yet.

    Raises:
        ConfigError: another scheme, or an option the source does not have.
    """
    try:
        scheme = urlsplit(uri).scheme.lower() if "://" in uri else ""
    except ValueError as error:
        raise ConfigError(f"{redact(uri)!r} is not an address: {error}") from None
    try:
        if uri in ("", "push"):
            return PushSource(**options)
        if scheme in ("rtsp", "rtsps"):
            return RtspSource(uri, **options)
        if scheme == "file":
            return FileSource(Path(unquote(urlsplit(uri).path)), **options)
        if not scheme:
            return FileSource(uri, **options)
    except TypeError as error:
        raise ConfigError(f"source {uri or 'push'!r} does not take these options: {error}") from None
    raise ConfigError(f"source {uri!r} has an unknown scheme {scheme!r}; there are: rtsp, rtsps, file, push")
