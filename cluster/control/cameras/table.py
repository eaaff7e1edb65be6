"""The controller's cameras as they were written, beside the directory that places them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence

from cluster.config import SightlineConfig, camera_settings
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.directory import Directory
from cluster.errors import ConfigError

log = logging.getLogger(__name__)


class CameraTable:
    """Resolves what was written against the configuration, and keeps both sides in step."""

    def __init__(self, config: SightlineConfig, directory: Directory) -> None:
        self._config = config
        self._directory = directory
        self._managed: dict[str, ManagedCamera] = {}

    def load(self, cameras: Iterable[ManagedCamera], now_s: float) -> list[ManagedCamera]:
        """Those there are when a controller starts; returns those of them that were not there before. One that does not
        go with the configuration is logged and left out; what was written of it stays with whoever keeps it."""
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
        """Take a camera in; returns it with its life.

        Raises:
            CameraExistsError: the name is taken, with other settings.
            ManagedElsewhereError: the name is taken by another manager, unless it is to be taken over.
            ConfigError: settings that contradict each other.
            CapacityError: there is no room, unless ``force`` is set.
        """
        name = managed.entry.name
        known = self._managed.get(name)
        if takeover and known is not None and known.manager != managed.manager:
            return self.update(managed, now_s, takeover=True)
        settings = camera_settings(self._config, managed.entry)
        managed = _alive(managed, known)
        self._directory.add(settings, now_s, force=force, manager=managed.manager, life=managed.life)
        self._managed[name] = managed
        return managed

    def update(self, managed: ManagedCamera, now_s: float, *, takeover: bool = False) -> ManagedCamera:
        """Other settings for a camera, in place of all it had but its life; see :meth:`Directory.update`.

        Raises:
            UnknownCameraError: there is none.
            ManagedElsewhereError: it belongs to another manager, and is not to be taken over.
            ConfigError: settings that contradict each other.
        """
        settings = camera_settings(self._config, managed.entry)
        self._directory.update(settings, now_s, manager=managed.manager, takeover=takeover)
        managed = _alive(managed, self._managed.get(managed.entry.name))
        self._managed[managed.entry.name] = managed
        return managed

    def remove(self, name: str, *, manager: str | None = None, takeover: bool = False) -> None:
        """See :meth:`Directory.remove`."""
        self._directory.remove(name, manager=manager, takeover=takeover)
        self._managed.pop(name, None)

    def managed(self, names: Sequence[str] = ()) -> list[ManagedCamera]:
        """Sorted by name; all of them without ``names``.

        Raises:
            UnknownCameraError: there is none of a name.
        """
        for name in names:
            self._directory.settings(name)
        return [self._managed[name] for name in sorted(names or self._managed)]


def _alive(managed: ManagedCamera, known: ManagedCamera | None) -> ManagedCamera:
    """With the life of the camera that is ``known``; one that begins gets a new one."""
    life = known.life if known is not None and known.life else uuid.uuid4().hex[:16]
    return managed if managed.life == life else managed.model_copy(update={"life": life})
