"""Files and folders that only their owner may read, whatever the umask; a lock on a folder."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from cluster.errors import ConfigError

LOCK = "lock"
RETRY_S = 0.1


def make_private_folder(path: Path) -> None:
    """Create a folder with mode 0700, and its parents; an existing folder keeps its mode. Raises ``OSError``: it cannot
    be created."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str | Path, flags: int) -> int:
    """``opener`` for :func:`open` that sets mode 0600, also on an existing file. Raises ``OSError``."""
    handle = os.open(path, flags, 0o600)
    # The mode of another user's file, as on a volume shared by a group, cannot be changed.
    with contextlib.suppress(PermissionError):
        os.fchmod(handle, 0o600)
    return handle


class FolderLock:
    """Exclusive lock on a folder, until :meth:`release` or the end of this process.

    ``wait_s``: seconds to wait for the previous holder, such as a process being restarted. Raises ``ConfigError``:
    another process holds it; ``OSError``: the folder cannot be created or written."""

    def __init__(self, folder: Path, setting: str, *, wait_s: float = 5.0) -> None:
        make_private_folder(folder)
        self._handle = open_private(folder / LOCK, os.O_RDWR | os.O_CREAT)
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    self.release()
                    raise ConfigError(
                        f"{folder} is in use by another Sightline cluster; stop that one, or choose another {setting}"
                    ) from None
            time.sleep(RETRY_S)

    def release(self) -> None:
        os.close(self._handle)
