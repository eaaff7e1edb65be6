"""Bytes that are a block, and every other kind of bytes."""

import dataclasses
import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.memory.tiers import codec
from cluster.memory.tiers.base import Block, BlockKey
from cluster.memory.tiers.codec import (
    BlockFault,
    encode_block,
    open_block,
    open_manifest,
    seal_manifest,
)

KEY = BlockKey("yard", 3, 1, 17)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def block(count: int, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> Block:
    rng = torch.Generator().manual_seed(seed)
    key, value = (8 * torch.randn(2, count, width, generator=rng)).to(dtype)
    frame, cell = torch.randint(0, 10_000, (2, count), generator=rng, dtype=torch.int32)
    return Block(key, value, frame, cell)


def same(left: Block | None, right: Block) -> bool:
    if left is None:
        return False
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(right)]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@given(count=st.integers(0, 9), width=st.integers(1, 9), seed=st.integers(0, 9))
def test_any_block_comes_back_bit_for_bit(dtype: torch.dtype, count: int, width: int, seed: int) -> None:
    made = block(count, width, dtype, seed)
    assert same(open_block(encode_block(KEY, made, fingerprint="m"), KEY, fingerprint="m"), made)


def test_any_flipped_bit_and_any_cut_is_damage() -> None:
    data = encode_block(KEY, block(2, 3), fingerprint="m")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert open_block(bytes(flipped), KEY, fingerprint="m") is BlockFault.DAMAGED
    for length in range(len(data)):
        assert open_block(data[:length], KEY, fingerprint="m") is BlockFault.DAMAGED
    assert open_block(data + b"\0", KEY, fingerprint="m") is BlockFault.DAMAGED


@given(st.binary(max_size=80))
def test_any_other_bytes_are_no_block(data: bytes) -> None:
    assert open_block(data, KEY, fingerprint="m") is BlockFault.DAMAGED


@pytest.mark.parametrize(
    "other",
    [BlockKey("yard2", 3, 1, 17), BlockKey("yard", 4, 1, 17), BlockKey("yard", 3, 0, 17), BlockKey("yard", 3, 1, 18)],
)
def test_the_block_of_another_key_is_refused(other: BlockKey) -> None:
    assert open_block(encode_block(other, block(2), fingerprint="m"), KEY, fingerprint="m") is BlockFault.DAMAGED


def test_another_model_and_another_version_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_block(encode_block(KEY, block(2), fingerprint="m2"), KEY, fingerprint="m") is BlockFault.FOREIGN
    monkeypatch.setattr(codec, "VERSION", codec.VERSION + 1)
    later = encode_block(KEY, block(2), fingerprint="m")
    monkeypatch.undo()
    assert open_block(later, KEY, fingerprint="m") is BlockFault.FOREIGN


def test_what_is_decoded_owns_its_memory() -> None:
    made = block(3)
    data = encode_block(KEY, made, fingerprint="m")
    one, two = (open_block(data, KEY, fingerprint="m") for _ in range(2))
    assert isinstance(one, Block)
    one.key.zero_()
    assert same(two, made)


def test_what_cannot_be_stored_is_said() -> None:
    with pytest.raises(ConfigError, match="1 to 1024 bytes"):
        encode_block(KEY, block(2), fingerprint="")
    with pytest.raises(ValueError, match="float32, float16, bfloat16, int8 or uint8"):
        encode_block(KEY, block(2, dtype=torch.float64), fingerprint="m")
    odd = block(2)
    with pytest.raises(ValueError, match=r"must be \[n, D\]"):
        encode_block(KEY, Block(odd.key, odd.value[:1], odd.frame, odd.cell), fingerprint="m")


def test_only_who_has_the_secret_makes_a_block() -> None:
    made = block(2)
    data = encode_block(KEY, made, fingerprint="m", secret=b"ours")
    assert same(open_block(data, KEY, fingerprint="m", secret=b"ours"), made)
    for other in (b"", b"theirs"):
        forged = encode_block(KEY, made, fingerprint="m", secret=other)
        assert open_block(forged, KEY, fingerprint="m", secret=b"ours") is BlockFault.DAMAGED
        assert open_block(data, KEY, fingerprint="m", secret=other) is BlockFault.DAMAGED
        manifest = seal_manifest("yard", b"theirs", fingerprint="m", secret=other)
        assert open_manifest(manifest, "yard", fingerprint="m", secret=b"ours") is BlockFault.DAMAGED
    manifest = seal_manifest("yard", b"ours", fingerprint="m", secret=b"ours")
    assert open_manifest(manifest, "yard", fingerprint="m", secret=b"ours") == b"ours"


def test_the_digest_is_blake2b_over_name_version_and_content() -> None:
    """Taken apart by hand: magic, version, digest; then what the digest is of."""
    data = encode_block(KEY, block(2), fingerprint="m", secret=b"ours")
    name = struct.pack("<qqqI", 3, 1, 17, len("yard")) + b"yard"
    whole = hashlib.blake2b(name + struct.pack("<H", codec.VERSION) + data[22:], digest_size=16, key=b"ours")
    assert data[:22] == b"SLKV" + struct.pack("<H", codec.VERSION) + whole.digest()


def test_manifests_are_protected_alike() -> None:
    data = seal_manifest("yard", b"where all is", fingerprint="m")
    assert open_manifest(data, "yard", fingerprint="m") == b"where all is"
    assert open_manifest(data, "gate", fingerprint="m") is BlockFault.DAMAGED
    assert open_manifest(data, "yard", fingerprint="m2") is BlockFault.FOREIGN
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert open_manifest(bytes(flipped), "yard", fingerprint="m") is BlockFault.DAMAGED
    assert all(open_manifest(data[:n], "yard", fingerprint="m") is BlockFault.DAMAGED for n in range(len(data)))
    assert open_block(data, KEY, fingerprint="m") is BlockFault.DAMAGED
