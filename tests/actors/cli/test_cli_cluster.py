"""The commands against a real cluster, and the demo from start to end."""

import json
import re
import signal
import urllib.request

import psutil
import pytest

from cluster.lab.scenes.street_clips import make_clip

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NOBODY = "rtsp://127.0.0.1:9/stream1"
CONFIG = """
model: {name: tiny-qwen2_5_vl}
window: {length_s: 4, stride_s: 2}
sampling: {anchor_interval_s: 4}
gateway: {port: 0, http_port: 0}
cluster: {decoders: 1}
questions: [{id: person, text: "Is anyone there?"}]
cameras:
  - {name: street, source: street.mp4, source_options: {loop: true, realtime: true}}
  - name: depot
"""


def without_model(config):
    """For what begins and ends the same without one: it starts in two thirds of the time."""
    simulated = "{name: demo}\nengine: simulated\nsimulated: {costs: demo-cpu}"
    return config.replace("{name: tiny-qwen2_5_vl}", simulated) + "memory: {enabled: false}\ntiers: {node: false}\n"


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def test_a_cluster_from_the_command_line(cli, wait_for):
    make_clip("street", cli.folder / "street.mp4", seconds=8, fps=10, size=(256, 144))
    (cli.folder / "c.yaml").write_text(CONFIG)
    process, log = cli.start("serve", "-c", "c.yaml", "--json", "addresses.json")
    addresses = wait_for(lambda: read_json(cli.folder / "addresses.json") or process.poll() is not None)
    assert addresses is not True, log.read_text()
    gateway = addresses["gateway"]

    def run(*arguments, code=0):
        done = cli(*arguments, SIGHTLINE_GATEWAY=gateway)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    # Answers as JSON lines; two of them, then it ends by itself.
    lines = run("watch", "street", "--count", "2", "--json", "-").stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [(a["camera"], a["question"]) for a in answers] == [("street", "person")] * 2
    assert all(0 <= a["score"] <= 1 and a["tokens"]["full"] > 0 for a in answers)
    assert "street" in run("watch", "--count", "1").stdout

    # A camera that pushes, from waiting to ended, and what is told of it.
    statuses = {each["name"]: each for each in json.loads(run("cameras", "list", "--json", "-").stdout)}
    assert statuses["depot"]["state"] == "waiting"
    pushed = run("push", "street.mp4", "--gateway", gateway, "--camera", "depot", "--json", "pushed.json")
    assert "sent 80 packets" in pushed.stdout
    assert read_json(cli.folder / "pushed.json")["packets"] == 80

    def depot():
        done = json.loads(run("cameras", "list", "--json", "-").stdout)
        return next(each for each in done if each["name"] == "depot")

    wait_for(lambda: depot()["state"] == "ended")
    # The decoder says that it ended, the replica how much it answered, each with its own heartbeat.
    wait_for(lambda: depot()["windows_done"] + depot()["windows_gated"] >= 3)

    # The doctor finds nothing wrong, and then the camera that nobody answers for.
    checked = {each["what"]: each for each in json.loads(run("doctor", "-g", gateway, "--json", "-").stdout)}
    assert (checked["gateway"]["state"], checked["replicas"]["state"]) == ("ok", "ok")
    assert checked["cameras"]["found"] == "1 of 2 running"
    assert checked["memory"]["state"] == checked["alerts"]["state"] == "ok"
    run("cameras", "add", "lost", NOBODY, "-q", "Is anyone there?", code=3)
    wait_for(lambda: "refuses" in cli("doctor", "-g", gateway).stdout)
    assert "lost: rtsp://127.0.0.1:9/stream1 refuses the connection" in run("doctor", "-g", gateway, code=1).stdout
    run("cameras", "remove", "lost", "--yes")

    # Cameras come and go while it runs; what is wrong is refused in one line.
    assert "there is no file missing.mp4" in run("cameras", "add", "gate", "missing.mp4", code=2).stderr
    added = run(
        "cameras", "add", "gate", "street.mp4", "-q", "fence@0.7=Is anyone climbing?", "--set", "window.stride_s=4"
    )
    assert added.stdout.startswith("gate: ")
    assert "gate" in run("cameras", "list").stdout
    assert "a camera 'gate' already" in run("cameras", "add", "gate", code=1).stderr
    assert "there is no camera 'gatr'" in run("cameras", "remove", "gatr", "--yes", code=1).stderr
    assert run("cameras", "remove", "gate", "--yes").stdout == "gate: removed\n"
    assert not re.search(r"\bgate\b", run("cameras", "list").stdout)
    refused = run("push", "street.mp4", "--gateway", gateway, "--camera", "nobody", code=1)
    assert "there is no camera 'nobody'" in refused.stderr

    # What runs until Ctrl-C ends with it.
    for endless in (
        ["watch", "-g", gateway],
        ["push", "street.mp4", "--gateway", gateway, "--camera", "depot", "--realtime", "--loop"],
    ):
        running, output = cli.start(*endless)
        wait_for(lambda output=output: output.read_text())
        assert cli.interrupt(running) == 130
        assert "Traceback" not in output.read_text()

    # One page of metrics for all processes.
    with urllib.request.urlopen(f"http://{addresses['metrics']}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    for process_name in ("gateway", "decoder-0", "replica-0"):
        assert f'process="{process_name}"' in page
    assert 'sightline_windows_total{process="replica-0",reason="",result="done"}' in page

    assert cli.interrupt(process) == 130
    assert "stopped" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert cli.orphans() == []


@pytest.mark.parametrize(
    ("phase", "number"),
    [("starting ray", signal.SIGTERM), ("starting serve", signal.SIGTERM), ("starting gateway", signal.SIGHUP)],
)
def test_terminating_serve_while_it_starts_is_a_clean_end(cli, wait_for, phase, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, and so does what they start")
    (cli.folder / "c.yaml").write_text(CONFIG)
    process, log = cli.start("serve", "-c", "c.yaml")
    wait_for(lambda: phase in log.read_text() or process.poll() is not None)
    process.send_signal(number)
    assert process.wait(60) == 0, log.read_text()
    told = log.read_text()
    assert told.endswith("stopped\n")
    # Those that are still starting have nothing to end.
    assert "did not stop within" not in told
    assert "ready" not in told
    assert "Traceback" not in told
    assert cli.orphans() == []


def test_a_termination_while_ray_forks_is_a_clean_end(cli):
    # Python drops what a signal's handler raises in callbacks of a fork.
    (cli.folder / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        "def terminate():\n"
        "    pathlib.Path('forked').touch()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "if os.environ.pop('FORK_TERMINATES', None):\n"
        "    os.register_at_fork(after_in_parent=terminate)\n"
    )
    cli.environment.update(PYTHONPATH=str(cli.folder), FORK_TERMINATES="1")
    (cli.folder / "c.yaml").write_text(CONFIG)
    process, log = cli.start("serve", "-c", "c.yaml")
    assert process.wait(60) == 0, log.read_text()
    told = log.read_text()
    assert (cli.folder / "forked").exists()
    assert told == "starting ray\nstopped\n"
    assert cli.orphans() == []


def test_terminating_serve_is_a_clean_end(cli, wait_for):
    config = CONFIG.replace("source: street.mp4, source_options: {loop: true, realtime: true}", f'source: "{NOBODY}"')
    (cli.folder / "c.yaml").write_text(config)
    process, log = cli.start("serve", "-c", "c.yaml", "--json", "addresses.json")
    # It has told of its cameras by then: the one that is added here is not among them.
    wait_for(lambda: "Stop with Ctrl-C" in log.read_text() or process.poll() is not None)
    gateway = read_json(cli.folder / "addresses.json")["gateway"]
    added = cli("cameras", "add", "late", NOBODY, SIGHTLINE_GATEWAY=gateway)
    assert "late: backoff" in added.stdout, added.stderr
    assert (added.returncode, "late was added, but does not answer" in added.stderr) == (3, True)
    assert "nothing listens there" in added.stderr
    # Whoever watches is told why nothing comes.
    watching, said = cli.start("watch", "street", "-g", gateway)
    wait_for(lambda: "street: " in said.read_text() and "nothing listens there" in said.read_text())
    cli.interrupt(watching)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    wait_for(lambda: log.read_text().endswith("stopped\n"))
    told = " ".join(log.read_text().split())
    assert f"street: {NOBODY} refuses the connection" in told
    assert "ready 2 cameras, 1 without pictures" in told
    assert f"state {cli.folder}/state/sightline: cameras, incidents, clips" in told
    assert "model tiny-qwen2_5_vl has random weights" in told
    assert f"console http://{read_json(cli.folder / 'addresses.json')['metrics']}/ " in told
    assert cli.orphans() == []

    # The next one has the camera that was added to this one, and its incidents.
    (cli.folder / "c.yaml").write_text(without_model(config))
    process, log = cli.start("serve", "-c", "c.yaml")
    wait_for(lambda: "Stop with Ctrl-C" in log.read_text() or process.poll() is not None)
    assert "ready    3 cameras, 2 without pictures" in log.read_text()
    assert (cli.folder / "state" / "sightline" / "alerts" / "alerts.sqlite").exists()
    check_end_with_its_cluster(cli, process, log, "raylet")


def test_serve_ends_when_its_cluster_does(cli, wait_for):
    (cli.folder / "c.yaml").write_text(without_model(CONFIG.split("cameras:")[0]))
    process, log = cli.start("serve", "-c", "c.yaml", "--json", "addresses.json")
    wait_for(lambda: "Stop with Ctrl-C." in log.read_text() or process.poll() is not None)
    check_end_with_its_cluster(cli, process, log, "gcs_server")


def check_end_with_its_cluster(cli, process, log, victim):
    """Agents of the raylet that die: tests/actors/test_session.py."""
    said = log.read_text()
    below = psutil.Process(process.pid).children(recursive=True)
    next(each for each in below if each.name() == victim).kill()
    assert process.wait(90) == 1
    told = log.read_text().removeprefix(said)
    found = re.fullmatch(r"error: the cluster has ended: (.+) of Ray died; see its logs\n", told)
    assert victim in found[1]
    assert cli.orphans() == []
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """The demo's four, made by the first demo that runs: the next one finds them whole."""
    return tmp_path_factory.mktemp("clips")


def test_the_demo_from_start_to_end(cli, clips):
    (cli.folder / "out").mkdir()
    (cli.folder / "out" / "clips").symlink_to(clips)
    done = cli.process(
        "demo", "--out", "out", "--seconds", "14", "--model", "tiny-qwen2_5_vl", "--no-open", "--json", "-", timeout=240
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == read_json(cli.folder / "out" / "report.json")
    assert [camera["name"] for camera in report["cameras"]] == ["yard", "road", "gate", "night"]
    for camera in report["cameras"]:
        assert len(camera["live"]) >= 2, camera["name"]
        asked = {question["id"] for question in camera["questions"]}
        assert len(asked) == 3
        assert all(set(window["scores"]) == set(window["truth"]) == asked for window in camera["live"])
        # One round of the scene, 40 s, with a window every 4 s.
        assert len(camera["compared"]) == 10
        assert camera["windows_lost"] == camera["windows_dropped"] == camera["gaps"] == 0
    night = next(camera for camera in report["cameras"] if camera["name"] == "night")
    # Where nothing moved since the last window, its answer stands.
    assert any(window["gated"] for camera in report["cameras"] for window in camera["compared"])
    assert not any(any(window["truth"].values()) for window in night["compared"])
    yard = report["cameras"][0]
    # Somebody lies there from 24.2 to 39.4 s; the window that ends at 60 s opens at 40 s.
    assert [window["truth"]["fall"] for window in yard["compared"]] == [False] + [True] * 8 + [False]
    assert report["comparison"]["our_truth"]["judged"] > 100
    assert report["comparison"]["tokens_share"] < 0.4
    assert report["comparison"]["flops_ratio"] > 3
    assert "randomly initialised" in done.stderr
    page = (cli.folder / "out" / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 20
    # What it ran can be run again by hand.
    assert cli("config", "check", "-c", "out/config.yaml").returncode == 0
    assert cli.orphans() == []


def test_ctrl_c_ends_the_demo_and_everything_it_started(cli, wait_for, clips):
    (cli.folder / "out").mkdir()
    (cli.folder / "out" / "clips").symlink_to(clips)
    process, log = cli.start("demo", "--out", "out", "--model", "tiny-qwen2_5_vl", "--no-open")
    wait_for(lambda: "yard     running" in log.read_text() or process.poll() is not None)
    assert cli.interrupt(process) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert cli.orphans() == []
    assert not (cli.folder / "out" / "report.html").exists()
