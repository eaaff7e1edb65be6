"""Values that programs trip over, and ways to damage bytes; all from one random generator."""

from __future__ import annotations

import random
from typing import Any

TEXTS = (
    "",
    " ",
    "gate",
    "yard",
    "nobody",
    "a" * 200,
    "A" * 70_000,
    "\x00",
    "\u202e",
    "\ud7ff",
    "ü" * 50,
    "💥",
    "../../etc/passwd",
    "%00",
    "%s%n",
    "${HOME}",
    "{{7*7}}",
    "'; --",
    "<script>",
    "null",
    "NaN",
    "-1",
    "1e400",
    "rtsp://u:p@h:99999/x",
    "rtsp://[::1",
    "file:///dev/zero",
    "h264",
    "\r\nX: y",
    "=?",
    "camera/gate",
    "0,0 1,0 1,1",
    "0,0 nan,0 1,1",
    "*",
    "[",
)
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 3600.0)


def text(rng: random.Random) -> str:
    """A text of which something may break."""
    if rng.random() < 0.75:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD000)))) for _ in range(rng.randrange(20)))


def raw(rng: random.Random, most: int = 64) -> bytes:
    """Random bytes."""
    return rng.randbytes(rng.randrange(most + 1))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, lost, doubled or put in."""
    body = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(6):
            case 0 if body:
                body[at % len(body)] ^= 1 << rng.randrange(8)
            case 1:
                body[at:at] = raw(rng, 8)
            case 2:
                del body[at : at + rng.randrange(1, 9)]
            case 3:
                body = body[:at]
            case 4:
                body[at:at] = body[max(0, at - rng.randrange(1, 17)) : at]
            case _ if body:
                body[at % len(body)] = rng.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(body)


def tree(rng: random.Random, depth: int = 3) -> Any:
    """What JSON and YAML can say."""
    kinds = 8 if depth else 6
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice(FLOATS)
        case 4 | 5:
            return text(rng)
        case 6:
            return [tree(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {text(rng): tree(rng, depth - 1) for _ in range(rng.randrange(4))}
