"""The camera table as it is stored, so that a restarted controller knows cameras added at run time."""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.config import CameraEntry
from cluster.control.cameras.changes import CameraChanges, merge_configuration
from cluster.control.cameras.managed import ManagedCamera, entry_from_json, entry_to_json
from cluster.errors import ConfigError, UnavailableError
from cluster.security.private_files import FolderLock

SEEDED = "seeded"
RUN = "run"
COUNTED = "counted"
DECODERS = "decoders"
CAMERA = "camera/"
REMOVED = "removed/"


class Table(Protocol):
    """Keys and values; ``durable``: it outlives the cluster, whose end then deletes nothing."""

    durable: bool

    def get(self, key: str) -> bytes | None: ...

    def write(self, put: Mapping[str, bytes], delete: Sequence[str] = ()) -> None:
        """Put values, then delete keys: all or nothing in a durable table."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Sorted keys that begin with ``prefix``."""
        ...


class FileTable:
    """A :class:`Table` in a SQLite file that only its owner may read: sources hold passwords.

    Raises:
        ConfigError: the file cannot be opened or written.
        UnavailableError: from all methods, the disk is full or fails; nothing was changed.
    """

    durable = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the cameras cannot be kept in {path}: {error}; choose another --state") from None

    def get(self, key: str) -> bytes | None:
        return next((bytes(value) for (value,) in self._read("SELECT value FROM kept WHERE key = ?", key)), None)

    def write(self, put: Mapping[str, bytes], delete: Sequence[str] = ()) -> None:
        try:
            with self._connection:
                self._connection.execute("BEGIN")
                self._connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", put.items())
                self._connection.executemany("DELETE FROM kept WHERE key = ?", [(key,) for key in delete])
        except sqlite3.Error as error:
            raise UnavailableError(
                f"the cameras cannot be written to {self._path}: {error}; make room there, and try again"
            ) from error

    def keys(self, prefix: str) -> list[str]:
        return [key for (key,) in self._read("SELECT key FROM kept ORDER BY key") if key.startswith(prefix)]

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise UnavailableError(f"the cameras cannot be read from {self._path}: {error}") from error


class CameraStore:
    """Cameras, pending deletions and window counts of a cluster in a :class:`Table`."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def begin(self, run_id: str) -> bool:
        """Note the run that uses the store; returns whether it did so before: its controller was restarted."""
        before = self._table.get(RUN)
        self._table.write({RUN: run_id.encode()})
        return before == run_id.encode()

    def load(self) -> list[ManagedCamera]:
        """Stored cameras."""
        values = [self._table.get(key) for key in self._table.keys(CAMERA)]
        return [ManagedCamera.model_validate_json(value) for value in values if value is not None]

    def follow(self, configuration: Sequence[CameraEntry]) -> CameraChanges:
        """Apply the changes between the last configuration's cameras and this one's, none at first, to the stored
        cameras."""
        value = self._table.get(SEEDED)
        last = [entry_from_json(entry) for entry in json.loads(value)] if value is not None else []
        found = merge_configuration(last, configuration, self.load())
        now = json.dumps([entry_to_json(entry, secrets=True) for entry in configuration]).encode()
        removed = {REMOVED + name: b"1" for name in found.removed}
        self._table.write(_as_kept(found.changed) | removed | {SEEDED: now}, [CAMERA + name for name in found.removed])
        return found

    def put(self, *cameras: ManagedCamera) -> None:
        self._table.write(_as_kept(cameras))

    def remove(self, name: str) -> None:
        """Delete a camera, of which every replica must delete the memory."""
        self._table.write({REMOVED + name: b"1"}, [CAMERA + name])

    def removed(self) -> list[str]:
        """Removed cameras that not every replica has deleted yet."""
        return [key.removeprefix(REMOVED) for key in self._table.keys(REMOVED)]

    def delete_removed(self, name: str) -> None:
        self._table.write({}, [REMOVED + name])

    def counted(self) -> dict[str, dict[str, dict[str, int]]]:
        """See :meth:`Directory.export_counts`."""
        value = self._table.get(COUNTED)
        found: dict[str, dict[str, dict[str, int]]] = json.loads(value) if value is not None else {}
        return found

    def put_counted(self, counted: dict[str, dict[str, dict[str, int]]]) -> None:
        self._table.write({COUNTED: json.dumps(counted).encode()})

    def decoders(self) -> int:
        """Number of decoders that were wanted last; 0 before the first :meth:`put_decoders`."""
        return int(self._table.get(DECODERS) or 0)

    def put_decoders(self, count: int) -> None:
        self._table.write({DECODERS: b"%d" % count})

    def end(self) -> None:
        """Delete everything, unless the table is to outlive the cluster."""
        if not self._table.durable:
            self._table.write({}, self._table.keys(""))


def _as_kept(cameras: Iterable[ManagedCamera]) -> dict[str, bytes]:
    return {CAMERA + managed.entry.name: managed.to_json().encode() for managed in cameras}


def lock_state(folder: Path) -> FolderLock:
    """Lock a cluster's folder of state: two clusters would overwrite each other's.

    Raises:
        ConfigError: it cannot be made or written, or another cluster uses it.
    """
    try:
        return FolderLock(folder, "folder with --state (cluster.state_dir)", wait_s=0.0)
    except OSError as error:
        raise ConfigError(
            f"the state cannot be kept in {folder}: {error.strerror or error}; choose another folder with --state, "
            "or --state none to lose added cameras and incidents when the cluster ends"
        ) from None
