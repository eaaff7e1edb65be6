"""Folders in shared memory: they end with their process, killed or not, and nobody takes a living one's away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.engine.vllm.connector.store import SharedFolder, remove_abandoned
from cluster.errors import ConfigError

HOLDS = """
import os, signal, sys
from cluster.engine.vllm.connector.store import SharedFolder
folder = SharedFolder(sys.argv[1])
(folder.path / "block").write_bytes(b"kv")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_goes_when_it_is_closed(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.cap_bytes > 0
    folder.close()
    folder.close()
    assert not list(tmp_path.iterdir())


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", HOLDS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    left = Path(ended.stdout.strip())
    assert (left / "block").exists()
    alive = SharedFolder(tmp_path)
    assert not left.exists()
    assert remove_abandoned(tmp_path) == 0
    assert alive.path.exists()
    alive.close()


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder for KV"):
        SharedFolder(tmp_path / "missing")
