"""From a file and overrides to a checked configuration; every error says where and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.camera import CameraEntry
from cluster.config.expand import expand
from cluster.config.problems import InvalidConfigError, Problem, from_validation
from cluster.config.resolve import deep_merge
from cluster.config.root import SightlineConfig
from cluster.config.yaml import Document, read_yaml
from cluster.errors import ConfigError
from cluster.redaction import SourceAddress


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> SightlineConfig:
    """Read a YAML file (None: defaults only), lay ``overrides`` (nested mappings) over it, and check everything.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the message names file, line, key and remedy.
    """
    where = str(path) if path is not None else "configuration"
    return _checked(Document({}) if path is None else read_yaml(_read(Path(path)), where), where, overrides or {})


def load_tree(tree: Mapping[str, Any], where: str = "configuration") -> SightlineConfig:
    """Check what a configuration file holds, given as a mapping; ``where`` names it in messages.

    Raises:
        ConfigError: something in it is wrong; the message names key and remedy.
    """
    return _checked(Document(dict(tree)), where, {})


def _checked(document: Document, where: str, overrides: Mapping[str, Any]) -> SightlineConfig:
    tree, secret, unset = expand(document.data)
    if unset:
        raise InvalidConfigError([replace(problem, line=document.line(problem.path)) for problem in unset], where=where)
    try:
        return SightlineConfig.model_validate(deep_merge(tree, overrides))
    except ValidationError as error:
        problems = from_validation(error, SightlineConfig, secret)
        raise InvalidConfigError([_place(p, document, overrides) for p in problems], where=where) from None


def parse_camera(
    name: str,
    source: str | SourceAddress = "",
    questions: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> CameraEntry:
    """A camera added while the cluster runs, as ``Cameras.Add`` gives it; check it with ``camera_settings``.

    Raises:
        ConfigError: a key or value is wrong.
    """
    body: dict[str, Any] = {**(settings or {}), "name": name, "source": source}
    if questions:
        body["questions"] = [dict(question) for question in questions]
    try:
        return CameraEntry.model_validate(body)
    except ValidationError as error:
        raise InvalidConfigError(from_validation(error, CameraEntry), where=f"camera {name}") from None


def _place(problem: Problem, document: Document, overrides: Mapping[str, Any]) -> Problem:
    """The problem with its line, unless an override and not the file says what is wrong."""
    node: Any = overrides
    for part in problem.path:
        if not isinstance(node, Mapping) or part not in node:
            return replace(problem, line=document.line(problem.path))
        node = node[part]
    return problem


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the YAML file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8; a configuration is YAML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
