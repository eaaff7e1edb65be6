"""Coroutine tests on an event loop of their own with a deadline; videos that many tests use, encoded once."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from footage_parts import video

DEADLINE_S = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture(scope="session")
def h264():
    """Ten seconds, a keyframe each second."""
    return video(200)


@pytest.fixture(scope="session")
def h264_b():
    """The same with B-pictures."""
    return video(200, b_frames=2)
