"""The console's bench, on a small wall: figures and what they are made of."""

import console_bench as console
import pytest

from cluster.errors import ConfigError
from cluster.lab.bench.harness import main


def test_it_times_the_wall_and_weighs_a_page_that_stays_open(chromium, monkeypatch):
    # One browser for all tests.
    monkeypatch.setattr(console, "SETTLE_S", 1.5)
    with console.gateway(30, 0.2) as url:
        load = console.first_paint(chromium, url)
        held = console.stay_open(chromium, url, 1.0)
    assert 0 < load["contentful_s"] <= load["wall_s"]
    assert held["cameras"] == 30
    assert held["behind"] == 0
    assert held["changes"] > 30
    assert held["heap_begin_mib"] > 0.5
    assert 100 < held["nodes_end"] < 5000


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        main(["console", "--cameras", "0"])
    with pytest.raises(ConfigError, match="needs Chromium"):
        main(["console", "--browser", "no-such-browser"])
