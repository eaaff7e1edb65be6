"""What processes show of themselves: series of cameras that come and go, of tiers, of the fleet, and zeros."""

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from certificates import Authority
from dashboards_bench import series_per_camera
from emitted_labels import emitted
from prometheus_client import CollectorRegistry

from actors.startup import config_digest
from cluster import metrics
from cluster.config import load_config
from cluster.memory.prefetch import TOTALS, Prefetcher
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, TierState
from cluster.memory.tiers.stack import TierStack
from cluster.metrics.gpu import GpuCollector
from cluster.replica.memory import MemoryCollector
from cluster.replica.window_queue import DropReason
from cluster.types import Answer, Question, StreamSpec, Timing, TokenCount
from cluster.types.reports import ReplicaStatus
from cluster.wire.tls import TlsFiles


def samples(registry=metrics.REGISTRY, **labels):
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key not in labels)): sample.value
        for family in registry.collect()
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }


def answer(camera, question="person", score=0.5, latency_s=3.0):
    tokens = TokenCount(9, 8, 3, 2, 3, 1, 3)
    return Answer(camera, 0, 0, 1, question, score, False, "", False, tokens, Timing(latency_s=latency_s))


def spec(camera, *questions):
    return StreamSpec(camera, tuple(Question(each, "?") for each in questions), stride_s=2.0)


def test_series_of_a_camera_come_with_its_answers_and_go_with_it():
    cameras = metrics.AnsweredCameras(clock=lambda: 1234.0)
    cameras.record_window([answer("pier")])
    assert samples(camera="pier") == {}  # not opened: it left while its window was computed
    cameras.open_camera(spec("pier", "person", "car"))
    cameras.record_window([answer("pier", "person", 0.25), answer("pier", "car", 0.75)])
    cameras.set_memory_bytes({"pier": 4096, "elsewhere": 1})
    assert samples(camera="pier") == {
        ("sightline_camera_lag_seconds",): 3.0,
        ("sightline_camera_answered_timestamp_seconds",): 1234.0,
        ("sightline_camera_memory_bytes",): 4096,
        ("sightline_camera_score", "person"): 0.25,
        ("sightline_camera_score", "car"): 0.75,
    }
    assert samples(camera="elsewhere") == {}
    cameras.open_camera(spec("pier", "car"))
    assert ("sightline_camera_score", "person") not in samples(camera="pier")
    cameras.retain_cameras(["another"])
    assert samples(camera="pier") == {}


def of_replica(number):
    cameras = metrics.AnsweredCameras()
    for each in range(number):
        cameras.open_camera(spec(f"pier-{each}", "person", "car"))
        cameras.record_window([answer(f"pier-{each}", question) for question in ("person", "car")])
    return [partial(cameras.retain_cameras, [])]


def of_decoder(number):
    cameras = [metrics.CameraMetrics(f"pier-{each}") for each in range(number)]
    for camera in cameras:
        camera.count_lazy_events({"missed": 1, "overflow": 0})
    return [camera.remove for camera in cameras]


@pytest.mark.parametrize("cameras_of", [of_replica, of_decoder])
def test_the_cameras_of_a_process_that_drains_go_at_once(cameras_of):
    """A replica's event loop stood still for nine seconds, a decoder of 1,000 cameras for three, where each of them
    went through the series of all."""

    def calls_to_remove(number):
        found, seen = cameras_of(number), []
        sys.setprofile(lambda _frame, event, _arg: seen.append(event) if event == "call" else None)
        try:
            for remove in found:
                remove()
        finally:
            sys.setprofile(None)
        assert samples(camera=f"pier-{number - 1}") == {}
        return len(seen)

    assert calls_to_remove(200) < 5 * calls_to_remove(50)


def test_positives_are_counted_by_question_of_which_there_are_so_many():
    def counted():
        return {key[1:]: value for key, value in samples().items() if key[0] == "sightline_answers_total"}

    before = counted()
    cameras = metrics.AnsweredCameras()
    cameras.open_camera(spec("pier", "q0"))
    for number in range(66):
        cameras.record_window([replace(answer("pier", f"q{number}"), positive=number == 0)])
    cameras.record_window([replace(answer("pier", "q0"), positive=True), replace(answer("pier", "q65"), positive=True)])
    # ``positive``, then ``question``: labels in the order of their names.
    more = {key: value - before.get(key, 0) for key, value in counted().items() if value != before.get(key, 0)}
    assert (more[("yes", "q0")], more[("no", "q63")], more[("no", "other")], more[("yes", "other")]) == (2, 1, 2, 1)
    assert len({question for _, question in more}) == 65
    cameras.retain_cameras([])


