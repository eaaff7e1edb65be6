"""YAML read with the line of every key; duplicate keys, aliases without end and several documents are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from cluster.config.problems import InvalidConfigError, KeyPath, Problem

MAX_BYTES = 4 * 2**20
MAX_NODES = 200_000
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(slots=True)
class Document:
    """``data``: what the file says, empty for an empty file. ``lines``: path -> line, counted from 1."""

    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """Line of the key, or of the nearest section around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)


def read_yaml(text: str, where: str) -> Document:
    """Parse one document whose top level is a mapping.

    Raises:
        InvalidConfigError: not YAML, not a mapping, a key twice, or beyond the size limits above.
    """

    def refuse(message: str, line: int | None = None, path: KeyPath = ()) -> InvalidConfigError:
        return InvalidConfigError([Problem(path, message, line)], where=where)

    if len(text.encode()) > MAX_BYTES:
        raise refuse(f"is larger than {MAX_BYTES // 2**20} MiB, which no configuration needs")
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        # Control characters; its own words are two lines with a position that nobody counts.
        line = text.count("\n", 0, error.position) + 1
        raise refuse(f"is not valid YAML: it holds the control character U+{error.character:04X}", line) from None
    try:
        root = loader.get_single_node()
        if root is None:
            return Document({})
        if not isinstance(root, yaml.MappingNode):
            raise refuse("must be a mapping of sections such as `window:` and `cameras:`", _line(root))
        document = Document({}, {(): _line(root)})
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
    """Builds plain values from YAML nodes, noting lines on the way."""

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
        # Merge keys (`<<: *base`) come first, so that what is written here wins.
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
