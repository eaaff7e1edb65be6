"""What all benches share: names, tables, JSON, and errors before minutes are spent."""

import json
import math
import re
import runpy
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from cluster.errors import ConfigError, SightlineError
from cluster.files import json_text
from cluster.lab.bench import harness
from cluster.lab.bench.harness import BENCHES, IN_CHECKOUT, BenchResult, load_module, machine, main, run_parts, table


def test_table_aligns_and_shows_missing_values():
    text = table([{"clip": "a", "ratio": 12.3456}, {"clip": "longer", "ratio": None}])
    assert text.splitlines() == ["clip    ratio", "a       12.35", "longer      -"]
    assert table([]) == ""


def test_a_row_of_another_kind_has_columns_of_its_own():
    text = table([{"clip": "a", "ratio": 1}, {"clip": "b", "retriever": "top_k"}])
    assert text.splitlines() == ["clip  ratio  retriever", "a         1          -", "b         -      top_k"]


def test_json_has_figures_rows_and_machine():
    figures = {"front_end_ratio": 0.9, "change_missed": math.nan, "sent_late_s": math.inf}
    text = json_text(BenchResult(figures, [{"clip": "a"}]).as_json("codec"))
    body = json.loads(text)
    assert body["bench"] == "codec"
    assert body["figures"] == {"front_end_ratio": 0.9, "change_missed": None, "sent_late_s": None}
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))
    assert body["rows"] == [{"clip": "a"}]
    assert body["machine"] == machine()
    assert body["machine"]["cores"] >= 1


def test_unknown_bench_is_refused():
    with pytest.raises(ConfigError, match="unknown bench 'windows'; there are: window, codec"):
        main(["windows"])


@pytest.mark.parametrize("name", list(BENCHES))
def test_every_bench_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_told_before_the_bench_runs(tmp_path):
    with pytest.raises(SightlineError, match=r"cannot write .*: it is a folder; name a file in it"):
        main(["window", "--json", str(tmp_path), "--clips", "/no/such/clip.mp4"])


def test_json_on_standard_output_is_alone_there(monkeypatch, tmp_path, capsys):
    def run(_args):
        print("a table of a part")
        return BenchResult({"ratio": 2.0}, [{"clip": "a"}])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        harness, "load_module", lambda name: SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=run)
    )
    assert main(["codec", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["figures"] == {"ratio": 2.0}
    assert "a table of a part" in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [KeyboardInterrupt, None])
def test_the_last_result_stands_until_there_is_a_new_one(tmp_path, monkeypatch, broken):
    path = tmp_path / "results" / "codec.json"
    path.parent.mkdir()
    path.write_text("before")

    def run(_args):
        assert path.read_text() == "before"
        if broken:
            raise broken
        return BenchResult({}, [])

    bench = SimpleNamespace(__doc__="", add_arguments=lambda _parser: None, run=run)
    monkeypatch.setattr(harness, "load_module", lambda _name: bench)
    with pytest.raises(broken) if broken else nullcontext():
        main(["codec", "--json", str(path)])
    assert path.read_text().startswith("before" if broken else "{")
    assert list(path.parent.iterdir()) == [path]


def test_test_tools_need_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "SUPPORT", tmp_path / "support")
    for name in IN_CHECKOUT:
        with pytest.raises(ConfigError, match=f"{name} needs a checkout of Sightline's source"):
            load_module(name)
    assert load_module("codec").run


def test_a_part_that_fails_costs_the_others_nothing():
    def fails() -> BenchResult:
        raise ConfigError("redis-server is needed")

    found = run_parts({"kill": fails, "step": lambda: BenchResult({"ratio": 1.0}, [{"steps": 2}])}, {})
    assert found.figures == {"parts_failed": 1.0, "ratio": 1.0}
    assert found.rows[0] == {"part": "kill", "failed": "kill", "why": "ConfigError: redis-server is needed"}
    assert [row["met"] for row in found.goals] == ["no", None]
    with pytest.raises(ConfigError, match="redis-server"):
        run_parts({"kill": fails}, {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["batch", "--windows", "0"],
        ["window", "--windows", "0"],
        ["window", "--policies", "newest"],
        ["scheduler", "--streams", "0"],
        ["scheduler", "--replicas", "0"],
        ["ingest", "--packets", "0"],
        ["streams", "--size", "640"],
        ["streams", "--size", "0x360"],
    ],
)
def test_options_that_leave_nothing_to_measure_are_refused_at_once(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"argument {arguments[1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["cost", "--rounds", "2", "--windows", "5"],
            "a fit needs at least 8 timed steps, and 2 rounds of 5 leave 5",
        ),
        (["gpu", "--dry-run", "--shape", "none-such", "--layers", "1"], "--layers must be at least 2 with --dry-run"),
    ],
)
def test_too_few_of_what_is_compared_are_refused_before_anything_is_measured(arguments, why):
    with pytest.raises(ConfigError, match=why):
        main([*arguments, *(["--model", "none-such"] if arguments[0] == "cost" else [])])


@pytest.mark.parametrize(
    ("raised", "said", "code"),
    [
        (ConfigError("no such clip"), "error: no such clip\n", 2),
        (ModuleNotFoundError("No module named 'redis'", name="redis"), "error: this needs redis, which is not", 2),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_a_bench_without_the_cli_ends_as_with_it(monkeypatch, capsys, raised, said, code):
    monkeypatch.setattr(harness, "main", Mock(side_effect=raised))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("cluster.lab.bench", run_name="__main__")
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", ["cost", "memory"])
def test_a_place_for_results_that_cannot_be_written_is_refused_before_anything_is_measured(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SightlineError, match="cannot write"):
        main([name, "--model", "none-such", "--out", str(tmp_path / "file" / "results")])
