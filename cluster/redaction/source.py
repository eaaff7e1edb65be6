"""The source of a camera, which shows itself without its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cluster.redaction.address import Kind, openable, parse
from cluster.redaction.known import forms
from cluster.redaction.text import KNOWN

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from pydantic_core.core_schema import SerializationInfo

REVEAL: Mapping[str, Any] = {"reveal": True}
"""Context for ``model_dump_json`` where sources are to be written in full."""


class SourceAddress:
    """An address or path. ``str``, ``repr``, formatting and JSON give what may be shown of it; the whole of it has only
    who asks for it with :meth:`reveal`. From then on this process knows its secrets (:func:`redact`)."""

    __slots__ = ("_shown", "_text", "holds_password")

    def __init__(self, text: str | SourceAddress = "") -> None:
        self._text: str = text.reveal() if isinstance(text, SourceAddress) else text
        self._shown, self.holds_password = _read(self._text)

    def reveal(self) -> str:
        """As it was written, secrets included; not for anything that people or files may see."""
        return self._text

    def openable(self) -> str:
        """As libraries take it, secrets included."""
        return openable(self._text)

    @property
    def scheme(self) -> str:
        """In small letters; empty for a path."""
        scheme, separator, _ = self._text.partition("://")
        return scheme.lower() if separator else ""

    def __bool__(self) -> bool:
        return bool(self._text)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return repr(self._shown)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, SourceAddress) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceAddress, (self._text,)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            _validated,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _serialised, info_arg=True, when_used="json", return_schema=core_schema.str_schema()
            ),
        )


@lru_cache(maxsize=2**14)
def _read(text: str) -> tuple[str, bool]:
    """What is shown of an address, and whether it holds a secret for certain. Cameras go from process to process."""
    pieces = parse(text)
    KNOWN.add(forms(pieces))
    certain = any(piece.kind is Kind.SECRET and piece.shown != piece.text for piece in pieces)
    return "".join(piece.shown for piece in pieces), certain


def _validated(value: object) -> SourceAddress:
    from pydantic_core import PydanticKnownError

    if not isinstance(value, str | SourceAddress):
        raise PydanticKnownError("string_type")
    return SourceAddress(value)


def _serialised(source: SourceAddress, info: SerializationInfo) -> str:
    return source.reveal() if info.context == REVEAL else str(source)
