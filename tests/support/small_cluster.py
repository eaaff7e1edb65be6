"""A small real cluster, started by the command line, with cameras that push to it and somebody who watches it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from watched_cameras import STRIDE_S, WatchedCameras

from cluster.alerts.service import FILE as INCIDENTS
from cluster.errors import SightlineError
from cluster.lab.bench.processes import RedisServer

CAMERAS = ("dock", "gate", "yard")
BLOCK_FRAMES = 4
DISK_BYTES = 8 * 2**20

TITLES = {
    "decoder": "ray::Decoder",
    "replica": "ray::ServeReplica",
    "controller": "ray::Controller",
    "gateway": "ray::Gateway",
    "tier": "ray::TierNode",
    "alerting": "ray::Alerting",
    "raylet": "raylet",
    "dashboard-agent": "ray::DashboardAgent",
    "runtime-env-agent": "ray::RuntimeEnvAgent",
}
"""Process -> how its title begins."""

PROCESSES = {"decoder": 2, "replica": 2, "controller": 1, "gateway": 1, "tier": 1, "alerting": 1}

START_S = 240.0


class SmallCluster(WatchedCameras):
    """``sightline serve`` with two decoders, two replicas, a node tier, a Redis, and a small disk for incidents.

    A context manager: at its end nothing of it is left. Use it from one thread.

    Args:
        folder: of its files and logs.

    Raises:
        SightlineError: it did not start.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        super().__init__(folder)
        self.redis = RedisServer()
        self._seen: set[psutil.Process] = set()
        self._disk = folder / "disk"
        self._disk.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._configuration()))
        self.output = folder / "serve.log"
        addresses = folder / "addresses.json"
        addresses.unlink(missing_ok=True)
        with self.output.open("w") as out:
            self.serve = subprocess.Popen(
                self._command(addresses), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder
            )
        try:
            self.begin(self._wait_until_ready(addresses), CAMERAS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SmallCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the cameras, then the cluster; kill what does not stop."""
        self.stop_pushing()
        self.note_processes()
        if self.serve.poll() is None:
            self.serve.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.serve.wait(30.0)
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.serve.wait()
        self.redis.kill()
        self.end()

    # -- processes ------------------------------------------------------------------------------
    def note_processes(self) -> None:
        """Remember every process of the cluster's, so that it is found also when its parents are gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self.serve.pid).children(recursive=True))

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of a kind (``TITLES``) that run below ``serve``, the busiest first."""
        self.note_processes()
        found: list[tuple[float, psutil.Process]] = []
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                title = process.cmdline()[:1] if name != "raylet" else [process.name()]
                if is_alive(process) and title and title[0].startswith(TITLES[name]):
                    found.append((sum(process.cpu_times()[:2]), process))
        return [process for _, process in sorted(found, key=lambda pair: -pair[0])]

    def left(self) -> list[psutil.Process]:
        """What still runs of all processes that were ever noted."""
        return [process for process in self._seen if is_alive(process)]

    # -- the disk -------------------------------------------------------------------------------
    def fill_disk(self) -> None:
        """Every byte of the file system that incidents and clips are on, also what was freed since the last call."""
        if not self._ballast.exists():
            with contextlib.closing(sqlite3.connect(self._on_disk(INCIDENTS))) as incidents:
                # What the database has taken already it would go on writing into.
                for _ in range(100):
                    busy, *_ = incidents.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    if not busy:
                        break
                    time.sleep(0.05)
                else:
                    raise SightlineError("the database of incidents was busy for too long to fill the disk behind it")
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass

    def empty_disk(self) -> None:
        self._ballast.unlink()

    @property
    def _ballast(self) -> Path:
        return self._on_disk("ballast")

    def _on_disk(self, name: str) -> Path:
        # The file system is mounted for the cluster alone, so that it goes with it.
        return Path(f"/proc/{self.serve.pid}/root{self._disk}") / name

    # -- starting -------------------------------------------------------------------------------
    def _configuration(self) -> dict[str, Any]:
        return {
            "model": {"name": "tiny-qwen2_5_vl", "threads": 1},
            "sampling": {"anchor_interval_s": 4},
            "window": {"length_s": 2 * STRIDE_S, "stride_s": STRIDE_S, "static_gate": False},
            "memory": {"block_frames": BLOCK_FRAMES},
            "tiers": {"redis_url": self.redis.url},
            "gateway": {"port": 0, "http_port": 0},
            "cluster": {"decoders": 2, "replicas": 2, "log_dir": str(self.folder / "logs"), "start_timeout_s": START_S},
            "alerts": {
                "folder": str(self._disk),
                "update_s": STRIDE_S,
                "cooldown_s": 0,
                "sinks": [{"name": "log", "kind": "log"}],
            },
            "clips": {"keep_free": 0, "before_s": 2, "after_s": 2},
        }

    def _command(self, addresses: Path) -> list[str]:
        serve = "import sys; from actors.cli import main; sys.exit(main())"
        mount = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs "$0" && exec "$@"'
        own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
        started = [sys.executable, "-c", serve, "serve", "-c", str(self.folder / "config.json")]
        return [*own, "sh", "-c", mount, str(self._disk), *started, "--json", str(addresses)]

    def _wait_until_ready(self, addresses: Path) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.serve.poll() is None:
            # It is written in one go, but not at once.
            with contextlib.suppress(OSError, ValueError):
                return str(json.loads(addresses.read_text())["gateway"])
            time.sleep(0.1)
        said = self.output.read_text().strip().splitlines()
        raise SightlineError(f"sightline serve did not start: {said[-1] if said else 'it said nothing'}")


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or could; what is dead and not yet buried does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
