"""Blocks of position-free KV in a folder of shared memory: one file per frame and worker.

Files, because every process of the host can reach them (the engine core's scheduler, its workers, the replica), because
they outlive the process that wrote them, and because a rename makes a block appear whole or not at all. On a folder in
memory (tmpfs) reading one is a mapping and costs no copy.

A file is a prefix (magic, version, length of the header, digest), a JSON header padded to 64 bytes, and
``[2, layers, tokens, heads, size]`` of keys before rotary and values. The digest is over header and KV.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from cluster.errors import ConfigError

SHARED = Path("/dev/shm")
PREFIX = "sightline-kv-"
_LOCK = "owner"
# Share of the free space at start; other users of shared memory (vLLM's queues) need some.
SHARE = 0.5


class SharedFolder:
    """A new folder for blocks, removed on close.

    It holds a lock for as long as its process lives. A folder without one was left by a process that was killed, and
    the next process of the same user on the host removes it, so that no memory is lost for longer than that.

    Args:
        root: where it is made; shared memory where there is any, else the folder for temporary files.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        root = Path(root) if root is not None else SHARED if os.access(SHARED, os.W_OK) else Path(tempfile.gettempdir())
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._lock: IO[bytes] | None = (self.path / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.cap_bytes = int(shutil.disk_usage(root).free * SHARE)
        except OSError as error:
            raise ConfigError(f"no folder for KV can be made in {root}: {error}") from None

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            lock.close()


def remove_abandoned(root: Path) -> int:
    """Remove folders whose process has died; returns how many."""
    removed = 0
    for path in root.glob(f"{PREFIX}*"):
        try:
            with (path / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except OSError:
            # Its process lives or is creating it, or another user owns it.
            continue
    return removed


VERSION = 1
_MAGIC = b"SLPF"
_PREFIX = struct.Struct("<4sHH16s")
_ALIGNED = 64
_LONGEST_HEADER = 4096
_SUFFIX = ".kv"


class Fault(Enum):
    """Why there is no block: ``MISSING``, ``DAMAGED`` (cut, or changed), or ``FOREIGN`` (whole, but of another model,
    version, shape or key)."""

    MISSING = "missing"
    DAMAGED = "damaged"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token in one worker: ``layers x heads x size``, of keys and of values."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype

    def block(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of a block of ``tokens``."""
        return (2, self.layers, tokens, self.heads, self.size)

    def nbytes(self, tokens: int) -> int:
        return 2 * self.layers * tokens * self.heads * self.size * self.dtype.itemsize


class BlockFolder:
    """Index of the stored blocks, without their KV. ``shards``: workers that each hold a part of every block."""

    def __init__(self, folder: str | Path, *, shards: int = 1) -> None:
        self.folder, self.shards = Path(folder), shards

    def tokens(self, key: str) -> int | None:
        """Tokens of a block present in all shards with its full length; None otherwise."""
        found = [_tokens(self.path(key, shard), key) for shard in range(self.shards)]
        return found[0] if None not in found and len(set(found)) == 1 else None

    def drop_blocks(self, keys: Iterable[str]) -> int:
        """Delete blocks; returns how many existed."""
        dropped = 0
        for key in keys:
            gone = [_unlink(self.path(key, shard)) for shard in range(self.shards)]
            dropped += any(gone)
        return dropped

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(entry.stat().st_size for entry in _entries(self.folder, _SUFFIX))

    def path(self, key: str, shard: int = 0) -> Path:
        name = blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / f"{name}.{shard}{_SUFFIX}"


class BlockStore:
    """Blocks of one shard under a byte cap. One process writes to a shard at a time; others may read, delete, and
    restore blocks.

    A block is checked against its digest when this process opens it; while it stays mapped it is not checked again.

    Args:
        fingerprint: what must be equal for a block to be of use: model and whatever else changes its KV.
        cap_bytes: most bytes of this shard's files; the blocks unused longest make room.

    Raises:
        ConfigError: a folder that cannot be made, or a cap that can hold nothing.
    """

    def __init__(
        self, folder: BlockFolder, *, shape: KVShape, fingerprint: str, shard: int = 0, cap_bytes: int
    ) -> None:
        self.folder, self.shape, self.fingerprint, self.shard, self.cap_bytes = (
            folder, shape, fingerprint, shard, cap_bytes,
        )  # fmt: skip
        self.evicted = 0
        self._open: dict[str, tuple[int, Tensor]] = {}
        if cap_bytes < shape.nbytes(1):
            raise ConfigError(f"a cap of {cap_bytes} bytes holds no KV of even one token; give it some hundred MiB")
        try:
            folder.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder for KV {folder.folder} cannot be made: {error}") from None

    def get(self, key: str, *, again: bool = True) -> Tensor | Fault:
        """A block's KV ``[2, layers, tokens, heads, size]``, keys before rotary, read-only.

        Damaged or foreign blocks are deleted, so that they are never promised again. ``again``: keep it mapped for
        later calls, until a :meth:`put` finds its file deleted.
        """
        path = self.folder.path(key, self.shard)
        try:
            found = path.stat()
        except OSError:
            self._open.pop(path.name, None)
            return Fault.MISSING
        held = self._open.get(path.name)
        if held is None or held[0] != found.st_ino:
            block = self._read(path, found.st_size, key)
            if isinstance(block, Fault):
                self._open.pop(path.name, None)
                if block is not Fault.MISSING:
                    _unlink(path)
                return block
            held = (found.st_ino, block)
            if again:
                self._open[path.name] = held
        with contextlib.suppress(OSError):
            os.utime(path)
        return held[1]

    def put(self, items: Sequence[tuple[str, Tensor]], *, again: bool = True) -> list[bool]:
        """Write blocks ``[2, layers, tokens, heads, size]``, replacing those of the same key; returns which are stored.

        ``again``: keep them mapped as in :meth:`get`.
        """
        sizes = [self.shape.nbytes(block.shape[2]) + _LONGEST_HEADER for _, block in items]
        self._evict(sum(sizes))
        room = self.cap_bytes
        held = []
        for (key, block), size in zip(items, sizes, strict=True):
            fits = size <= room
            path = self.folder.path(key, self.shard)
            held.append(fits and self._write(path, key, block))
            room -= size if fits else 0
            if again and held[-1]:
                self._keep(path, block.shape[2])
        return held

    # -- files ------------------------------------------------------------------------------------
    def _write(self, path: Path, key: str, block: Tensor) -> bool:
        head = self._header(key, block.shape[2])
        body = block.detach().to("cpu", self.shape.dtype).contiguous().view(torch.uint8).reshape(-1).numpy().data
        whole = _PREFIX.pack(_MAGIC, VERSION, len(head), _digest(head, body)) + head
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                file.write(whole)
                file.write(body)
            part.replace(path)
        except OSError:
            _unlink(part)
            return False
        return True

    def _keep(self, path: Path, tokens: int) -> None:
        """Map a file just written, without verification."""
        try:
            found = path.stat()
            mapped = torch.from_file(str(path), shared=False, size=found.st_size, dtype=torch.uint8)
        except (OSError, RuntimeError):
            return
        block = mapped[-self.shape.nbytes(tokens) :].view(self.shape.dtype).view(self.shape.block(tokens))
        self._open[path.name] = (found.st_ino, block)

    def _header(self, key: str, tokens: int) -> bytes:
        shape = self.shape
        body = json.dumps(
            {
                "key": key, "fingerprint": self.fingerprint, "tokens": tokens, "layers": shape.layers,
                "heads": shape.heads, "size": shape.size, "dtype": str(shape.dtype), "bytes": shape.nbytes(tokens),
            }
        ).encode()  # fmt: skip
        return body.ljust(-(-(_PREFIX.size + len(body)) // _ALIGNED) * _ALIGNED - _PREFIX.size)

    def _read(self, path: Path, size: int, key: str) -> Tensor | Fault:
        if not size:
            return Fault.DAMAGED
        try:
            # A private mapping without an open file: there are as many as frames in all windows.
            mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except RuntimeError:
            # Deleted meanwhile, or out of mappings; the block itself may be fine.
            return Fault.MISSING
        data = mapped.numpy().data
        opened = _open_header(data, key)
        if isinstance(opened, Fault):
            return opened
        header, begin, digest = opened
        if size - begin != header["bytes"] or _digest(data[_PREFIX.size : begin], data[begin:]) != digest:
            return Fault.DAMAGED
        if data[_PREFIX.size : begin] != self._header(key, int(header["tokens"])):
            return Fault.FOREIGN
        return mapped[begin:].view(self.shape.dtype).view(self.shape.block(int(header["tokens"])))

    def _evict(self, nbytes: int) -> None:
        """Delete least recently used blocks until ``nbytes`` more fit, and unmap deleted ones."""
        held = []
        for entry in _entries(self.folder.folder, f".{self.shard}{_SUFFIX}"):
            with contextlib.suppress(OSError):
                found = entry.stat()
                held.append((found.st_mtime_ns, found.st_size, entry.name))
        used = sum(size for _, size, _ in held)
        names = {name for _, _, name in held}
        for _, size, name in sorted(held):
            if used + nbytes <= self.cap_bytes:
                break
            self.evicted += _unlink(self.folder.folder / name)
            names.discard(name)
            used -= size
        for name in self._open.keys() - names:
            del self._open[name]


def _open_header(data: memoryview, key: str) -> tuple[dict[str, Any], int, bytes] | Fault:
    if len(data) < _PREFIX.size:
        return Fault.DAMAGED
    magic, version, length, digest = _PREFIX.unpack_from(data)
    if magic != _MAGIC or len(data) < _PREFIX.size + length:
        return Fault.DAMAGED
    if version != VERSION:
        return Fault.FOREIGN
    try:
        header = json.loads(bytes(data[_PREFIX.size : _PREFIX.size + length]))
        sizes = int(header["tokens"]) > 0 and int(header["bytes"]) > 0
    except (ValueError, KeyError, TypeError):
        return Fault.DAMAGED
    if header.get("key") != key or not sizes:
        return Fault.FOREIGN
    return header, _PREFIX.size + length, digest


def _tokens(path: Path, key: str) -> int | None:
    try:
        with path.open("rb") as file:
            opened = _open_header(memoryview(file.read(_LONGEST_HEADER)), key)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if isinstance(opened, Fault):
        return None
    header, begin, _ = opened
    return int(header["tokens"]) if size == begin + header["bytes"] else None


def _entries(folder: Path, suffix: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return [entry for entry in found if entry.name.endswith(suffix)]


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _digest(head: bytes | memoryview, body: memoryview) -> bytes:
    taken = blake2b(head, digest_size=16)
    taken.update(body)
    return taken.digest()
