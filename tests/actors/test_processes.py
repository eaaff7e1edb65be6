"""What a change of the configuration restarts: the processes that read it, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.processes import processes
from cluster.config import load_config
from cluster.config.sources import file_roots
from cluster.hosts import is_below
from cluster.redaction import SourceAddress

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


def test_decoders_may_open_the_files_of_the_configuration(tmp_path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.touch()
    config = load_config(None, BASE | {"cameras": [{"name": "gate", "source": str(clip)}]})
    [given] = [each.arguments[0] for each in processes(config, "run", None) if each.name == "decoder-0"]
    assert given.cameras == []
    roots = file_roots(given, SourceAddress(str(clip)))
    assert is_below(clip, roots)
    assert is_below(Path("here.mp4"), roots)
    assert not is_below(tmp_path / "another.mp4", roots)
