"""Configuration problems (file, line, key, error and remedy), and the base class and types of sections."""

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeAlias
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from cluster.errors import ConfigError
from cluster.redaction import KNOWN, KnownSecrets, redact
from cluster.registry import Registry, near


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, text in descriptions(model).items():
        schema["properties"].get(name, {})["description"] = text


class Section(BaseModel):
    """Base of configuration sections: frozen, and unknown keys are refused. The docstring below a field is its
    description."""

    model_config = ConfigDict(
        # Most processes validate few of them: a twentieth of a second of every start.
        defer_build=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        json_schema_extra=_describe,
        protected_namespaces=(),
    )


@functools.cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Description of each field, parsed on demand: ``use_attribute_docstrings`` would delay every start by 0.15 s."""
    found = {name: field.description for name, field in model.model_fields.items() if field.description}
    for section in reversed(model.__mro__):
        if issubclass(section, Section) and section is not Section:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
            assert isinstance(tree, ast.ClassDef)
            for pair in pairwise(tree.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = " ".join(text.split())
    return found


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kKMGT]B|[KMGT]iB)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")

_BYTES = {None: 1, "B": 1, "kB": 10**3, "KB": 10**3}
_BYTES |= {f"{letter}B": 1000**power for power, letter in enumerate("MGT", start=2)}
_BYTES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SECONDS = {None: 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def parse_size(value: object) -> int:
    """Parse bytes from a number, or from text like ``64MiB`` (2^20), ``64MB`` (10^6) and ``512 KiB``. Raises
    ``ValueError``: not a size."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        return round(float(match[1]) * _BYTES[match[2]])
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"must be a number of bytes, or a size like 512KiB, 64MiB or 2GB, not {value!r}")
    return int(value)


def parse_duration(value: object) -> float:
    """Parse seconds from a number, or from text like ``90s``, ``10m`` (or ``10min``), ``24h`` and ``7d``. Raises
    ``ValueError``: not a duration."""
    match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number of seconds, or a duration like 90s, 10m, 24h or 7d, not {value!r}")
    return float(value)


@dataclass(frozen=True)
class OneOf:
    """Annotation of a string that must name one of ``policies``; the schema enumerates them."""

    policies: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": self.policies.names()}

    def _known(self, name: str) -> str:
        if name not in self.policies:
            raise ValueError(self.policies.unknown(name))
        return name


def size_text(nbytes: int) -> str:
    """Format bytes in the largest exact unit, like ``64MiB``; parses back to the same number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _BYTES[unit] == 0:
            return f"{nbytes // _BYTES[unit]}{unit}"
    return str(nbytes)


Size: TypeAlias = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_SIZE.pattern}$"}]}),
]
"""Bytes; bounds of ``Field`` apply to the number."""

Duration: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{_TIME.pattern}$"}]}),
]
"""Seconds; bounds of ``Field`` apply to the number."""


def _check_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"there is no time zone {name[:80]!r}; name one like UTC or Europe/Berlin") from None
    return name


TimeZone: TypeAlias = Annotated[str, AfterValidator(_check_zone)]
"""IANA name of a time zone."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. ``line`` counts from 1; None if the key is not from a file."""

    path: KeyPath
    message: str
    line: int | None = None

    @property
    def key(self) -> str:
        """Readable key: ``cameras[1].window.stride_s``."""
        text = ""
        for part in self.path:
            if isinstance(part, int):
                text += f"[{part}]"
                continue
            # Keys may hold line breaks; messages must not.
            name = str(part)
            text += "." * bool(text) + (name if name.isprintable() else repr(name)[1:-1])
        return text

    def sentence(self, where: str) -> str:
        """``FILE:LINE: KEY: what is wrong``."""
        place = where if self.line is None else f"{where}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class InvalidConfigError(ConfigError):
    """Raised for an invalid configuration. The message is the first problem; ``problems`` holds all."""

    def __init__(self, problems: Sequence[Problem], *, where: str) -> None:
        self.problems = tuple(problems)
        self.where = where
        more = f" (and {len(problems) - 1} more: `sightline config check` lists them)" if len(problems) > 1 else ""
        super().__init__(problems[0].sentence(where) + more)

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickling: Exception would be rebuilt from the message alone.
        return functools.partial(InvalidConfigError, where=self.where), (self.problems,)

    def sentences(self) -> list[str]:
        return [problem.sentence(self.where) for problem in self.problems]


def from_validation(
    error: ValidationError, root: type[BaseModel], secret: Iterable[KeyPath] = (), known: KnownSecrets = KNOWN
) -> list[Problem]:
    """Convert pydantic's errors. Values at the paths in ``secret`` (from the environment) are not shown; ``known``:
    secrets to redact, empty for the author of the values (:func:`cluster.wire.status.sentence_of`)."""
    hidden = set(secret)
    found: list[Problem] = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        inner: Sequence[Problem] = getattr(cause, "problems", ())
        loc = details["loc"]
        # An unknown key stays as written: `_clean` might take it for a name that pydantic added.
        unknown = loc[-1:] if details["type"] == "extra_forbidden" else ()
        path = (*_clean(loc[: len(loc) - len(unknown)], root), *unknown)
        if inner:
            found += [replace(problem, path=(*path, *problem.path)) for problem in inner]
        else:
            # The message may hold an address written under another key.
            found.append(Problem(path, redact(_message(details, path, root, shown=path not in hidden), known)))
    return found


def _message(details: ErrorDetails, path: KeyPath, root: type[BaseModel], *, shown: bool) -> str:
    kind = details["type"]
    model = _model_at(root, path[:-1])
    if kind == "extra_forbidden":
        fields = list(model.model_fields) if model else []
        return f"unknown key{near(path[-1], fields) or ';'} keys here: {', '.join(fields)}"
    meaning = descriptions(model).get(str(path[-1]), "").split(";")[0] if model and path else ""
    if kind == "missing":
        return f"is missing; it means: {meaning}" if meaning else "is missing"
    if kind == "value_error":
        return str(details.get("ctx", {}).get("error"))
    message = details["msg"].removeprefix("Input ").replace("should", "must").split(", unable")[0]
    got = ""
    if shown and not isinstance(details["input"], Mapping | list):
        got = f", not {details['input']!r}"
    if kind == "model_type":
        message, got = "must be a section with keys of its own", f", not {details['input']!r}" if shown else ""
    choices = str(details.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    hint = near(details["input"], choices) if kind == "literal_error" and shown else ""
    return f"{message}{got}{hint}" + (f" ({meaning.rstrip('.')})" if meaning and not hint else "")


def _clean(loc: Sequence[str | int], root: type[BaseModel]) -> KeyPath:
    """Pydantic's location without the names that it adds for union members."""
    path: KeyPath = ()
    for part in loc:
        model = _model_at(root, path)
        if model is None or isinstance(part, int) or part in model.model_fields or not part[:1].isupper():
            path = (*path, part)
    return path


def _model_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Section at ``path``, through lists and optional sections."""
    current: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return None
        current = section_of(current.model_fields[part].annotation)
    return current


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Section model of a field, also in a list or optional; ``None`` for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return next(filter(None, map(section_of, typing.get_args(annotation))), None)
    return None


class ConflictError(ValueError):
    """Raised for keys that are valid individually but contradict each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems
