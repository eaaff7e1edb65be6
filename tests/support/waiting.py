"""Waiting for what other threads, tasks and processes do."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: object = "", timeout_s: float = 60.0) -> Any:
    """The condition's value once it is true; fails with ``what``, or with what that says, after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, _never(what, found)
        time.sleep(0.01)
    return found


async def until_async(condition: Callable[[], Any], what: object = "", timeout_s: float = 60.0) -> Any:
    """The same, while the event loop goes on."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, _never(what, found)
        await asyncio.sleep(0.01)
    return found


def _never(what: object, found: object) -> str:
    return f"never happened: {what() if callable(what) else what}; still {found!r}"
