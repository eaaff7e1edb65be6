"""The audit log: who saw and asked what, a line of JSON each."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


class AuditLog:
    """Appends to ``path``, and keeps ``files`` older ones of ``max_bytes`` as ``path.1``, ``path.2``, …

    A disk that is full or gone loses lines, never calls: they are counted in ``lost`` and logged once until it is well.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20, files: int = 8) -> None:
        self.path = path
        self.lost = 0
        self._max_bytes, self._files = max_bytes, files
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._unwell = False

    def write(self, principal: str, call: str, *, cameras: list[str], outcome: str, text: str = "") -> None:
        """One call: ``outcome`` is ``ok`` or the error's name; ``text`` the question, where there was one."""
        line = {"at": round(time.time(), 3), "who": principal, "call": call, "cameras": cameras, "outcome": outcome}
        if text:
            line["text"] = text
        with self._lock:
            try:
                self._append(json.dumps(line, ensure_ascii=False) + "\n")
                self._unwell = False
            except OSError as error:
                self.lost += 1
                self._drop()
                if not self._unwell:
                    log.error("the audit log %s cannot be written: %s", self.path, error.strerror)
                self._unwell = True

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _drop(self) -> None:
        """What the file still holds back is lost with it: else it would appear later, although it was counted."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._file.write(line)
        # What was answered before a crash must be in it.
        self._file.flush()
        if self._file.tell() >= self._max_bytes:
            self._file.close()
            self._file = None
            self._rotate()

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = Path(f"{self.path}.{number}")
            if older.exists():
                older.replace(f"{self.path}.{number + 1}")
        self.path.replace(f"{self.path}.1")
