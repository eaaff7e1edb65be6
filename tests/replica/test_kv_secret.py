"""The secret over what cameras remember: where it comes from, and that a tier of the cluster keeps to it."""

import asyncio
from pathlib import Path

import pytest

from actors import tier as actor
from actors.preflight import check_settings
from cluster.config import load_config
from cluster.config.secrets import memory_secret
from cluster.config.security import SecurityConfig
from cluster.errors import ConfigError, UnavailableError
from cluster.memory.tiers.base import BlockKey, Outcome
from cluster.memory.tiers.remote import RemoteTier
from cluster.replica.memory import tier_stack

HIT, MISS, RETRY = Outcome.HIT, Outcome.MISS, Outcome.RETRY
MARK = "a model"


def config(**more: object) -> SecurityConfig:
    return SecurityConfig.model_validate(more)


def test_no_file_is_no_secret() -> None:
    assert memory_secret(config()) == b""


def test_white_space_around_it_does_not_count(tmp_path: Path) -> None:
    for name, text in {"one": b"0123456789abcdef", "two": b"0123456789abcdef\n", "other": b"0123456789abcdeg"}.items():
        (tmp_path / name).write_bytes(text)
    one, two, other = (memory_secret(config(memory_key_file=str(tmp_path / n))) for n in ("one", "two", "other"))
    assert len(one) == 32
    assert one == two != other
    assert b"0123" not in one


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read: No such file"), (b"", "holds 0 bytes"), (b"short\n" * 2, "holds 11 bytes")],
)
def test_a_file_that_is_no_secret_is_refused_before_anything_starts(
    tmp_path: Path, text: bytes | None, said: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        check_settings(load_config(None, {"security": {"memory_key_file": str(path)}}))


async def test_a_tier_of_the_cluster_takes_only_what_its_replicas_sealed_and_keeps_to_its_caps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray: the class that Ray makes an actor of, and the stack of a replica of the same configuration."""
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    path = tmp_path / "key"
    path.write_text("a secret of the cluster\n")
    settings = load_config(
        None,
        {
            "tiers": {"node_bytes": "64MiB", "camera_bytes": "1MiB", "deadline_s": 20},
            "memory": {"cap": "1MiB"},
            "security": {"memory_key_file": str(path)},
        },
    )
    node = actor.TierNode(settings, "tier-a", "127.0.0.1")
    address = await node.open(MARK)

    def work() -> None:
        stack = tier_stack(settings, MARK, address)
        # No camera is taken with a larger cap than the configuration allows; a client that asks for one is not heard.
        stack.set_cap("gate", 2**40)
        assert stack.lowest.limit == 2**20
        assert stack.lowest.put_manifest("gate", b"ours") is HIT
        assert stack.lowest.put_manifest("gate", bytes(2**20)) is MISS
        thief = RemoteTier(address, fingerprint=MARK, deadline_s=20.0)
        assert thief.put_manifest("gate", b"theirs") is RETRY
        assert thief.manifest("gate") == (MISS, None)
        assert stack.lowest.manifest("gate") == (HIT, b"ours")
        assert stack.lowest.load([BlockKey("gate", 0, 0, 0)])[0].outcome is MISS
        thief.close()
        stack.close()

    try:
        await asyncio.to_thread(work)
    finally:
        await node.stop()


async def test_a_replica_that_looks_for_its_tier_takes_nothing_from_a_newer_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    node = actor.TierNode(load_config(None, {"tiers": {"node_bytes": "64MiB"}}), "tier-a", "127.0.0.1")
    try:
        # Started anew: whoever finds it first opens it.
        address = await node.open("old", replace=False)
        assert await node.open("old", replace=False) == await node.open("old") == address
        newer = await node.open("new")
        assert newer != address
        with pytest.raises(UnavailableError, match="another model"):
            await node.open("old", replace=False)
        assert await node.open("new", replace=False) == newer
    finally:
        await node.stop()
