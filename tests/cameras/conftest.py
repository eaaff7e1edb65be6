"""Coroutine tests run on an event loop of their own with a deadline; a Kubernetes API server without Kubernetes."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from kube_server import KubeServer

DEADLINE_S = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture
def kube(tmp_path):
    server = KubeServer(tmp_path)
    yield server
    server.close()
