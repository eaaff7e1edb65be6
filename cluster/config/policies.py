"""Names and parameters of policies, checked when a configuration is loaded and without loading torch."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import typing
from typing import Any

from pydantic import TypeAdapter, ValidationError

import cluster.engine
from cluster.config.problems import Problem, near
from cluster.config.pruning import PruningConfig
from cluster.errors import ConfigError


@functools.cache
def refresh_names() -> list[str]:
    """Refresh policies by the files they live in: importing them would import torch."""
    # Not by find_spec of the package, which would import its parents.
    found = pkgutil.iter_modules([f"{folder}/native/refresh" for folder in cluster.engine.__path__])
    return sorted(module.name for module in found if module.name != "base")


def refresh_problem(name: str) -> str | None:
    """What is wrong with a refresh policy's name."""
    known = refresh_names()
    if name in known:
        return None
    return f"unknown refresh policy {name!r}{near(name, known) or ';'} there are: {', '.join(known)}"


def pruning_problems(pruning: PruningConfig) -> list[Problem]:
    """What is wrong with a pruning section; paths are relative to it."""
    from cluster.vision import pruners

    if pruning.policy not in pruners:
        known = pruners.names()
        message = f"unknown pruner {pruning.policy!r}{near(pruning.policy, known) or ';'} there are: {', '.join(known)}"
        return [Problem(("policy",), message)]
    policy = pruners.get(pruning.policy)
    parameters = policy_parameters(policy)
    found: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in pruning.options.items():
        if name not in parameters:
            has = f"it has: {', '.join(parameters)}" if parameters else "it has none"
            message = f"the pruner {pruning.policy!r} has no parameter {name!r}{near(name, parameters) or ';'} {has}"
            found.append(Problem(("options", name), message))
            continue
        try:
            values[name] = TypeAdapter(parameters[name]).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Input ").replace("should", "must").split(", unable")[0]
            found.append(Problem(("options", name), f"{message}, not {value!r}"))
    if not found:
        try:
            policy(**values)
        except (ConfigError, ValueError) as error:
            found.append(Problem(("options",), str(error)))
    return found


def policy_parameters(policy: type) -> dict[str, Any]:
    """Name -> type of the parameters a policy's dataclass takes."""
    if not dataclasses.is_dataclass(policy):
        return {}
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    hints = typing.get_type_hints(policy) if names else {}
    return {name: hints[name] for name in names}
