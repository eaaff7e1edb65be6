"""Loads a configuration from a file, ``${NAME}`` variables and overrides, with located errors; generates its schema."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config.camera import CameraEntry
from cluster.config.problems import InvalidConfigError, KeyPath, Problem, from_validation
from cluster.config.root import SightlineConfig, deep_merge
from cluster.errors import ConfigError
from cluster.redaction import KnownSecrets, SourceAddress

MAX_BYTES = 4 * 2**20
MAX_NODES = 200_000
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(slots=True)
class Document:
    """A parsed file. ``data``: its mapping, empty for an empty file; ``where``: its name in messages; ``lines``: key
    path -> line, counted from 1."""

    data: dict[str, Any]
    where: str
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """Line of the key, or of the nearest section around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)

    def refusal(self, problems: Iterable[Problem]) -> InvalidConfigError:
        """Error that lists the problems with their lines."""
        return InvalidConfigError([replace(each, line=self.line(each.path)) for each in problems], where=self.where)


def read_yaml(text: str, where: str) -> Document:
    """Parse one document whose top level is a mapping. Raises ``InvalidConfigError``: not YAML, not a mapping, a
    duplicate key, or beyond the size limits above."""

    def refuse(message: str, line: int | None = None, path: KeyPath = ()) -> InvalidConfigError:
        return InvalidConfigError([Problem(path, message, line)], where=where)

    if len(text.encode()) > MAX_BYTES:
        raise refuse(f"is larger than {MAX_BYTES // 2**20} MiB, which no configuration needs")
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        # Control characters; PyYAML's own message is two lines with an offset.
        line = text.count("\n", 0, error.position) + 1
        raise refuse(f"is not valid YAML: it holds the control character U+{error.character:04X}", line) from None
    try:
        root = loader.get_single_node()
        if root is None:
            return Document({}, where)
        if not isinstance(root, yaml.MappingNode):
            raise refuse("must be a mapping of sections such as `window:` and `cameras:`", _line(root))
        document = Document({}, where, {(): _line(root)})
        document.data = _Reader(loader, document.lines, where).mapping(root, (), frozenset())
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise refuse(f"is not valid YAML: {error.problem or error.context}", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise refuse(f"is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise refuse("is nested too deeply") from None
    finally:
        loader.dispose()


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Reader:
    """Builds plain values from YAML nodes, recording lines."""

    def __init__(self, loader: yaml.SafeLoader, lines: dict[KeyPath, int], where: str) -> None:
        self.loader = loader
        self.lines = lines
        self.where = where

    def refuse(self, message: str, node: yaml.Node, path: KeyPath) -> InvalidConfigError:
        return InvalidConfigError([Problem(path, message, _line(node))], where=self.where)

    def value(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Any:
        if id(node) in above:
            raise self.refuse("refers to itself through an alias", node, path)
        self.lines.setdefault(path, _line(node))
        if len(self.lines) > MAX_NODES:
            raise self.refuse(f"has more than {MAX_NODES} values once aliases are expanded", node, path)
        if isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN_TAGS:
            raise self.refuse(f"has the tag {node.tag!r}; a configuration holds plain values only", node, path)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, above)
        if isinstance(node, yaml.SequenceNode):
            inside = above | {id(node)}
            return [self.value(item, (*path, index), inside) for index, item in enumerate(node.value)]
        return self.loader.construct_object(node)

    def mapping(self, node: yaml.MappingNode, path: KeyPath, above: frozenset[int]) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.key(key_node, path)
            if key in first and key != "<<":
                raise self.refuse(f"is given twice, first on line {first[key]}; keep one", key_node, (*path, key))
            first[key] = _line(key_node)
        # Merge keys (`<<: *base`) come first, so that explicit keys win.
        self.loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, path)
            self.lines[(*path, key)] = _line(key_node)
            found[key] = self.value(value_node, (*path, key), above | {id(node)})
        return found

    def key(self, node: yaml.Node, path: KeyPath) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.refuse("a key must be a plain name", node, path)
        return str(node.value)


_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|\$\{(?P<bad>[^}]*)\}?")

_USER_INFO = re.compile(r"://[^/?#@]*\Z")
"""Matches text that ends inside an address's user info, provided that an ``@`` follows."""


