"""``${NAME}`` and ``${NAME:-default}`` in strings of the configuration, for secrets and addresses."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from cluster.config.problems import Path, Problem

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|\$\{(?P<bad>[^}]*)\}?")


def expand(tree: Any, environment: Mapping[str, str] | None = None) -> tuple[Any, set[Path], list[Problem]]:
    """The tree with variables filled in, the paths whose value came from one, and what could not be filled in.

    ``$${`` stands for a literal ``${``. An empty variable counts as set unless a default is given (as in a shell).
    """
    variables = os.environ if environment is None else environment
    touched: set[Path] = set()
    problems: list[Problem] = []

    def text(value: str, path: Path) -> str:
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
                return found or default
            if found is None:
                message = f"environment variable {name} is not set; set it, or write ${{{name}:-default}}"
                problems.append(Problem(path, message))
                return ""
            return found

        return _REFERENCE.sub(fill, value)

    def walk(node: Any, path: Path) -> Any:
        if isinstance(node, str):
            return text(node, path)
        if isinstance(node, dict):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value, (*path, index)) for index, value in enumerate(node)]
        return node

    return walk(tree, ()), touched, problems
