"""Tier in a Redis server, where blocks outlive the process and node that wrote them."""

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierSettings, TierState
from cluster.memory.tiers.codec import BlockFault, Codec
from cluster.memory.tiers.redis_link import RedisFullError, RedisLink, RedisUnavailableError, StreamIndex, split_parts

MANIFEST = "manifest"
"""Field of the manifest in the hash of sizes, beside those of blocks."""

_VALUE_BYTES = 512 * 2**20
"""Maximum size of a value with the server's default ``proto-max-bulk-len``."""

_PREFIX = "sightline:kv"
_FIELD = r"-?\d+:-?\d+:-?\d+"
_KEYS_AT_ONCE = 512
_RENEWED_AT_ONCE = 4096


class RedisTier(Tier):
    """One value per block, ``sightline:kv:kv:{stream}:{layer}:{head}:{block}``, one for the manifest, and a hash of
    their sizes. A stream has one writer at a time; a new one begins with :meth:`manifest`.

    A value and its entry in the hash are written in one transaction; on a server that evicts, deleting a stream also
    scans for values without an entry. Values of another model, settings or format version are misses (``foreign``), as
    are damaged and forged ones (``damaged``, which are deleted). A value counts towards the cap with its size and twice
    its key's.

    While the server is down, every call returns ``RETRY`` at once; afterwards its contents may be outdated.

    Args:
        url: ``redis://[user:password@]host:port/database``, ``rediss://`` or ``unix://``.
        cap_bytes: of each stream, which :meth:`set_cap` can only lower.
        ttl_s: time to live; blocks live at least half of it after their stream's last :meth:`put_manifest` or
            :meth:`renew`.
        batch_bytes: approximate size of a pipeline.
        fingerprint, secret, deadline_s: see :class:`TierSettings`.

    Raises:
        ConfigError: an invalid address or fingerprint. An unreachable server is not an error.
    """

    def __init__(
        self,
        url: str,
        *,
        fingerprint: str,
        cap_bytes: int,
        ttl_s: float,
        deadline_s: float = 1.0,
        secret: bytes = b"",
        name: str = "redis",
        batch_bytes: int = 1024 * 1024,
    ) -> None:
        super().__init__(name, cap_bytes)
        self._codec = Codec(fingerprint, secret)
        self._ttl_s, self._batch_bytes = int(ttl_s), batch_bytes
        self._indexes: dict[str, StreamIndex] = {}
        self._counts: Counter[str] = Counter()
        self._trouble = ""
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._link = RedisLink(url, deadline_s=deadline_s, on_change=self._changed)

    @classmethod
    def from_settings(cls, settings: TierSettings) -> Self | None:
        if settings.redis_url is None:
            return None
        cap = settings.camera_bytes or sys.maxsize
        return cls(settings.redis_url, cap_bytes=cap, ttl_s=settings.redis_ttl_s, **settings.storage)

    # -- Tier -----------------------------------------------------------------------------------
    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        outcomes: dict[BlockKey, Outcome] = {}
        streams: dict[str, list[tuple[BlockKey, Block]]] = defaultdict(list)
        for key, block in dict(items).items():
            streams[key.stream].append((key, block))
        until = self._link.deadline()
        try:
            with self._writer(until):
                for stream, mine in streams.items():
                    self._store(stream, mine, until, outcomes)
        except RedisUnavailableError as error:
            self._refused(error, 0)
        results = [outcomes.get(key, Outcome.RETRY) for key, _ in items]
        with self._lock:
            self._counts["retries"] += results.count(Outcome.RETRY)
        return results

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        loaded: list[Loaded] = []
        until = self._link.deadline()
        try:
            for part in self._by_size(keys):
                with self._lock:
                    seen = [self._index(key.stream).entries.get(_field(key)) for key in part]
                values = self._link.execute(until, "MGET", *map(self._key, part))
                opened = [self._open(key, data) for key, data in zip(part, values, strict=True)]
                loaded += [
                    Loaded(Outcome.HIT, got) if isinstance(got, Block) else Loaded(Outcome.MISS) for got in opened
                ]
                with self._lock:
                    for key, was, got in zip(part, seen, opened, strict=True):
                        if got is None or got is BlockFault.DAMAGED:
                            self._index(key.stream).mark_missing(_field(key), was)
        except RedisUnavailableError as error:
            self._refused(error, len(keys) - len(loaded))
        return loaded + [Loaded(Outcome.RETRY)] * (len(keys) - len(loaded))

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        """See :class:`Tier`. Reads the hash of sizes; on a server that evicts, also scans for blocks whose entry was
        evicted, from where the last call ran out of time."""
        until = self._link.deadline()
        try:
            names = {name.decode() for name in self._link.execute(until, "HKEYS", self._sizes(stream))}
            if self._link.evicts:
                with self._lock:
                    listing, prefix = self._index(stream).listing, self._named(stream, "")
                for found in self._link.scan(until, listing, prefix, _FIELD):
                    listing.found.update(name.removeprefix(prefix) for name in found)
                names |= listing.found
                listing.begin()
        except RedisUnavailableError as error:
            self._refused(error, 1)
            return Outcome.RETRY, []
        return Outcome.HIT, [BlockKey(stream, *map(int, name.split(":"))) for name in sorted(names - {MANIFEST})]

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        until = self._link.deadline()
        try:
            with self._writer(until):
                if keys is not None:
                    self._known(stream, until)
                    names = [_field(key) for key in dict.fromkeys(keys) if key.stream == stream]
                    return self._delete(stream, names, until)
                # Another process may have written it since.
                self._invalidate(stream)
                index = self._known(stream, until)
                with self._lock:
                    index.gone.clear()
                    names = [name for name in index.entries if name != MANIFEST]
                gone = self._delete(stream, names, until)
                if self._link.evicts:
                    # Also delete blocks whose entry was evicted, from where the last attempt stopped.
                    for found in self._link.scan(until, index.deletion, self._named(stream, ""), _FIELD):
                        gone += self._link.execute(until, "UNLINK", *found) if found else 0
                self._link.execute(until, "UNLINK", self._sizes(stream), self._named(stream, MANIFEST))
                self.leave(stream)
        except RedisUnavailableError as error:
            self._invalidate(stream)
            self._refused(error, 1)
            return None
        return gone

    def leave(self, stream: str) -> None:
        with self._lock:
            self._indexes.pop(stream, None)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See :class:`Tier`. Without ``HIT`` the previous manifest stays; with it, the stream is renewed."""
        until = self._link.deadline()
        data = self._codec.encode_manifest(stream, manifest)
        held = self._held(stream, MANIFEST, data)
        try:
            with self._writer(until):
                index, cap = self._known(stream, until), self.cap(stream)
                if held > min(cap, _VALUE_BYTES):
                    with self._lock:
                        self._counts["too_large"] += 1
                    return Outcome.MISS
                if index.total - index.size(MANIFEST) + held > cap:
                    # As in _store: the server may have been emptied.
                    self._invalidate(stream)
                    raise RedisUnavailableError(f"the manifest of {stream} does not fit under its cap with its blocks")
                self._write(stream, index, {MANIFEST: data}, until)
                self._renew(stream, until)
        except RedisUnavailableError as error:
            self._refused(error, 1, full=isinstance(error, RedisFullError))
            return Outcome.RETRY
        return Outcome.HIT

    def renew(self, stream: str) -> None:
        """Renew the time to live of the stream's values, least recently renewed first, once half of it has passed."""
        until = self._link.deadline()
        try:
            with self._writer(until):
                self._renew(stream, until)
        except RedisUnavailableError as error:
            self._refused(error, 0)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """See :class:`Tier`. Rereads the stream's index, as another process may have written it."""
        self._invalidate(stream)
        try:
            data = self._link.execute(self._link.deadline(), "GET", self._named(stream, MANIFEST))
        except RedisUnavailableError as error:
            self._refused(error, 1)
            return Outcome.RETRY, None
        if data is None:
            return Outcome.MISS, None
        opened = self._codec.decode_manifest(stream, data)
        if isinstance(opened, bytes):
            return Outcome.HIT, opened
        with self._lock:
            self._counts[opened.value] += 1
        return Outcome.MISS, None

    def nbytes(self, stream: str | None = None) -> int:
        """Bytes as counted towards the cap; evicted values count until noticed. For a ``stream``, asks the server only
        if its index is unknown. Without, sums this process's streams, and pings the server: an idle one would otherwise
        not be checked."""
        until = self._link.deadline()
        try:
            if stream is None:
                self._link.execute(until, "PING")
            else:
                with self._writer(until):
                    self._known(stream, until)
        except RedisUnavailableError:
            pass
        with self._lock:
            if stream is not None:
                return self._index(stream).total
            return sum(index.total for index in self._indexes.values())

    def state(self) -> TierState:
        with self._lock:
            counts = {**self._counts, "failures": self._link.failures}
        return TierState(self._link.up, self._link.reason or self._trouble, counts)

    def close(self) -> None:
        self._link.close()

    # -- names ----------------------------------------------------------------------------------
    def _key(self, key: BlockKey) -> str:
        return self._named(key.stream, _field(key))

    def _named(self, stream: str, name: str) -> str:
        return f"{_PREFIX}:manifest:{stream}" if name == MANIFEST else f"{_PREFIX}:kv:{stream}:{name}"

    def _held(self, stream: str, name: str, data: bytes) -> int:
        return len(data) + 2 * len(self._named(stream, name))

    def _sizes(self, stream: str) -> str:
        return f"{_PREFIX}:sizes:{stream}"

    # -- one writer at a time -------------------------------------------------------------------
    @contextmanager
    def _writer(self, until: float) -> Iterator[None]:
        if not self._link.up:
            raise RedisUnavailableError(self._link.reason)
        if not self._writing.acquire(timeout=max(0.0, until - time.monotonic()) / 3):
            raise RedisUnavailableError("another write is taking too long")
        try:
            yield
        finally:
            self._writing.release()

    def _store(
        self, stream: str, items: Sequence[tuple[BlockKey, Block]], until: float, outcomes: dict[BlockKey, Outcome]
    ) -> None:
        index, cap = self._known(stream, until), self.cap(stream)
        self._sweep(stream, index, until)
        batch: dict[BlockKey, bytes] = {}
        unwanted: list[str] = []
        more = 0
        for key, block in items:
            data = self._codec.encode(key, block)
            held = self._held(stream, _field(key), data)
            grows = held - index.size(_field(key))
            if held > cap or index.total + more + grows > cap:
                outcomes[key] = Outcome.MISS if held > cap else Outcome.RETRY
                unwanted.append(_field(key))
                continue
            if batch and sum(map(len, batch.values())) + len(data) > self._batch_bytes:
                self._send(stream, index, batch, until, outcomes)
                batch, more = {}, 0
            batch[key] = data
            more += grows
        if batch:
            self._send(stream, index, batch, until, outcomes)
        if Outcome.RETRY in outcomes.values():
            # Reread the server's hash before applying the cap again: the server may have been emptied.
            self._invalidate(stream)
        # A refused block must not leave an older one under its key.
        self._delete(stream, [name for name in unwanted if index.size(name)], until)

    def _send(
        self,
        stream: str,
        index: StreamIndex,
        batch: dict[BlockKey, bytes],
        until: float,
        outcomes: dict[BlockKey, Outcome],
    ) -> None:
        values = {_field(key): data for key, data in batch.items()}
        try:
            self._write(stream, index, values, until)
        except RedisFullError as error:
            self._refused(error, 0, full=len(batch))
            outcomes.update(dict.fromkeys(batch, Outcome.RETRY))
            self._delete(stream, [name for name in values if index.size(name)], until)
            return
        with self._lock:
            self._counts["stored"] += len(batch)
            self._counts["bytes_in"] += sum(map(len, values.values()))
        outcomes.update(dict.fromkeys(batch, Outcome.HIT))

    def _write(self, stream: str, index: StreamIndex, values: dict[str, bytes], until: float) -> None:
        """Write values and their entries in one transaction."""
        sizes = {name: self._held(stream, name, data) for name, data in values.items()}
        commands: list[tuple[Any, ...]] = [
            ("HSET", self._sizes(stream), *(part for pair in sizes.items() for part in pair)),
            ("EXPIRE", self._sizes(stream), 2 * self._ttl_s),
            *(("SET", self._named(stream, name), data, "EX", self._ttl_s) for name, data in values.items()),
        ]
        index.deletion.begin()
        try:
            self._link.execute_all(until, commands, whole=True)
        except RedisFullError:
            raise
        except RedisUnavailableError:
            # The server may have executed it nevertheless.
            self._invalidate(stream)
            raise
        now = time.monotonic()
        with self._lock:
            for name, size in sizes.items():
                index.put(name, size, now)
            self._trouble = ""

    def _delete(self, stream: str, names: Sequence[str], until: float) -> int:
        """Delete blocks before their entries, so that no block lacks one; not in a transaction, which a full server
        refuses."""
        gone = 0
        for part in split_parts(names, _KEYS_AT_ONCE):
            blocks = [self._named(stream, name) for name in part]
            commands = [("UNLINK", *blocks), ("HDEL", self._sizes(stream), *part)]
            gone += (deleted := self._link.execute_all(until, commands)[0])
            with self._lock:
                self._index(stream).remove(part)
                self._counts["dropped"] += deleted
        return gone

    def _renew(self, stream: str, until: float) -> None:
        index, now = self._known(stream, until), time.monotonic()
        self._sweep(stream, index, until)
        with self._lock:
            due = index.renewal_due(now - self._ttl_s / 2, _RENEWED_AT_ONCE)
        for names in split_parts(due, _KEYS_AT_ONCE):
            commands: list[tuple[Any, ...]] = [("EXPIRE", self._sizes(stream), 2 * self._ttl_s)]
            commands += [("EXPIRE", self._named(stream, name), self._ttl_s) for name in names]
            there = self._link.execute_all(until, commands)[1:]
            with self._lock:
                for name, alive in zip(names, there, strict=True):
                    if alive:
                        index.put(name, index.size(name), now)
                    else:
                        index.mark_missing(name, index.entries.get(name))

    def _sweep(self, stream: str, index: StreamIndex, until: float) -> None:
        with self._lock:
            names = index.pop_gone()
        self._delete(stream, names, until)

    def _known(self, stream: str, until: float) -> StreamIndex:
        """The stream's index, read from the server if needed."""
        with self._lock:
            index = self._index(stream)
        if not index.known:
            found = self._link.execute(until, "HGETALL", self._sizes(stream))
            with self._lock:
                index.replace(found)
        return index

    # -- internal -------------------------------------------------------------------------------
    def _open(self, key: BlockKey, data: bytes | None) -> Block | BlockFault | None:
        got = None if data is None else self._codec.decode(key, data)
        with self._lock:
            self._counts["hits" if isinstance(got, Block) else "misses"] += 1
            if isinstance(got, BlockFault):
                self._counts[got.value] += 1
            self._counts["bytes_out"] += len(data) if data is not None else 0
        return got

    def _by_size(self, keys: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        """Batch keys to about ``batch_bytes``; blocks of unknown size count as an eighth of that."""
        part: list[BlockKey] = []
        filled = 0
        for key in keys:
            with self._lock:
                size = self._index(key.stream).size(_field(key)) or self._batch_bytes // 8
            if part and (filled + size > self._batch_bytes or len(part) == _KEYS_AT_ONCE):
                yield part
                part, filled = [], 0
            part.append(key)
            filled += size
        if part:
            yield part

    def _index(self, stream: str) -> StreamIndex:
        return self._indexes.setdefault(stream, StreamIndex())

    def _invalidate(self, stream: str) -> None:
        with self._lock:
            self._index(stream).known = False

    def _changed(self) -> None:
        with self._lock:
            for index in self._indexes.values():
                index.known = False

    def _refused(self, error: RedisUnavailableError, blocks: int, *, full: int = 0) -> None:
        with self._lock:
            self._counts["retries"] += blocks
            self._counts["full"] += full
            # While the link is down, it has the reason.
            self._trouble = str(error) if self._link.up else ""


def _field(key: BlockKey) -> str:
    return f"{key.layer}:{key.head}:{key.block}"