def test_when_a_certificate_ends_is_told(tmp_path):
    certificate, key = Authority().issue(tmp_path, "gateway", valid_s=7200.0)
    TlsFiles(certificate, key).context()
    told = samples(file=str(certificate))[("sightline_certificate_expiry_timestamp_seconds",)]
    assert abs(told - time.time() - 7200) < 60


def test_lag_is_told_in_strides():
    cameras = metrics.AnsweredCameras()

    def late():
        page = samples()
        return page["sightline_lag_strides_count",] - page["sightline_lag_strides_bucket", "1.0"]

    cameras.open_camera(spec("gate"))
    before = late()
    cameras.record_window([answer("gate", latency_s=1.9)])
    assert late() == before
    cameras.record_window([answer("gate", latency_s=2.1)])
    assert late() == before + 1
    cameras.retain_cameras([])


@pytest.mark.parametrize("questions", [1, 8, 20])
def test_a_camera_costs_at_most_25_series(questions):
    before = samples()
    grown = series_per_camera(40, questions)
    assert grown == 15 + min(questions, metrics.MAX_QUESTIONS)
    assert grown <= 25
    assert {name for name, *_ in samples() if "camera" in name} == {name for name, *_ in before if "camera" in name}


def test_tiers_tell_bytes_hits_and_whether_they_work(monkeypatch):
    import torch

    host, node = Arena(8 << 20, name="host"), Arena(8 << 20, name="node")
    tiers = TierStack([host, node])
    key = BlockKey("gate", 0, 0, 1)
    kv, places = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int32)
    tiers.store([(key, Block(kv, kv, places, places))])
    tiers.load([key, BlockKey("gate", 0, 0, 2)])
    registry = CollectorRegistry()
    collector = MemoryCollector(tiers)
    registry.register(collector)
    assert samples(registry)["sightline_tier_bytes", "node"] == 0  # as of the last refresh
    collector.refresh()
    page = samples(registry)
    assert page["sightline_tier_bytes", "node"] == node.nbytes() > 0
    assert page["sightline_tier_up", "host"] == 1
    assert page["sightline_tier_blocks_total", "hits", "host"] == 1
    assert page["sightline_tier_blocks_total", "misses", "node"] == 1
    assert page["sightline_tier_blocks_total", "evicted", "node"] == 0
    assert page["sightline_memory_blocks_total", "stored"] == 1
    node.close()
    assert samples(registry)["sightline_tier_up", "node"] == 0
    # It answers and takes nothing: full, read-only.
    monkeypatch.setattr(host, "state", lambda: TierState(True, "the server refuses: READONLY"))
    assert samples(registry)["sightline_tier_up", "host"] == 0
    tiers.close()


def test_prefetchers_add_up_when_they_are_closed_and_once():
    before = TOTALS.missed
    tiers = TierStack([Arena(8 << 20)])
    prefetcher = Prefetcher(tiers.load)
    prefetcher.fetch([BlockKey("gate", 0, 0, 1)])
    prefetcher.close()
    prefetcher.close()
    assert TOTALS.missed == before + 1
    tiers.close()


def test_a_replica_that_left_has_no_series():
    fleet = metrics.FleetMetrics({"replica": 2})
    fleet.set_members({"replica": 1})
    fleet.set_replicas([ReplicaStatus("replica-a", cameras=3, utilisation=0.5), ReplicaStatus("replica-b")])
    assert samples(replica="replica-a")["sightline_fleet_cameras",] == 3
    fleet.set_replicas([ReplicaStatus("replica-b")])
    assert samples(replica="replica-a") == {}
    assert samples(role="replica")["sightline_fleet_wanted",] == 2
    fleet.set_replicas([])


