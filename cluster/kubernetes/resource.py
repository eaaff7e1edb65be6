"""A ``Camera`` resource of Kubernetes, and the camera that its ``spec`` describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from cluster.config.camera import CameraEntry
from cluster.config.problems import InvalidConfigError, Problem, from_validation
from cluster.errors import ConfigError
from cluster.kubernetes.keys import camel, to_camel, to_snake
from cluster.redaction import SourceAddress

GROUP = "sightline.io"
VERSION = "v1alpha1"
PLURAL = "cameras"
KIND = "Camera"
TAKEOVER = f"{GROUP}/takeover"
"""Annotation: ``"true"`` takes a camera over from another manager."""

_CREDENTIALS = ("secretName", "usernameKey", "passwordKey")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where a source's name and password are: the keys of a Secret in the resource's namespace."""

    secret: str
    username_key: str = "username"
    password_key: str = "password"


@dataclass(frozen=True, slots=True)
class CameraResource:
    """What counts of one object. ``body`` is all of it, as the server gave it."""

    name: str
    uid: str
    generation: int
    version: str
    takeover: bool
    spec: Mapping[str, Any] = field(repr=False)
    status: Mapping[str, Any]
    body: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, body: Any) -> CameraResource:
        """An object of a list or a watch.

        Raises:
            ValueError: no object with a name and a version.
        """
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        if not isinstance(metadata, Mapping) or not metadata.get("name") or not metadata.get("resourceVersion"):
            raise ValueError("an object without metadata.name and metadata.resourceVersion")
        annotations, generation = metadata.get("annotations"), metadata.get("generation")
        spec, status = body.get("spec"), body.get("status")
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata.get("uid", "")),
            generation=generation if isinstance(generation, int) else 0,
            version=str(metadata["resourceVersion"]),
            takeover=isinstance(annotations, Mapping) and annotations.get(TAKEOVER) == "true",
            spec=spec if isinstance(spec, Mapping) else {},
            status=status if isinstance(status, Mapping) else {},
            body=body,
        )

    @property
    def asked(self) -> tuple[str, int, bool]:
        """What its author wants: it changes with anything but the status."""
        return self.uid, self.generation, self.takeover

    @property
    def credentials(self) -> Credentials | None:
        """The Secret that its source needs.

        Raises:
            ConfigError: the section is wrong.
        """
        given = self.spec.get("credentials")
        if given is None:
            return None
        if not isinstance(given, Mapping) or not given.get("secretName"):
            raise self._refuse(Problem(("credentials", "secretName"), "is missing; name the Secret"))
        for key, value in given.items():
            if key not in _CREDENTIALS:
                raise self._refuse(Problem(("credentials", key), f"unknown key; keys here: {', '.join(_CREDENTIALS)}"))
            if not isinstance(value, str) or not value:
                raise self._refuse(Problem(("credentials", key), "must be a name"))
        return Credentials(
            given["secretName"], given.get("usernameKey", "username"), given.get("passwordKey", "password")
        )

    def entry(self, secret: Mapping[str, str] | None = None, *, allow_password: bool = False) -> CameraEntry:
        """The camera.

        Args:
            secret: the values of its Secret.
            allow_password: the source may hold one: it is no object that others can read.

        Raises:
            ConfigError: a key or value is wrong; the sentence never holds a password.
        """
        found: list[Problem] = []
        spec = {key: value for key, value in self.spec.items() if key not in ("credentials", "name")}
        masks = spec.pop(camel("privacy_masks"), None)
        body = to_snake(spec, CameraEntry, (), found)
        if "name" in self.spec:
            found.append(Problem(("name",), "is not given here: a camera is called as its resource, metadata.name"))
        if masks is not None:
            body["privacy_masks"] = [_mask(mask) for mask in masks] if isinstance(masks, list) else masks
        source = body.get("source", "")
        if isinstance(source, str) and SourceAddress(source).holds_password and not allow_password:
            found.append(
                Problem(("source",), "must hold no password; put it into a Secret, and name that under credentials")
            )
        if found:
            raise self._refuse(*found)
        credentials = self.credentials
        if credentials is not None:
            body["source"] = self._with_password(source, credentials, secret or {})
        try:
            return CameraEntry.model_validate({**body, "name": self.name})
        except ValidationError as error:
            hidden = [("source",)] if credentials is not None else []
            raise self._refuse(*map(to_camel, from_validation(error, CameraEntry, hidden))) from None

    def _with_password(self, source: Any, credentials: Credentials, secret: Mapping[str, str]) -> str:
        scheme, separator, rest = str(source).partition("://")
        if not separator or not rest or scheme == "file" or "@" in rest.split("/")[0]:
            message = "must be an address without a user, as rtsp://10.0.0.11/stream1, to go with credentials"
            raise self._refuse(Problem(("source",), message))
        missing = [key for key in (credentials.username_key, credentials.password_key) if not secret.get(key)]
        if missing:
            message = f"Secret {credentials.secret!r} has no {' and no '.join(map(repr, missing))}"
            raise self._refuse(Problem(("credentials",), message))
        user, password = (
            quote(secret[key].strip(), safe="") for key in (credentials.username_key, credentials.password_key)
        )
        return f"{scheme}://{user}:{password}@{rest}"

    def _refuse(self, *problems: Problem) -> ConfigError:
        return InvalidConfigError(
            [Problem(("spec", *problem.path), problem.message) for problem in problems], where=f"camera {self.name}"
        )


def _mask(mask: Any) -> Any:
    """``{points: [{x, y}, ...]}`` as the configuration takes it; a rectangle is the same in both."""
    if not isinstance(mask, Mapping) or set(mask) != {"points"} or not isinstance(mask["points"], list):
        return mask
    points = mask["points"]
    whole = all(isinstance(point, Mapping) and set(point) == {"x", "y"} for point in points)
    return [[point["x"], point["y"]] for point in points] if whole else points
