"""The streams bench at its smallest: real processes, costs of every part, nothing lost, no process left behind."""

import argparse

import psutil
import pytest

from cluster.errors import SightlineError
from cluster.lab.bench import streams


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    streams.add_arguments(parser)
    return parser.parse_args(given)


def test_it_tells_what_every_process_takes_and_leaves_nothing_running() -> None:
    given = ("--cameras", "2", "--seconds", "2", "--warmup", "3", "--size", "160x96", "--gather", "0.1")
    result = streams.run(arguments(*given))
    assert set(result.figures) == {"stream_ms", "decoder_ms", "gateway_ms", "replica_ms", "generator_ms"}
    assert result.figures["stream_ms"] == pytest.approx(
        sum(result.figures[f"{process}_ms"] for process in streams.CHAIN)
    )
    assert all(figure > 0 for figure in result.figures.values())
    parts = {(row["process"], row["part"]): row["ms"] for row in result.rows}
    assert 0 < parts["decoder", "inside: decode"] < parts["decoder", "thread camera"]
    assert parts["replica", "thread engine"] > 0
    assert "windows answered" in result.notes[1]
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "push_processes" in command]


def test_nothing_decoded_is_no_cost() -> None:
    look = {"user_s": 1.0, "system_s": 0.0, "faults": 0, "switches": 0, "threads": {}, "pictures": 7}
    looks = dict.fromkeys((*streams.CHAIN, "generator"), look)
    with pytest.raises(SightlineError, match="increase --seconds"):
        streams._result(arguments(), looks, looks)


def test_frames_that_were_lost_on_the_way_are_no_cheap_ones() -> None:
    before = {"user_s": 1.0, "system_s": 0.0, "faults": 0, "switches": 0, "threads": {}, "pictures": 7, "windows": 1}
    after = before | {"user_s": 2.0, "pictures": 107}
    looks = [dict.fromkeys((*streams.CHAIN, "generator"), look | {"lost": 0}) for look in (before, after)]
    assert streams._result(arguments(), *looks).figures["stream_ms"] == 150
    looks[1] = looks[1] | {"replica": after | {"lost": 40}}
    with pytest.raises(SightlineError, match="40 frames or windows were lost"):
        streams._result(arguments(), *looks)
