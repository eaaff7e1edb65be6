"""The controller's declared cameras, kept consistent with the directory that places them, and their storage, from which
a restarted controller restores cameras added at run time."""

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from cluster.config import SightlineConfig, camera_settings
from cluster.config.camera import CameraEntry
from cluster.config.problems import InvalidConfigError, from_validation
from cluster.config.sources import check_files
from cluster.control.cameras.managed import (
    CameraChanges,
    ManagedCamera,
    check_manager,
    entry_from_json,
    entry_to_json,
    merge_configuration,
    unique_id,
    written_keys,
)
from cluster.control.directory import Directory
from cluster.errors import ConfigError, NotReadyError, UnavailableError
from cluster.redaction.address import HIDDEN
from cluster.security.private_files import FolderLock

log = logging.getLogger(__name__)

SEEDED = "seeded"
RUN = "run"
COUNTED = "counted"
DECODERS = "decoders"
VERSION = "version"
MOST_CHANGES = 2**30
"""More than the versions that any controller gives its table."""
CAMERA = "camera/"
REMOVED = "removed/"


class Table(Protocol):
    """Key-value store; ``durable``: it outlives the cluster, whose end then deletes nothing."""

    durable: bool

    def get(self, key: str) -> bytes | None: ...

    def write(self, put: Mapping[str, bytes], delete: Sequence[str] = ()) -> None:
        """Put values, then delete keys; atomic in a durable table."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Sorted keys that begin with ``prefix``."""
        ...


class FileTable:
    """A :class:`Table` in a SQLite file, readable only by its owner, since sources hold passwords. Raises
    ``ConfigError``: the file cannot be opened or written. All methods raise ``UnavailableError``: the disk is full or
    fails; nothing was changed."""

    durable = True

    def __init__(self, path: Path) -> None:
        self._path = path
        # The connection's own lock covers statements, not transactions.
        self._lock = threading.Lock()
        try:
            # On a file system that has become read-only, an existing file can still be read.
            if not path.exists():
                path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cameras cannot be stored in {path}: {error}; choose another --state") from None

    def get(self, key: str) -> bytes | None:
        return next((bytes(value) for (value,) in self._read("SELECT value FROM kept WHERE key = ?", key)), None)

    def write(self, put: Mapping[str, bytes], delete: Sequence[str] = ()) -> None:
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN")
                self._connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", put.items())
                self._connection.executemany("DELETE FROM kept WHERE key = ?", [(key,) for key in delete])
        except sqlite3.Error as error:
            raise UnavailableError(
                f"cameras cannot be written to {self._path}: {error}; free disk space there, and try again"
            ) from error

    def keys(self, prefix: str) -> list[str]:
        return [key for (key,) in self._read("SELECT key FROM kept ORDER BY key") if key.startswith(prefix)]

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise UnavailableError(f"cameras cannot be read from {self._path}: {error}") from error


