"""What ``sightline incidents follow`` prints of an event: what is new with it."""

from dataclasses import replace

import pytest
from rpc_serving import serving_in_thread

from actors.cli import main
from actors.cli.incidents import event_line, troubles
from cluster.alerts.dispatcher import Outbox
from cluster.alerts.grpc_service import IncidentsServicer
from cluster.alerts.incident import AlertEvent, Delivery, Incident, clip_settled
from cluster.errors import NotReadyError

OPEN = Incident("i1", "gate", "question", "fence", "critical", 0, 1, 0.9, 2, 100.0, 100.0, text="Somebody climbs.")
KIM = replace(OPEN, acknowledged_by="Kim", acknowledged_s=101.0)
FULL = "no clip: the disk is full"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (AlertEvent("i1-1", "new", 100.0, OPEN), "Somebody climbs."),
        (AlertEvent("i1-2", "update", 101.0, KIM, cause="acknowledged"), "acknowledged by Kim"),
        (clip_settled(replace(KIM, clip="whole"), 110.0), "clip ready"),
        (clip_settled(replace(KIM, clip="none", footage_note=FULL), 110.0), FULL),
        (AlertEvent("i1-3", "end", 120.0, replace(KIM, ended_s=120.0, reason="the camera is silent")), "is silent"),
    ],
)
def test_a_line_ends_with_what_is_new(event, said):
    line = event_line(event)
    assert line.endswith(said)
    assert f"{event.kind:6}" in line


def test_dead_alerts_come_with_the_command_that_tries_them_again():
    letter = Delivery(AlertEvent("i1-1", "new", 100.0, OPEN), "ops", "dead", 3, "answered 404")
    lines = troubles(Outbox({}, "", 0, 0, 0, 0, [letter]))
    assert lines[0].endswith("for ops: answered 404")
    assert "sightline incidents resend" in lines[1]
    assert troubles(Outbox({}, "", 0, 0, 0, 0, [])) == []
    assert troubles(Outbox({}, "", 0, 7, 0, 0, []))[0].startswith("7 delivered alerts were deleted early")


class Storm:
    """Of so many open incidents, of which one has ended by now."""

    def __init__(self, count):
        self.open = {f"i{number}": replace(OPEN, id=f"i{number}", opened_s=100.0 - number) for number in range(count)}

    async def incidents(self, query):
        return [*self.open.values()][: query.limit]

    async def acknowledge(self, incident_id, by):
        if incident_id == "i1":
            raise NotReadyError(f"no incident {incident_id!r} is open")
        return replace(self.open[incident_id], acknowledged_by=by)


def test_incidents_of_a_storm_are_counted_and_acknowledged_together(monkeypatch, capsys):
    with serving_in_thread(IncidentsServicer(Storm(60))) as address:
        monkeypatch.setenv("SIGHTLINE_GATEWAY", address)
        assert main(["incidents", "list", "--json", "-"]) == 0
        assert capsys.readouterr().err == "the newest 50; there may be more: --before i49\n"
        assert main(["incidents", "list", "-n", "100"]) == 0
        assert capsys.readouterr().err == ""
        assert main(["incidents", "ack", "i0", "i1", "i2", "--by", "ann"]) == 1
    out = capsys.readouterr()
    assert out.out == "i0: acknowledged by ann\ni2: acknowledged by ann\n"
    assert "no incident 'i1' is open" in out.err
