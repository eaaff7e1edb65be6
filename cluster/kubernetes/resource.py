"""The Kubernetes resource ``Camera``, its conversion to a camera, and its status."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from pydantic import Field, ValidationError

from cluster.config.camera import CameraEntry
from cluster.config.load import Document, expand, read_file, read_yaml
from cluster.config.problems import InvalidConfigError, Problem, Section, from_validation
from cluster.control.cameras.managed import KUBERNETES
from cluster.errors import ConfigError
from cluster.kubernetes.keys import camel, to_camel, to_snake
from cluster.redaction import SourceAddress, redact
from cluster.types import CameraStatus

GROUP = "sightline.io"
VERSION = "v1alpha1"
PLURAL = "cameras"
KIND = "Camera"
TAKEOVER = f"{GROUP}/takeover"
"""Annotation: ``"true"`` takes a camera over from another manager."""
POLYGONS = ("privacy_masks", "zones")
"""Keys of a camera that are lists of polygons."""


class Credentials(Section):
    """User and password of the source, from a Secret in this namespace; never shown in the status."""

    secret_name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")
    username_key: str = Field(
        default="username", min_length=1, max_length=253, description="Key of the user name; default username."
    )
    password_key: str = Field(
        default="password", min_length=1, max_length=253, description="Key of the password; default password."
    )


@dataclass(frozen=True, slots=True)
class CameraResource:
    """Relevant fields of one object. ``body``: the whole object as received."""

    name: str
    uid: str
    generation: int
    version: str
    takeover: bool
    spec: Mapping[str, Any] = field(repr=False)
    status: Mapping[str, Any]
    body: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, body: Any) -> Self:
        """Parse an object of a list or a watch. Raises ``ValueError``: an object without name or version."""
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
        """Identifies the requested spec: changes with everything except the status."""
        return self.uid, self.generation, self.takeover

    @property
    def credentials(self) -> Credentials | None:
        """The Secret that the source needs, if any. Raises ``ConfigError``: the section is invalid."""
        given = self.spec.get("credentials")
        if given is None:
            return None
        found: list[Problem] = []
        body = to_snake(given, Credentials, ("credentials",), found) if isinstance(given, Mapping) else given
        try:
            if not found:
                return Credentials.model_validate(body)
        except ValidationError as error:
            found = [replace(each, path=("credentials", *each.path)) for each in from_validation(error, Credentials)]
        raise self._refuse(*map(to_camel, found))

    def entry(self, secret: Mapping[str, str] | None = None, *, allow_password: bool = False) -> CameraEntry:
        """Convert to a camera.

        Args:
            secret: the values of its Secret.
            allow_password: accept a password in the source, because the object is not readable by others.

        Raises:
            ConfigError: a key or value is wrong; the message never holds a password.
        """
        found: list[Problem] = []
        spec = {key: value for key, value in self.spec.items() if key not in ("credentials", "name")}
        polygons = {key: spec.pop(camel(key), None) for key in POLYGONS}
        body = to_snake(spec, CameraEntry, (), found)
        if "name" in self.spec:
            found.append(Problem(("name",), "must not be given: the camera's name is metadata.name"))
        for key, given in polygons.items():
            if given is not None:
                body[key] = [_polygon(each) for each in given] if isinstance(given, list) else given
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
        keys = credentials.username_key, credentials.password_key
        # Files from which Secrets are created often end with a line break.
        values = {key: secret.get(key, "").strip() for key in keys}
        missing = [key for key in keys if not values[key]]
        if missing:
            message = f"Secret {credentials.secret_name!r} has no {' and no '.join(map(repr, missing))}"
            raise self._refuse(Problem(("credentials",), message))
        user, password = (quote(values[key], safe="") for key in keys)
        return f"{scheme}://{user}:{password}@{rest}"

    def _refuse(self, *problems: Problem) -> ConfigError:
        return InvalidConfigError(
            [Problem(("spec", *problem.path), problem.message) for problem in problems], where=f"camera {self.name}"
        )


def _polygon(polygon: Any) -> Any:
    """Convert ``{points: [{x, y}, ...]}``; rectangles have the same form in both."""
    if not isinstance(polygon, Mapping) or set(polygon) != {"points"} or not isinstance(polygon["points"], list):
        return polygon
    points = polygon["points"]
    whole = all(isinstance(point, Mapping) and set(point) == {"x", "y"} for point in points)
    return [[point["x"], point["y"]] for point in points] if whole else points


Truth = Literal["True", "False", "Unknown"]

MESSAGE_CHARS = 1024
"""Maximum characters of a condition's message, which is stored with every status."""