class CameraStore:
    """Cameras, pending deletions and window counts of a cluster in a :class:`Table`. A restarted controller changes
    nothing in it before it places cameras, so that it also starts on a full disk."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def begin(self, run_id: str) -> bool:
        """Record the run that uses the store; returns whether it already was, as after a restart of the controller."""
        known = self._table.get(RUN) == run_id.encode()
        if not known:
            self._table.write({RUN: run_id.encode()})
        return known

    def later_version(self, clock: int) -> int:
        """A version above all those of earlier controllers, although the clock (milliseconds) may have been set back
        or, with a disk that takes nothing, theirs were not stored."""
        version = int(self._table.get(VERSION) or 0) + MOST_CHANGES + clock
        try:
            self._table.write({VERSION: b"%d" % version})
        except UnavailableError as error:
            log.error("%s", error)
        return version

    def load(self) -> list[ManagedCamera]:
        values = [(key.removeprefix(CAMERA), self._table.get(key)) for key in self._table.keys(CAMERA)]
        return [_stored(name, value) for name, value in values if value is not None]

    def follow(self, configuration: Sequence[CameraEntry]) -> CameraChanges:
        """Apply the changes since the last configuration's cameras (none at first) to the stored cameras."""
        value = self._table.get(SEEDED)
        last = [_last(entry) for entry in json.loads(value)] if value is not None else []
        found = merge_configuration(last, configuration, self.load())
        now = json.dumps([entry_to_json(entry, secrets=True) for entry in configuration]).encode()
        removed = {REMOVED + camera.life: camera.entry.name.encode() for camera in found.removed}
        gone = [CAMERA + camera.entry.name for camera in found.removed]
        if found.changed or gone or now != value:
            self._table.write(_as_kept(found.changed) | removed | {SEEDED: now}, gone)
        return found

    def put(self, *cameras: ManagedCamera) -> None:
        self._table.write(_as_kept(cameras))

    def remove(self, life: str, name: str) -> None:
        """Delete a camera, and record that every replica must delete its memory."""
        self._table.write({REMOVED + life: name.encode()}, [CAMERA + name])

    def removed(self) -> dict[str, str]:
        """Removed cameras (life -> name) that not every replica has deleted yet."""
        return {key.removeprefix(REMOVED): (self._table.get(key) or b"").decode() for key in self._table.keys(REMOVED)}

    def put_deleted(self, lives: Iterable[str]) -> None:
        """Record removed cameras that all replicas have deleted."""
        self._table.write({}, [REMOVED + life for life in lives])

    def counted(self) -> dict[str, dict[str, dict[str, int]]]:
        """See :meth:`Directory.export_counts`."""
        value = self._table.get(COUNTED)
        found: dict[str, dict[str, dict[str, int]]] = json.loads(value) if value is not None else {}
        return found

    def put_counted(self, counted: dict[str, dict[str, dict[str, int]]]) -> None:
        self._table.write({COUNTED: json.dumps(counted).encode()})

    def decoders(self) -> int:
        """Last wanted number of decoders; 0 before the first :meth:`put_decoders`."""
        return int(self._table.get(DECODERS) or 0)

    def put_decoders(self, count: int) -> None:
        self._table.write({DECODERS: b"%d" % count})

    def end(self) -> None:
        """Delete everything, unless the table outlives the cluster."""
        if not self._table.durable:
            self._table.write({}, self._table.keys(""))


def _stored(name: str, value: bytes) -> ManagedCamera:
    """Parse a stored camera; one with keys unknown to this version has ``trouble``, and an entry of its name alone."""
    try:
        return ManagedCamera.model_validate_json(value)
    except ValidationError as error:
        trouble = str(InvalidConfigError(from_validation(error, ManagedCamera), where=f"camera {name}"))
        kept = {key: text for key, text in json.loads(value).items() if key in ("manager", "uid", "life", "revision")}
        return ManagedCamera(entry=_named(name), trouble=trouble, **kept)


def _last(text: str) -> CameraEntry:
    """Parse an entry of the last configuration; one with keys unknown to this version then differs from any other."""
    try:
        return entry_from_json(text)
    except ValidationError:
        return _named(json.loads(text)["name"])


def _named(name: str) -> CameraEntry:
    """An entry of a name alone, not validated: this version may not allow it."""
    return CameraEntry.model_construct(name=name)


def _as_kept(cameras: Iterable[ManagedCamera]) -> dict[str, bytes]:
    return {CAMERA + managed.entry.name: managed.to_json().encode() for managed in cameras}


def lock_state(folder: Path) -> FolderLock:
    """Lock a cluster's state folder, which two clusters would overwrite. Raises ``ConfigError``: it cannot be created
    or written, or another cluster uses it."""
    try:
        return FolderLock(folder, "folder with --state (cluster.state_dir)", wait_s=0.0)
    except OSError as error:
        raise ConfigError(
            f"state cannot be stored in {folder}: {error.strerror or error}; choose another folder with --state, "
            "or --state none to lose added cameras and incidents when the cluster stops"
        ) from None


