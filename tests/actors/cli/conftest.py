"""Waiting for what processes do."""

import time

import pytest


def wait_for(condition, timeout_s=240):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"nothing within {timeout_s} s")


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for
