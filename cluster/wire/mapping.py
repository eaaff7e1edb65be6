"""Maps dataclasses to protobuf messages and back: fields correspond by name, except that ``stream`` is ``camera``.

A field's metadata may give another name, ``field(metadata={"wire": "event"})``, or an empty one to leave it out.
"""

import functools
import typing
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def _wire_name(field: Field[Any]) -> str:
    return str(field.metadata.get("wire", "camera" if field.name == "stream" else field.name))


def to_message(kind: type[M], value: Any, /, omit: Collection[str] = (), **given: Any) -> M:
    """Convert ``value``: nested dataclasses become messages, sequences repeated fields; None is left unset.

    ``omit``: fields of ``value`` that the message lacks; ``given``: fields of the message that ``value`` lacks, or
    holds in another form.
    """
    return kind(**_body(value, (*omit, *given)), **given)


def from_message(kind: type[T], message: Message, /, **given: Any) -> T:
    """The inverse of :func:`to_message`: an unset field is None where the dataclass allows it, else its wire default.
    ``given``: fields of ``kind`` that ``message`` lacks, or holds in another form."""
    read = (each for each in _fields(kind) if each.name not in given)  # type: ignore[arg-type]
    return kind(**{each.name: each.read(message) for each in read}, **given)


def _body(value: Any, omit: Collection[str] = ()) -> dict[str, Any]:
    told = ((each.wire_name, getattr(value, each.name)) for each in _fields(type(value)))  # type: ignore[arg-type]
    return {name: _wire_value(inner) for name, inner in told if inner is not None and name not in omit}


def _wire_value(value: Any) -> Any:
    if is_dataclass(value):
        return _body(value)
    return [_wire_value(each) for each in value] if isinstance(value, tuple | list) else value


class _Field(NamedTuple):
    name: str
    wire_name: str
    optional: bool
    inner: Any
    many: Callable[[Any], Any] | None

    def read(self, message: Message) -> Any:
        value = getattr(message, self.wire_name)
        if self.optional and not message.HasField(self.wire_name):
            return None
        if self.many is not None:
            return self.many(value if self.inner is None else (from_message(self.inner, each) for each in value))
        return value if self.inner is None else from_message(self.inner, value)


@functools.cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints, found = typing.get_type_hints(kind), []
    for field in filter(_wire_name, fields(kind)):
        hint = hints[field.name]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        many = origin if origin in (tuple, list) else None
        inner = next((each for each in arguments or (hint,) if is_dataclass(each)), None)
        found.append(_Field(field.name, _wire_name(field), type(None) in arguments, inner, many))
    return tuple(found)
