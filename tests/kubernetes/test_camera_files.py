"""Files of cameras, and what has to change so that a cluster is like them."""

import json

import pytest
from camera_cluster import CameraCluster
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import CameraEntry
from cluster.control.cameras.managed import (
    CLUSTER,
    CONFIGURATION,
    ManagedCamera,
    entry_from_json,
    entry_to_json,
    manager_from_outside,
    merge_configuration,
    plan,
    settings_of,
    with_variables,
    written_keys,
)
from cluster.errors import CameraExistsError, ConfigError, ManagedElsewhereError, UnknownCameraError
from cluster.kubernetes.resource import as_yaml, parse_cameras, read_cameras
from cluster.redaction import SourceAddress

BOTH = """
cameras:
  - name: gate
    source: rtsp://viewer:${GATE}@10.0.0.1/stream
    window: {stride_s: 4}
--- # the second one as a resource
apiVersion: sightline.io/v1alpha1
kind: Camera
metadata: {name: yard}
spec:
  priority: critical
  window: {strideSeconds: 2}
  memory: {retention: 24h}
"""


def entry(name, **keys):
    return CameraEntry.model_validate({"name": name, **keys})


def test_lists_and_resources_in_one_file_mean_the_same():
    gate, yard = parse_cameras(BOTH, "both.yaml", {"GATE": "s3cret"})
    assert written_keys(gate) == {
        "name": "gate",
        "source": SourceAddress("rtsp://viewer:s3cret@10.0.0.1/stream"),
        "window": {"stride_s": 4.0},
    }
    assert written_keys(yard) == {
        "name": "yard",
        "priority": "critical",
        "window": {"stride_s": 2.0},
        "memory": {"retention": 86400.0},
    }
    assert settings_of(gate) == {"window": {"stride_s": 4.0}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "cameras:\n  - name: gate\n    windw: {}\n",
            "f.yaml:3: cameras[0].windw: unknown key; did you mean 'window'?",
        ),
        ("cameras: []\nmodel: {}\n", "f.yaml:2: model: unknown key; keys here: cameras"),
        ("a: 1\n---\ncameras:\n  - {name: gate, priority: urgent}\n", "f.yaml:1: a: unknown key"),
        (
            "cameras: []\n---\ncameras:\n  - name: gate\n    priority: urgent\n",
            "f.yaml:5: cameras[0].priority: must be",
        ),
        ("cameras:\n  - name: gate\n    source: rtsp://u:${NONE}@x/\n", "environment variable NONE is not set"),
        ("kind: Secret\n", "f.yaml:1: kind: must be Camera, not 'Secret'"),
        ("kind: Camera\nspec: {}\n", "a Camera resource needs metadata.name and spec"),
        (
            "kind: Camera\nmetadata: {name: g}\nspec:\n  credentials: {}\n",
            "f.yaml:4: spec.credentials: only Kubernetes",
        ),
        ("kind: Camera\nmetadata: {name: g}\nspec:\n  sampling: {fps: 0}\n", "f.yaml:4: spec.sampling.fps: must be"),
        ("- gate\n", "must be a mapping"),
        ("cameras: [\n", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text, sentence):
    with pytest.raises(ConfigError) as failure:
        parse_cameras(text, "f.yaml", {})
    assert sentence in str(failure.value)


