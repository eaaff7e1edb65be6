"""Host facts and process limits: loopback, folders, cores, memory, file descriptors, malloc, parent death."""

import contextlib
import ctypes
import ipaddress
import logging
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

log = logging.getLogger(__name__)

# From malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A dual-stack socket reports 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_below(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` lies in one of ``folders``, symbolic links followed."""
    resolved = path.resolve()
    return any(resolved.is_relative_to(folder.resolve()) for folder in folders)


_CPU_LIMITS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with a container's CPU quota and period: cgroup v2, then v1."""


def usable_cores() -> int:
    """Cores this process may use: its CPU affinity, capped by the container's quota. One thread per host core would be
    throttled."""
    cores = len(os.sched_getaffinity(0))
    for files in _CPU_LIMITS:
        # "max" or -1: no limit.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join(Path(file).read_text() for file in files).split())
            if quota > 0:
                cores = min(cores, max(1, quota // period))
    return cores


_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes() -> int:
    """Memory of the host, or the container's limit if lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _MEMORY_LIMITS:
        # "max": no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(limits)


def gib(nbytes: float) -> str:
    """Format a memory size: ``4.1 GiB``."""
    return f"{nbytes / 2**30:.1f} GiB"


def raise_file_limit(count: int) -> int:
    """Raise the soft limit on file descriptors to ``count``, or to the hard limit if lower; returns how many are
    allowed. Many systems default to 1024, which idle connections alone can exhaust."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        log.warning("%d file descriptors are needed, but only %d allowed; raise the limit (ulimit -n)", count, allowed)
    return allowed


def limit_malloc_retention() -> None:
    """Make glibc return large freed blocks to the system.

    By default it raises its mmap threshold to sizes freed before and keeps an arena per thread, so a burst of large
    messages would stay resident.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 2)


def end_with_parent() -> None:
    """Exit this ``multiprocessing`` process when its parent ends for any reason; no-op without a parent.

    Pool processes would otherwise wait for tasks forever after the parent is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block: a pool interrupted while it starts cannot be shut down.

    Processes started in the block inherit the blocked SIGINT until :func:`start_pool_process`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_pool_process() -> None:
    """Pool initializer: the process exits with its parent, and silently on Ctrl-C, which reaches every process of the
    terminal but is reported by the parent alone."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
