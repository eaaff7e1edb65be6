"""The controller's cameras as declared, beside the directory that places them."""

import logging
import uuid
from collections.abc import Iterable, Sequence

from cluster.config import SightlineConfig, camera_settings
from cluster.config.camera import CameraEntry
from cluster.config.sources import check_files
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.cameras.store import CameraStore
from cluster.control.directory import Directory
from cluster.errors import ConfigError
from cluster.redaction.address import HIDDEN

log = logging.getLogger(__name__)


class CameraTable:
    """Resolves declarations against the configuration, and keeps them, the directory and the ``store`` consistent: what
    cannot be stored changes nothing. ``store``: None: nowhere."""

    def __init__(self, config: SightlineConfig, directory: Directory, store: CameraStore | None = None) -> None:
        self._config = config
        self._directory = directory
        self._store = store
        self._managed: dict[str, ManagedCamera] = {}

    def load(self, cameras: Iterable[ManagedCamera], now_s: float) -> list[ManagedCamera]:
        """Restore cameras when a controller starts; returns the new ones. One that does not fit the configuration is
        logged and left out; its stored declaration is kept."""
        new = []
        for managed in cameras:
            try:
                settings = camera_settings(self._config, managed.entry)
            except ConfigError as error:
                log.error("camera %s is left out: %s", managed.entry.name, error)
                continue
            known = _alive(managed, managed)
            self._directory.add(settings, now_s, manager=managed.manager, life=known.life)
            self._managed[settings.name] = known
            if known is not managed:
                new.append(known)
        return new

    def add(
        self, managed: ManagedCamera, now_s: float, *, force: bool = False, takeover: bool = False
    ) -> ManagedCamera:
        """Add a camera; returns it with its life.

        Raises:
            CameraExistsError: the name is taken, with other settings.
            ManagedElsewhereError: the name is taken by another manager, unless it is to be taken over.
            ConfigError: settings that contradict each other, or a file that may not be opened or does not exist.
            CapacityError: no capacity, unless ``force`` is set.
            UnavailableError: it cannot be stored.
        """
        name = managed.entry.name
        known = self._managed.get(name)
        if takeover and known is not None and known.manager != managed.manager:
            return self.update(managed, now_s, takeover=True)
        _refuse_hidden(managed.entry)
        check_files(self._config, managed.entry)
        settings = camera_settings(self._config, managed.entry)
        managed = _alive(managed, known)
        self._directory.add(settings, now_s, force=force, manager=managed.manager, life=managed.life)
        try:
            self._keep(managed)
        except Exception:
            # Only the directory could tell whether it takes the camera. Nobody has seen it yet.
            if known is None:
                self._directory.remove(name)
            raise
        self._managed[name] = managed
        return managed

    def update(self, managed: ManagedCamera, now_s: float, *, takeover: bool = False) -> ManagedCamera:
        """Replace all settings of a camera, keeping its life; see :meth:`Directory.update`. A source as it is shown,
        with its secrets hidden, stays as it is.

        Raises:
            UnknownCameraError: there is none.
            ManagedElsewhereError: it belongs to another manager, and is not to be taken over.
            ConfigError: settings that contradict each other, or a file that may not be opened or does not exist.
            UnavailableError: it cannot be stored.
        """
        managed = managed.model_copy(update={"entry": self.restore_secrets(managed.entry)})
        check_files(self._config, managed.entry)
        settings = camera_settings(self._config, managed.entry)
        self._directory.check_manager(settings.name, managed.manager, takeover=takeover)
        managed = _alive(managed, self._managed.get(managed.entry.name))
        self._keep(managed)
        self._directory.update(settings, now_s, manager=managed.manager, takeover=takeover)
        self._managed[managed.entry.name] = managed
        return managed

    def remove(self, name: str, *, manager: str | None = None, takeover: bool = False) -> None:
        """See :meth:`Directory.remove`. Raises ``UnavailableError`` as well: it cannot be stored."""
        self._directory.check_manager(name, manager, takeover=takeover)
        if self._store is not None:
            self._store.remove(name)
        self._directory.remove(name, manager=manager, takeover=takeover)
        self._managed.pop(name, None)

    def _keep(self, managed: ManagedCamera) -> None:
        if self._store is not None:
            self._store.put(managed)

    def restore_secrets(self, entry: CameraEntry) -> CameraEntry:
        """The entry with the source of the camera of its name, if it has exactly that with its secrets hidden.

        Raises:
            ConfigError: another source with hidden secrets.
        """
        known = self._managed.get(entry.name)
        if known is not None and HIDDEN in entry.source.reveal() and entry.source.reveal() == str(known.entry.source):
            return entry.model_copy(update={"source": known.entry.source})
        _refuse_hidden(entry)
        return entry

    def check_test(self, entry: CameraEntry) -> CameraEntry:
        """A camera whose source is to be tested, with its secrets.

        Raises:
            ConfigError: settings that contradict each other, or a source that may not be opened.
        """
        entry = self.restore_secrets(entry)
        check_files(self._config, entry)
        camera_settings(self._config, entry)
        return entry

    @property
    def names(self) -> list[str]:
        """Of all cameras, sorted."""
        return sorted(self._managed)

    def managed(self, names: Sequence[str] = ()) -> list[ManagedCamera]:
        """Sorted by name; all of them without ``names``.

        Raises:
            UnknownCameraError: there is none of a name.
        """
        for name in names:
            self._directory.settings(name)
        return [self._managed[name] for name in sorted(names or self._managed)]


def _refuse_hidden(entry: CameraEntry) -> None:
    if HIDDEN in entry.source.reveal():
        raise ConfigError(f"the source {entry.source} has {HIDDEN} in place of a secret; write the secret in its place")


def _alive(managed: ManagedCamera, known: ManagedCamera | None) -> ManagedCamera:
    """Copy with the life of the ``known`` camera, or with a new one."""
    life = known.life if known is not None and known.life else uuid.uuid4().hex[:16]
    return managed if managed.life == life else managed.model_copy(update={"life": life})
