"""A Ray that dies under a session is noticed, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_parts import until

from cluster.lab.bench.processes import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SESSION = """
import os, sys, time
import ray
from actors.session import RaySession

@ray.remote(num_cpus=0)
class TierNode:
    def pid(self):
        return os.getpid()

session = RaySession(sys.argv[1] if len(sys.argv) > 1 else None)
session.start()
node = TierNode.remote()
print(ray.get(node.pid.remote()), flush=True)
while (failure := session.failure()) is None:
    time.sleep(0.2)
session.stop(10.0)
print(failure, flush=True)
"""


def started(*address: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A driver of its own, since Ray may end the process that it is connected to; and an actor of ours."""
    driver = subprocess.Popen([sys.executable, "-c", SESSION, *address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, psutil.Process(int(driver.stdout.readline()))


@pytest.fixture
def another(monkeypatch):
    """``(process, address)`` of a Ray that somebody else started on this machine."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port)]
    command += ["--num-cpus", "1", "--include-dashboard=false", "--object-store-memory", str(80 * 2**20)]
    # Ray asks for a token where this machine happens to have one, and tells only clients that look for it themselves.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ray:
        yield psutil.Process(ray.pid), f"127.0.0.1:{port}"
        below = psutil.Process(ray.pid).children(recursive=True)
        ray.terminate()
        for process in psutil.wait_procs(below, 20)[1]:
            process.kill()


def kill(parent: int, name: str) -> None:
    below = psutil.Process(parent).children(recursive=True)
    next(each for each in below if name in (each.name(), each.cmdline()[0])).kill()


@pytest.mark.parametrize(
    ("victim", "dead"),
    [
        ("raylet", "raylet"),
        ("gcs_server", "gcs_server"),
        # The raylet ends with its agents.
        ("ray::DashboardAgent", "raylet"),
        ("ray::RuntimeEnvAgent", "raylet"),
    ],
)
def test_a_private_ray_that_died(victim, dead):
    driver, _ = started()
    below = psutil.Process(driver.pid).children(recursive=True)
    kill(driver.pid, victim)
    said, _ = driver.communicate(timeout=120)
    assert said == f"{dead} of Ray died\n"
    assert driver.returncode == 0
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_a_ray_that_was_joined_and_died(another):
    """And what ran there of ours is gone."""
    ray, address = another
    until("the other's Ray", lambda: any(each.name() == "raylet" for each in ray.children(recursive=True)))
    driver, actor = started(address)
    assert actor.is_running()
    kill(ray.pid, "raylet")
    said, _ = driver.communicate(timeout=120)
    assert said in ("raylet of Ray died\n", "gcs_server and raylet of Ray died\n"), "--block ends the rest with it"
    assert driver.returncode == 0
    until("the end of the actor", lambda: not actor.is_running() or actor.status() == psutil.STATUS_ZOMBIE)
