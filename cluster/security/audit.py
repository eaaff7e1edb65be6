"""The audit log: one JSON line per audited call."""

import contextlib
import glob
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cluster.security.private_files import make_private_folder, open_private

log = logging.getLogger(__name__)

DAY_S = 86_400.0
LOOK_EVERY_S = 3_600.0


class AuditLog:
    """Appends to ``path``, and keeps older files of ``max_bytes`` as ``path.1``, ``path.2``, …

    ``retention_s``: files are also rotated once a day, and deleted when their last line is older than that, however
    many there are; ``None`` keeps the newest ``files``. Checked with the first call of every hour.

    A full or failing disk loses lines, never calls: they are counted in ``lost`` and logged once until it recovers.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 64 * 2**20,
        files: int = 8,
        retention_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.lost = 0
        self._max_bytes, self._files = max_bytes, files
        self._retention_s, self._clock = retention_s, clock
        self._next_look_s = float("-inf")
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._unwell = False

    def write(
        self, principal: str, call: str, *, cameras: list[str], outcome: str, peer: str = "", text: str = ""
    ) -> None:
        """Write one call: ``outcome`` is ``ok`` or the error's name; ``peer`` the address that it came from; ``text``
        the question, where there was one."""
        line = {"at": round(self._clock(), 3), "who": principal, "peer": peer, "call": call, "cameras": cameras}
        line["outcome"] = outcome
        if text:
            line["text"] = text
        with self._lock:
            try:
                self._expire()
                self._append(json.dumps(line, ensure_ascii=False) + "\n")
                self._unwell = False
            except OSError as error:
                self.lost += 1
                self._drop()
                if not self._unwell:
                    log.error("the audit log %s cannot be written: %s", self.path, error.strerror)
                self._unwell = True

    def _drop(self) -> None:
        """Discard the file's buffer: else lines counted as lost would appear later."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            make_private_folder(self.path.parent)
            self._file = open(  # noqa: SIM115
                self.path, "a", encoding="utf-8", errors="backslashreplace", opener=open_private
            )
        self._file.write(line)
        # The log must survive a crash of this process.
        self._file.flush()
        if self._file.tell() >= self._max_bytes:
            self._file.close()
            self._file = None
            self._rotate()

    def _expire(self) -> None:
        """Rotate a file begun a day ago, and delete files past their retention."""
        now_s = self._clock()
        if self._retention_s is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        if now_s - _begun_s(self.path, now_s) >= min(DAY_S, self._retention_s):
            self._drop()
            self._rotate()
        for older in self._older().values():
            if now_s - older.stat().st_mtime >= self._retention_s:
                older.unlink()

    def _rotate(self) -> None:
        for number, older in sorted(self._older().items(), reverse=True):
            if self._retention_s is not None or number < self._files:
                older.replace(f"{self.path}.{number + 1}")
        self.path.replace(f"{self.path}.1")

    def _older(self) -> dict[int, Path]:
        found = self.path.parent.glob(f"{glob.escape(self.path.name)}.*")
        return {int(each.suffix[1:]): each for each in found if each.suffix[1:].isdecimal()}


def _begun_s(path: Path, now_s: float) -> float:
    """Time of a file's first line; now where there is none, 0 where it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["at"])
    except FileNotFoundError:
        return now_s
    except (ValueError, KeyError, TypeError):
        return 0.0
