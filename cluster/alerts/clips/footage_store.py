"""Folder of snapshots and clips, bounded by size, age and free disk space (``FootageStore``)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal, cast

from cluster.errors import NotReadyError, SightlineError
from cluster.security.private_files import make_private_folder, open_private

log = logging.getLogger(__name__)

Kind = Literal["snapshot", "clip", "end"]
KINDS: dict[Kind, tuple[str, str]] = {
    "snapshot": ("jpg", "image/jpeg"),
    "clip": ("mp4", "video/mp4"),
    "end": ("mp4", "video/mp4"),
}
"""Kind -> (suffix, media type). ``end``: a second clip, of an incident's end."""

READ_BYTES = 256 * 2**10
_NAME = re.compile(r"(\d{13})-([0-9a-f]{16})-([0-9a-f]{16})-(snapshot|clip|end)\.(jpg|mp4)")
_PART = ".part"


class StorageError(SightlineError):
    """A snapshot or clip cannot be written or deleted; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. ``camera``: see :func:`camera_key`; ``at_ms``: start of writing, Unix time in milliseconds."""

    at_ms: int
    camera: str
    incident: str
    kind: Kind
    size: int

    @property
    def name(self) -> str:
        return f"{self.at_ms:013d}-{self.camera}-{self.incident}-{self.kind}.{KINDS[self.kind][0]}"

    @property
    def media_type(self) -> str:
        return KINDS[self.kind][1]


@dataclass(frozen=True, slots=True)
class Deleted:
    """Number and bytes of deleted files."""

    files: int
    bytes: int


def camera_key(camera: str) -> str:
    """Hash of a camera's name for file names, in which the name itself may not be valid."""
    return hashlib.blake2b(camera.encode(), digest_size=8).hexdigest()


