"""Binary format of blocks and manifests, with authentication.

The digest covers format version, full key (camera, layer, head, block), fingerprint and content. With a ``secret`` it
is a keyed BLAKE2b (RFC 7693): only holders of the secret can produce valid blocks, and a block stored under another key
is rejected. Replay of an older block or manifest of the same key is not detected.
"""

import struct
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from hmac import compare_digest

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.memory.tiers.base import Block, BlockKey

VERSION = 3
"""Format version. All versions begin with magic, version and digest, so that each can recognise the others."""

_MAGIC, _MANIFEST = b"SLKV", b"SLMF"
_PREFIX = struct.Struct("<4sH16s")
_OWNER = struct.Struct("<H")  # length of the fingerprint that follows
_SHAPE = struct.Struct("<HII")  # dtype, tokens, width
_KEY = struct.Struct("<qqqI")
# uint8 is for byte blocks, which hold no KV.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8)


class BlockFault(Enum):
    """Why data was rejected. ``FOREIGN``: intact, but of another format version, model or settings. ``DAMAGED``:
    truncated, changed, of another key, or sealed with another secret (forged)."""

    FOREIGN = "foreign"
    DAMAGED = "damaged"


def check_block(block: Block) -> tuple[int, int]:
    """A block's number of members and width; ``ValueError`` for unsupported dtypes or inconsistent shapes."""
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


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes blocks and manifests.

    Args:
        fingerprint: model and settings, which must match; 1 to 1,024 bytes of UTF-8 (else ``ConfigError``).
        secret: key of the digest, up to 64 bytes; without one the digest detects damage but not forgery.
    """

    fingerprint: str
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.fingerprint.encode()) <= 1024:
            raise ConfigError("the fingerprint of model and settings must have 1 to 1024 bytes of UTF-8")

    def encode(self, key: BlockKey, block: Block) -> bytes:
        """Encode a block: header, digest, shape, frames and cells, then keys and values. ``ValueError``: see
        :func:`check_block`."""
        count, width = check_block(block)
        kv = [part.detach().to("cpu").contiguous() for part in (block.key, block.value)]
        places = [part.detach().to("cpu", torch.int32).contiguous() for part in (block.frame, block.cell)]
        shape = _SHAPE.pack(_DTYPES.index(block.key.dtype), count, width)
        return self._sealed(_MAGIC, key, shape, *map(_raw, (*places, *kv)))

    def decode(self, key: BlockKey, data: bytes) -> Block | BlockFault:
        """Decode the block of ``key``, on the CPU, or return why it is not that block."""
        body = self._unsealed(_MAGIC, key, data)
        if isinstance(body, BlockFault):
            return body
        if len(body) < _SHAPE.size:
            return BlockFault.DAMAGED
        kind, count, width = _SHAPE.unpack_from(body)
        payload = body[_SHAPE.size :]
        if kind >= len(_DTYPES) or len(payload) != 8 * count + 2 * count * width * _DTYPES[kind].itemsize:
            return BlockFault.DAMAGED
        dtype = _DTYPES[kind]
        if not payload:
            nothing, places = torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.int32)
            return Block(nothing, nothing.clone(), places, places.clone())
        # One owned copy, in which every part is aligned to its type.
        held = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        frame, cell = held[: 8 * count].view(torch.int32).view(2, count)
        keys, values = held[8 * count :].view(dtype).view(2, count, width)
        return Block(keys, values, frame, cell)

    def encode_manifest(self, stream: str, manifest: bytes) -> bytes:
        """Encode a stream's manifest, protected like a block."""
        return self._sealed(_MANIFEST, BlockKey(stream, -1, -1, -1), manifest)

    def decode_manifest(self, stream: str, data: bytes) -> bytes | BlockFault:
        """Inverse of :meth:`encode_manifest` for this stream, or why the data was rejected."""
        body = self._unsealed(_MANIFEST, BlockKey(stream, -1, -1, -1), data)
        return body if isinstance(body, BlockFault) else bytes(body)

    def _sealed(self, magic: bytes, key: BlockKey, *parts: bytes | memoryview) -> bytes:
        owner = self.fingerprint.encode()
        body = b"".join([_OWNER.pack(len(owner)), owner, *parts])
        return _PREFIX.pack(magic, VERSION, _digest(key, VERSION, memoryview(body), self.secret)) + body

    def _unsealed(self, magic: bytes, key: BlockKey, data: bytes) -> memoryview | BlockFault:
        """The content after digest and fingerprint, once both are verified."""
        whole = memoryview(data)
        if len(whole) < _PREFIX.size:
            return BlockFault.DAMAGED
        found, version, digest = _PREFIX.unpack_from(whole)
        body = whole[_PREFIX.size :]
        if found != magic or not compare_digest(digest, _digest(key, version, body, self.secret)):
            return BlockFault.DAMAGED
        owner = self.fingerprint.encode()
        begins = _OWNER.pack(len(owner)) + owner
        if version != VERSION or body[: len(begins)] != begins:
            return BlockFault.FOREIGN
        return body[len(begins) :]


def _raw(part: Tensor) -> memoryview:
    return part.reshape(-1).view(torch.uint8).numpy().data


def _digest(key: BlockKey, version: int, body: memoryview, secret: bytes) -> bytes:
    stream = key.stream.encode()
    taken = blake2b(_KEY.pack(key.layer, key.head, key.block, len(stream)), digest_size=16, key=secret)
    taken.update(stream + version.to_bytes(2, "little"))
    taken.update(body)
    return taken.digest()
