"""Tasks without which a process is of no use: one that fails ends the process, one that is stopped does not."""

import asyncio
import subprocess
import sys

import pytest
from ray.exceptions import GetTimeoutError, RaySystemError, RpcError

import actors.remote
from actors.startup import run_task
from cluster.errors import ConfigError, UnavailableError

PROCESS = """
import asyncio, logging
from actors.startup import run_task

async def heartbeat():
    await asyncio.sleep(0)
    raise KeyError("camera gate")

async def main():
    logging.basicConfig()
    task = run_task(heartbeat())
    try:
        await asyncio.shield(task)
    except KeyError:
        print("told", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_process_whose_task_fails_exits_and_says_why():
    """Ray restarts a process that exits with 1; whoever waited for the task has its error."""
    ended = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "told\n")
    assert "CRITICAL" in ended.stderr
    assert "heartbeat failed" in ended.stderr
    assert "KeyError: 'camera gate'" in ended.stderr


LOGGING = """
import logging, sys
from actors.startup import configure_logging
from cluster.config.cluster import ClusterConfig

configure_logging(f"replica-{sys.argv[2]}", ClusterConfig(log_dir=sys.argv[1]), numbered="replica")
logging.info("%s has started", sys.argv[2])
print(flush=True)
sys.stdin.read()
"""


def test_a_replica_that_starts_goes_on_with_the_log_of_one_that_has_ended(tmp_path):
    """Each has another name: with files of these names, a replica that fails to start over and over fills the disk."""

    def start(name):
        command = [sys.executable, "-c", LOGGING, str(tmp_path), name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline()
        return process

    def end(process):
        process.communicate(timeout=30)

    first, second = start("a1"), start("b2")
    end(first)
    third = start("c3")
    end(second)
    end(third)
    logs = {file.name: file.read_text() for file in tmp_path.glob("*.log")}
    assert sorted(logs) == ["replica-0.log", "replica-1.log"]
    assert [name in logs["replica-0.log"] for name in ("a1 has", "b2 has", "c3 has")] == [True, False, True]


def test_a_log_folder_that_takes_no_file_keeps_no_replica_from_starting(tmp_path):
    """Full or read-only, which root can only imitate: no file can be created in place of a folder."""
    for name in (".replica-0.lock", "replica-0.log"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", LOGGING, str(tmp_path), "a1"]
    ended = subprocess.run(command, capture_output=True, input="", text=True, timeout=60)
    assert ended.returncode == 0
    assert "a1 has started" in ended.stderr


async def test_stops_and_errors_that_are_told_end_no_process(monkeypatch):
    exits = []
    monkeypatch.setattr("actors.startup.EXIT_S", 0.0)
    monkeypatch.setattr("actors.startup.os._exit", exits.append)

    async def forever():
        await asyncio.Event().wait()

    async def trouble_while_stopping():
        try:
            await forever()
        finally:
            raise OSError("the file is closed")

    async def refused():
        raise ConfigError("port 50051 is taken")

    async def done():
        return 7

    stopped = [run_task(forever()), run_task(trouble_while_stopping())]
    await asyncio.sleep(0)
    for task in stopped:
        task.cancel()
    assert await run_task(done()) == 7
    with pytest.raises(ConfigError, match="is taken"):
        await run_task(refused(), told=ConfigError)
    await asyncio.wait(stopped)
    await asyncio.sleep(0.05)
    assert exits == []
    with pytest.raises(ConfigError):
        await run_task(refused())
    await asyncio.sleep(0.05)
    assert exits == [1]


async def test_a_process_that_told_why_it_does_not_start_exits_after_a_while(monkeypatch, caplog):
    """After a restart nobody asks it: the lock or port that it waits for must not keep it from starting for good."""
    exits = []
    monkeypatch.setattr("actors.startup.TOLD_S", 0.01)
    monkeypatch.setattr("actors.startup.os._exit", exits.append)

    async def refused():
        raise ConfigError("the folder is in use")

    with pytest.raises(ConfigError, match="is in use"):
        await run_task(refused(), told=ConfigError)
    assert exits == []
    await asyncio.sleep(0.1)
    assert exits == [1]
    assert "the folder is in use" in caplog.text


@pytest.mark.parametrize("error", [RpcError("the head is away"), RaySystemError("no such id"), GetTimeoutError("late")])
@pytest.mark.parametrize("where", ["looking it up", "calling it"])
async def test_a_ray_that_is_away_ends_no_loop(monkeypatch, error, where):
    """Loops go on after ``UnavailableError``: a head that restarts must not make every process exit."""

    class Handle:
        class replicas:  # noqa: N801
            @staticmethod
            async def remote(known, timeout_s):
                raise error

    def get_actor(name, namespace):
        if where == "looking it up":
            raise error
        return Handle

    monkeypatch.setattr(actors.remote.ray, "get_actor", get_actor)
    with pytest.raises(UnavailableError, match=r"Ray does not|did not answer"):
        await actors.remote.REMOTE_CONTROLLER.replicas({}, 0.0)
