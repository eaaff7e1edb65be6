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
from cluster.memory.tiers.base import Block, BlockKey, TierSettings
from cluster.memory.tiers.codec import BlockFault, Codec

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
    assert same(Codec("m").decode(KEY, Codec("m").encode(KEY, made)), made)


def test_any_flipped_bit_and_any_cut_is_damage() -> None:
    data = Codec("m").encode(KEY, block(2, 3))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Codec("m").decode(KEY, bytes(flipped)) is BlockFault.DAMAGED
    for length in range(len(data)):
        assert Codec("m").decode(KEY, data[:length]) is BlockFault.DAMAGED
    assert Codec("m").decode(KEY, data + b"\0") is BlockFault.DAMAGED


@given(st.binary(max_size=80))
def test_any_other_bytes_are_no_block(data: bytes) -> None:
    assert Codec("m").decode(KEY, data) is BlockFault.DAMAGED


@pytest.mark.parametrize(
    "other",
    [BlockKey("yard2", 3, 1, 17), BlockKey("yard", 4, 1, 17), BlockKey("yard", 3, 0, 17), BlockKey("yard", 3, 1, 18)],
)
def test_the_block_of_another_key_is_refused(other: BlockKey) -> None:
    assert Codec("m").decode(KEY, Codec("m").encode(other, block(2))) is BlockFault.DAMAGED


def test_another_model_and_another_version_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Codec("m").decode(KEY, Codec("m2").encode(KEY, block(2))) is BlockFault.FOREIGN
    monkeypatch.setattr(codec, "VERSION", codec.VERSION + 1)
    later = Codec("m").encode(KEY, block(2))
    monkeypatch.undo()
    assert Codec("m").decode(KEY, later) is BlockFault.FOREIGN


def test_what_is_decoded_owns_its_memory() -> None:
    made = block(3)
    data = Codec("m").encode(KEY, made)
    one, two = (Codec("m").decode(KEY, data) for _ in range(2))
    assert isinstance(one, Block)
    one.key.zero_()
    assert same(two, made)


def test_what_cannot_be_stored_is_said() -> None:
    with pytest.raises(ConfigError, match="1 to 1024 bytes"):
        Codec("").encode(KEY, block(2))
    with pytest.raises(ValueError, match="float32, float16, bfloat16, int8 or uint8"):
        Codec("m").encode(KEY, block(2, dtype=torch.float64))
    odd = block(2)
    with pytest.raises(ValueError, match=r"must be \[n, D\]"):
        Codec("m").encode(KEY, Block(odd.key, odd.value[:1], odd.frame, odd.cell))


def test_a_log_that_shows_codec_or_settings_does_not_show_the_secret() -> None:
    settings = TierSettings(fingerprint="m", host_bytes=1, node_bytes=1, secret=b"ours")
    assert "ours" not in repr(Codec("m", b"ours")) + repr(settings)


def test_only_who_has_the_secret_makes_a_block() -> None:
    made = block(2)
    data = Codec("m", b"ours").encode(KEY, made)
    assert same(Codec("m", b"ours").decode(KEY, data), made)
    for other in (b"", b"theirs"):
        forged = Codec("m", other).encode(KEY, made)
        assert Codec("m", b"ours").decode(KEY, forged) is BlockFault.DAMAGED
        assert Codec("m", other).decode(KEY, data) is BlockFault.DAMAGED
        manifest = Codec("m", other).encode_manifest("yard", b"theirs")
        assert Codec("m", b"ours").decode_manifest("yard", manifest) is BlockFault.DAMAGED
    manifest = Codec("m", b"ours").encode_manifest("yard", b"ours")
    assert Codec("m", b"ours").decode_manifest("yard", manifest) == b"ours"


def test_the_digest_is_blake2b_over_name_version_and_content() -> None:
    """Taken apart by hand: magic, version, digest; then what the digest is of."""
    data = Codec("m", b"ours").encode(KEY, block(2))
    name = struct.pack("<qqqI", 3, 1, 17, len("yard")) + b"yard"
    whole = hashlib.blake2b(name + struct.pack("<H", codec.VERSION) + data[22:], digest_size=16, key=b"ours")
    assert data[:22] == b"SLKV" + struct.pack("<H", codec.VERSION) + whole.digest()


def test_manifests_are_protected_alike() -> None:
    data = Codec("m").encode_manifest("yard", b"where all is")
    assert Codec("m").decode_manifest("yard", data) == b"where all is"
    assert Codec("m").decode_manifest("gate", data) is BlockFault.DAMAGED
    assert Codec("m2").decode_manifest("yard", data) is BlockFault.FOREIGN
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Codec("m").decode_manifest("yard", bytes(flipped)) is BlockFault.DAMAGED
    assert all(Codec("m").decode_manifest("yard", data[:n]) is BlockFault.DAMAGED for n in range(len(data)))
    assert Codec("m").decode(KEY, data) is BlockFault.DAMAGED
