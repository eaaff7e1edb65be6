"""The bench of questions to all cameras, small: every camera answers, and its figures are times."""

import argparse

import fleet_bench
import pytest

from cluster.errors import ConfigError


def arguments(*given):
    parser = argparse.ArgumentParser()
    fleet_bench.add_arguments(parser)
    return parser.parse_args(given)


def test_every_camera_answers_and_the_first_before_the_last():
    args = arguments("--cameras", "3", "--frames", "16", "--model", "tiny-qwen2_5_vl", "--only", "ask_all")
    figures = fleet_bench.run(args).figures
    assert figures["ask_all_unanswered"] == 0
    assert 0 < figures["ask_all_s"] < figures["ask_all_whole_s"]


@pytest.mark.parametrize("given", [("--cameras", "0"), ("--frames", "3"), ("--seconds", "0")])
def test_nothing_to_measure_is_said(given):
    with pytest.raises(ConfigError, match="must be at least 1"):
        fleet_bench.run(arguments(*given))
