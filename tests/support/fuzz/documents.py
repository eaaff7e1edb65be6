"""What people write: configurations, cameras as YAML and as Kubernetes objects, privacy masks, questions' settings."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.config import SightlineConfig, camera_settings, load_config, parse_camera
from cluster.config.camera import CameraEntry
from cluster.config.polygon import parse_polygon
from cluster.errors import SightlineError
from cluster.kubernetes.resource import CameraResource, parse_cameras
from fuzz.rpc import damaged, text, tree

HANG_S = 5.0

CONFIGURATION = """\
model: {name: tiny}
sampling: {fps: 2.0, anchor_interval_s: 8}
pruning: {policy: replenish, options: {margin: 4.5}}
window: {length_s: 40, stride_s: 8}
memory: {cap: 64MiB, retention: 24h}
questions:
  - {id: fence, text: "Is anyone climbing the fence?", threshold: 0.6}
cameras:
  - {name: gate, source: "rtsp://10.0.0.1/x", privacy_masks: ["0,0 0.3,0 0.3,0.5"]}
gateway: {port: 0}
"""

CAMERAS = """\
cameras:
- name: yard
  source: rtsp://10.0.0.2/stream
  priority: critical
  window: {stride_s: 4}
  questions: [{id: smoke, text: "Is there smoke?"}]
---
apiVersion: sightline.io/v1alpha1
kind: Camera
metadata: {name: depot, namespace: default}
spec: {source: "rtsp://10.0.0.3/stream", privacyMasks: ["0,0 1,0 1,1"]}
"""

OBJECT: dict[str, Any] = {
    "apiVersion": "sightline.io/v1alpha1",
    "kind": "Camera",
    "metadata": {"name": "depot", "namespace": "default", "generation": 1, "resourceVersion": "7", "uid": "u"},
    "spec": {
        "source": "rtsp://10.0.0.3/stream",
        "priority": "normal",
        "questions": [{"id": "smoke", "text": "Is there smoke?", "threshold": 0.5}],
        "privacyMasks": ["0,0 1,0 1,1"],
        "credentials": {"secretName": "camera", "usernameKey": "username"},
    },
}


class DocumentCases:
    """Texts and trees to everything that reads what people write; only our own errors may come of it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "configuration.yaml"
        self.outcomes: Counter[str] = Counter()
        self._base = load_config(None, {"questions": [{"id": "fence", "text": "Is anyone climbing the fence?"}]})
        self._kinds: tuple[Callable[[random.Random], object], ...] = (
            self._configuration,
            self._overrides,
            self._cameras,
            self._camera,
            self._camera,
            self._object,
            self._object,
            self._mask,
        )

    def one(self, rng: random.Random) -> str:
        """Do one case; empty when all is well, else what went wrong."""
        kind = rng.choice(self._kinds)
        began = time.monotonic()
        try:
            kind(rng)
            self.outcomes["taken"] += 1
        except SightlineError as error:
            self.outcomes["refused"] += 1
            if not str(error).strip():
                return f"{kind.__name__}: {type(error).__name__} says nothing"
        except Exception as error:
            return f"{kind.__name__}: {type(error).__name__}: {error}"
        if time.monotonic() - began > HANG_S:
            return f"{kind.__name__}: took {time.monotonic() - began:.1f} s"
        return ""

    def _configuration(self, rng: random.Random) -> object:
        self._file.write_bytes(damaged(rng, CONFIGURATION.encode()))
        return load_config(self._file)

    def _overrides(self, rng: random.Random) -> object:
        return load_config(None, {name: value(rng, field.annotation) for name, field in _some(rng, SightlineConfig)})

    def _cameras(self, rng: random.Random) -> object:
        return parse_cameras(damaged(rng, CAMERAS.encode()).decode("utf-8", "replace"), "fuzz", {})

    def _camera(self, rng: random.Random) -> object:
        settings = {name: value(rng, field.annotation) for name, field in _some(rng, CameraEntry)}
        settings.pop("name", None)
        source = settings.pop("source", "")
        name = rng.choice(("gate", "yard.2", text(rng)))
        entry = parse_camera(name, source if isinstance(source, str) else text(rng), (), settings)
        return camera_settings(self._base, entry)

    def _object(self, rng: random.Random) -> object:
        body = json.loads(json.dumps(OBJECT))
        for _ in range(rng.randrange(1, 4)):
            _spoil(rng, body)
        try:
            resource = CameraResource.of(body)
        except ValueError:
            # What an API server never sends; who watches it makes a sentence of that.
            return None
        return resource.asked, resource.entry({"username": text(rng), "password": text(rng)})

    def _mask(self, rng: random.Random) -> object:
        written = tree(rng) if rng.random() < 0.5 else damaged(rng, b"0,0 0.3,0 0.3,0.5").decode("utf-8", "replace")
        try:
            return parse_polygon(written)
        except ValueError:
            # What the configuration makes a sentence of.
            return None


def _some(rng: random.Random, model: type[BaseModel]) -> list[tuple[str, Any]]:
    fields = list(model.model_fields.items())
    return rng.sample(fields, min(len(fields), rng.randrange(1, 4)))


def value(rng: random.Random, annotation: Any, depth: int = 3) -> Any:
    """What a field of the configuration may be given: nonsense, or a section of keys that exist."""
    section = _section(annotation)
    if section is None or depth == 0 or rng.random() < 0.1:
        return tree(rng)
    return {name: value(rng, field.annotation, depth - 1) for name, field in _some(rng, section)}


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _section(part))), None)


def _spoil(rng: random.Random, body: Any) -> None:
    """Replace, drop or add something somewhere in a tree."""
    while isinstance(body, dict | list) and body:
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        key = rng.choice(keys)
        if not isinstance(body[key], dict | list) or rng.random() < 0.3:
            match rng.randrange(3):
                case 0:
                    body[key] = tree(rng)
                case 1:
                    del body[key]
                case _ if isinstance(body, dict):
                    body[text(rng)] = tree(rng)
            return
        body = body[key]
