"""What the command line says and how it ends, without a cluster."""

import contextlib
import json
import re
import subprocess
import sys

import pytest
from chart_parts import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cli import configuration, doctor, serve
from actors.cli.app import command
from actors.cli.options import parse_questions, parse_settings
from actors.cli.output import plural, print_json
from cluster.config import load_config
from cluster.errors import ConfigError, SightlineError
from cluster.files import check_writable
from cluster.lab.scenes.street_clips import make_clip
from cluster.redaction import redact

COMMANDS = [
    ["demo"],
    ["serve"],
    ["cameras"],
    ["cameras", "add"],
    ["cameras", "list"],
    ["cameras", "remove"],
    ["cameras", "update"],
    ["cameras", "apply"],
    ["cameras", "export"],
    ["replicas"],
    ["replicas", "list"],
    ["replicas", "drain"],
    ["watch"],
    ["ask"],
    ["memory"],
    ["forget"],
    ["push"],
    ["scenes"],
    ["scenes", "make"],
    ["scenes", "show"],
    ["eval"],
    ["eval", "accuracy"],
    ["eval", "memory"],
    ["eval", "calibrate"],
    ["train"],
    ["train", "demo-model"],
    ["plan"],
    ["plan", "accelerator"],
    ["config"],
    ["config", "check"],
    ["config", "schema"],
    ["config", "crd"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(cli, command):
    done = cli(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: sightline {' '.join(command)}" in done.stdout
    groups = (["cameras"], ["replicas"], ["scenes"], ["eval"], ["train"], ["plan"], ["config"])
    assert f"$ sightline {' '.join(command)}" in done.stdout or command in groups


def test_the_overview_names_every_command_and_the_exit_codes(cli):
    done = cli("--help")
    names = "demo serve cameras replicas watch ask memory forget push scenes eval train bench plan config doctor"
    for name in names.split():
        assert f"│ {name} " in done.stdout
    for code in ("0 success", "1 failure", "2 invalid command line or configuration", "130 interrupted with Ctrl-C"):
        assert code in " ".join(done.stdout.split())


def test_configurations_of_examples_need_no_password(monkeypatch):
    monkeypatch.delenv("CAMERA_PASSWORD", raising=False)
    for each in (serve.serve, configuration.check, doctor.doctor):
        for path in re.findall(r"configs/[\w.]+", each.__doc__):
            load_config(ROOT / path)


def test_help_loads_neither_torch_nor_ray_nor_grpc():
    code = (
        "import sys; from actors.cli import main; main(['--help']); main(['demo', '--help'])\n"
        "print('LOADED', {'torch', 'ray', 'grpc', 'av', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED set()"


# Command line -> exit code and what the one line on standard error must hold.
WRONG = {
    "no such command": (["srve"], 2, "No such command 'srve'. Did you mean 'serve'?"),
    "missing argument": (["push", "--gateway", "a:1", "--camera", "x"], 2, "Missing argument 'SOURCE'"),
    "nothing to ask of all": (["ask", "--all"], 2, "no question; add one, as in: sightline ask --all"),
    "nobody to ask": (["ask"], 2, "no camera; name one, as in: sightline ask gate"),
    "missing option": (["serve"], 2, "Missing option '--config'"),
    "not a number": (["demo", "--seconds", "soon"], 2, "Invalid value for '--seconds'"),
    "no such configuration": (["serve", "-c", "city.yaml"], 2, "city.yaml: there is no such configuration file"),
    "unknown key": (["serve", "-c", "wrong.yaml"], 2, "wrong.yaml:1: windw: unknown key; did you mean 'window'?"),
    "wrong setting": (
        ["serve", "-c", "right.yaml", "--set", "window.stride_s=99"],
        2,
        "window.stride_s: must not exceed",
    ),
    "no value": (["serve", "-c", "right.yaml", "--set", "window"], 2, "--set 'window' is not KEY=VALUE"),
    "missing model": (
        ["serve", "-c", "right.yaml", "--set", "model.name=no/such/model"],
        2,
        "no model 'no/such/model'",
    ),
    "a shape without weights": (
        ["serve", "-c", "right.yaml", "--set", "model.name=qwen2_5_vl-7b"],
        2,
        "'qwen2_5_vl-7b' is a shape without weights, for `models show` and benchmarks; name the checkpoint, "
        "Qwen/Qwen2.5-VL-7B-Instruct, or its folder",
    ),
    "unknown model in the demo": (["demo", "--model", "tiny-qwen"], 2, "there is no model 'tiny-qwen'; name a"),
    "unknown engine in the demo": (["demo", "--engine", "vlm"], 2, "engine: must be 'native'"),
    "an engine that is not installed": (["demo", "--engine", "vllm"], 2, "vLLM, which is not installed here"),
    "unwritable report": (["demo", "--out", "right.yaml/out"], 1, "cannot write right.yaml/out"),
    "nobody there": (["cameras", "list", "-g", "127.0.0.1:1"], 1, "no Sightline gateway answers at 127.0.0.1:1"),
    "nobody to watch": (["watch", "-g", "127.0.0.1:1"], 1, "no Sightline gateway answers at 127.0.0.1:1"),
    "not an address": (["cameras", "list", "-g", "nowhere"], 2, "'nowhere' is not an address; write HOST:PORT"),
    "empty question": (["cameras", "add", "x", "-q", " "], 2, "question 1 is empty"),
    "wrong camera key": (
        ["cameras", "add", "x", "--set", "windw.stride_s=1"],
        2,
        "windw: unknown key; did you mean 'window'",
    ),
    "nothing to push": (["push", "no.mp4", "--gateway", "127.0.0.1:1", "--camera", "x"], 1, "no.mp4 does not exist"),
    "nowhere to push": (
        ["push", "right.yaml", "--gateway", "nowhere", "--camera", "x"],
        2,
        "'nowhere' is not an address",
    ),
    "a camera has its pace": (
        ["push", "rtsp://127.0.0.1:1/x", "--gateway", "127.0.0.1:1", "--camera", "x", "--loop"],
        2,
        "--loop, --realtime and --speed are for files",
    ),
    "no password": (
        ["cameras", "discover", "10.0.0.0/24", "--user", "viewer"],
        2,
        "no terminal to ask for the password of 'viewer'; set CAMERA_PASSWORD",
    ),
    "unknown bench": (["bench", "speed"], 2, "unknown bench 'speed'; there are: window, codec"),
}


def options(of):
    for each in getattr(of, "commands", {}).values():
        yield from options(each)
    yield from of.params


def test_an_option_has_one_meaning_in_all_commands():
    """-n is a number, -c a configuration; a gateway is named with --gateway wherever one is."""
    found = {}
    for each in options(command()):
        for flag in each.opts:
            found.setdefault(flag, []).append(each)
    assert {each.type_descriptor.annotation for each in found["-n"]} == {int}
    assert len(found["-c"]) >= 4
    assert {each.name for each in found["-c"]} == {"config"}
    assert found["-c"] == found["--config"]
    assert "--to" not in found


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_goes_wrong_is_one_line_and_a_code(cli, arguments, code, message):
    (cli.folder / "wrong.yaml").write_text("windw: {}\n")
    (cli.folder / "right.yaml").write_text("questions: [{id: q, text: t}]\ncameras: [{name: a}]\n")
    done = cli(*arguments)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert cli.orphans() == []


def test_the_port_of_another_program_is_named_before_anything_starts(cli):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (cli.folder / "c.yaml").write_text(
            f"model: {{name: tiny-qwen2_5_vl}}\ngateway: {{port: {port}, http_port: 0}}\n"
        )
        done = cli("serve", "-c", "c.yaml")
    assert done.returncode == 2
    assert (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another gateway.port" in done.stderr
    )
    assert "starting ray" not in done.stdout


def test_a_file_for_addresses_is_tried_before_anything_starts_and_keeps_none_of_before(cli):
    import socket

    (cli.folder / "c.yaml").write_text("model: {name: tiny-qwen2_5_vl}\ngateway: {port: 1, http_port: 0}\n")
    done = cli("serve", "-c", "c.yaml", "--json", cli.folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "it is a folder; name a file in it" in done.stderr
    before = cli.folder / "addresses.json"
    before.write_text('{"gateway": "127.0.0.1:50051"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli("serve", "-c", "c.yaml", "--set", f"gateway.port={port}", "--json", before).returncode == 2
    assert not before.exists()


def test_an_end_that_is_asked_for_while_the_libraries_load_is_no_failure(cli, monkeypatch):
    import signal

    (cli.folder / "c.yaml").write_text("model: {name: tiny-qwen2_5_vl}\n")
    monkeypatch.setattr("actors.runtime.Cluster", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("sys.unraisablehook", None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert cli("serve", "-c", "c.yaml").returncode in (None, 0)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_ctrl_c_while_nobody_answers(cli, wait_for):
    make_clip("street", cli.folder / "street.mp4", seconds=1, fps=10, size=(64, 64))
    process, log = cli.start("push", "street.mp4", "--gateway", "127.0.0.1:1", "--camera", "x", "--realtime", "--loop")
    wait_for(lambda: "backoff" in log.read_text())
    assert cli.interrupt(process) == 130
    assert "Traceback" not in log.read_text()


def test_a_bench_gets_its_options_untouched(cli):
    listing = cli("bench")
    assert listing.returncode == 0
    assert "usage: sightline bench NAME" in listing.stdout
    own = cli("bench", "window", "--help")
    assert own.returncode == 0
    assert "usage: sightline bench window" in own.stdout
    assert "--json FILE" in own.stdout
    wrong = cli("bench", "window", "--no-such-option")
    assert wrong.returncode == 2
    assert "unrecognized arguments: --no-such-option" in wrong.stderr


def test_config_check_lists_every_problem(cli):
    (cli.folder / "c.yaml").write_text("sampling: {fps: 0}\nmodel: {seed: -1}\n")
    done = cli("config", "check", "-c", "c.yaml", "--json", "out/problems.json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    report = json.loads((cli.folder / "out" / "problems.json").read_text())
    assert not report["ok"]
    assert {(p["key"], p["line"]) for p in report["problems"]} == {("sampling.fps", 1), ("model.seed", 2)}
    (cli.folder / "c.yaml").write_text("questions: [{id: q, text: t}]\ncameras: [{name: a}, {name: b}]\n")
    done = cli("config", "check", "-c", "c.yaml")
    assert (done.returncode, done.stdout) == (0, "c.yaml: ok, 2 cameras, 2 questions in all\n")
    (cli.folder / "d.yaml").write_text("questions: [{id: q, text: t}]\n")
    assert cli("config", "check", "-c", "d.yaml").stdout == "d.yaml: ok, 0 cameras, 1 question in all\n"
    assert json.loads(cli("config", "check", "-c", "c.yaml", "--json", "-").stdout)["ok"]


def test_the_schema_is_json(cli):
    assert json.loads(cli("config", "schema").stdout)["title"] == "Sightline configuration"


def test_versions(cli):
    assert cli("--version").stdout.startswith("sightline ")


def test_help_is_made_of_paragraphs_and_options_without_values_have_none(cli):
    text = cli("serve", "--help", COLUMNS="100").stdout
    assert "the Ray cluster at cluster.ray_address" in " ".join(text.split())
    assert max(map(len, map(str.rstrip, text.splitlines()))) <= 100
    # Broken where the source breaks, lines of a paragraph would be much shorter now and then.
    start = text.index("Starts the gateway")
    paragraph = text[start : text.index("$ sightline serve")].strip().splitlines()
    assert all(len(line.strip()) > 70 for line in paragraph[:-1])
    assert "<bool>" not in cli("incidents", "list", "--help").stdout


def test_shells_complete_commands_and_options(cli):
    for words, found in (("sightline camer", "cameras"), ("sightline cameras list --ga", "--gateway")):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_SIGHTLINE_COMPLETE": "complete_bash"}
        assert cli(**asked).stdout.split() == [found]


# Output of our own, of rich, and of typer.
PRINTED = (["config", "schema"], ["loadtest", "profiles"], ["--help"])


def test_a_reader_that_has_seen_enough_is_no_error(cli):
    commands = [f"{' '.join(cli.command(each))} | true; echo ${{PIPESTATUS[0]}}" for each in PRINTED]
    done = subprocess.run(
        ["bash", "-c", "\n".join(commands)], capture_output=True, text=True, timeout=90, env=cli.environment
    )
    assert done.stdout.split() == ["0"] * len(PRINTED)
    assert done.stderr == ""


def test_a_locale_without_the_letters_of_a_name_is_no_error(cli):
    cli("tokens", "create", "門衛", "--role", "view", "--file", "t.json")
    cli.environment["PYTHONIOENCODING"] = "latin-1"
    done = cli.process("tokens", "list", "--file", "t.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u9580" in done.stdout


@pytest.mark.parametrize("command", PRINTED, ids=" ".join)
def test_a_full_disk_under_standard_output_is_one_line(cli, command):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            cli.command(command), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=cli.environment
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write: No space left on device; free some space, or choose another path\n"


# -- options ------------------------------------------------------------------------------------


def test_settings_nest_and_take_yaml_values():
    tree = parse_settings(
        ["window.stride_s=4", "window.length_s=8.5", "model.name=x", "source.loop=true", "a.b=[1, 2]"]
    )
    assert tree == {
        "window": {"stride_s": 4, "length_s": 8.5},
        "model": {"name": "x"},
        "source": {"loop": True},
        "a": {"b": [1, 2]},
    }
    for wrong in ("window", "=3", "a..b=3", "a=[1"):
        with pytest.raises(ConfigError):
            parse_settings([wrong])


def test_questions_may_have_an_id_and_a_threshold():
    assert parse_questions(["Is anyone there?", "car=A car?", "fire@0.8=Is 2+2=4?"]) == [
        {"id": "q1", "text": "Is anyone there?"},
        {"id": "car", "text": "A car?"},
        {"id": "fire", "text": "Is 2+2=4?", "threshold": 0.8},
    ]
    assert parse_questions(["fire@1e-3=x"]) == [{"id": "fire", "text": "x", "threshold": 0.001}]
    for wrong in ("1.2.3", "0,8", "80%", ""):
        with pytest.raises(ConfigError, match=f"the threshold '{wrong}' is not a number"):
            parse_questions([f"fire@{wrong}=Is it burning?"])


@settings(deadline=None)
@given(st.text(min_size=1).filter(lambda text: text.strip()))
def test_any_text_is_a_question(text):
    with contextlib.suppress(ConfigError):  # ID@THRESHOLD=TEXT with a threshold that is no number
        (question,) = parse_questions([text])
        assert question["text"]
        assert question["text"] in text


def test_passwords_are_not_shown():
    assert redact("rtsp://viewer:hunter2@10.0.0.1/a") == "rtsp://viewer:***@10.0.0.1/a"
    assert redact("cannot open rtsp://viewer:hun:ter2@cam/a: refused") == "cannot open rtsp://viewer:***@cam/a: refused"
    assert redact("rtsp://10.0.0.1:554/a@b") == "rtsp://10.0.0.1:554/a@b"


def test_a_full_or_forbidden_disk_is_one_sentence(tmp_path):
    with pytest.raises(SightlineError, match="cannot write /dev/full: No space left on device; choose another path"):
        print_json("/dev/full", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(SightlineError, match=r"cannot write .*file/deeper: "):
        check_writable(tmp_path / "file" / "deeper")
    # A link is as /dev/stdout of a shell's `> file`: it stays, and its file is written.
    (tmp_path / "link").symlink_to("linked.json")
    print_json(str(tmp_path / "link"), {})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "linked.json").read_text() == "{}\n"
    check_writable(tmp_path / "new" / "deeper")
    assert list((tmp_path / "new" / "deeper").iterdir()) == []


def test_small_words():
    assert (plural(1, "camera"), plural(2, "camera"), plural(0, "camera")) == ("1 camera", "2 cameras", "0 cameras")
