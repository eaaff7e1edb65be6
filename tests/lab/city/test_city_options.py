"""What the command line says of a city, and what it answers."""

import json

import pytest

from actors.cli import main
from cluster.control.ladder import default
from cluster.errors import ConfigError
from cluster.lab.city.plan import FULL
from cluster.lab.city.result import Objective
from cluster.lab.city.study import parse_ladder, parse_objective, parse_pools


def test_pools_are_kinds_with_numbers():
    pools, counted = parse_pools(["h100=64", "a100=8,h200=2"])
    assert [(pool.kind, pool.replicas) for pool in pools] == [("h100", 64), ("a100", 8), ("h200", 2)]
    assert counted
    pools, counted = parse_pools(["h100"])
    assert not counted
    assert "H100" in pools[0].costs.device


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["h100", "a100=2"], "KIND=N for each"),
        (["h100="], "no number"),
        (["h100=0"], "at least 1"),
        (["h100=-2"], "at least 1"),
        (["h100=1", "h100=2"], "twice"),
        (["tpu=4"], "there are: a100, h100, h200"),
        ([""], "KIND=N"),
        (["missing.json=2"], "no cost model 'missing.json'"),
    ],
)
def test_what_is_no_pool_is_refused(texts, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_pools(texts)


def test_an_objective_changes_what_it_names():
    assert parse_objective("") == Objective()
    assert parse_objective("quality=0.9, on_time=0.95") == Objective(on_time=0.95, quality=0.9)
    for text in ("quality=2", "speed=0.5", "quality"):
        with pytest.raises(ConfigError, match="names are: on_time, answered, quality"):
            parse_objective(text)


def test_a_ladder_is_the_default_none_or_a_file(tmp_path):
    assert parse_ladder("default") == default()
    assert parse_ladder("none") == FULL
    default().save(tmp_path)
    assert parse_ladder(str(tmp_path)) == default()
    with pytest.raises(ConfigError, match="no ladder"):
        parse_ladder(str(tmp_path / "none.json"))


def test_a_city_is_simulated_shown_and_written(tmp_path, capsys):
    data, html = tmp_path / "city.json", tmp_path / "city.html"
    words = "plan city -n 60 -g h100=1 --hours 0.05 --warmup 60 --price 2.5 --mix night --event 100:wake:1"
    assert main([*words.split(), "--json", str(data), "--out", str(html)]) == 0
    shown = capsys.readouterr().out
    assert "1 h100 meet the objective for 60 cameras" in shown
    assert "2.50 an hour" in shown
    body = json.loads(data.read_text())
    assert body["balance"]["missing"] == 0
    assert body["cost_per_hour"] == 2.5
    assert body["figures"]["simulate_s"] > 0
    page = html.read_text()
    assert page.count("<svg") >= 3
    assert "computed, not measured" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("plan city -g h100", "give the number of cameras"),
        ("plan city -n 5 -g h100=1 --hours 0", "--hours must be"),
        ("plan city -n 5 -g h100=1 --hours 0.01", "warm-up"),
        ("plan city -n 5 -g h100=1 --start nan", "time of day"),
        ("plan city -n 5 -g h100=1 --event 60:kil:1", "WHAT is one of"),
        ("plan city -g h100=2 --event 60:kill:1", "events need a number of cameras"),
        ("plan city --against nowhere.json --out city.html", "leave out"),
        ("plan city --against nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, complaint, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.startswith("error: ")
