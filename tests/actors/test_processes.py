"""What a change of the configuration restarts: the processes that read it, and no other."""

from __future__ import annotations

import pytest

from actors.processes import processes
from cluster.config import load_config

BASE = {
    "model": {"name": "tiny-qwen2_5_vl"},
    "questions": [{"id": "person", "text": "Is there a person?"}],
    "kubernetes": {"enabled": True},
}
DECODERS = {"decoder-0", "decoder-1"}
ALL = {"controller", "gateway", "alerting", "reconciler", *DECODERS}


def digests(**changes) -> dict[str, str]:
    return {each.name: each.digest for each in processes(load_config(None, BASE | changes), "run", None)}


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({}, set()),
        ({"questions": [{"id": "car", "text": "Is there a car?"}]}, {"controller"}),
        ({"cameras": [{"name": "gate"}]}, {"controller"}),
        ({"window": {"stride_s": 4}}, {"controller"}),
        ({"alerts": {"cooldown_s": 5}}, {"alerting"}),
        ({"clips": {"after_s": 5}}, {"alerting", *DECODERS}),
        ({"gateway": {"credit": 8}}, {"gateway", *DECODERS}),
        ({"cluster": {"replicas": 2}}, {"controller"}),
        ({"kubernetes": {"enabled": True, "resync_s": 5}}, {"reconciler"}),
        ({"security": {"calls_per_s": 5}}, ALL),
        ({"model": {"name": "tiny-internvl3"}}, ALL),
    ],
)
def test_a_change_restarts_what_reads_it(changes, restarted) -> None:
    before, after = digests(), digests(**changes)
    assert {name for name in before if before[name] != after[name]} == restarted


def test_more_decoders_restart_none() -> None:
    before, after = digests(), digests(cluster={"decoders": 3})
    assert after.keys() - before.keys() == {"decoder-2"}
    assert {name for name in before if before[name] != after[name]} == {"controller"}
