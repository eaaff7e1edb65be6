"""The audit log: one JSON line per audited call."""

import contextlib
import glob
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cluster.redaction import one_line
from cluster.security.private_files import make_private_folder, open_private

log = logging.getLogger(__name__)

DAY_S = 86_400.0
LOOK_EVERY_S = 3_600.0
MOST_QUEUED = 10_000
"""Maximum lines queued for a slow disk: some megabytes."""
CLOSE_S = 2.0
"""Maximum seconds to wait for a slow disk when closing."""


class AuditLog:
    """Appends to ``path``, rotating at ``max_bytes`` to ``path.1``, ``path.2``, …

    ``retention_s``: also rotate once a day, and delete files whose last line is older, however many there are; ``None``
    keeps the newest ``files``. Checked at the first call of every hour.

    A full or failing disk loses lines, never calls: ``on_lost`` is called for each lost line, from any thread; the
    process log reports an outage once, until it ends.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 64 * 2**20,
        files: int = 8,
        retention_s: float | None = None,
        clock: Callable[[], float] = time.time,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.path, self._on_lost = path, on_lost
        self._max_bytes, self._files = max_bytes, files
        self._retention_s, self._clock = retention_s, clock
        self._next_look_s = float("-inf")
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._unwell = False

    def write(
        self, principal: str, call: str, *, cameras: list[str], outcome: str, peer: str = "", text: str = ""
    ) -> None:
        """Write one call. ``outcome``: ``ok`` or the error's name; ``peer``: the caller's address; ``text``: the
        question, if any."""
        line = {"at": round(self._clock(), 3), "who": principal, "peer": peer, "call": call, "cameras": cameras}
        line["outcome"] = outcome
        if text:
            line["text"] = text
        self._put(one_line(json.dumps(line, ensure_ascii=False)) + "\n")

    def close(self) -> None:
        """Write the lines that are queued, if any."""

    def _put(self, line: str) -> None:
        with self._lock:
            try:
                self._expire()
                self._append(line)
                self._unwell = self._unwell and self._waits()
            except OSError as error:
                self._drop()
                self._lose(error.strerror)

    def _waits(self) -> bool:
        """Whether lines are queued: a disk that is too slow has not recovered with every line that it accepts."""
        return False

    def _lose(self, reason: str | None) -> None:
        self._on_lost()
        if not self._unwell:
            log.error("the audit log %s cannot be written: %s", self.path, reason)
        self._unwell = True

    def _drop(self) -> None:
        """Close the file: lines left in its buffer, counted as lost, must not appear later."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _append(self, line: str) -> None:
        if self._file is None or not os.fstat(self._file.fileno()).st_nlink:
            self._drop()
            make_private_folder(self.path.parent)
            self._file = open(self.path, "a", encoding="utf-8", opener=open_private)  # noqa: SIM115
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
        # More than an hour away: the clock was set back.
        if self._retention_s is None or 0.0 < self._next_look_s - now_s <= LOOK_EVERY_S:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        if abs(now_s - _begun_s(self.path, now_s)) >= min(DAY_S, self._retention_s):
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


class QueuedAuditLog(AuditLog):
    """Writes on a thread of its own, so that a slow disk delays no call. Lines beyond ``most`` queued ones are lost."""

    def __init__(self, path: Path, *, most: int = MOST_QUEUED, **options: Any) -> None:
        super().__init__(path, **options)
        self._queue: queue.Queue[str | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _waits(self) -> bool:
        return not self._queue.empty()

    def _put(self, line: str) -> None:
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._lose("the disk does not answer")

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            super()._put(line)


def _begun_s(path: Path, now_s: float) -> float:
    """Time of a file's first line; now if there is no file, 0 if the line is invalid."""
    try:
        with path.open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["at"])
    except FileNotFoundError:
        return now_s
    except (ValueError, KeyError, TypeError):
        return 0.0
