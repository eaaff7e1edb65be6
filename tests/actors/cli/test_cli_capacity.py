"""Adding cameras to a full cluster, and draining a replica, as an operator types it; the controller's rules, no Ray."""

import json
from contextlib import ExitStack

import pytest
from rpc_serving import serving_in_thread

from cluster.config import SightlineConfig, camera_settings, load_config
from cluster.control.costs import CostModel
from cluster.control.directory import Directory
from cluster.control.fleet_settings import FleetSettings
from cluster.control.ladder import default
from cluster.gateway import directory
from cluster.types import PatchGeometry
from cluster.types.reports import DecoderInfo, DecoderNumbers, ReplicaInfo

# A window of 0.5 s: two cameras of a window a second fill a replica, four at half as many windows.
COSTS = CostModel("made-up", "none", "made up", 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
SHORT = ["--set", "window.length_s=8", "--set", "window.stride_s=1", "-q", "p=Is anyone there?"]


class Rules:
    """The controller's directory behind the gateway's services."""

    def __init__(self, replicas: int) -> None:
        self.config: SightlineConfig = load_config(None)
        self.directory = Directory(quality=FleetSettings(COSTS, default()))
        self.directory.join_decoder(DecoderInfo("decoder-0", "d", "d:1", "", 1), 0.0)
        self.decoders: DecoderNumbers | None = None
        for number in range(replicas):
            self.directory.join_replica(ReplicaInfo(f"r{number}", "r:1", "", 1, PatchGeometry(14, 2, 2)), 0.0)

    async def add_camera(self, managed, force=False, takeover=False):
        settings = camera_settings(self.config, managed.entry)
        self.directory.check_add(settings, 0.0, force=force)
        self.directory.add(settings, 0.0)
        return self.directory.status(managed.entry.name)

    async def list_cameras(self):
        return [self.directory.status(name) for name in self.directory.cameras]

    async def list_replicas(self):
        return self.directory.replica_statuses()

    async def decoder_numbers(self):
        return self.decoders

    async def drain_replica(self, name, undo):
        return self.directory.drain(name, undo=undo)


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def serve(replica_count: int, decoders: DecoderNumbers | None = None) -> str:
            rules = Rules(replica_count)
            rules.decoders = decoders
            servicers = directory.CamerasServicer(rules), directory.ReplicasServicer(rules)
            return stack.enter_context(serving_in_thread(*servicers))

        yield serve


def test_cameras_are_taken_reduced_refused_and_forced(cli, serve):
    gateway = serve(1)

    def add(name, *more):
        return cli("cameras", "add", name, *SHORT, *more, SIGHTLINE_GATEWAY=gateway)

    first = add("gate", "--priority", "critical")
    assert first.returncode == 0, first.stderr
    # Nothing has come of it yet, so that there is no load that answers would wait for.
    assert first.stdout.splitlines()[-1] == "accepted by replica-0: a window every 1 s"
    results = [add(f"cam-{number}", "--json", "-") for number in range(4)]
    codes = [done.returncode for done in results]
    assert codes[0] == 0
    assert json.loads(results[0].stdout)["rung"] == "stride"
    assert codes == sorted(codes)
    assert codes[-1] == 1
    refused = results[-1]
    assert refused.stdout == ""
    [line] = refused.stderr.strip().splitlines()
    assert "camera 'cam-3' is refused: the fleet is full" in line
    assert "replicas too few" in line
    forced = add("cam-3", "--force")
    assert forced.returncode == 0
    assert "at reduced quality (" in forced.stdout
    wrong = add("yard", "--priority", "urgent")
    assert wrong.returncode == 2
    assert "priority" in wrong.stderr
    assert "'critical'" in wrong.stderr
    table = cli("cameras", "list", SIGHTLINE_GATEWAY=gateway).stdout
    assert "critical, full" in table
    assert "cam-3: quality " in table


def test_decoders_that_follow_load_are_counted_below_the_replicas(cli, serve):
    assert "decoders" not in cli("replicas", "list", SIGHTLINE_GATEWAY=serve(1)).stdout
    gateway = serve(1, DecoderNumbers(running=2, wanted=3, least=1, most=6))
    table = cli("replicas", "list", SIGHTLINE_GATEWAY=gateway).stdout
    assert "decoders: 2 running, 3 wanted by their load, between 1 and 6" in table
    listed = json.loads(cli("replicas", "list", "--json", "-", SIGHTLINE_GATEWAY=gateway).stdout)
    assert [each["name"] for each in listed] == ["replica-0"]


def test_a_replica_is_drained_and_taken_back(cli, serve):
    gateway = serve(2)

    def run(*arguments):
        return cli(*arguments, SIGHTLINE_GATEWAY=gateway)

    for number in range(2):
        assert run("cameras", "add", f"cam-{number}", *SHORT).returncode == 0
    before = {each["name"]: each for each in json.loads(run("replicas", "list", "--json", "-").stdout)}
    assert {name: each["cameras"] for name, each in before.items()} == {"replica-0": 1, "replica-1": 1}
    assert "replica-1: drained; it still holds 0 cameras" in run("replicas", "drain", "replica-1").stdout
    assert "drained" in run("replicas", "list").stdout
    after = {each["name"]: each["cameras"] for each in json.loads(run("replicas", "list", "--json", "-").stdout)}
    assert after == {"replica-0": 2, "replica-1": 0}
    last = run("replicas", "drain", "replica-0")
    assert (last.returncode, last.stderr.strip()) == (
        1,
        "error: no other replica takes cameras; replica-0 keeps its own until there is one",
    )
    unknown = run("replicas", "drain", "replica-7")
    assert unknown.returncode == 1
    assert "there is no replica 'replica-7'; there are: replica-0, replica-1" in unknown.stderr
    assert "accepts cameras again" in run("replicas", "drain", "replica-1", "--undo").stdout
