"""Polygons on a camera's picture: its ``privacy_masks`` and ``zones``."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

MAX_MASKS = 32
MAX_ZONES = 4
MAX_POINTS = 256

_RECTANGLE = ("x", "y", "width", "height")


def parse_polygon(value: object) -> tuple[tuple[float, float], ...]:
    """Parse a polygon from ``[[x, y], ...]``, text like ``0,0 0.3,0 0.3,0.5``, or ``{x, y, width, height}``.

    Coordinates are fractions of the picture's width and height, 0..1 from the top left. Edges may cross. Raises
    ``ValueError``: anything else, fewer than three points, a coordinate outside 0..1, or points on one line.
    """
    points = _points(value)
    if not 3 <= len(points) <= MAX_POINTS:
        raise ValueError(f"a polygon needs 3 to {MAX_POINTS} points, not {len(points)}")
    for x, y in points:
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise ValueError(
                f"the point {x:g},{y:g} of a polygon is outside the picture; coordinates are fractions of width and "
                "height, 0..1"
            )
    (x0, y0), *others = points
    if len({_direction(x - x0, y - y0) for x, y in others if (x, y) != (x0, y0)}) < 2:
        raise ValueError("all points of a polygon lie on one line, which covers no area; give its corners")
    return tuple(points)


def _points(value: object) -> list[tuple[float, float]]:
    if isinstance(value, str):
        return [_point(part.split(","), part) for part in value.split()]
    if isinstance(value, Mapping):
        return _rectangle(value)
    if isinstance(value, Sequence):
        return [_point(part, part) for part in value]
    raise ValueError(
        f"a polygon is a list of points [x, y], text like '0,0 0.3,0 0.3,0.5', or a rectangle "
        f"{{x, y, width, height}}, not {value!r}"
    )


def _point(pair: Any, shown: object) -> tuple[float, float]:
    if isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2:
        return _number(pair[0], shown), _number(pair[1], shown)
    raise ValueError(f"a point of a polygon is two numbers x,y, not {shown!r}")


def _number(value: object, shown: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a point of a polygon is two numbers x,y, not {shown!r}")
    return number


def _rectangle(value: Mapping[Any, Any]) -> list[tuple[float, float]]:
    if set(value) != set(_RECTANGLE):
        raise ValueError(f"a rectangle has the keys {', '.join(_RECTANGLE)}, not {sorted(value)}")
    x, y, width, height = (_number(value[key], value[key]) for key in _RECTANGLE)
    if width <= 0 or height <= 0:
        raise ValueError(f"a rectangle needs a positive width and height, not {width:g} x {height:g}")
    # Rounded, as a sum like 0.7 + 0.3 may exceed 1.
    right, bottom = round(x + width, 9), round(y + height, 9)
    return [(x, y), (right, y), (right, bottom), (x, bottom)]


def _direction(x: float, y: float) -> tuple[float, float]:
    """Unit vector along a line through the origin, with its sign normalised."""
    length = math.hypot(x, y)
    x, y = round(x / length, 9) + 0.0, round(y / length, 9) + 0.0
    return (x, y) if (x, y) > (0.0, 0.0) else (-x + 0.0, -y + 0.0)


_NUMBER = {"type": "number", "minimum": 0, "maximum": 1}
_POINTS = {
    "type": "array",
    "minItems": 3,
    "maxItems": MAX_POINTS,
    "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": _NUMBER},
}
_BOX = {
    "type": "object",
    "required": list(_RECTANGLE),
    "additionalProperties": False,
    "properties": dict.fromkeys(_RECTANGLE, _NUMBER),
}

PicturePolygon: TypeAlias = Annotated[
    tuple[tuple[float, float], ...],
    BeforeValidator(parse_polygon),
    WithJsonSchema({"anyOf": [_POINTS, _BOX, {"type": "string"}]}),
]
"""A polygon as its corners ``(x, y)``."""