class CameraTable:
    """Resolves declared cameras against the configuration, and keeps them consistent with the directory."""

    def __init__(self, config: SightlineConfig, directory: Directory) -> None:
        self._config = config
        self._directory = directory
        self._managed: dict[str, ManagedCamera] = {}
        self._left_out: dict[str, ManagedCamera] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """Lives, by name, of cameras that do not fit this version or configuration. They are not removed."""
        return {name: managed.life for name, managed in self._left_out.items()}

    def load(self, cameras: Iterable[ManagedCamera], now_s: float) -> None:
        """Restore cameras at start. One that does not fit the configuration is left out, but stays stored."""
        for managed in cameras:
            try:
                if managed.trouble:
                    raise ConfigError(managed.trouble)
                settings = camera_settings(self._config, managed.entry)
            except ConfigError as error:
                log.error("camera %s is left out; add it again or remove it: %s", managed.entry.name, error)
                self._left_out[managed.entry.name] = managed.model_copy(update={"trouble": str(error)})
                continue
            self._directory.add(settings, now_s, manager=managed.manager, life=managed.life)
            self._managed[settings.name] = managed

    def check_add(
        self, managed: ManagedCamera, now_s: float, *, force: bool = False, takeover: bool = False
    ) -> ManagedCamera:
        """Check a camera to add; returns it with its life, for :meth:`apply`. One that was left out continues with the
        new settings.

        Raises:
            CameraExistsError: the name is taken, with other settings.
            ManagedElsewhereError: the name is taken by another manager, without ``takeover``.
            ConfigError: contradicting settings, or a file that may not be opened or does not exist.
            CapacityError: no capacity, unless ``force`` is set.
        """
        name = managed.entry.name
        known, left = self._managed.get(name), self._left_out.get(name)
        if takeover and known is not None and known.manager != managed.manager:
            return self.check_update(managed, takeover=True)
        if known is not None or left is not None:
            self._check_manager(name, managed.manager, takeover=takeover)
        _refuse_hidden(managed.entry)
        check_files(self._config, managed.entry)
        settings = camera_settings(self._config, managed.entry)
        self._directory.check_add(settings, now_s, force=force)
        return _alive(managed, known or left)

    def check_update(self, managed: ManagedCamera, *, takeover: bool = False) -> ManagedCamera:
        """Check a camera with all settings replaced; returns it with its life, for :meth:`apply`. A source given as
        displayed, with its secrets masked, is unchanged.

        Raises:
            UnknownCameraError: there is none.
            ManagedElsewhereError: it belongs to another manager, without ``takeover``.
            NotReadyError: it was changed since the ``revision`` on which the new settings are based.
            ConfigError: contradicting settings, or a file that may not be opened or does not exist.
        """
        managed = managed.model_copy(update={"entry": self.restore_secrets(managed.entry)})
        check_files(self._config, managed.entry)
        settings = camera_settings(self._config, managed.entry)
        self._directory.settings(settings.name)
        known = self._check_manager(settings.name, managed.manager, takeover=takeover)
        updated = _alive(managed, known)
        # A call repeated because its reply was lost has the revision from before it.
        if known.revision not in (updated.revision, managed.revision) and managed.revision:
            raise NotReadyError(
                f"the settings of camera {settings.name!r} were changed elsewhere since they were read, and nothing is "
                "saved; read them again (reload the page, or repeat the command), then change them"
            )
        return updated

    def apply(self, managed: ManagedCamera, now_s: float) -> ManagedCamera:
        """Add or change a checked camera."""
        settings = camera_settings(self._config, managed.entry)
        if settings.name in self._managed:
            self._directory.update(settings, now_s, manager=managed.manager)
        else:
            self._directory.add(settings, now_s, manager=managed.manager, life=managed.life)
        self._managed[settings.name] = managed
        self._left_out.pop(settings.name, None)
        return managed

    def remove(self, name: str) -> None:
        """Remove a checked camera."""
        if name not in self._left_out:
            self._directory.remove(name)
        self._managed.pop(name, None)
        self._left_out.pop(name, None)

    def check_remove(self, name: str, *, manager: str | None = None, takeover: bool = False) -> str:
        """Check a camera to remove; returns its life. Raises ``UnknownCameraError``, and ``ManagedElsewhereError``: it
        belongs to another manager than ``manager`` (None: not checked), without ``takeover``."""
        if name not in self._left_out:
            self._directory.settings(name)
        return self._check_manager(name, manager, takeover=takeover).life

    def _check_manager(self, name: str, manager: str | None, *, takeover: bool) -> ManagedCamera:
        """An existing camera, if ``manager`` (None: not checked) may change it. Raises ``ManagedElsewhereError``: it
        belongs to another manager, without ``takeover``."""
        known = self._left_out.get(name) or self._managed[name]
        if manager is not None:
            check_manager(name, known.manager, manager, takeover=takeover)
        return known

    def restore_secrets(self, entry: CameraEntry) -> CameraEntry:
        """The entry with its camera's stored source, if its own is exactly that with the secrets masked. Raises
        ``ConfigError``: another source with masked secrets."""
        known = self._managed.get(entry.name)
        if known is not None and HIDDEN in entry.source.reveal() and entry.source.reveal() == str(known.entry.source):
            return entry.model_copy(update={"source": known.entry.source})
        _refuse_hidden(entry)
        return entry

    def check_test(self, entry: CameraEntry) -> CameraEntry:
        """Check a camera whose source is to be tested; returns it with its secrets and resolved settings. Raises
        ``ConfigError``: contradicting settings, or a source that may not be opened."""
        entry = self.restore_secrets(entry)
        check_files(self._config, entry)
        camera = camera_settings(self._config, entry)
        # Decoders know neither the cluster's own sections nor the tiers that bound a memory.
        sections = ("sampling", "pruning", "window", "source_options", "decode")
        return entry.model_copy(update={name: getattr(camera, name) for name in sections} | {"memory": None})

    def managed(self, names: Sequence[str] = (), *, left_out: bool = False) -> list[ManagedCamera]:
        """Cameras sorted by name: those of ``names``, or all; ``left_out``: include those left out. Raises
        ``UnknownCameraError``: there is none of a name."""
        for name in names:
            self._directory.settings(name)
        known = self._managed | (self._left_out if left_out else {})
        return [known[name] for name in sorted(names or known)]