def test_a_folder_is_all_its_files_and_a_name_is_in_one_of_them(tmp_path):
    with pytest.raises(ConfigError, match="no YAML file in this folder"):
        read_cameras(tmp_path)
    (tmp_path / "a.yaml").write_text("cameras: [{name: gate}]")
    (tmp_path / "b.yml").write_text("# nothing but a comment\n---\ncameras: [{name: yard}]\n")
    (tmp_path / "c.txt").write_text("cameras: [{name: notes}]")
    assert [each.name for each in read_cameras(tmp_path)] == ["gate", "yard"]
    (tmp_path / "d.yaml").write_text("cameras: [{name: gate}]")
    with pytest.raises(ConfigError, match=r"d\.yaml: camera 'gate' is already in .*a\.yaml"):
        read_cameras(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_cameras(tmp_path / "none.yaml")


def test_what_is_exported_reads_back_and_names_a_variable_for_each_secret():
    cameras = parse_cameras(BOTH, "both.yaml", {"GATE": "s3cret"})
    gate, yard = (json.loads(entry_to_json(each, secrets=False)) for each in cameras)
    hidden, variables = with_variables(gate)
    assert (hidden["source"], variables) == ("rtsp://viewer:${GATE_PASSWORD}@10.0.0.1/stream", ["GATE_PASSWORD"])
    text = as_yaml([hidden, yard], ["Set GATE_PASSWORD."])
    assert "s3cret" not in text
    again = parse_cameras(text, "export.yaml", {"GATE_PASSWORD": "s3cret"})
    assert [written_keys(each) for each in again] == [written_keys(each) for each in cameras]
    two = {"name": "1-a", "source": "http://h/?user=***&password=***"}
    assert with_variables(two, ["CAMERA_1_A_PASSWORD"]) == (
        {**two, "source": "http://h/?user=${CAMERA_1_A_PASSWORD_2}&password=${CAMERA_1_A_PASSWORD_3}"},
        ["CAMERA_1_A_PASSWORD_2", "CAMERA_1_A_PASSWORD_3"],
    )
    assert with_variables({"name": "gate"}) == ({"name": "gate"}, [])


def test_the_variables_of_thousands_of_cameras_are_not_gone_through_for_each() -> None:
    class Taken(dict[str, str]):
        def __iter__(self):
            raise AssertionError("all were gone through")

    hidden = {"name": "gate", "source": "rtsp://viewer:***@10.0.0.1/1"}
    assert with_variables(hidden, Taken(GATE_PASSWORD="gate"))[1] == ["GATE_PASSWORD_2"]


def test_a_written_camera_is_no_json_by_itself_and_its_secrets_are_only_where_they_are_asked_for():
    address = "rtsp://viewer:s3cret@10.0.0.1/stream?token=t0ken"
    gate = entry("gate", source=address)
    with pytest.raises(TypeError):
        json.dumps(written_keys(gate))
    for shown in (
        str(written_keys(gate)),
        f"{gate!r} {gate} {gate.source}",
        gate.model_dump_json(),
        str(gate.model_dump()),
        entry_to_json(gate, secrets=False),
    ):
        assert "rtsp://viewer:***@10.0.0.1/stream?token=***" in shown
        assert "s3cret" not in shown
        assert "t0ken" not in shown
    assert json.loads(entry_to_json(gate, secrets=True))["source"] == address
    assert ManagedCamera.model_validate_json(ManagedCamera(entry=gate).to_json()).entry.source.reveal() == address


def test_a_plan_adds_changes_and_prunes_its_own_and_leaves_others():
    present = [
        ManagedCamera(entry=entry("same"), manager="file"),
        ManagedCamera(entry=entry("other", window={"stride_s": 8}), manager="file"),
        ManagedCamera(entry=entry("gone"), manager="file"),
        ManagedCamera(entry=entry("theirs"), manager=CLUSTER),
        ManagedCamera(entry=entry("untouched"), manager=CLUSTER),
    ]
    wanted = [entry("same"), entry("other", window={"stride_s": 4}), entry("new"), entry("theirs")]
    changes = plan(wanted, present, "file", prune=True)
    assert [(change.kind, change.name) for change in changes] == [
        ("add", "new"),
        ("update", "other"),
        ("same", "same"),
        ("conflict", "theirs"),
        ("remove", "gone"),
    ]
    assert changes[1].differences() == ["window.stride_s: 8.0 -> 4.0"]
    assert changes[3].owner == CLUSTER
    kinds = {change.name: change.kind for change in plan(wanted, present, "file", takeover=True)}
    assert (kinds["theirs"], kinds.get("gone")) == ("takeover", None)


def test_differences_name_questions_and_hide_passwords():
    old = entry("a", source="rtsp://u:one@h/", questions=[{"id": "q", "text": "Fire?"}])
    new = entry("a", source="rtsp://u:two@h/", questions=[{"id": "q", "text": "Fire?", "threshold": 0.7}])
    [change] = plan([new], [ManagedCamera(entry=old)], CLUSTER)
    assert change.differences() == ["questions.q.threshold: (not given) -> 0.7", "source: another password"]


def test_the_table_lets_only_its_manager_change_a_camera():
    table = CameraCluster().table
    table.add(ManagedCamera(entry=entry("gate"), manager=CONFIGURATION), 0.0)
    changed = ManagedCamera(entry=entry("gate", priority="critical"))
    for call in (
        lambda: table.add(changed, 0.0),
        lambda: table.update(changed, 0.0),
        lambda: table.remove("gate", manager=CLUSTER),
    ):
        with pytest.raises(ManagedElsewhereError, match="'gate' is written in the cluster's configuration; change it"):
            call()
    table.add(changed, 0.0, takeover=True)
    assert [(each.manager, each.entry.priority) for each in table.managed()] == [(CLUSTER, "critical")]
    with pytest.raises(CameraExistsError, match="update it"):
        table.add(ManagedCamera(entry=entry("gate")), 0.0)
    with pytest.raises(ConfigError, match="stride_s"):
        table.update(ManagedCamera(entry=entry("gate", window={"length_s": 1})), 0.0)
    with pytest.raises(UnknownCameraError, match="did you mean 'gate'"):
        table.managed(["gates"])
    table.remove("gate", manager="north", takeover=True)
    assert table.managed() == []


def test_another_configuration_moves_its_own_cameras_only():
    last = [entry("stays"), entry("changes"), entry("goes"), entry("taken"), entry("was-removed")]
    now = [entry("stays"), entry("changes", priority="critical"), entry("comes"), entry("was-removed")]
    now.append(entry("added-by-hand", priority="critical"))
    cameras = [ManagedCamera(entry=each, manager=CONFIGURATION) for each in last[:3]]
    cameras += [ManagedCamera(entry=entry("taken"), manager="file"), ManagedCamera(entry=entry("added-by-hand"))]
    found = merge_configuration(last, now, cameras)
    assert {each.entry.name: (each.manager, each.entry.priority) for each in found.cameras} == {
        "stays": (CONFIGURATION, "normal"),
        "changes": (CONFIGURATION, "critical"),
        "comes": (CONFIGURATION, "normal"),
        "taken": ("file", "normal"),
        "added-by-hand": (CLUSTER, "normal"),
    }
    names = [[each.entry.name for each in those] for those in (found.changed, found.removed)]
    assert (*names, found.left) == (
        ["changes", "comes"],
        ["goes"],
        ["added-by-hand"],
    )


@pytest.mark.parametrize("name", ["configuration", "kubernetes", "a b", "x" * 64, "-"])
def test_who_may_call_itself_what(name):
    with pytest.raises(ConfigError, match="a manager"):
        manager_from_outside(name)
    assert (manager_from_outside(""), manager_from_outside("north")) == (CLUSTER, "north")


@given(
    priority=st.sampled_from(["critical", "normal"]),
    window=st.none()
    | st.fixed_dictionaries({}, optional={"stride_s": st.floats(0.1, 40), "static_gate": st.booleans()}),
    retention=st.none() | st.floats(1, 1e6),
)
def test_what_is_kept_of_a_camera_survives_json_with_what_was_not_written(priority, window, retention):
    given_keys = {"priority": priority, "window": window, "memory": {"retention": retention}}
    managed = ManagedCamera(entry=entry("gate", **given_keys), manager="north", uid="7")
    again = ManagedCamera.model_validate_json(managed.to_json())
    assert (again, written_keys(again.entry)) == (managed, written_keys(managed.entry))
    assert again.entry.memory.model_fields_set == {"retention"}
    assert written_keys(entry_from_json(entry_to_json(managed.entry, secrets=True))) == written_keys(managed.entry)
