"""Memory of a process, as the kernel counts it."""

from pathlib import Path


def process_memory_mib(key: str, pid: int | None = None) -> float:
    """A field of ``/proc/PID/status`` such as ``VmRSS`` or ``VmHWM`` in MiB, 0 once the process has ended; by default
    this process's."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), 0.0)
