"""A Ray that dies under a session is noticed, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

SESSION = """
import sys, time
from actors.session import RaySession

session = RaySession(None)
session.start()
print("started", flush=True)
while (failure := session.failure()) is None:
    time.sleep(0.2)
session.stop(10.0)
print(failure, flush=True)
"""


def started() -> subprocess.Popen[str]:
    """A driver of its own: Ray may end the process that it is connected to."""
    command = [sys.executable, "-c", SESSION]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "started\n"
    return driver


def kill(parent: int, name: str) -> None:
    next(each for each in psutil.Process(parent).children(recursive=True) if each.name() == name).kill()


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_private_ray_that_died(victim):
    driver = started()
    below = psutil.Process(driver.pid).children(recursive=True)
    kill(driver.pid, victim)
    said, _ = driver.communicate(timeout=30)
    assert said == f"{victim} of Ray died\n"
    assert driver.returncode == 0
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
