"""Atomic file writes, JSON, and errors that say why a file cannot be read or written."""

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, SightlineError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, renamed to it on success; on failure ``path`` is unchanged. For a symbolic
    link, its target is replaced; a pipe or device such as /dev/stdout is written directly. Raises ``OSError``: the
    rename failed."""
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a ``SightlineError`` that says why ``what`` cannot be written;
    ``BrokenPipeError`` passes through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise SightlineError(f"cannot write {what}: {why}; choose another path or free some space") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises ``ConfigError``: it cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def jsonable(body: Any) -> Any:
    """Convert plain values and dataclasses to dictionaries, lists, text and numbers. NaN and infinity (an age, a failed
    measurement), which JSON lacks, become None; bytes become base64. Raises ``TypeError``: another type."""
    return json.loads(json.dumps(body, default=_plain), parse_constant=lambda _: None)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return {each.name: getattr(value, each.name) for each in fields(value)}


def json_text(body: Any, *, indent: int | None = 2) -> str:
    """JSON of a body, see :func:`jsonable`."""
    return json.dumps(jsonable(body), indent=indent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises ``SightlineError``: it cannot be written."""
    with writing(path), replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def check_writable(folder: Path, needed_bytes: int = 1 << 16) -> None:
    """Create the folder and test-write ``needed_bytes`` to it, before anything expensive starts. Raises
    ``SightlineError``: it cannot be created or written, or the disk is full."""
    probe = folder / ".sightline-write-test"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(needed_bytes))
        finally:
            probe.unlink(missing_ok=True)


def check_file_writable(path: Path) -> None:
    """Check a file's folder likewise. Raises ``SightlineError``: ``path`` is a folder, or cannot be written."""
    if path.is_dir():
        raise SightlineError(f"cannot write {path}: it is a folder; name a file in it")
    check_writable(path.parent)
