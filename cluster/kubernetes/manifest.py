"""Files for ``sightline cameras apply``: a ``cameras:`` list as in the configuration, or Camera resources."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field, ValidationError

from cluster.config.camera import CameraEntry
from cluster.config.load import Document, expand, read_yaml
from cluster.config.problems import InvalidConfigError, Problem, Section, from_validation
from cluster.errors import ConfigError
from cluster.kubernetes.resource import KIND, CameraResource

_END = re.compile(r"---(\s.*)?")


class CamerasFile(Section):
    """One document with cameras; other sections of a configuration are a cluster's, not a camera's."""

    cameras: list[CameraEntry] = Field(default_factory=list, description="The cameras.")


def read_cameras(path: str | Path, text: str | None = None) -> list[CameraEntry]:
    """The cameras of a file, of all YAML files right in a folder, or of ``text`` that came from elsewhere.

    Raises:
        ConfigError: a file cannot be read, or something in it is wrong; the message names file, line, key and remedy.
    """
    sources = {str(path): text} if text is not None else {str(file): _read(file) for file in _files(Path(path))}
    found: dict[str, tuple[CameraEntry, str]] = {}
    for where, content in sources.items():
        for entry in parse_cameras(content, where):
            if entry.name in found:
                other = found[entry.name][1]
                raise ConfigError(f"{where}: camera {entry.name!r} is in {other} already; names must be unique")
            found[entry.name] = entry, where
    return [entry for entry, _ in found.values()]


def parse_cameras(text: str, where: str, environment: Mapping[str, str] | None = None) -> list[CameraEntry]:
    """The cameras of a text of one or more documents, with ``${NAME}`` filled in.

    Raises:
        ConfigError: see :func:`read_cameras`.
    """
    return [entry for each in _documents(text) for entry in _of_document(read_yaml(each, where), where, environment)]


def _of_document(document: Document, where: str, environment: Mapping[str, str] | None) -> list[CameraEntry]:
    tree, secret, unset = expand(document.data, environment)
    if unset:
        raise InvalidConfigError([replace(each, line=document.line(each.path)) for each in unset], where=where)
    if not tree:
        return []
    if "kind" in tree:
        return [_of_resource(tree, document, where)]
    try:
        return CamerasFile.model_validate(tree).cameras
    except ValidationError as error:
        found = from_validation(error, CamerasFile, secret)
        raise InvalidConfigError(
            [replace(each, line=document.line(each.path)) for each in found], where=where
        ) from None


def _of_resource(tree: Mapping[str, object], document: Document, where: str) -> CameraEntry:
    def refuse(path: tuple[str, ...], message: str) -> InvalidConfigError:
        return InvalidConfigError([Problem(path, message, document.line(path))], where=where)

    if tree["kind"] != KIND:
        raise refuse(("kind",), f"must be {KIND}, not {tree['kind']!r}")
    metadata, spec = tree.get("metadata"), tree.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(spec, Mapping) or "name" not in metadata:
        raise refuse((), "a Camera resource needs metadata.name and spec")
    if "credentials" in spec:
        raise refuse(
            ("spec", "credentials"), "only Kubernetes has Secrets; write source: rtsp://USER:${PASSWORD}@HOST/PATH here"
        )
    resource = CameraResource.of({**tree, "metadata": {**metadata, "resourceVersion": "0"}})
    try:
        return resource.entry(allow_password=True)
    except InvalidConfigError as error:
        placed = [replace(each, line=document.line(each.path)) for each in error.problems]
        raise InvalidConfigError(placed, where=where) from None


def _documents(text: str) -> Iterator[str]:
    """Each document at its own line of the whole, so that what is wrong is found there."""
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
        raise ConfigError(f"{path}: there is no YAML file in this folder")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8; cameras are YAML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def as_yaml(entries: list[dict[str, object]], comments: list[str]) -> str:
    """A file that :func:`read_cameras` reads."""
    import yaml

    head = "".join(f"# {line}\n" for line in comments)
    # Through JSON, so that equal values are written out and not shared by aliases.
    plain = json.loads(json.dumps({"cameras": entries}))
    return head + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
