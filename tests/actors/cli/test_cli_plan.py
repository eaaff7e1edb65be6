"""``sightline plan``: tables, files, and how it ends."""

import json

import pytest

from actors.cli import main
from cluster.lab.planning import figures


def test_the_table_names_machine_method_and_length(capsys):
    assert main(["plan", "accelerator", "-p", "vrex8", "-p", "h100", "-m", "resv-dre", "--cache", "20000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ours,) = [line for line in lines if "V-Rex8" in line]
    assert "ReSV + DRE" in ours
    assert "20000" in ours
    assert any("H100 SXM *" in line for line in lines)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_simulated(tmp_path, capsys):
    assert main(["plan", "city", "--gpus", "h100=64", "--json", str(tmp_path)]) == 1
    assert f"error: cannot write {tmp_path}: it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["plan", "accelerator"]], ids=" ".join)
def test_help_explains_it(capsys, command):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: sightline {' '.join(command)}" in text
    assert "accelerator" in text
    assert command == ["plan"] or "$ sightline plan accelerator --check" in text


def test_every_machine_is_there_by_default(capsys):
    assert main(["plan", "accelerator"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("AGX Orin", "A100", "H100", "H200", "V-Rex8", "V-Rex48"))


def test_json_holds_what_the_table_does(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["--platform", "a100", "--method", "rekv", "--batch", "4", "--frame-tokens", "20", "--json", str(out)]
    assert main(["plan", "accelerator", *arguments]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["platform"], row["method"], row["batch"], row["extrapolated"]) == ("a100", "rekv", 4, False)
    assert f"{1000 * row['frame']['latency']:.0f} ms" in capsys.readouterr().out


def test_json_on_standard_output_is_alone_there(capsys):
    assert main(["plan", "accelerator", "-p", "a100", "--json", "-", "--check"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {"where", "paper", "model", "error", "calibrated"} <= set(body["check"][0])
    assert body["mean_error"] < figures.BOUND


def test_check_prints_paper_model_and_error_and_fails_beyond_the_bound(capsys, monkeypatch):
    assert main(["plan", "accelerator", "--check"]) == 0
    text = capsys.readouterr().out
    assert "Fig. 16" in text
    assert "Mean absolute relative error" in text
    monkeypatch.setattr(figures, "BOUND", 0.01)
    assert main(["plan", "accelerator", "--check"]) == 1
    assert "states at most 1 %" in capsys.readouterr().err


def test_out_writes_a_page_whose_charts_are_there(tmp_path, capsys):
    assert main(["plan", "accelerator", "-p", "agx-orin", "-p", "vrex8", "--out", str(tmp_path / "plan")]) == 0
    page = (tmp_path / "plan" / "plan.md").read_text()
    drawn = {path.name for path in (tmp_path / "plan").glob("*.svg")}
    assert len(drawn) == 5
    assert all(f"({name})" in page for name in drawn)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--platform", "agx", "agx-orin"),
        ("--method", "paged", "infinigenp"),
        ("--model", "gpt", "llama3-8b"),
        ("--cache", "0", "at least 1"),
        ("--batch", "-1", "at least 1"),
        ("--frame-tokens", "0", "at least 1"),
    ],
)
def test_a_wrong_name_or_length_ends_with_two_and_says_what_is_right(capsys, option, value, said):
    assert main(["plan", "accelerator", option, value]) == 2
    error = capsys.readouterr().err
    assert value in error
    assert said in error


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["plan", "accelerator", "-p", "a100", "--out", str(tmp_path / "file")]) == 1
    assert "cannot write" in capsys.readouterr().err
