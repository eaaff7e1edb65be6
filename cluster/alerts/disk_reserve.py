"""Space that is kept on a disk for when it is full (``DiskReserve``)."""

import contextlib
import os
from pathlib import Path

from cluster.security.private_files import open_private

RESERVE_BYTES = 2**20
"""Enough for the state of thousands of incidents."""
SPARE = 4
"""Free space, in reserves, from which the reserve is taken again."""


class DiskReserve:
    """A file that holds space and nothing else. On a full disk it makes room for what must be written once more."""

    def __init__(self, path: Path, nbytes: int = RESERVE_BYTES) -> None:
        self._path, self._nbytes = path, nbytes
        self._held = path.exists() and path.stat().st_size >= nbytes

    def hold(self) -> None:
        """Take the space, unless it is held or the disk has little left."""
        if self._held:
            return
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < SPARE * self._nbytes:
                return
            handle = open_private(self._path, os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(handle, 0, self._nbytes)
                self._held = True
            finally:
                os.close(handle)

    def release(self) -> bool:
        """Give the space back; whether there was any."""
        held, self._held = self._held, False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        return held
