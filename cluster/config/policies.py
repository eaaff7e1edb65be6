"""Names and parameters of policies, checked when a configuration is loaded and without loading torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

import cluster.engine
import cluster.memory
from cluster.config.memory import MemoryConfig
from cluster.config.problems import Problem, near
from cluster.config.pruning import PruningConfig
from cluster.errors import ConfigError

MEMORY_PACKAGES = {"compressor": "compress", "organiser": "organise", "retriever": "retrieve"}
"""Kind of a memory's policy -> package of ``cluster.memory`` that has them."""


@functools.cache
def refresh_names() -> list[str]:
    """Refresh policies by the files they live in: importing them would import torch."""
    # Not by find_spec of the package, which would import its parents.
    found = pkgutil.iter_modules([f"{folder}/native/refresh" for folder in cluster.engine.__path__])
    return sorted(module.name for module in found if module.name != "base")


def refresh_problem(name: str) -> str | None:
    """What is wrong with a refresh policy's name."""
    return None if name in refresh_names() else _unknown("refresh policy", name, refresh_names())


def pruning_problems(pruning: PruningConfig) -> list[Problem]:
    """What is wrong with a pruning section; paths are relative to it."""
    from cluster.vision import pruners

    if pruning.policy not in pruners:
        return [Problem(("policy",), _unknown("pruner", pruning.policy, pruners.names()))]
    policy = pruners.get(pruning.policy)
    what = f"pruner {pruning.policy!r}"
    return option_problems(what, policy, policy_parameters(policy), "options", pruning.options)


def memory_problems(memory: MemoryConfig) -> list[Problem]:
    """What is wrong with the policies of a memory section; paths are relative to it.

    Options are checked by the policy itself, which loads torch; a section without any is checked by names alone.
    """
    found: list[Problem] = []
    for kind, package in MEMORY_PACKAGES.items():
        name, options = getattr(memory, kind), getattr(memory, f"{kind}_options")
        if name not in memory_names(kind):
            found.append(Problem((kind,), _unknown(kind, name, memory_names(kind))))
        elif options:
            policy = getattr(importlib.import_module(f"cluster.memory.{package}"), f"{kind}s").get(name)
            found += _memory_option_problems(f"{kind} {name!r}", policy, f"{kind}_options", options)
    return found


@functools.cache
def memory_names(kind: str) -> list[str]:
    """Names of a memory's policies of one kind, as their files register them: importing them would import torch."""
    files = [file for folder in cluster.memory.__path__ for file in Path(folder, MEMORY_PACKAGES[kind]).glob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    calls = [call for node in nodes if isinstance(node, ast.ClassDef) for call in node.decorator_list]
    return sorted(
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == f"{kind}s.register"
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    )


def _memory_option_problems(what: str, policy: type, key: str, options: Mapping[str, Any]) -> list[Problem]:
    """A policy's options are what it takes by keyword only; before them come sizes that only a camera tells."""
    taken = inspect.signature(policy).parameters.values()
    hints = typing.get_type_hints(policy.__init__)  # type: ignore[misc]
    parameters = {each.name: hints[each.name] for each in taken if each.kind is each.KEYWORD_ONLY}
    sizes = [1 for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    return option_problems(what, functools.partial(policy, *sizes), parameters, key, options)


def option_problems(
    what: str, make: Callable[..., object], parameters: Mapping[str, Any], key: str, options: Mapping[str, Any]
) -> list[Problem]:
    """What is wrong with the options of a policy that takes ``parameters`` (name -> type)."""
    found: list[Problem] = []
    for name, value in options.items():
        if name not in parameters:
            has = f"it has: {', '.join(parameters)}" if parameters else "it has none"
            message = f"the {what} has no parameter {name!r}{near(name, parameters) or ';'} {has}"
            found.append(Problem((key, name), message))
            continue
        try:
            # As JSON: the options go to the policy as they are written, so only lists may stand for something else.
            adapter = TypeAdapter(parameters[name], config=ConfigDict(allow_inf_nan=False))
            adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Input ").replace("should", "must").split(", unable")[0]
            if first["loc"]:  # inside a list, or of one of several types: its own sentence would not say of what
                message = f"must be {parameters[name]}"
            found.append(Problem((key, name), f"{message}, not {value!r}"))
    if not found:
        try:
            make(**options)
        except (ConfigError, ValueError) as error:
            found.append(Problem((key,), str(error)))
    return found


def _unknown(kind: str, name: str, known: list[str]) -> str:
    return f"unknown {kind} {name!r}{near(name, known) or ';'} there are: {', '.join(known)}"


def policy_parameters(policy: type) -> dict[str, Any]:
    """Name -> type of the parameters a policy's dataclass takes."""
    if not dataclasses.is_dataclass(policy):
        return {}
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    hints = typing.get_type_hints(policy) if names else {}
    return {name: hints[name] for name in names}