_VOLATILE = frozenset({"lagSeconds", "lastAnswer", "answers", "reason"})
"""Fields that change with every window and are not worth a write of their own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of applying a spec.

    * ``accepted``: whether the camera runs with it; if not, ``reason`` (a word) and ``message`` (a sentence) say why
    * ``conflict``: a sentence naming the camera's other manager; empty if none
    """

    accepted: Truth
    reason: str
    message: str = ""
    conflict: str = ""


ACCEPTED = Outcome("True", "Accepted")


def status_of(
    resource: CameraResource, outcome: Outcome, camera: CameraStatus | None, now: str, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the whole status. ``camera``: the cluster's camera of that name, or ``None``; ``now``: RFC 3339 time for
    conditions that changed since the status ``before``."""
    # Another manager's camera of this name does not concern this resource.
    own = camera if camera is not None and camera.manager == KUBERNETES else None
    running: tuple[Truth, str, str]
    if own is None:
        running = ("False", "NotRunning", "the cluster runs no camera for this resource")
    else:
        running = ("True" if own.state == "running" else "False", own.state.capitalize(), own.reason)
    conflict: tuple[Truth, str, str] = ("True", "ManagedElsewhere", outcome.conflict)
    if not outcome.conflict:
        conflict = ("False", "None", "")
    found = {
        "Accepted": (outcome.accepted, outcome.reason, outcome.message),
        "Running": running,
        "Conflict": conflict,
    }
    known = _by_type(before)
    status: dict[str, Any] = {
        "observedGeneration": resource.generation,
        "conditions": [
            _condition(kind, *value, now=now, generation=resource.generation, before=known.get(kind, {}))
            for kind, value in found.items()
        ],
    }
    if camera is not None:
        status["manager"] = camera.manager
    return status | (_seen(own) if own is not None else {})


def worth_writing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Literal["nothing", "later", "soon"]:
    """How urgently to write a status. ``soon``: a change that people wait for; ``later``: only figures that change with
    every window."""
    if before == after:
        return "nothing"
    return "later" if _steady(before) == _steady(after) else "soon"


def _steady(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without volatile fields, such as countdowns in conditions' messages."""
    kept = {key: value for key, value in status.items() if key not in _VOLATILE}
    kept["conditions"] = {
        kind: (each.get("status"), each.get("reason"), "" if kind == "Running" else each.get("message"))
        for kind, each in _by_type(status).items()
    }
    return kept


def _by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    conditions = status.get("conditions")
    if not isinstance(conditions, list):
        return {}
    return {str(each.get("type")): each for each in conditions if isinstance(each, Mapping)}


def _condition(
    kind: str, status: Truth, reason: str, message: str, *, now: str, generation: int, before: Mapping[str, Any]
) -> dict[str, Any]:
    same = before.get("status") == status and isinstance(before.get("lastTransitionTime"), str)
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": redact(message)[:MESSAGE_CHARS],
        "lastTransitionTime": before["lastTransitionTime"] if same else now,
        "observedGeneration": generation,
    }


def _seen(camera: CameraStatus) -> dict[str, Any]:
    lag_s = camera.latency_s or camera.expected_lag_s
    answers = [
        {"question": each.question, "score": round(each.score, 2), "positive": each.positive}
        for each in camera.last_answers
    ]
    told = " · ".join(
        f"{each['question']} {each['score']:.2f} {'yes' if each['positive'] else 'no'}" for each in answers
    )
    texts = {
        "state": camera.state,
        "reason": redact(camera.reason)[:MESSAGE_CHARS],
        "source": redact(camera.source),
        "decoder": camera.decoder,
        "replica": camera.replica,
        "rung": camera.rung,
        "rungReason": camera.rung_reason,
        "lastAnswer": told,
    }
    figures: dict[str, Any] = {"lagSeconds": round(lag_s, 2)} if lag_s else {}
    return {key: value for key, value in texts.items() if value} | figures | ({"answers": answers} if answers else {})


