"""What a host's name or address says about where it is, and what this host lets a process have."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import resource

log = logging.getLogger(__name__)

# Of malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine, and nobody else reaches what listens there."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket for both kinds of addresses shows 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def raise_file_limit(count: int) -> int:
    """Let this process have ``count`` file descriptors, as far as its host allows; returns how many it may have.

    Many systems start processes with 1024: as many idle connections, and nobody else gets in.
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
    """Have the C library give large blocks back to the system when they are freed, where it is glibc.

    It stops doing so for blocks of a size that was freed once, and each thread keeps its own: a flood of large messages
    would leave most of what it took.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 2)
