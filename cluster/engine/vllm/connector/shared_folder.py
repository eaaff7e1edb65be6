"""A folder in shared memory that ends with its process, whatever ended that."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from cluster.errors import ConfigError

SHARED = Path("/dev/shm")
PREFIX = "sightline-kv-"
_LOCK = "owner"
# Of what is free there when it begins: what else the host keeps in shared memory (vLLM's own queues) needs some.
SHARE = 0.5


class SharedFolder:
    """A new folder for blocks, and its cap in bytes.

    It holds a lock for as long as its process lives. A folder without one was left by a process that was killed, and
    the next process of the same user on the host removes it, so that no memory is lost for longer than that.

    Args:
        root: where it is made; shared memory where there is any, else the folder for temporary files.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        root = Path(root) if root is not None else SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._lock: IO[bytes] | None = (self.path / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.cap_bytes = int(shutil.disk_usage(root).free * SHARE)
        except OSError as error:
            raise ConfigError(f"no folder for KV can be made in {root}: {error}") from None

    def close(self) -> None:
        """Remove it with all that is in it; harmless when repeated."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            lock.close()


def remove_abandoned(root: Path) -> int:
    """Remove the folders of processes that are gone; returns how many."""
    removed = 0
    for path in root.glob(f"{PREFIX}*"):
        try:
            with (path / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except OSError:
            # Its process lives, is just making it, or it is another user's.
            continue
    return removed
