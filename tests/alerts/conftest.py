"""Coroutine tests on an event loop of their own with a deadline; the makers of alert_parts."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from alert_parts import Make

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


@pytest.fixture
def make() -> Make:
    return Make()


async def until(condition: Any, what: str = "", timeout_s: float = 20.0) -> None:
    """Wait until ``condition()`` holds; fails with ``what`` after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"never happened: {what or condition}")


@pytest.fixture(name="until")
def until_fixture() -> Any:
    return until
