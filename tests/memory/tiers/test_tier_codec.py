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
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def block(count: int, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> Block:
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, count, width, generator=rng).to(dtype)
    frame, cell = torch.randint(0, 10_000, (2, count), generator=rng, dtype=torch.int32)
    return Block(key, value, frame, cell)


def same(left: Block | None, right: Block) -> bool:
    if left is None:
        return False
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(right)]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@given(count=st.integers(0, 9), width=st.integers(1, 9), seed=st.integers(0, 9))
def test_plain_comes_back_bit_for_bit(dtype: torch.dtype, count: int, width: int, seed: int) -> None:
    made = block(count, width, dtype, seed)
    assert same(open_block(encode_block(KEY, made, fingerprint="m"), KEY, fingerprint="m"), made)


@pytest.mark.parametrize("dtype", DTYPES)
@given(count=st.integers(0, 9), width=st.integers(1, 9), seed=st.integers(0, 9))
def test_int8_is_off_by_half_a_step_of_its_channel(dtype: torch.dtype, count: int, width: int, seed: int) -> None:
    made = block(count, width, dtype, seed)
    back = open_block(encode_block(KEY, made, fingerprint="m", store_as="int8"), KEY, fingerprint="m")
    assert isinstance(back, Block)
    assert torch.equal(back.frame, made.frame)
    assert torch.equal(back.cell, made.cell)
    for was, now in ((made.key, back.key), (made.value, back.value)):
        assert now.dtype == dtype
        if count:
            most = was.float().abs().amax(0)
            # Half a step, and what the type itself rounds away.
            assert bool(((now.float() - was.float()).abs() <= most / 254 + most * torch.finfo(dtype).eps).all())


def error(made: Block) -> float:
    """Relative RMS error of the keys' ``int8`` storage."""
    back = open_block(encode_block(KEY, made, fingerprint="m", store_as="int8"), KEY, fingerprint="m")
    assert isinstance(back, Block)
    return float((back.key - made.key).norm() / made.key.norm())


def test_int8_by_hand_and_its_error() -> None:
    # Column steps 1 and 0.1: 127 and 0.1 are whole steps, 63.4 is not.
    key = torch.tensor([[127.0, 12.7], [63.4, 0.1]])
    made = Block(key, torch.zeros(2, 2), *torch.zeros(2, 2, dtype=torch.int32))
    back = open_block(encode_block(KEY, made, fingerprint="m", store_as="int8"), KEY, fingerprint="m")
    assert isinstance(back, Block)
    torch.testing.assert_close(back.key, torch.tensor([[127.0, 12.7], [63.0, 0.1]]))
    assert not back.value.any()
    assert error(made) == pytest.approx(0.4 / (127**2 + 12.7**2 + 63.4**2 + 0.1**2) ** 0.5, rel=1e-3)
    # A normal channel of 64 members reaches about 2.4 deviations: steps of 0.019, an error of step / sqrt(12).
    assert 0.003 < error(block(64, 64)) < 0.008


def test_int8_is_about_half_of_fp16_and_leaves_what_is_not_finite_alone() -> None:
    made = block(64, 64, torch.float16)
    plain, small = (len(encode_block(KEY, made, fingerprint="m", store_as=form)) for form in ("plain", "int8"))
    assert small < 0.6 * plain
    made.key[0, 0] = torch.inf
    assert same(open_block(encode_block(KEY, made, fingerprint="m", store_as="int8"), KEY, fingerprint="m"), made)


@pytest.mark.parametrize("form", ["plain", "int8"])
def test_any_flipped_bit_and_any_cut_is_damage(form: str) -> None:
    data = encode_block(KEY, block(2, 3), fingerprint="m", store_as=form)
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
    with pytest.raises(ConfigError, match="'int4'; there are: plain, int8"):
        encode_block(KEY, block(2), fingerprint="m", store_as="int4")
    with pytest.raises(ConfigError, match="1 to 1024 bytes"):
        encode_block(KEY, block(2), fingerprint="")
    with pytest.raises(ValueError, match="float32, float16, bfloat16 or uint8"):
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
