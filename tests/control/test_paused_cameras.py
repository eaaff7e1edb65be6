"""A paused camera is nobody's work: not assigned, no load, no alert; it keeps its owner and its secrets."""

import pytest
from camera_cluster import DeclaredCameras

from cluster.alerts.health import HealthMonitor
from cluster.alerts.open_incidents import OpenIncidents
from cluster.config import camera_settings, load_config, parse_camera
from cluster.control.cameras.managed import ManagedCamera, settings_of
from cluster.control.directory import Directory
from cluster.decoder.pipeline import pipeline_settings
from cluster.errors import ConfigError, NotPlacedError
from cluster.types import PatchGeometry
from cluster.types.reports import CameraReport, DecoderInfo, ReplicaInfo

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
SOURCE = "rtsp://operator:hunter2horse@10.0.0.9/stream1"
QUESTIONS = [{"id": "q", "text": "Is anyone there?"}]


def managed(source: str = SOURCE, **settings) -> ManagedCamera:
    return ManagedCamera(entry=parse_camera("gate", source, QUESTIONS, settings))


@pytest.fixture
def table() -> DeclaredCameras:
    directory = Directory()
    directory.join_decoder(DecoderInfo("decoder-0", "d/0", "d:1", "", 1), 0.0)
    directory.join_replica(ReplicaInfo("r1", "r1:1", "", 1, GEOMETRY), 0.0)
    return DeclaredCameras(load_config(None, {}), directory)


def test_it_is_assigned_to_nobody_until_it_is_resumed(table: DeclaredCameras) -> None:
    directory = table._directory
    table.add(managed(), 0.0)
    life = table.managed(["gate"])[0].life
    [assigned] = directory.assignment("decoder-0").cameras
    report = CameraReport("gate", "running", codec="h264", width=640, height=360, life=life)
    assert directory.heartbeat_decoder("decoder-0", "d/0", [report], 1.0)
    assert directory.status("gate").windows_per_s > 0
    version = directory.version
    table.update(managed(paused=True), 1.0)
    assert directory.version > version, "its decoder hears of it"
    assert directory.assignment("decoder-0").cameras == ()
    assert directory.expected_cameras == []
    # Nobody holds packets of it, which would have to be erased; its memory can be asked.
    with pytest.raises(NotPlacedError, match="it is paused"):
        directory.route("gate").to_decoder("gate")
    assert directory.route("gate").to_replica("gate") == "r1:1"
    # A last report of its decoder, on its way, does not bring it back.
    assert directory.heartbeat_decoder("decoder-0", "d/0", [report], 2.0)
    status = directory.status("gate")
    assert (status.state, status.reason, status.windows_per_s) == ("paused", "", 0.0)
    table.update(managed(), 3.0)
    [again] = directory.assignment("decoder-0").cameras
    assert again.life == assigned.life == life, "the same camera: its memory is its own"
    assert directory.status("gate").state == "waiting"
    assert directory.route("gate").to_decoder("gate") == "d:1"


def test_it_is_not_missed(table: DeclaredCameras) -> None:
    table.add(managed(paused=True), 0.0)
    kept = OpenIncidents("site")
    monitor = HealthMonitor(kept, load_config(None, {}).alerts.health, 60.0)
    for second in range(0, 3600, 10):
        monitor.update(table._directory.status("gate"), None, 1e9 + second, stride_s=8.0)
    assert kept.oldest_first == []


def test_a_source_as_it_is_shown_keeps_its_password_and_no_other_gets_it(table: DeclaredCameras) -> None:
    shown = "rtsp://operator:***@10.0.0.9/stream1"
    table.add(managed(), 0.0)
    assert str(table.managed(["gate"])[0].entry.source) == shown
    table.update(managed(shown, priority="critical"), 1.0)
    [camera] = table.managed(["gate"])
    assert (camera.entry.source.reveal(), camera.entry.priority) == (SOURCE, "critical")
    assert table.check_test(managed(shown).entry).source.reveal() == SOURCE
    for elsewhere in ("rtsp://operator:***@10.6.6.6/stream1", "rtsp://operator:***@10.0.0.9/stream2"):
        for call in (lambda: table.update(managed(elsewhere), 2.0), lambda: table.check_test(managed(elsewhere).entry)):  # noqa: B023
            with pytest.raises(ConfigError, match="in place of a secret"):
                call()
    assert table.managed(["gate"])[0].entry.source.reveal() == SOURCE
    with pytest.raises(ConfigError, match="in place of a secret"):
        table.add(ManagedCamera(entry=parse_camera("other", shown, QUESTIONS)), 0.0)


def test_a_source_is_tested_as_it_would_run_although_decoders_have_no_sections_of_cameras() -> None:
    sections = {
        "sampling": {"fps": 5},
        "window": {"length_s": 8, "stride_s": 4},
        "pruning": {"policy": "none"},
        "source": {"decoded_bytes": 2**29, "backoff": {"max_s": 60}},
        "cluster": {"decode": "cpu"},
        "tiers": {"host_bytes": "2GiB"},
    }
    table = DeclaredCameras(load_config(None, sections), Directory())
    camera = managed(memory={"cap": "1536MiB"}, source_options={"connect_timeout_s": 9}).entry
    sent = table.check_test(camera)
    there = parse_camera("gate", sent.source, settings=settings_of(sent))
    wanted = camera_settings(load_config(None, sections), camera)
    found = camera_settings(load_config(None, {}), there)
    assert pipeline_settings(found) == pipeline_settings(wanted)
    assert found.source_options == wanted.source_options