_END = re.compile(r"---(\s.*)?")


class CamerasFile(Section):
    """A document of cameras alone; other sections of a configuration belong to the cluster."""

    cameras: list[CameraEntry] = Field(default_factory=list, description="The cameras.")


def read_cameras(path: str | Path, text: str | None = None) -> list[CameraEntry]:
    """Read the cameras of a file, of all YAML files directly in a folder, or of ``text`` from elsewhere. Raises
    ``ConfigError``: a file cannot be read or is invalid; the message names file, line, key and remedy."""
    if text is None:
        sources = {str(file): read_file(file, "file", "cameras are") for file in _files(Path(path))}
    else:
        sources = {str(path): text}
    found: dict[str, tuple[CameraEntry, str]] = {}
    for where, content in sources.items():
        for entry in parse_cameras(content, where):
            if entry.name in found:
                other = found[entry.name][1]
                raise ConfigError(f"{where}: camera {entry.name!r} is already in {other}; names must be unique")
            found[entry.name] = entry, where
    return [entry for entry, _ in found.values()]


def parse_cameras(text: str, where: str, environment: Mapping[str, str] | None = None) -> list[CameraEntry]:
    """Parse the cameras of one or more documents, with ``${NAME}`` substituted. Raises ``ConfigError``: see
    :func:`read_cameras`."""
    return [entry for each in _documents(text) for entry in _of_document(read_yaml(each, where), environment)]


def _of_document(document: Document, environment: Mapping[str, str] | None) -> list[CameraEntry]:
    tree, secret, unset = expand(document.data, environment)
    if unset:
        raise document.refusal(unset)
    if not tree:
        return []
    if "kind" in tree:
        return [_of_resource(tree, document)]
    try:
        return CamerasFile.model_validate(tree).cameras
    except ValidationError as error:
        raise document.refusal(from_validation(error, CamerasFile, secret)) from None


def _of_resource(tree: Mapping[str, object], document: Document) -> CameraEntry:
    if tree["kind"] != KIND:
        raise document.refusal([Problem(("kind",), f"must be {KIND}, not {tree['kind']!r}")])
    metadata, spec = tree.get("metadata"), tree.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(spec, Mapping) or "name" not in metadata:
        raise document.refusal([Problem((), "a Camera resource needs metadata.name and spec")])
    if "credentials" in spec:
        message = "only Kubernetes has Secrets; write source: rtsp://USER:${PASSWORD}@HOST/PATH here"
        raise document.refusal([Problem(("spec", "credentials"), message)])
    resource = CameraResource.of({**tree, "metadata": {**metadata, "resourceVersion": "0"}})
    try:
        return resource.entry(allow_password=True)
    except InvalidConfigError as error:
        raise document.refusal(error.problems) from None


def _documents(text: str) -> Iterator[str]:
    """Documents, each padded with line breaks to its place in the file, so that errors give the right line."""
    lines = text.splitlines()
    begin = 0
    for number, line in enumerate([*lines, "---"]):
        if _END.fullmatch(line):
            part = lines[begin:number]
            if any(each.strip() and not each.lstrip().startswith("#") for each in part):
                yield "\n" * begin + "\n".join(part) + "\n"
            begin = number + 1


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())
    if not found:
        raise ConfigError(f"{path}: no YAML file in this folder")
    return found


def as_yaml(entries: list[dict[str, object]], comments: list[str]) -> str:
    """Write a file for :func:`read_cameras`."""
    import yaml

    head = "".join(f"# {line}\n" for line in comments)
    # Through JSON, so that repeated values are written out instead of becoming YAML aliases.
    plain = json.loads(json.dumps({"cameras": entries}))
    return head + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
