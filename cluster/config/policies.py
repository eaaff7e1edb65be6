"""Validates policy names and parameters when a configuration is loaded, without importing torch."""

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cluster.config.camera import PruningConfig
from cluster.config.memory import MemoryConfig
from cluster.config.problems import Problem
from cluster.errors import ConfigError
from cluster.memory.frame_retrieval import make_frame_retrieval
from cluster.registry import compressors, frame_retrievals, near, organisers, pruners, retrievers

MEMORY_POLICIES = {
    "compressor": compressors,
    "organiser": organisers,
    "retriever": retrievers,
    "frame_retrieval": frame_retrievals,
}


def pruning_problems(pruning: PruningConfig) -> list[Problem]:
    """Problems of a pruning section; paths are relative to it."""
    policy = pruners.get(pruning.policy)
    what = f"pruner {pruning.policy!r}"
    return option_problems(what, policy, policy_parameters(policy), "options", pruning.options)


def memory_problems(memory: MemoryConfig) -> list[Problem]:
    """Problems of the policies in a memory section; paths are relative to it.

    Options are checked by the policy itself, which imports torch; a section without options is checked by names alone.
    """
    found: list[Problem] = []
    for kind, policies in MEMORY_POLICIES.items():
        name, options = getattr(memory, kind), getattr(memory, f"{kind}_options")
        if options and name is None:
            found.append(Problem((f"{kind}_options",), f"belong to no policy; name one with {kind}, or omit them"))
        elif options:
            found += _memory_option_problems(f"{kind} {name!r}", policies.get(name), f"{kind}_options", options)
    return found or _frame_retrieval_problems(memory)


def _frame_retrieval_problems(memory: MemoryConfig) -> list[Problem]:
    """Problems of ``frame_retrieval``: no memory to read, or an organiser it cannot read."""
    if memory.frame_retrieval is None:
        return []
    spec = memory.spec()
    if spec is None:
        message = f"{memory.frame_retrieval!r} reads the memory, but memory.enabled is off; enable it, or set null"
        return [Problem(("frame_retrieval",), message)]
    try:
        make_frame_retrieval(spec)
    except ConfigError as error:
        return [Problem(("frame_retrieval",), str(error))]
    return []


def _memory_option_problems(what: str, policy: type, key: str, options: Mapping[str, Any]) -> list[Problem]:
    """A policy's options are its keyword-only parameters; the positional ones are sizes given by the camera."""
    taken = inspect.signature(policy).parameters.values()
    hints = typing.get_type_hints(policy.__init__)  # type: ignore[misc]
    parameters = {each.name: hints[each.name] for each in taken if each.kind is each.KEYWORD_ONLY}
    sizes = [1 for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    return option_problems(what, functools.partial(policy, *sizes), parameters, key, options)


def option_problems(
    what: str, make: Callable[..., object], parameters: Mapping[str, Any], key: str, options: Mapping[str, Any]
) -> list[Problem]:
    """Problems of the options of a policy that takes ``parameters`` (name -> type)."""
    found: list[Problem] = []
    for name, value in options.items():
        if name not in parameters:
            has = f"it has: {', '.join(parameters)}" if parameters else "it has none"
            message = f"the {what} has no parameter {name!r}{near(name, parameters) or ';'} {has}"
            found.append(Problem((key, name), message))
            continue
        try:
            # Strict JSON: options are passed to the policy as written, so only lists may be converted.
            adapter = TypeAdapter(parameters[name], config=ConfigDict(allow_inf_nan=False))
            adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Input ").replace("should", "must").split(", unable")[0]
            if first["loc"]:  # inside a list or a union, where pydantic's message does not say what it is about
                message = f"must be {parameters[name]}"
            found.append(Problem((key, name), f"{message}, not {value!r}"))
    if not found:
        try:
            make(**options)
        except (ConfigError, ValueError) as error:
            found.append(Problem((key,), str(error)))
    return found


@functools.cache  # Resolving type hints compiles them, which every added camera would repeat.
def policy_parameters(policy: type) -> Mapping[str, Any]:
    """Name -> type of the parameters of a policy's dataclass."""
    if not dataclasses.is_dataclass(policy):
        return {}
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    hints = typing.get_type_hints(policy) if names else {}
    return {name: hints[name] for name in names}
