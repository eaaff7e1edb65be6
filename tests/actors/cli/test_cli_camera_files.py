"""Cameras as files, and changes while they run, as an operator types it; the controller's table, no Ray."""

import io
import json

import pytest
from camera_cluster import DeclaredCameras
from rpc_serving import serving_in_thread

from actors.cli import main
from cluster.config import load_config, parse_camera
from cluster.control.cameras.managed import CONFIGURATION, ManagedCamera
from cluster.control.directory import Directory
from cluster.errors import UnavailableError
from cluster.gateway import directory
from cluster.gateway.guard import Guard
from cluster.security.limits import RateLimit
from cluster.security.roles import Principal, Role

FILE = """
cameras:
  - name: gate
    source: rtsp://viewer:${PASSWORD}@10.0.0.1/stream
    window: {stride_s: 4}
  - name: yard
"""


class Rules:
    """The controller's table behind the gateway's service."""

    def __init__(self):
        self.directory = Directory()
        self.table = DeclaredCameras(load_config(None, {"questions": [{"id": "q", "text": "Fire?"}]}), self.directory)
        self.table.load([ManagedCamera(entry=parse_camera("written"), manager=CONFIGURATION)], 0.0)

    async def add_camera(self, managed, force=False, takeover=False):
        self.table.add(managed, 0.0, takeover=takeover)
        return self.directory.status(managed.entry.name)

    async def update_camera(self, managed, takeover=False):
        self.table.update(managed, 0.0, takeover=takeover)
        return self.directory.status(managed.entry.name)

    async def remove_camera(self, name, manager, takeover=False):
        self.table.remove(name, manager=manager, takeover=takeover)

    async def get_camera(self, name):
        return self.directory.status(name)

    async def list_cameras(self):
        return [self.directory.status(name) for name in self.directory.cameras]

    async def managed_cameras(self, names=()):
        return self.table.managed(names)

    def managers(self):
        return {each.entry.name: each.manager for each in self.table.managed()}


@pytest.fixture
def limit():
    """The rate limit of every token."""
    return RateLimit(1000.0, 1000)


@pytest.fixture
def rules(monkeypatch, limit):
    rules = Rules()
    guard = Guard(lambda _: Principal("ann", frozenset(Role)), rate=limit)
    with serving_in_thread(directory.CamerasServicer(rules), guard=guard) as address:
        monkeypatch.setenv("SIGHTLINE_GATEWAY", address)
        monkeypatch.setenv("PASSWORD", "s3cret")
        monkeypatch.setenv("SIGHTLINE_TOKEN", "ann's")
        yield rules


@pytest.fixture
def run(rules, capsys):
    def run(*arguments, code=0):
        done = main([str(each) for each in arguments])
        out = capsys.readouterr()
        assert done == code, out
        assert "s3cret" not in out.out + out.err
        return out.err.strip() if code else out.out

    return run


def test_a_file_is_applied_changed_and_pruned(rules, run, tmp_path):
    file = tmp_path / "cameras.yaml"
    file.write_text(FILE)
    shown = run("cameras", "apply", "-f", file, "--dry-run")
    assert "+ add gate" in shown
    assert "source: (not given) -> rtsp://viewer:***@10.0.0.1/stream" in shown
    assert "2 cameras would change, 0 unchanged" in shown
    assert rules.managers() == {"written": CONFIGURATION}

    assert "2 cameras changed, 0 unchanged" in run("cameras", "apply", "-f", file)
    assert rules.managers() == {"written": CONFIGURATION, "gate": "file", "yard": "file"}
    assert rules.directory.settings("gate").source.reveal() == "rtsp://viewer:s3cret@10.0.0.1/stream"
    version = rules.directory.version
    assert "0 cameras changed, 2 unchanged" in run("cameras", "apply", "-f", file)
    assert rules.directory.version == version, "the same again touches nothing"

    file.write_text(FILE.replace("stride_s: 4", "stride_s: 2").replace("  - name: yard\n", ""))
    report = tmp_path / "changes.json"
    shown = run("cameras", "apply", "-f", file, "--prune", "--json", report)
    assert "~ update gate\n    window.stride_s: 4.0 -> 2.0\n- remove yard" in shown
    assert [(each["change"], each["camera"], each["error"]) for each in json.loads(report.read_text())] == [
        ("update", "gate", ""),
        ("remove", "yard", ""),
    ]
    assert rules.managers() == {"written": CONFIGURATION, "gate": "file"}
    assert "file" in run("cameras", "list")


