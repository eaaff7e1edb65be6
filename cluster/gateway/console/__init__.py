"""The console's files, served from memory."""

import functools
import gzip
import hashlib
import mimetypes
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
"""Folder served at ``/console/``; its ``index.html`` is the page at ``/``."""
_COMPRESSED = ("text/", "application/javascript", "application/json", "image/svg")


class _File(NamedTuple):
    kind: str
    tag: str
    data: bytes
    packed: bytes


class Files:
    """Files of a folder, cached in memory; changed files are read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def reply(self, request: Request, name: str) -> Response:
        """Response with the file, or 304. Raises ``FileNotFoundError``: it is not in this folder."""
        file = self._file(name)
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == file.tag:
            return Response(status_code=304, headers=headers)
        data = file.data
        if file.packed and "gzip" in request.headers.get("Accept-Encoding", ""):
            data = file.packed
            headers["Content-Encoding"] = "gzip"
        return Response(data, headers={**headers, "Content-Type": file.kind})

    def _file(self, name: str) -> _File:
        try:
            if not any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in name.split("/")):
                path = (self._folder / name).resolve(strict=True)
                # A symlink may lead out of the folder.
                if path.is_relative_to(self._folder):
                    status = path.stat()
                    return _read(path, status.st_mtime_ns, status.st_size)
        except OSError:
            pass
        raise FileNotFoundError(f"the console has no file {name!r}")


@functools.lru_cache(256)
def _read(path: Path, changed_ns: int, size: int) -> _File:  # noqa: ARG001
    data = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("text/") or kind == "application/javascript":
        kind += "; charset=utf-8"
    packed = gzip.compress(data, 6, mtime=0) if kind.startswith(_COMPRESSED) and len(data) > 500 else b""
    return _File(kind, f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"', data, packed)
