"""Host facts and process limits: loopback, folders, cores, memory, file descriptors, malloc, the parent's end."""

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

# Of malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket for both kinds of addresses shows 127.0.0.1 as ::ffff:127.0.0.1.
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
"""Files of a container's quota and its period, of both versions of control groups."""


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity, fewer where its container has a limit. With a thread for
    each core of the host it would be throttled."""
    cores = len(os.sched_getaffinity(0))
    for files in _CPU_LIMITS:
        # "max", or -1, where there is none.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join(Path(file).read_text() for file in files).split())
            if quota > 0:
                cores = min(cores, max(1, quota // period))
    return cores


_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes() -> int:
    """Memory of the host, or of its container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _MEMORY_LIMITS:
        # "max" where there is none.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(limits)


def gib(nbytes: float) -> str:
    """``4.1 GiB``, of memory."""
    return f"{nbytes / 2**30:.1f} GiB"


def raise_file_limit(count: int) -> int:
    """Raise the file descriptor limit to ``count``, as far as the host allows; returns the limit.

    Many systems default to 1024, which as many idle connections exhaust.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        log.warning("%d file descriptors are wanted and %d allowed; raise the limit (ulimit -n)", count, allowed)
    return allowed


def limit_malloc_retention() -> None:
    """Make glibc return large freed blocks to the system.

    By default it keeps blocks of sizes that were freed before, per thread, so a burst of large messages would stay
    resident.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 2)


def end_with_parent() -> None:
    """End this process of ``multiprocessing`` when its parent process ends, however it ended; without one, do nothing.

    A pool's would wait for tasks for ever if the parent is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: a pool that is interrupted while it starts cannot be shut down.

    Processes started in the block begin with Ctrl-C held, until :func:`start_pool_process`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_pool_process() -> None:
    """Initializer of a pool's process: it ends with its parent, and silently with Ctrl-C, which reaches every process
    of the terminal and only the parent reports."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
