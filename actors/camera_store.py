"""Persists the camera table in Ray's key-value store, which outlives the controller actor."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ray.experimental import internal_kv

from cluster.config import CameraEntry
from cluster.control.cameras.managed import ManagedCamera, entry_from_json, entry_to_json

SEEDED = b"seeded"
CAMERA = b"camera/"
REMOVED = b"removed/"
COUNTED = b"counted"


class CameraStore:
    """The cameras of one run in Ray's key-value store."""

    def __init__(self, run_id: str) -> None:
        self._namespace = f"sightline-{run_id}".encode()

    def load(self) -> list[ManagedCamera] | None:
        """Stored cameras; ``None`` when this run has not been seeded yet."""
        if internal_kv._internal_kv_get(SEEDED, namespace=self._namespace) is None:
            return None
        keys = internal_kv._internal_kv_list(CAMERA, namespace=self._namespace)
        values = [internal_kv._internal_kv_get(key, namespace=self._namespace) for key in sorted(keys)]
        return [ManagedCamera.model_validate_json(value) for value in values if value is not None]

    def seed(self, entries: Sequence[CameraEntry]) -> None:
        """Store the configuration's cameras; from here on the store is authoritative."""
        seeded = json.dumps([entry_to_json(entry, secrets=True) for entry in entries]).encode()
        internal_kv._internal_kv_put(SEEDED, seeded, namespace=self._namespace)

    def seeded(self) -> list[CameraEntry]:
        """Cameras of the last configuration."""
        value = internal_kv._internal_kv_get(SEEDED, namespace=self._namespace)
        return [entry_from_json(entry) for entry in json.loads(value)] if value is not None else []

    def put(self, managed: ManagedCamera) -> None:
        internal_kv._internal_kv_put(
            CAMERA + managed.entry.name.encode(), managed.to_json().encode(), namespace=self._namespace
        )

    def delete(self, name: str) -> None:
        internal_kv._internal_kv_del(CAMERA + name.encode(), namespace=self._namespace)

    def removed(self) -> list[str]:
        """Removed cameras that not every replica has deleted yet."""
        keys = internal_kv._internal_kv_list(REMOVED, namespace=self._namespace)
        return [key.removeprefix(REMOVED).decode() for key in sorted(keys)]

    def put_removed(self, name: str) -> None:
        internal_kv._internal_kv_put(REMOVED + name.encode(), b"1", namespace=self._namespace)

    def delete_removed(self, name: str) -> None:
        internal_kv._internal_kv_del(REMOVED + name.encode(), namespace=self._namespace)

    def counted(self) -> dict[str, dict[str, dict[str, int]]]:
        """See :meth:`Directory.export_counts`."""
        value = internal_kv._internal_kv_get(COUNTED, namespace=self._namespace)
        found: dict[str, dict[str, dict[str, int]]] = json.loads(value) if value is not None else {}
        return found

    def put_counted(self, counted: dict[str, dict[str, dict[str, int]]]) -> None:
        internal_kv._internal_kv_put(COUNTED, json.dumps(counted).encode(), namespace=self._namespace)

    def clear(self) -> None:
        """Delete everything of this run."""
        internal_kv._internal_kv_del(REMOVED, del_by_prefix=True, namespace=self._namespace)
        internal_kv._internal_kv_del(CAMERA, del_by_prefix=True, namespace=self._namespace)
        internal_kv._internal_kv_del(COUNTED, namespace=self._namespace)
        internal_kv._internal_kv_del(SEEDED, namespace=self._namespace)
