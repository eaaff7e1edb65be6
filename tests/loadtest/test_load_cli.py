"""What ``sightline loadtest`` says without a cluster."""

import pytest

from actors.cli import main
from actors.cli.loadtest import _config, _profile, _two_cores
from cluster.config import load_config


def said(capsys) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize("command", ["run", "search"])
def test_commands_explain_themselves_with_an_example(capsys, command) -> None:
    assert main(["loadtest", command, "--help"]) == 0
    assert f"$ sightline loadtest {command} -c" in said(capsys)


def test_profiles_and_faults_are_listed_with_what_they_do(capsys) -> None:
    assert main(["loadtest", "profiles"]) == 0
    assert "aligned The worst case of arrivals" in said(capsys)
    assert main(["loadtest", "faults"]) == 0
    text = said(capsys)
    assert "kill-replica kills the replica with most cameras" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "nothing to test"),
        (["run", "-g", "somewhere"], "'somewhere' is not an address"),
        (["run", "-g", "127.0.0.1:1", "-p", "nothing"], "there is no load profile 'nothing'"),
        (["run", "-g", "127.0.0.1:1", "-f", "kill-replicas"], "did you mean 'kill-replica'"),
        (["run", "-c", "missing.yaml"], "missing.yaml: there is no such configuration file"),
        (["run", "-g", "127.0.0.1:1", "--set", "window.stride_s=99"], "window.stride_s"),
        (["search", "-g", "127.0.0.1:1", "--replicas", "2"], "leave out --gateway"),
    ],
)
def test_wrong_command_lines_end_with_one_sentence(capsys, arguments, message) -> None:
    assert main(["loadtest", *arguments]) == 2
    text = said(capsys)
    assert message in text
    assert text.startswith("error: ")


def test_a_report_that_is_a_folder_is_refused_before_the_load(capsys, tmp_path) -> None:
    assert main(["loadtest", "run", "-g", "127.0.0.1:1", "--out", str(tmp_path)]) == 1
    assert "it is a folder; name a file in it" in said(capsys)


def test_a_test_with_a_cluster_s_own_configuration_leaves_its_sinks_and_what_it_keeps_alone(tmp_path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"""
        questions: [{{id: q, text: "Is it?"}}]
        cameras: [{{name: gate, source: "demo://gate"}}]
        cluster: {{state_dir: {tmp_path}, replicas: 3}}
        alerts: {{folder: {tmp_path}, consecutive: 5, sinks: [{{name: desk, kind: log}}]}}
        clips: {{folder: {tmp_path}, before_s: 3}}
        """
    )
    used = _config(config, None, None)
    assert (used.cameras, used.alerts.sinks) == ([], [])
    assert (used.cluster.state_dir, used.alerts.folder, used.clips.folder) == (None, None, None)
    assert (used.cluster.replicas, used.alerts.consecutive, used.clips.before_s) == (3, 5, 3)


def test_only_the_documented_load_measures_the_figure_of_two_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    usual = load_config(None, {"engine": "simulated", "simulated": {"costs": "demo-cpu"}, "model": {"name": "demo"}})
    assert _two_cores(_profile("dense", streams=100, measure_s=30.0), usual)
    assert not _two_cores(_profile("dense", mix={"quiet": 1.0}), usual)
    window = usual.window.model_copy(update={"stride_s": 40.0})
    assert not _two_cores(_profile("dense"), usual.model_copy(update={"window": window}))
    assert not _two_cores(_profile("dense"), usual.model_copy(update={"engine": "native"}))


def test_a_wrong_cost_model_is_refused_by_name_with_how_to_make_one(capsys, tmp_path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("{engine: simulated, model: {name: demo}, questions: [{id: q, text: 'Is it?'}]}")
    profile = tmp_path / "profile.yaml"
    profile.write_text("{width: 64, height: 64, mix: {quiet: 1}}")
    for setting, message in (
        ("simulated.costs=null", "needs simulated.costs"),
        ("simulated.costs=h1000", "there is no cost model 'h1000'"),
        ("simulated.costs=qwen2.5-vl-7b-h100", "not of 'demo'"),
    ):
        assert main(["loadtest", "run", "-c", str(config), "-p", str(profile), "--set", setting]) == 2
        text = said(capsys)
        assert message in text
        assert "sightline bench cost" in text
