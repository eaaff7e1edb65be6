"""Video input: packet sources, their supervision, and decoding into samples with codec change (steps 1 and 2)."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.codec.file import FileSource
from cluster.codec.network import PROTOCOLS, NetworkSource
from cluster.codec.push import PushSource
from cluster.codec.source import CameraState, Source, SourceStatus, StreamHeader
from cluster.codec.supervisor import Backoff, SourceSupervisor
from cluster.errors import ConfigError
from cluster.redaction import SourceAddress

CLIPS = {path.stem: path for path in sorted((Path(__file__).parent / "clips").glob("*.mp4"))}
"""Bundled clips by name, of scenes the bundled model was trained for; a camera's source is ``demo://NAME``."""

__all__ = [
    "CLIPS",
    "Backoff",
    "CameraState",
    "FileSource",
    "NetworkSource",
    "PushSource",
    "Source",
    "SourceStatus",
    "SourceSupervisor",
    "StreamHeader",
    "open_source",
]


def open_source(uri: str | SourceAddress, **options: Any) -> Source:
    """Create the source for a camera's address: a URL of one of :data:`~cluster.codec.network.PROTOCOLS`, a path or
    ``file://`` URL, ``demo://NAME`` for a bundled clip, "" or "push" for push.

    ``options`` are passed to the source's constructor. Opens nothing yet.

    Raises:
        ConfigError: malformed address, unknown scheme or clip, or an option the source does not take.
    """
    address = SourceAddress(uri)
    scheme = address.scheme
    try:
        if address.reveal() in ("", "push"):
            return PushSource(**options)
        if scheme in PROTOCOLS:
            return NetworkSource(address, **options)
        if scheme == "file":
            return FileSource(Path(unquote(urlsplit(address.reveal()).path)), **options)
        if scheme == "demo":
            name = address.reveal().partition("://")[2]
            if name not in CLIPS:
                raise ConfigError(f"there is no bundled clip {name!r}; there are: {', '.join(CLIPS)}")
            return FileSource(CLIPS[name], **options)
        if not scheme:
            return FileSource(address.reveal(), **options)
    except ValueError:
        raise ConfigError(f"{address!r} is not an address") from None
    except TypeError as error:
        raise ConfigError(f"source {str(address) or 'push'!r} does not take these options: {error}") from None
    known = ", ".join(PROTOCOLS)
    raise ConfigError(f"source {address!r} has an unknown scheme {scheme!r}; there are: {known}, file, demo, push")
