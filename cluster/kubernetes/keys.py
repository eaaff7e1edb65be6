"""Converts configuration keys to Kubernetes style: ``stride_s`` is ``strideSeconds``, ``fps`` stays ``fps``."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from cluster.config.camera import CameraEntry
from cluster.config.problems import InvalidConfigError, KeyPath, Problem, section_of
from cluster.registry import near

_SNAKE = re.compile(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b")


def camel(key: str) -> str:
    """``max_idle_s`` -> ``maxIdleSeconds``."""
    spelled = re.sub(r"_s$", "_seconds", key)
    first, *rest = spelled.split("_")
    return first + "".join(part.capitalize() for part in rest)


def to_snake(body: Mapping[str, Any], model: type[BaseModel], path: KeyPath, found: list[Problem]) -> dict[str, Any]:
    """Convert a camel-case mapping to the keys of ``model``; unknown keys are reported in ``found``."""
    names = {camel(field): field for field in model.model_fields}
    result: dict[str, Any] = {}
    for key, value in body.items():
        if key not in names:
            found.append(Problem((*path, key), f"unknown key{near(key, names) or ';'} keys here: {', '.join(names)}"))
            continue
        section = section_of(model.model_fields[names[key]].annotation)
        result[names[key]] = value if section is None else _inside(value, section, (*path, key), found)
    return result


def _inside(value: Any, section: type[BaseModel], path: KeyPath, found: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        return to_snake(value, section, path, found)
    if isinstance(value, list):
        return [_inside(each, section, (*path, index), found) for index, each in enumerate(value)]
    return value


def to_camel(problem: Problem) -> Problem:
    """Convert a configuration problem to resource keys."""
    path = tuple(camel(part) if isinstance(part, str) else part for part in problem.path)
    return Problem(path, in_camel(problem.message))


def in_resource_words(error: Exception) -> str:
    """An error's message, with configuration keys converted to resource keys."""
    if not isinstance(error, InvalidConfigError):
        return str(error)
    return "; ".join(to_camel(problem).sentence(error.where) for problem in error.problems)


def in_camel(text: str) -> str:
    """Replace configuration keys in a sentence by resource keys."""
    return _SNAKE.sub(lambda match: camel(match[0]) if match[0] in _every_key() else match[0], text)


@functools.cache
def _every_key() -> frozenset[str]:
    return frozenset(_keys(CameraEntry))


def _keys(model: type[BaseModel]) -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        section = section_of(field.annotation)
        found += [key, *(_keys(section) if section is not None else ())]
    return found