def test_a_camera_of_files_is_paused_and_resumed_and_stays_theirs(rules, run, tmp_path):
    file = tmp_path / "cameras.yaml"
    file.write_text(FILE)
    run("cameras", "apply", "-f", file)
    run("cameras", "pause", "gate")
    settings = rules.directory.settings("gate")
    assert (settings.paused, settings.source.reveal()) == (True, "rtsp://viewer:s3cret@10.0.0.1/stream")
    assert "paused: True -> (not given)" in run("cameras", "apply", "-f", file, "--dry-run")
    run("cameras", "resume", "gate")
    assert "0 cameras changed, 2 unchanged" in run("cameras", "apply", "-f", file)
    assert "is written in the cluster's configuration" in run("cameras", "pause", "written", code=1)
    run("cameras", "pause", "written", "--takeover")
    assert rules.managers() == {"written": "cluster", "gate": "file", "yard": "file"}


def test_standing_in_another_managers_way_changes_nothing_at_all(rules, run, tmp_path, monkeypatch):
    text = "cameras: [{name: new}, {name: written, priority: critical}]"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    said = run("cameras", "apply", "-f", "-", code=1)
    assert "nothing was changed; these belong to other managers: written (configuration); see --takeover" in said
    assert rules.managers() == {"written": CONFIGURATION}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert "! takeover written (belongs to configuration)" in run("cameras", "apply", "-f", "-", "--takeover")
    assert rules.managers() == {"new": "file", "written": "file"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-16"))))
    said = run("cameras", "apply", "-f", "-", code=2)
    assert "standard input is not UTF-8 text; cameras are YAML" in said
    said = run("cameras", "remove", "written", "--yes", code=1)
    assert "camera 'written' belongs to the files that were applied as 'file'; change it there" in said
    run("cameras", "remove", "written", "--yes", "--takeover")
    assert rules.managers() == {"new": "file"}


def test_what_the_cluster_refuses_is_said_and_the_rest_is_done(rules, run, tmp_path):
    file = tmp_path / "cameras.yaml"
    file.write_text("cameras: [{name: a, window: {length_s: 1}}, {name: b}]")
    said = run("cameras", "apply", "-f", file, code=1)
    assert "1 camera could not be changed: a" in said
    assert rules.managers() == {"written": CONFIGURATION, "b": "file"}
    for wrong in (
        ["-f", tmp_path / "none.yaml"],
        ["-f", file, "--manager", "kubernetes"],
        ["-f", file, "--manager", "cluster"],
    ):
        run("cameras", "apply", *wrong, code=2)


@pytest.mark.parametrize("limit", [RateLimit(40.0, 4)])
def test_more_cameras_than_a_token_may_change_at_once_are_all_applied(rules, run, tmp_path, limit):
    file = tmp_path / "cameras.yaml"
    file.write_text(json.dumps({"cameras": [{"name": f"km-{number}"} for number in range(12)]}))
    assert "12 cameras changed" in run("cameras", "apply", "-f", file)
    assert len(rules.managers()) == 13


def test_a_cluster_that_goes_away_is_not_asked_for_every_other_camera(rules, run, tmp_path, monkeypatch):
    """Each call to a gateway that hangs lasts until its deadline: hours for thousands of cameras."""
    file = tmp_path / "cameras.yaml"
    file.write_text(json.dumps({"cameras": [{"name": f"km-{number:02}"} for number in range(40)]}))
    add, asked = rules.add_camera, []

    async def gone_after_two(managed, **given):
        asked.append(managed.entry.name)
        if len(asked) > 2:
            raise UnavailableError("the controller restarts")
        return await add(managed)

    report = tmp_path / "changes.json"
    with monkeypatch.context() as context:
        context.setattr(rules, "add_camera", lambda managed, *_: gone_after_two(managed))
        said = run("cameras", "apply", "-f", file, "--json", report, code=1)
    assert len(asked) == 5
    assert "38 cameras could not be changed: km-02, km-03" in said
    assert said.endswith("km-11, and 28 more")
    errors = [each["error"] for each in json.loads(report.read_text())]
    assert errors[:2] == ["", ""]
    assert {each.partition(":")[0] for each in errors[5:]} == {"not tried"}
    assert "38 cameras changed, 2 unchanged" in run("cameras", "apply", "-f", file)


def test_the_cameras_of_a_line_are_listed_paused_and_resumed_together(rules, run, tmp_path):
    file = tmp_path / "cameras.yaml"
    names = ["line-1-a", "line-7-a", "line-7-b"]
    file.write_text(json.dumps({"cameras": [{"name": name} for name in names]}))
    run("cameras", "apply", "-f", file)

    def paused():
        return [name for name in names if rules.directory.settings(name).paused]

    said = run("cameras", "pause", "line-7-*", "written", code=1)
    assert "camera 'written' is written in the cluster's configuration" in said
    assert paused() == ["line-7-a", "line-7-b"], "one that cannot be paused does not keep the others running"
    assert [each["name"] for each in json.loads(run("cameras", "list", "--state", "paused", "--json", "-"))] == paused()
    assert [each["name"] for each in json.loads(run("cameras", "list", "line-*-a", "--json", "-"))] == names[:2]
    assert "no such cameras" in run("cameras", "list", "line-8-*")
    assert run("cameras", "resume", "line-7-*") == "line-7-a: resumed\nline-7-b: resumed\n"
    assert paused() == []
    assert "no camera matches line-8-*" in run("cameras", "pause", "line-7-*", "line-8-*", code=1)
    assert "there is no camera 'line-1'" in run("cameras", "pause", "line-1", "line-7-a", code=1)
    assert paused() == []


def test_an_export_applies_elsewhere(rules, run, tmp_path, monkeypatch):
    file = tmp_path / "cameras.yaml"
    file.write_text(FILE)
    run("cameras", "apply", "-f", file)
    run("cameras", "add", "literal", "-q", "q=Is ${this} there?")
    out = tmp_path / "out.yaml"
    out.write_text("written by others, for everybody")
    out.chmod(0o644)
    run("cameras", "export", "-o", out)
    assert out.stat().st_mode & 0o777 == 0o600
    assert "# Set GATE_PASSWORD to camera gate's password, URL-escaped." in out.read_text()
    assert "s3cret" not in out.read_text()
    monkeypatch.setenv("GATE_PASSWORD", "s3cret")
    before = {each.entry.name: each.entry for each in rules.table.managed()}
    assert "0 unchanged" in run("cameras", "apply", "-f", out, "--manager", "elsewhere", "--takeover")
    assert {each.entry.name: each.entry for each in rules.table.managed()} == before
    assert set(rules.managers().values()) == {"elsewhere"}
    assert "name: gate" in run("cameras", "export", "gate")
    assert "cameras: []" in run("cameras", "export", "--manager", "file")
    assert "there is no camera 'gat'; did you mean 'gate'?" in run("cameras", "export", "gat", code=1)


def test_one_camera_is_changed_in_place(rules, run):
    run(
        "cameras",
        "add",
        "gate",
        "rtsp://u:s3cret@h/1",
        "-q",
        "fence=Is anyone climbing?",
        "--set",
        "memory.retention=1h",
        "--no-wait",
    )
    assert run("cameras", "update", "gate", "--set", "window.stride_s=2", "--priority", "critical").startswith(
        "gate: changed"
    )
    settings = rules.directory.settings("gate")
    assert (settings.window.stride_s, settings.priority, settings.memory.retention) == (2, "critical", 3600)
    assert (settings.source.reveal(), settings.questions[0].id) == ("rtsp://u:s3cret@h/1", "fence")
    run("cameras", "update", "gate", "-q", "fence@0.7=Is anyone climbing?", "--source", "")
    settings = rules.directory.settings("gate")
    assert (settings.source.reveal(), settings.questions[0].threshold, settings.window.stride_s) == ("", 0.7, 2)
    assert "nothing to change" in run("cameras", "update", "gate", code=2)
    assert "window.strde_s: unknown key" in run("cameras", "update", "gate", "--set", "window.strde_s=2", code=2)
    assert "is written in the cluster's configuration" in run(
        "cameras", "update", "written", "--priority", "critical", code=1
    )
    run("cameras", "update", "written", "--priority", "critical", "--takeover")
    assert rules.managers()["written"] == "cluster"


MASK = [[0.0, 0.0], [0.5, 0.0], [0.5, 1.0]]


@pytest.mark.parametrize(
    "change", [["update", "gate", "--priority", "critical"], ["pause", "gate"], ["resume", "gate"]], ids=lambda c: c[0]
)
def test_a_mask_that_is_drawn_between_reading_and_saving_is_not_overwritten(rules, run, monkeypatch, change):
    run("cameras", "add", "gate", "rtsp://u:s3cret@10.0.0.1/stream", "--no-wait")

    async def read_then_masked(names=()):
        read = rules.table.managed(names)
        entry = parse_camera("gate", "rtsp://u:***@10.0.0.1/stream", settings={"privacy_masks": [MASK]})
        rules.table.update(ManagedCamera(entry=entry), 0.0)
        return read

    with monkeypatch.context() as context:
        context.setattr(rules, "managed_cameras", read_then_masked)
        assert "'gate' were changed elsewhere since they were read" in run("cameras", *change, code=1)
    run("cameras", *change)
    [gate] = rules.table.managed(["gate"])
    assert [[list(corner) for corner in mask] for mask in gate.entry.privacy_masks] == [MASK]
    assert gate.entry.source.reveal() == "rtsp://u:s3cret@10.0.0.1/stream"
    # Only what differs is a change: whoever repeats what is there, as after a lost reply, disturbs nobody.
    for revision in (gate.revision, "of the settings before"):
        assert rules.table.update(ManagedCamera(entry=gate.entry, revision=revision), 0.0).revision == gate.revision
