"""What a load test takes of its machine, by process, and what the ``/metrics`` page says meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

Page = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""(sample's name, its labels in order) -> value."""


def fetch(address: str, timeout_s: float = 5.0) -> Page:
    """The page at ``host:port``; empty when nobody answers, which a fault may be the reason for."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as reply:
            return parse(reply.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def parse(text: str) -> Page:
    """Raises ``ValueError`` for anything but Prometheus' text format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(before: Page, after: Page, name: str, label: str, where: Mapping[str, str] | None = None) -> Counter[str]:
    """By how much the counter ``name`` grew, summed by ``label``, of the samples with the labels ``where``.

    A process that began anew counts from 0: what it has counted since is what it shows.
    """
    total: Counter[str] = Counter()
    for (sample, labels), value in after.items():
        held = dict(labels)
        if sample != name or any(held.get(key) != wanted for key, wanted in (where or {}).items()):
            continue
        earlier = before.get((sample, labels), 0.0)
        growth = value - earlier if value >= earlier else value
        if growth:
            total[held.get(label, "")] += round(growth)
    return total


def level(page: Page, name: str, label: str) -> dict[str, float]:
    """The gauge ``name`` summed by ``label``."""
    total: dict[str, float] = {}
    for (sample, labels), value in page.items():
        if sample == name:
            key = dict(labels).get(label, "")
            total[key] = total.get(key, 0.0) + value
    return total


GENERATOR = "generator"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU: shares of its time in which it computed and in which it decoded video, and bytes of its memory."""

    number: int
    compute: float
    decode: float | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Means since the last look. ``cores``: by role (``replica``, ``decoder``, ``generator`` …); ``busy``: share of all
    the machine's cores, whoever used them, of which ``others``, in cores, is none of the processes looked at;
    ``network_bytes_s``: through all interfaces, both ways."""

    cores: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    busy: float = 0.0
    others: float = 0.0
    network_bytes_s: float = 0.0
    gpus: tuple[GpuUse, ...] = ()


class Machine:
    """Looks again at every :meth:`look`; processes may come and go in between."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._network = _network_bytes()
        self._at_s = time.monotonic()
        self._nvidia = shutil.which("nvidia-smi")
        self._machine = _machine_seconds()

    def look(self, processes: Mapping[str, int]) -> MachineUse:
        """``processes``: process ids by name; the part before a dash is the role. Takes some milliseconds."""
        now_s = time.monotonic()
        passed = max(1e-3, now_s - self._at_s)
        cores: dict[str, float] = {}
        memory: dict[str, int] = {}
        seconds: dict[int, float] = {}
        for name, pid in {**processes, GENERATOR: os.getpid()}.items():
            role = name.split("-")[0]
            try:
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds[pid] = times.user + times.system
                memory[role] = memory.get(role, 0) + process.memory_info().rss
            except psutil.Error:
                continue
            # One that was not there before says nothing yet.
            used = seconds[pid] - self._seconds.get(pid, seconds[pid])
            cores[role] = cores.get(role, 0.0) + used / passed
        network, machine = _network_bytes(), _machine_seconds()
        used, total = machine[0] - self._machine[0], machine[1] - self._machine[1]
        use = MachineUse(
            cores=cores,
            memory_bytes=memory,
            busy=used / total if total > 0 else 0.0,
            others=max(0.0, used / passed - sum(cores.values())),
            network_bytes_s=(network - self._network) / passed,
            gpus=read_gpus(self._ask_nvidia()) if self._nvidia else (),
        )
        self._seconds, self._network, self._machine, self._at_s = seconds, network, machine, now_s
        return use

    def _ask_nvidia(self) -> str:
        command = [str(self._nvidia), f"--query-gpu={','.join(GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return ""


GPU_COLUMNS = ("index", "utilization.gpu", "utilization.decoder", "memory.used")


def read_gpus(text: str) -> tuple[GpuUse, ...]:
    """What nvidia-smi prints of ``GPU_COLUMNS``: per cent, per cent or a word in brackets, MiB. Other lines are left
    out."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        try:
            number, compute, memory = int(parts[0]), float(parts[1]), float(parts[3])
        except (ValueError, IndexError):
            continue
        decode = float(parts[2]) / 100 if parts[2].replace(".", "", 1).isdigit() else None
        found.append(GpuUse(number, compute / 100, decode, round(memory * 2**20)))
    return tuple(found)


def _machine_seconds() -> tuple[float, float]:
    """Seconds that all cores together have worked, and that have passed on them."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # What a guest takes is part of user's time already.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - idle, total


def _network_bytes() -> int:
    counters = psutil.net_io_counters()
    return int(counters.bytes_sent + counters.bytes_recv) if counters else 0
