"""Binary format of blocks and manifests, with authentication.

The digest covers format version, full key (camera, layer, head, cluster), fingerprint and content. With a ``secret`` it
is a keyed BLAKE2b (RFC 7693): only holders of the secret can produce valid blocks, and a block stored under another key
is rejected. Replay of an older block or manifest of the same key is not detected.
"""

import struct
from enum import Enum
from hashlib import blake2b
from hmac import compare_digest

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey

VERSION = 2
"""Of the format. Every version begins with the magic, its number and the digest, so that any can tell any other."""

_MAGIC, _MANIFEST = b"SLKV", b"SLMF"
_PREFIX = struct.Struct("<4sH16s")
_SHAPE = struct.Struct("<HHII")  # dtype, bytes of the fingerprint, tokens, width
_KEY = struct.Struct("<qqqI")
# uint8 is for index parts, which hold no KV.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8)


class BlockFault(Enum):
    """Why bytes are not the block. ``FOREIGN``: intact, but of another format version, model or settings. ``DAMAGED``:
    truncated, changed, of another key, or sealed with another secret (forged)."""

    FOREIGN = "foreign"
    DAMAGED = "damaged"


def check_fingerprint(fingerprint: str) -> None:
    """Raises ``ConfigError`` for none, or one of more than 1,024 bytes."""
    if not 0 < len(fingerprint.encode()) <= 1024:
        raise ConfigError("a fingerprint of model and settings has 1 to 1024 bytes of UTF-8")


def check_block(block: Block) -> tuple[int, int]:
    """A block's number of members and width; ``ValueError`` where types or shapes do not fit."""
    key, value = block.key, block.value
    if key.dtype not in _DTYPES or value.dtype != key.dtype:
        raise ValueError(
            f"keys of {key.dtype} and values of {value.dtype} must both be float32, float16, bfloat16, int8 or uint8"
        )
    if key.ndim != 2 or key.shape != value.shape or not block.frame.shape == block.cell.shape == key.shape[:1]:
        raise ValueError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} must be [n, D], frames and cells [n]"
        )
    return key.shape[0], key.shape[1]


def encode_block(key: BlockKey, block: Block, *, fingerprint: str, secret: bytes = b"") -> bytes:
    """Encode a block: header, digest, frames and cells, then keys and values.

    Args:
        fingerprint: what must be equal for the block to be of use: model and settings, as a short string.
        secret: key of the digest, up to 64 bytes; without one the digest tells damage and not forgery.

    Raises:
        ConfigError: see :func:`check_fingerprint`.
        ValueError: see :func:`check_block`.
    """
    check_fingerprint(fingerprint)
    count, width = check_block(block)
    kv = [part.detach().to("cpu").contiguous() for part in (block.key, block.value)]
    places = [part.detach().to("cpu", torch.int32).contiguous() for part in (block.frame, block.cell)]
    owner = fingerprint.encode()
    head = _SHAPE.pack(_DTYPES.index(block.key.dtype), len(owner), count, width) + owner
    body = b"".join([head, *(_raw(part) for part in (*places, *kv))])
    return _PREFIX.pack(_MAGIC, VERSION, _digest(key, VERSION, memoryview(body), secret)) + body


def open_block(data: bytes, key: BlockKey, *, fingerprint: str, secret: bytes = b"") -> Block | BlockFault:
    """Decode the block of ``key`` under this fingerprint and secret, on the CPU; or why it is not that block."""
    body = _unsealed(data, _MAGIC, key, secret)
    if isinstance(body, BlockFault):
        return body
    if len(body) < _SHAPE.size:
        return BlockFault.DAMAGED
    kind, owned, count, width = _SHAPE.unpack_from(body)
    payload = body[_SHAPE.size + owned :]
    if body[_SHAPE.size : _SHAPE.size + owned] != fingerprint.encode():
        return BlockFault.FOREIGN
    if kind >= len(_DTYPES):
        return BlockFault.DAMAGED
    dtype = _DTYPES[kind]
    if len(payload) != 8 * count + 2 * count * width * dtype.itemsize:
        return BlockFault.DAMAGED
    if not payload:
        nothing, places = torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.int32)
        return Block(nothing, nothing.clone(), places, places.clone())
    # One owned copy; every part is aligned to its type.
    held = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    frame, cell = held[: 8 * count].view(torch.int32).view(2, count)
    keys, values = held[8 * count :].view(dtype).view(2, count, width)
    return Block(keys, values, frame, cell)


def seal_manifest(stream: str, manifest: bytes, *, fingerprint: str, secret: bytes = b"") -> bytes:
    """Encode a stream's manifest with the protection of a block."""
    owner = fingerprint.encode()
    body = len(owner).to_bytes(2, "little") + owner + manifest
    return _PREFIX.pack(_MANIFEST, VERSION, _digest(_manifest_key(stream), VERSION, memoryview(body), secret)) + body


def open_manifest(data: bytes, stream: str, *, fingerprint: str, secret: bytes = b"") -> bytes | BlockFault:
    """Decode what :func:`seal_manifest` encoded for this stream, or why it is not that."""
    body = _unsealed(data, _MANIFEST, _manifest_key(stream), secret)
    if isinstance(body, BlockFault):
        return body
    owned = 2 + int.from_bytes(body[:2], "little")
    if body[2:owned] != fingerprint.encode():
        return BlockFault.FOREIGN
    return bytes(body[owned:])


def _unsealed(data: bytes, magic: bytes, key: BlockKey, secret: bytes) -> memoryview | BlockFault:
    """What follows the digest."""
    whole = memoryview(data)
    if len(whole) < _PREFIX.size:
        return BlockFault.DAMAGED
    found, version, digest = _PREFIX.unpack_from(whole)
    body = whole[_PREFIX.size :]
    if found != magic or not compare_digest(digest, _digest(key, version, body, secret)):
        return BlockFault.DAMAGED
    return body if version == VERSION else BlockFault.FOREIGN


def _raw(part: Tensor) -> memoryview:
    return part.reshape(-1).view(torch.uint8).numpy().data


def _manifest_key(stream: str) -> BlockKey:
    return BlockKey(stream, -1, -1, -1)


def _digest(key: BlockKey, version: int, body: memoryview, secret: bytes) -> bytes:
    stream = key.stream.encode()
    taken = blake2b(_KEY.pack(key.layer, key.head, key.block, len(stream)), digest_size=16, key=secret)
    taken.update(stream + version.to_bytes(2, "little"))
    taken.update(body)
    return taken.digest()