class FootageStore:
    """Thread-safe file store; every call but :meth:`find` may block on the disk. The index is read from the file names
    when the folder can first be opened; until then, writes fail with ``StorageError``.

    A file appears under its name only once it is complete and synced.

    Args:
        folder: created if missing; must contain nothing else.
        max_bytes: limit of all files, including those being written; the oldest are deleted first.
        retention_s: age at which files are deleted.
        keep_free: bytes that must stay free on the disk.
        clip_lookback_s: maximum age of a clip's video when its file is begun, in seconds.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, retention_s: float, keep_free: int, clip_lookback_s: float = 0.0
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._retention_s = retention_s
        self._keep_free = keep_free
        self.clip_lookback_s = clip_lookback_s
        self._lock = threading.RLock()
        self._files: dict[tuple[str, Kind], StoredFile] = {}
        self._bytes = self._being_written = 0
        self._drafts: set[DraftFile] = set()
        self.trouble = ""
        self._opened = False
        with contextlib.suppress(StorageError), self._explained():
            self._open_folder()

    @property
    def bytes_stored(self) -> int:
        """Bytes of all files, including those being written."""
        return self._bytes + self._being_written

    # -- writing --------------------------------------------------------------------------------
    def begin(self, camera: str, incident: str, kind: Kind, now_s: float) -> DraftFile:
        """Start a new file; finish with :meth:`DraftFile.commit` or :meth:`DraftFile.abandon`. Raises
        ``StorageError``: no space, or the folder cannot be written."""
        stored = StoredFile(int(now_s * 1000), camera_key(camera), incident, kind, 0)
        with self._lock, self._explained():
            self._open_folder()
            self._check_free_space()
            draft = DraftFile(self, stored, self._folder / (stored.name + _PART))
            self._drafts.add(draft)
            return draft

    def _write(self, draft: DraftFile, file: FileIO, data: bytes) -> None:
        with self._lock:
            self._check_wanted(draft)
            draft.whole = False
            with self._explained():
                if self._being_written + len(data) > self._max_bytes:
                    raise StorageError(f"the files being written exceed clips.max_bytes = {self._max_bytes}")
                self._evict(len(data))
                self._check_free_space()
                left = memoryview(data)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    # Ends the file at the last complete write.
                    file.truncate(draft.size)
                    raise
                self._being_written += len(data)
                draft.size += len(data)
            draft.whole = True

    def _check_wanted(self, draft: DraftFile) -> None:
        if draft not in self._drafts:
            raise StorageError("the camera was forgotten")

    def _commit(self, draft: DraftFile, file: FileIO) -> StoredFile:
        with self._explained():
            # Outside the lock: other writers must not wait for this sync.
            os.fsync(file.fileno())
            file.close()
        with self._lock:
            self._check_wanted(draft)
            stored = replace(draft.stored, size=draft.size)
            with self._explained():
                self._delete_file((stored.incident, stored.kind))
                draft.path.replace(self._folder / stored.name)
                self._sync_folder()
            self._done(draft)
            self._files[stored.incident, stored.kind] = stored
            self._bytes += stored.size
            # A truncated file is committed too, but does not show that the disk has recovered.
            if self.trouble and draft.whole:
                log.info("snapshots and clips are stored again")
                self.trouble = ""
            return stored

    def _done(self, draft: DraftFile) -> None:
        with self._lock:
            if draft in self._drafts:
                self._drafts.discard(draft)
                self._being_written -= draft.size

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._trouble(_reason(error)) from None
        except StorageError as error:
            raise self._trouble(str(error)) from None
        except ValueError:
            raise StorageError("the camera was forgotten") from None

    def _trouble(self, sentence: str) -> StorageError:
        with self._lock:
            if sentence != self.trouble:
                log.error("cannot store snapshots and clips: %s", sentence)
            self.trouble = sentence
        return StorageError(sentence)

    def free_bytes(self) -> int:
        """Free bytes of the disk. Raises ``OSError``."""
        return shutil.disk_usage(self._folder).free

    def _check_free_space(self) -> None:
        free = self.free_bytes()
        if free < self._keep_free:
            # No varying figure, so that a lasting problem is logged once.
            raise StorageError(
                f"the disk is full: less than clips.keep_free = {self._keep_free / 2**20:.4g} MiB is free"
            )

    # -- reading --------------------------------------------------------------------------------
    def find(self, incident: str, kind: Kind) -> StoredFile | None:
        """File of an incident; None: there is none (any more)."""
        # No lock: event loops call this, and writers hold the lock while the disk hangs.
        return self._files.get((incident, kind))

    def open(self, stored: StoredFile) -> BinaryIO:
        """Open the file; the handle stays readable if the file is deleted. Raises ``NotReadyError``: it was deleted."""
        try:
            return (self._folder / stored.name).open("rb")
        except OSError:
            raise NotReadyError(f"the {stored.kind} of incident {stored.incident} no longer exists") from None

    # -- deleting -------------------------------------------------------------------------------
    def sweep(self, now_s: float) -> Deleted:
        """Delete files past their retention. Raises ``StorageError``: the folder cannot be opened."""
        oldest_ms = (now_s - self._retention_s) * 1000
        with self._lock:
            with self._explained():
                self._open_folder()
            return self._delete([each for each in self._files.values() if each.at_ms < oldest_ms])

    def delete_camera(self, camera: str, *, begun_before_s: float = math.inf, now_s: float = math.inf) -> Deleted:
        """Delete a camera's files, including those being written, begun before ``begun_before_s`` (Unix time) or
        after ``now_s``: the clock was ahead. Raises ``StorageError``: a file could not be deleted."""
        key = camera_key(camera)
        until_ms, now_ms = begun_before_s * 1000, now_s * 1000

        def selected(stored: StoredFile) -> bool:
            return stored.camera == key and not until_ms <= stored.at_ms <= now_ms

        with self._lock:
            with self._explained():
                self._open_folder()
            for draft in [draft for draft in self._drafts if selected(draft.stored)]:
                draft.abandon()
            deleted = self._delete([each for each in self._files.values() if selected(each)])
            with self._explained():
                self._sync_folder()
                names = [path.name for path in self._folder.iterdir() if f"-{key}-" in path.name]
            left = [name for name in names if not until_ms <= _begun_ms(name) <= now_ms]
            if left:
                raise StorageError(f"{len(left)} files of camera {camera!r} could not be deleted: {left[0]}")
            return deleted

    def _evict(self, size: int) -> None:
        if self.bytes_stored + size <= self._max_bytes:
            return
        # Frees more than needed, so that not every write has to scan.
        wanted = self.bytes_stored + size - self._max_bytes + self._max_bytes // 50
        chosen = []
        for stored in sorted(self._files.values(), key=lambda each: each.at_ms):
            if wanted <= 0:
                break
            wanted -= stored.size
            chosen.append(stored)
        self._delete(chosen)

    def _delete(self, files: list[StoredFile]) -> Deleted:
        count = freed = 0
        for stored in files:
            if self._delete_file((stored.incident, stored.kind)):
                count += 1
                freed += stored.size
        return Deleted(count, freed)

    def _delete_file(self, key: tuple[str, Kind]) -> bool:
        stored = self._files.get(key)
        if stored is None:
            return False
        try:
            (self._folder / stored.name).unlink(missing_ok=True)
        except OSError as error:
            log.error("cannot delete %s: %s", stored.name, error.strerror)
            return False
        del self._files[key]
        self._bytes -= stored.size
        return True

    # -- inside ---------------------------------------------------------------------------------
    def _open_folder(self) -> None:
        if self._opened:
            return
        make_private_folder(self._folder)
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_PART):
                # Left behind by a process that died.
                (self._folder / entry.name).unlink(missing_ok=True)
                continue
            match = _NAME.fullmatch(entry.name)
            if match is None or KINDS[cast(Kind, match[4])][0] != match[5] or not entry.is_file(follow_symlinks=False):
                continue
            stored = StoredFile(int(match[1]), match[2], match[3], cast(Kind, match[4]), entry.stat().st_size)
            self._files[stored.incident, stored.kind] = stored
        self._bytes = sum(stored.size for stored in self._files.values())
        self._opened = True
        self._evict(0)

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class DraftFile:
    """A file being written, see :meth:`FootageStore.begin`. Used by one thread at a time."""

    def __init__(self, store: FootageStore, stored: StoredFile, path: Path) -> None:
        self.stored = stored
        self.path = path
        self.size = 0
        self.whole = True
        self._store = store
        self._file = open(path, "wb", buffering=0, opener=open_private)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Append data. Raises ``StorageError``: no space, a disk error, or the camera was deleted in the meantime."""
        self._store._write(self, self._file, data)

    def commit(self) -> StoredFile:
        """Publish the complete file. Raises like :meth:`write`, having abandoned the file."""
        try:
            return self._store._commit(self, self._file)
        except StorageError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Delete the unfinished file; idempotent."""
        self._store._done(self)
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _begun_ms(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return f"disk error ({error.strerror or error})"
