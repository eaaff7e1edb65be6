"""Connection to a Redis server with deadlines, failure detection and recovery."""

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.errors import ConfigError

T = TypeVar("T")

_CONNECTIONS = 16
_SCANNED_AT_ONCE = 5000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class RedisUnavailableError(Exception):
    """The server is down, too slow, or refuses; the message says which."""


class RedisFullError(RedisUnavailableError):
    """The server has reached its memory limit."""


def connection_pool(url: str, deadline_s: float, **options: Any) -> Any:
    """An unconnected redis-py pool, with extra connection ``options``. ``ConfigError`` if ``url`` is not a Redis
    address, or has options unknown to redis-py."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=deadline_s / 6,
            socket_connect_timeout=deadline_s / 6,
            socket_timeout=deadline_s / 3,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        # Does not connect, but validates the address's options.
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, redis.RedisError):
        # Not chained, and without the address, which may contain a password.
        raise ConfigError(
            "the address of a Redis server looks like redis://host:6379/0, or "
            "rediss://host:6379/0?ssl_ca_certs=FILE with the options of redis-py (tiers.redis_url)"
        ) from None
    return pool


class RedisLink:
    """Runs commands with a deadline. After a failure all commands are refused at once, while a thread probes the server
    with exponential backoff.

    A call may take ``deadline_s``: no command starts after the first third; a command waits at most a sixth for a
    connection, a sixth to connect, and a third per read. (A server that trickles its answer can exceed that.)

    Args:
        on_change: called when another server process answers at the address, so that its contents may differ; this
            also counts as a failure.

    Raises:
        ConfigError: ``url`` is not a Redis address.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        on_change: Callable[[], None],
    ) -> None:
        import redis

        self.deadline_s = deadline_s
        self.up, self.reason, self.failures, self.evicts = True, "", 0, False
        self._on_change, self._clustered = on_change, False
        self._unknown = threading.Event()
        self._closed = threading.Event()
        self._run_id: str | None = None
        self._lock = threading.Lock()
        self._prober: threading.Thread | None = None
        self._refused, self._full = redis.ResponseError, redis.OutOfMemoryError
        self._read_only, self._unauthorised = redis.ReadOnlyError, redis.AuthenticationError
        self._errors = (redis.RedisError, OSError)
        pool = connection_pool(url, deadline_s, redis_connect_func=self._connected)
        # Untyped: its commands have no useful types.
        self._client: Any = redis.Redis(connection_pool=pool)
        try:
            self._identify()
        except self._errors as error:
            self._fail(error)

    def deadline(self) -> float:
        return time.monotonic() + self.deadline_s

    def execute(self, until: float, *command: Any) -> Any:
        """Execute one command; ``RedisUnavailableError`` if the server is down or refuses, or too little time is
        left."""
        return self._guarded(lambda: self._client.execute_command(*command), until)

    def execute_all(self, until: float, commands: Iterable[tuple[Any, ...]], *, whole: bool = False) -> list[Any]:
        """Execute commands in one pipeline; ``whole``: as a transaction, without which an error may leave some of them
        executed."""

        def run() -> list[Any]:
            with self._client.pipeline(transaction=whole) as pipe:
                # Error messages would embed the command with its block, which takes most of a second per megabyte.
                pipe.annotate_exception = lambda *_: None
                for command in commands:
                    pipe.execute_command(*command)
                answers: list[Any] = pipe.execute()
                return answers

        return self._guarded(run, until)

    def scan(self, until: float, scan: "Scan", prefix: str, rest: str) -> Iterator[list[str]]:
        """Yield the keys that consist of ``prefix`` and a match of ``rest``, one SCAN step at a time, from where
        ``scan`` stopped. Resuming the generator marks a step's keys as processed."""
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix) + "*"
        ours = re.compile(re.escape(prefix) + rest)
        if scan.server != self._run_id or not scan.cursor:
            scan.begin(self._run_id)
        while True:
            answer = self.execute(until, "SCAN", scan.cursor, "MATCH", pattern, "COUNT", _SCANNED_AT_ONCE)
            yield [name.decode() for name in answer[1] if ours.fullmatch(name.decode())]
            cursor = int(answer[0])
            if not cursor:
                # Detects a reconnect during the scan to another server, to which the cursor meant nothing.
                self.execute(until, "PING")
            if scan.server != self._run_id:
                raise RedisUnavailableError("another server answered during the scan")
            scan.cursor = cursor
            if not cursor:
                return

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self.up, self.reason = False, "closed"
            prober = self._prober
        if prober is not None:
            prober.join(self.deadline_s)
        self._client.close()
        self._client.connection_pool.disconnect()

    # -- internal -------------------------------------------------------------------------------
    def _guarded(self, run: Callable[[], T], until: float) -> T:
        if not self.up:
            raise RedisUnavailableError(self.reason)
        try:
            if self._unknown.is_set():
                self._identify()
            if self._clustered:
                raise RedisUnavailableError("the server is in cluster mode, which is not supported (tiers.redis_url)")
            if time.monotonic() > until - self.deadline_s * 2 / 3:
                raise RedisUnavailableError(f"the call needs more than its deadline of {self.deadline_s:g} s")
            return run()
        except self._full as error:
            raise RedisFullError("the server is full (maxmemory) and does not evict") from error
        except self._refused as error:
            if isinstance(error, self._read_only):
                # After a failover the address points to another server, but old connections to this one.
                self._client.connection_pool.disconnect(inuse_connections=False)
            raise RedisUnavailableError(f"the server refuses: {error}") from error
        except self._errors as error:
            self._fail(error)
            raise RedisUnavailableError(self.reason or str(error)) from error

    def _connected(self, connection: Any) -> None:
        connection.on_connect()
        self._unknown.set()

    def _identify(self) -> None:
        self._unknown.clear()
        try:
            info: Any = self._client.info()
        except self._refused:
            # INFO may not be permitted; a restart then shows as missing values.
            info = {}
        found = str(info.get("run_id", ""))
        # Unsupported: transactions and multi-key commands would span slots, perhaps on several servers.
        self._clustered = bool(info.get("cluster_enabled"))
        # An evicting server may evict hashes of sizes.
        self.evicts = not str(info.get("maxmemory_policy", "noeviction")).startswith("noeviction")
        changed, self._run_id = self._run_id not in (None, found), found
        if changed:
            self.failures += 1
            self._on_change()

    def _fail(self, error: Exception) -> None:
        # Most likely dead as well: each would be another failure when it is used.
        self._client.connection_pool.disconnect(inuse_connections=False)
        with self._lock:
            if self._closed.is_set():
                return
            self.failures += 1
            if self._prober is None:
                prober = threading.Thread(target=self._probe, name="redis-probe", daemon=True)
                try:
                    prober.start()
                except RuntimeError:
                    # No room for a thread: the next command tries the server.
                    return
                self._prober = prober
            self.up, self.reason = False, self._why(error)

    def _why(self, error: Exception) -> str:
        if isinstance(error, self._unauthorised):
            return "the server does not accept the user and password in tiers.redis_url, or requires them"
        return f"the server cannot be reached: {error}"

    def _probe(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closed.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                self._identify()
            # Also for want of memory: nothing else ends the outage.
            except Exception as error:
                self.reason = self._why(error)
                continue
            with self._lock:
                self._prober = None
                if not self._closed.is_set():
                    self.up, self.reason = True, ""
            return


@dataclass(slots=True, eq=False)
class Scan:
    """Progress of a server-wide SCAN over several calls: ``cursor``, 0 at the start and end, and the names ``found``
    so far, if its user collects them."""

    cursor: int = 0
    server: str | None = None
    found: set[str] = field(default_factory=set)

    def begin(self, server: str | None = None) -> None:
        self.cursor, self.server = 0, server
        self.found.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Size in bytes of a stored value, and when its time to live was last renewed."""

    size: int
    renewed: float


@dataclass(slots=True, eq=False)
class StreamIndex:
    """Local mirror of the stream's hash of sizes on the server. Not thread-safe.

    * ``known``: the hash has been read, and no write has been uncertain since
    * ``entries``: by field (``layer:head:block``, ``manifest``), least recently renewed first
    * ``gone``: fields whose value is missing or damaged, to be deleted with the next write
    * ``deletion``, ``listing``: scans of the server for values without an entry
    """

    known: bool = False
    total: int = 0
    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    gone: set[str] = field(default_factory=set)
    deletion: Scan = field(default_factory=Scan)
    listing: Scan = field(default_factory=Scan)

    def put(self, name: str, size: int, now: float) -> None:
        self.remove([name])
        self.entries[name] = Entry(size, now)
        self.total += size

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            there = self.entries.pop(name, None)
            self.total -= there.size if there is not None else 0

    def size(self, name: str) -> int:
        there = self.entries.get(name)
        return 0 if there is None else there.size

    def replace(self, found: Mapping[bytes, bytes]) -> None:
        """Replace all entries by the server's hash; as their age is unknown, all are due for renewal."""
        self.entries = OrderedDict((name.decode(), Entry(int(size), -math.inf)) for name, size in found.items())
        self.total = sum(entry.size for entry in self.entries.values())
        self.gone.clear()
        self.known = True

    def mark_missing(self, name: str, seen: Entry | None) -> None:
        """Record that a value was missing or damaged, unless its entry has changed since it was ``seen``."""
        if seen is not None and self.entries.get(name) is seen:
            self.remove([name])
            self.gone.add(name)

    def pop_gone(self) -> list[str]:
        """Return and clear the fields to delete, except those rewritten since."""
        names = [name for name in self.gone if name not in self.entries]
        self.gone.clear()
        return names

    def renewal_due(self, before: float, limit: int) -> list[str]:
        """At most ``limit`` fields not renewed since ``before``."""
        names: list[str] = []
        for name, entry in self.entries.items():
            if entry.renewed >= before or len(names) == limit:
                break
            names.append(name)
        return names


def split_parts(whole: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Slices of at most ``most`` items."""
    return (whole[at : at + most] for at in range(0, len(whole), most))