class StoredCameras:
    """Serialises changes of a table's cameras: each is checked, stored, and only then applied. A thread of its own
    writes, so that a slow disk blocks nothing else; a change that cannot be stored is not applied."""

    def __init__(self, table: CameraTable, store: CameraStore) -> None:
        self._table = table
        self._store = store
        self._one_by_one = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="camera-store")

    async def add(self, managed: ManagedCamera, *, force: bool = False, takeover: bool = False) -> ManagedCamera:
        """See :meth:`CameraTable.check_add`. Raises ``UnavailableError`` as well: it cannot be stored."""
        async with self._one_by_one:
            managed = self._table.check_add(managed, time.monotonic(), force=force, takeover=takeover)
            await self.write(self._store.put, managed)
            return self._table.apply(managed, time.monotonic())

    async def update(self, managed: ManagedCamera, *, takeover: bool = False) -> ManagedCamera:
        """See :meth:`CameraTable.check_update`. Raises ``UnavailableError`` as well: it cannot be stored."""
        async with self._one_by_one:
            managed = self._table.check_update(managed, takeover=takeover)
            await self.write(self._store.put, managed)
            return self._table.apply(managed, time.monotonic())

    async def remove(self, name: str, *, manager: str | None = None, takeover: bool = False) -> str:
        """See :meth:`CameraTable.check_remove`. Raises ``UnavailableError`` as well: it cannot be stored."""
        async with self._one_by_one:
            life = self._table.check_remove(name, manager=manager, takeover=takeover)
            await self.write(self._store.remove, life, name)
            self._table.remove(name)
            return life

    async def write(self, call: Callable[..., None], *given: object) -> None:
        """Run a call of the store, after earlier ones. Raises ``UnavailableError``: it cannot be stored."""
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)


def _refuse_hidden(entry: CameraEntry) -> None:
    if HIDDEN in entry.source.reveal():
        raise ConfigError(f"the source {entry.source} has {HIDDEN} in place of a secret; replace it by the secret")


def _alive(managed: ManagedCamera, known: ManagedCamera | None) -> ManagedCamera:
    """Copy with the life of the ``known`` camera, or a new one, and a new revision if anything differs."""
    revision = unique_id()
    if (
        known is not None
        and known.manager == managed.manager
        and written_keys(known.entry) == written_keys(managed.entry)
    ):
        revision = known.revision
    return managed.model_copy(update={"life": unique_id() if known is None else known.life, "revision": revision})