def test_a_camera_is_expected_for_as_long_as_the_controller_has_it():
    fleet = metrics.FleetMetrics({})
    # Other tests of this process count for cameras of other names.
    fleet.set_expected_cameras(["awaited gate", "awaited yard"])
    assert samples(camera="awaited gate")["sightline_camera_expected",] == 1
    fleet.set_expected_cameras(["awaited yard"])
    assert samples(camera="awaited gate") == {}
    fleet.set_expected_cameras([])
    assert samples(camera="awaited yard") == {}


def test_the_digest_of_a_configuration_changes_with_it_and_not_with_passwords():
    def digest(address, **window):
        return config_digest(load_config(None, {"window": window, "tiers": {"redis_url": address}}))

    assert digest("redis://u:one@localhost/1") == digest("redis://u:two@localhost/1")
    assert digest("redis://u:one@localhost/1") != digest("redis://u:one@localhost/2")
    assert digest("redis://localhost/1") != digest("redis://localhost/1", stride_s=4)


def test_what_a_process_counts_is_there_from_the_first_scrape_on():
    """In a process of its own: another test may have counted here."""
    wanted = {
        "gateway": ("sightline_log_records_total", "error"),
        "controller": ("sightline_process_restarts_total", "replica"),
        "decoder": ("sightline_frames_dropped_total", "replica_slow"),
        "replica": ("sightline_windows_total", "", "done"),
        "alerting": ("sightline_alert_deliveries_total", "dead", "hook"),
        "tier": ("sightline_node_tier_requests_total", "load", "refused"),
        "reconciler": ("sightline_reconciler_watch_restarts_total", "expired"),
    }
    code = f"""
from actors.startup import describe_process
from cluster import metrics
from cluster.config import load_config
config = load_config(None, {{"alerts": {{"sinks": [{{"name": "hook", "kind": "log"}}]}}}})
def page():
    found = [each for family in metrics.REGISTRY.collect() for each in family.samples]
    return {{(each.name, *sorted(each.labels.values())): each.value for each in found}}
for role, series in {wanted!r}.items():
    assert series not in page(), role
    describe_process(config, role)
    assert page()[series] == 0, role
    assert [value for (name, *_), value in page().items() if name == "sightline_build_info"] == [1], role
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_every_reason_to_drop_something_is_there_from_the_first_scrape_on():
    """A first burst of a reason without a series at 0 is invisible to ``rate()``."""
    known = emitted()
    assert {*DropReason, "failed"} <= known["sightline_windows_total", "reason"]
    assert known["sightline_http_connections_dropped_total", "reason"] == {"refused", "evicted", "cut"}


class Nvml:
    """As the management library answers for two GPUs, of which one is a partition that tells its memory only."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == "partition":
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetDecoderUtilization(self, handle):
        if handle == "partition":
            raise self.NVMLError("not supported")
        return [20, 1000]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=3, total=4)


def test_gpus_tell_their_busy_share_and_a_partition_what_it_can():
    registry = CollectorRegistry()
    registry.register(GpuCollector(Nvml(), {"0": "whole", "MIG-1": "partition"}))
    assert samples(registry) == {
        ("sightline_gpu_busy_ratio", "0"): 0.75,
        ("sightline_gpu_decoder_busy_ratio", "0"): 0.2,
        ("sightline_gpu_memory_bytes", "0", "used"): 3,
        ("sightline_gpu_memory_bytes", "0", "total"): 4,
        ("sightline_gpu_memory_bytes", "MIG-1", "used"): 3,
        ("sightline_gpu_memory_bytes", "MIG-1", "total"): 4,
    }


def test_without_the_library_or_a_gpu_there_are_no_metrics_of_gpus():
    assert metrics.gpu_collector(visible="no such GPU") is None


def test_a_process_without_files_does_not_say_that_its_disk_is_full():
    """A gauge without labels would be there in every process, at 0, and set off the rule of a disk that fills."""
    shown = "from prometheus_client import generate_latest; from cluster.metrics import families"
    code = f"{shown}; print(generate_latest(families.REGISTRY).decode())"
    page = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "# TYPE sightline_disk_free_bytes gauge" in page
    assert not [line for line in page.splitlines() if line.startswith("sightline_disk_free_bytes")]