def expand(tree: Any, environment: Mapping[str, str] | None = None) -> tuple[Any, set[KeyPath], list[Problem]]:
    """Expand ``${NAME}`` variables; returns the tree, the paths whose value came from one, and the problems.

    ``$${`` stands for a literal ``${``. An empty variable counts as set unless a default is given (as in a shell).
    The value of a variable in an address's user or password must be percent-escaped.
    """
    variables = os.environ if environment is None else environment
    touched: set[KeyPath] = set()
    problems: list[Problem] = []

    def text(value: str, path: KeyPath) -> str:
        def fill(match: re.Match[str]) -> str:
            if match.group() == "$${":
                return "${"
            if match["bad"] is not None:
                message = f"{match.group()!r} names no variable; write ${{NAME}}, ${{NAME:-default}}, or $${{ for ${{"
                problems.append(Problem(path, message))
                return ""
            touched.add(path)
            name, default = match["name"], match["default"]
            found = variables.get(name)
            if default is not None:
                found = found or default
            if found is None:
                message = f"environment variable {name} is not set; set it, or write ${{{name}:-default}}"
                problems.append(Problem(path, message))
                return ""
            before, after = value[: match.start()], value[match.end() :]
            in_user_info = _USER_INFO.search(before) and "@" in re.split("[/?#]", after)[0]
            # Unescaped, it would end the authority early and change the host.
            if in_user_info and re.search("[/?#]", found):
                message = f"the value of {name} contains / ? or #; percent-escape it in the variable"
                problems.append(Problem(path, message))
                return ""
            return found

        return _REFERENCE.sub(fill, value)

    def walk(node: Any, path: KeyPath) -> Any:
        if isinstance(node, str):
            return text(node, path)
        if isinstance(node, dict):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value, (*path, index)) for index, value in enumerate(node)]
        return node

    return walk(tree, ()), touched, problems


def schema_text() -> str:
    """JSON schema (2020-12) of a configuration file, as stored in ``configs/schema.json``."""
    dialect, body = "https://json-schema.org/draft/2020-12/schema", SightlineConfig.model_json_schema()
    schema = {"$schema": dialect, **body, "title": "Sightline configuration"}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> SightlineConfig:
    """Read a YAML file (None: defaults only), apply ``overrides`` (nested mappings), and validate. Raises
    ``ConfigError``: the file is unreadable or invalid; the message names file, line, key and remedy."""
    where = str(path) if path is not None else "configuration"
    document = Document({}, where) if path is None else read_yaml(read_file(Path(path)), where)
    return _checked(document, overrides or {})


def load_tree(tree: Mapping[str, Any], where: str = "configuration") -> SightlineConfig:
    """Validate a configuration given as a mapping; ``where`` names it in messages. Raises ``ConfigError``: it is
    invalid; the message names key and remedy."""
    return _checked(Document(dict(tree), where), {})


def _checked(document: Document, overrides: Mapping[str, Any]) -> SightlineConfig:
    tree, secret, unset = expand(document.data)
    if unset:
        raise document.refusal(unset)
    try:
        return SightlineConfig.model_validate(deep_merge(tree, overrides))
    except ValidationError as error:
        problems = from_validation(error, SightlineConfig, secret)
        raise InvalidConfigError([_place(p, document, overrides) for p in problems], where=document.where) from None


def parse_camera(
    name: str,
    source: str | SourceAddress = "",
    questions: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> CameraEntry:
    """Parse a camera of ``Cameras.Add``; ``camera_settings`` then checks it against the configuration. Raises
    ``ConfigError``: a key or value is invalid."""
    body: dict[str, Any] = {**(settings or {}), "name": name, "source": source}
    if questions:
        body["questions"] = [dict(question) for question in questions]
    try:
        return CameraEntry.model_validate(body)
    except ValidationError as error:
        problems = from_validation(error, CameraEntry, known=KnownSecrets())
        raise InvalidConfigError(problems, where=f"camera {name}") from None


def _place(problem: Problem, document: Document, overrides: Mapping[str, Any]) -> Problem:
    """The problem with its line, unless an override caused it."""
    node: Any = overrides
    for part in problem.path:
        if not isinstance(node, Mapping) or part not in node:
            return replace(problem, line=document.line(problem.path))
        node = node[part]
    return problem


def read_file(path: Path, file: str = "configuration file", what: str = "a configuration is") -> str:
    """Text of a YAML file; ``file`` and ``what`` name it in messages. Raises ``ConfigError``: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {file}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the YAML file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8; {what} YAML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
