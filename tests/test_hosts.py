"""What a host's name or address says about where it is; file descriptors; the end of a parent process."""

import resource
import subprocess
import sys

import psutil
import pytest

from cluster import hosts
from cluster.config import SightlineConfig
from cluster.hosts import is_loopback, usable_cores
from cluster.replica.engine import load_configured


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
def test_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "gateway", ""])
def test_of_others(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed"),
    [(200, 400, 300, 300), (200, 400, 500, 400), (350, 400, 300, 350), (400, 400, 400, 400)],
)
def test_files_that_a_process_may_have(soft, hard, wanted, allowed):
    """In a process of its own: a hard limit comes down for good."""
    program = f"""
import resource
from cluster.hosts import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
got = raise_file_limit({wanted})
print(got, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(min(wanted, allowed)), str(allowed), str(hard)]
    assert ("ulimit -n" in done.stderr) == (allowed < wanted)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 400


def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    """Small blocks between them keep the C library's heap where it is, if large ones lie in it."""
    code = (
        "import psutil\n"
        "from cluster.hosts import limit_malloc_retention\n"
        "{}\n"
        "bytearray(12 << 20)\n"  # freed once: from here on the C library keeps blocks of this size by default
        "before = psutil.Process().memory_info().rss\n"
        "kept = [(bytearray(4 << 20), bytearray(3000)) for _ in range(40)]\n"
        "for large, _ in kept: large[::4096] = b'x' * 1024\n"
        "kept, large = [small for _, small in kept], None\n"
        "print(psutil.Process().memory_info().rss - before)"
    )

    def growth(first: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", code.format(first)], text=True, timeout=60))

    assert growth("limit_malloc_retention()") < 10 << 20
    assert growth("pass") > 100 << 20, "without it there is nothing to test"


PARENT = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from cluster.hosts import end_with_parent

def work():
    print(multiprocessing.current_process().pid, flush=True)

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
    pool.submit(work)
    time.sleep(60)
"""


def test_a_process_of_a_pool_ends_with_the_parent_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    process.wait(10)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_container_s_limit_of_cpus_counts(monkeypatch, tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    names = [[str(tmp_path / file.rpartition("/")[2]) for file in each] for each in hosts._CPU_LIMITS]
    monkeypatch.setattr(hosts, "_CPU_LIMITS", names)
    monkeypatch.setattr(hosts.os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores() == cores


@pytest.mark.parametrize(("model", "neighbours", "threads"), [({}, 2, 3), ({}, 8, 1), ({"threads": 5}, 2, 5)])
def test_a_model_has_its_share_of_the_cores_of_its_machine(monkeypatch, model, neighbours, threads):
    import torch

    told = []
    monkeypatch.setattr("cluster.replica.engine.usable_cores", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr("cluster.models.loading.load_model", lambda *_, **__: None)
    load_configured(SightlineConfig(model=model, cluster={"replicas": 32}), neighbours)
    assert told == [threads]
