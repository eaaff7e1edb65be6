"""Every alert fires when it should, stays silent when it should, and has a runbook: with promtool on the real rules."""

import re
from pathlib import Path

import pytest
import yaml
from emitted_labels import emitted, unknown_values
from promtool import needs_promtool, promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/helm/sightline/rules/sightline.yaml"

S = "sightline_"
STATE = S + 'camera_state{camera="%s",state="%s",process="decoder-0"}'
WINDOWS = S + 'windows_total{result="%s",reason="%s",process="replica-0"}'
TOTAL = 'windows_total{result="done",reason="",process="replica-0"}'
PASSES = S + 'reconciler_pass_seconds_count{result="%s",process="reconciler"}'
CALLS = S + 'node_tier_requests_total{method="load",result="%s",process="tier-0"}'

ASKED = S + 'camera_asked{camera="%s",process="decoder-0"}'

EXPECTED = S + 'camera_expected{camera="%s",process="controller"}'


def down(count):
    """Ten cameras, and so many of them that give no picture."""
    series = {EXPECTED % f"c{n}": "1x60" for n in range(10)}
    for n in range(10):
        for state in ("running", "backoff"):
            series[STATE % (f"c{n}", state)] = str(int((state == "backoff") == (n < count))) + "x60"
    return series


def site_down(count):
    """Three cameras of the site north, so many of which give no picture; one in the south, among 40 elsewhere."""
    series = {EXPECTED % f"c{n}": "1x60" for n in range(40)} | {STATE % (f"c{n}", "running"): "1x60" for n in range(40)}
    for n, name in enumerate(("north-gate", "north/yard", "north-roof-2", "south-gate")):
        gone = n < count or name == "south-gate"
        series[EXPECTED % name] = "1x60"
        series[STATE % (name, "running")] = f"{int(not gone)}x60"
        series[STATE % (name, "backoff")] = f"{int(gone)}x60"
    return series


# name: when it fires, and the same with one thing in order: (series that break it, series where all is well). Values in
# promtool's notation, a sample a minute; every case ends after an hour.
CASES = {
    "SightlineGatewayDown": (
        {S + 'build_info{process="replica-0"}': "1x60"},
        {S + 'build_info{process="gateway"}': "1x60"},
    ),
    "SightlineControllerDown": (
        {S + 'build_info{process="gateway"}': "1x60"},
        {S + 'fleet_wanted{role="replica",process="controller"}': "1x60"},
    ),
    "SightlineProcessDown": (
        {S + 'process_up{process="decoder-0"}': "1x30 0x30"},
        {S + 'process_up{process="decoder-0"}': "1x58 0 1"},
    ),
    "SightlineMembersMissing": (
        {S + 'fleet_members{role="replica"}': "2x30 1x30", S + 'fleet_wanted{role="replica"}': "2x60"},
        {S + 'fleet_members{role="replica"}': "2x60", S + 'fleet_wanted{role="replica"}': "2x60"},
    ),
    "SightlineRestarts": (
        {S + 'process_restarts_total{role="replica",process="controller"}': "0x40 2 4 6x20"},
        {S + 'process_restarts_total{role="replica",process="controller"}': "0x40 1 2x20"},
    ),
    "SightlineConfigsDiffer": (
        {
            S + f'build_info{{process="{name}",version="1",config="{config}"}}': "1x60"
            for name, config in [("replica-0", "a"), ("replica-1", "b"), ("gateway", "c")]
        },
        {
            S + f'build_info{{process="{name}",version="1",config="{config}"}}': "1x60"
            for name, config in [("replica-0", "a"), ("replica-1", "a"), ("gateway", "c")]
        },
    ),
    "SightlineLogErrors": (
        {S + 'log_records_total{level="error",process="gateway"}': "0+10x60"},
        {S + 'log_records_total{level="error",process="gateway"}': "0+1x60"},
    ),
    "SightlineManyCamerasDown": (down(3), down(1)),
    "SightlineSiteDown": (site_down(3), site_down(2)),
    "SightlineCameraMissing": (
        {EXPECTED % "gate": "1x60", EXPECTED % "yard": "1x60", STATE % ("yard", "running"): "1x60"},
        {EXPECTED % "gate": "1x60", STATE % ("gate", "backoff"): "1x60", STATE % ("gate", "running"): "0x60"},
    ),
    "SightlineCameraDown": (
        # Each minute the source is either waited for or tried again, as is a camera that does not answer at all.
        {STATE % ("gate", "backoff"): "0x50 1 1 0 1 1 0 1 1 0 1", STATE % ("gate", "connecting"): "0x52 1 0 0 1 0 0 1"},
        {STATE % ("gate", "backoff"): "0x57 1x3", STATE % ("gate", "error"): "0x60"},
    ),
    "SightlineCameraSilent": (
        {
            S + 'camera_last_frame_age_seconds{camera="gate",process="decoder-0"}': "0x30 60+60x30",
            STATE % ("gate", "running"): "1x60",
        },
        {
            S + 'camera_last_frame_age_seconds{camera="gate",process="decoder-0"}': "0x30 60+60x30",
            STATE % ("gate", "running"): "0x60",
        },
    ),
    "SightlineCameraUnanswered": (
        {
            S + 'camera_answered_timestamp_seconds{camera="gate",process="replica-0"}': "600x60",
            STATE % ("gate", "running"): "1x60",
            S + 'camera_quality{camera="gate",process="decoder-0"}': "1x60",
            ASKED % "gate": "1x60",
        },
        {
            S + 'camera_answered_timestamp_seconds{camera="gate",process="replica-0"}': "600x60",
            STATE % ("gate", "running"): "1x60",
            S + 'camera_quality{camera="gate",process="decoder-0"}': "0x60",
            ASKED % "gate": "1x60",
        },
    ),
    "SightlineStreamDamaged": (
        {S + 'stream_gaps_total{camera="gate"}': "0+3x60", S + 'decode_errors_total{camera="gate"}': "0x60"},
        {S + 'stream_gaps_total{camera="gate"}': "0+1x60", S + 'decode_errors_total{camera="gate"}': "0x60"},
    ),
    "SightlineResourcesStale": (
        {S + 'reconciler_age_seconds{since="word",process="reconciler"}': "30x30 30+60x30"},
        {
            S + 'reconciler_age_seconds{since="word",process="reconciler"}': "0 100 200 300 0 100 200 300 250x60",
            S + 'reconciler_age_seconds{since="list",process="reconciler"}': "0+60x60",
        },
    ),
    "SightlineReconcilerFailing": (
        {PASSES % "unavailable": "0+8x60", PASSES % "done": "0+2x60"},
        {PASSES % "unavailable": "0+2x60", PASSES % "done": "0+8x60"},
    ),
    "SightlineResourcesRefused": (
        {S + 'camera_resources{state="conflict"}': "0x30 1x30", S + 'camera_resources{state="accepted"}': "9x60"},
        {S + 'camera_resources{state="conflict"}': "0x50 1x10", S + 'camera_resources{state="waiting"}': "9x60"},
    ),
    "SightlineAnswersLate": (
        {WINDOWS % ("late", ""): "0+3x60", WINDOWS % ("done", ""): "0+20x60", WINDOWS % ("gated", ""): "0x60"},
        {WINDOWS % ("late", ""): "0+1x60", WINDOWS % ("done", ""): "0+20x60", WINDOWS % ("gated", ""): "0x60"},
    ),
    "SightlineWindowsDropped": (
        {WINDOWS % ("dropped", "replaced"): "0+2x60", WINDOWS % ("done", ""): "0+20x60"},
        {
            WINDOWS % ("dropped", "shed"): "0+20x60",
            WINDOWS % ("lost", ""): "0x50 450x10",
            WINDOWS % ("done", ""): "0+20x60",
        },
    ),
    "SightlineReplicaBehind": (
        # An engine that hangs: the queue replaces its windows, two of a camera waiting at most.
        {WINDOWS % ("dropped", "replaced"): "0x30 0+38x30", WINDOWS % ("done", ""): "0+38x30 1140x30"},
        {
            WINDOWS % ("dropped", "replaced"): "0+3x60",
            WINDOWS % ("dropped", "shed"): "0+90x60",
            WINDOWS % ("done", ""): "0+38x60",
            WINDOWS.replace("replica", "decoder") % ("dropped", "no_replica"): "0+9x60",
        },
    ),
    "SightlineFull": (
        {
            # A simulated fleet a tenth above its capacity, whose ladder lowered a quarter of the cameras.
            S + 'fleet_utilisation{replica="replica-0"}': "0.951 0.955 0.945 0.952" + " 0.951 0.946 0.957 0.942" * 14,
            S + 'fleet_lowered_cameras{replica="replica-0"}': "92x60",
            S + 'fleet_cameras{replica="replica-0"}': "362x60",
        },
        {
            S + 'fleet_utilisation{replica="replica-0"}': "0.97x60",
            S + 'fleet_utilisation{replica="replica-1"}': "0.5x60",
            S + 'fleet_lowered_cameras{replica="replica-0"}': "36x60",
            S + 'fleet_cameras{replica="replica-0"}': "362x60",
        },
    ),
    "SightlineShedding": (
        {S + 'ladder_cameras{rung="shed"}': "0x30 2x30", S + 'ladder_cameras{rung="full"}': "9x60"},
        {S + 'ladder_cameras{rung="shed"}': "0x60", S + 'ladder_cameras{rung="full"}': "9x60"},
    ),
    "SightlineFramesDropped": (
        {S + 'frames_dropped_total{reason="replica_slow",process="decoder-0"}': "0+60x60"},
        {S + 'frames_dropped_total{reason="shed",process="decoder-0"}': "0+60x60"},
    ),
    "SightlineDecoderSlow": (
        {S + 'decode_keyframes_only_cameras{process="decoder-0"}': "4x60"},
        {S + 'decode_keyframes_only_cameras{process="decoder-0"}': "0x20 4x4 0x36"},
    ),
    "SightlineIngestDropped": (
        {S + 'ingest_packets_dropped_total{reason="queue_full",process="decoder-0"}': "0+1x60"},
        {S + 'ingest_packets_dropped_total{reason="queue_full",process="decoder-0"}': "7x60"},
    ),
    "SightlineAsksFailing": (
        {S + 'asks_total{result="failed"}': "0+1x60", S + 'asks_total{result="answered"}': "0+2x60"},
        {S + 'asks_total{result="failed"}': "0+1x60", S + 'asks_total{result="answered"}': "0+9x60"},
    ),
    "SightlineAnswersMissed": (
        {S + 'answers_missed_total{process="gateway"}': "0+5x60"},
        {S + 'answers_missed_total{process="gateway"}': "0x10 5x50"},
    ),
    "SightlineTierDown": (
        {
            S + 'tier_up{tier="redis",process="replica-0"}': "1x30 0x30",
            S + 'tier_up{tier="redis",process="replica-1"}': "1x60",
        },
        {S + 'tier_up{tier="redis",process="replica-0"}': "1x57 0x3"},
    ),
    "SightlineMemoryLost": (
        {S + 'memory_lost_total{kind="frames",process="replica-0"}': "0x40 5x20"},
        {S + 'memory_lost_total{kind="frames",process="replica-0"}': "5x60"},
    ),
    "SightlineNodeTierFailing": (
        {CALLS % "refused": "0+1x60", CALLS % "late": "0+1x60", CALLS % "ok": "0+20x60"},
        {CALLS % "left": "0+2x60", CALLS % "late": "0x30 5x30", CALLS % "ok": "0+20x60"},
    ),
    "SightlineBlocksDamaged": (
        {
            S + 'node_tier_events_total{event="damaged",process="tier-0"}': "0x60",
            S + 'tier_blocks_total{event="damaged",tier="redis",process="replica-0"}': "0x40 1x20",
        },
        {S + 'node_tier_events_total{event="evicted",process="tier-0"}': "0+5x60"},
    ),
    "SightlineAlertsUndelivered": (
        {S + 'alerts_waiting{sink="hook"}': "0x53 3x7"},
        {S + 'alerts_waiting{sink="hook"}': "3x56 0 3x3"},
    ),
    "SightlineObjectiveBurning": (
        {S + TOTAL: "0+100x60", WINDOWS % ("late", ""): "0+15x60"},
        # An hour ago it was bad, and is good again; what is shed does not count.
        {
            S + TOTAL: "0+100x60",
            WINDOWS % ("late", ""): "0+30x50 1500x10",
            WINDOWS % ("dropped", "shed"): "0+90x60",
        },
    ),
    "SightlineCertificateExpires": (
        {S + 'certificate_expiry_timestamp_seconds{file="tls.crt",process="gateway"}': f"{3600 + 6 * 86400}x60"},
        {S + 'certificate_expiry_timestamp_seconds{file="tls.crt",process="gateway"}': f"{3600 + 8 * 86400}x60"},
    ),
    "SightlineDiskFilling": (
        {S + 'disk_free_bytes{process="alerting"}': "2e9x60"},
        {S + 'disk_free_bytes{process="alerting"}': "3e9x60"},
    ),
    "SightlineGpuErrors": (
        {'DCGM_FI_DEV_XID_ERRORS{Hostname="node-1",gpu="0"}': "0x55 79x5"},
        {'DCGM_FI_DEV_XID_ERRORS{Hostname="node-1",gpu="0"}': "79x60"},
    ),
    "SightlineAlertsDead": (
        {S + 'alert_deliveries_total{sink="hook",result="dead"}': "0x40 1x20"},
        {S + 'alert_deliveries_total{sink="hook",result="failed"}': "0+1x60"},
    ),
    "SightlineAlertsUnwritten": ({S + "alerts_unwritten": "0x30 2x30"}, {S + "alerts_unwritten": "0x60"}),
    "SightlineAuditLost": ({S + "audit_lines_lost_total": "0x40 1x20"}, {S + "audit_lines_lost_total": "3x60"}),
    "SightlineTokensStale": ({S + "tokens_stale": "0x50 1x10"}, {S + "tokens_stale": "1x58 0x2"}),
    "SightlineAlertsLost": ({S + "alerts_lost_total": "0x40 1x20"}, {S + "alerts_lost_total": "3x60"}),
    "SightlineRingsShort": (
        {S + 'rings_short{process="decoder-0"}': "0x10 2x50", S + 'rings_short{process="decoder-1"}': "0x60"},
        {S + 'rings_short{process="decoder-0"}': "0x10 2x20 0x30"},
    ),
}


# The series itself is gone, with the process that had it: the alert fires all the same.
ABSENT = {
    "SightlineManyCamerasDown": {EXPECTED % f"c{n}": "1x60" for n in range(10)}
    | {STATE % (f"c{n}", "running"): "1x60" if n < 7 else "1x20 _x40" for n in range(10)},
    "SightlineCameraMissing": {EXPECTED % "gate": "1x60", STATE % ("gate", "running"): "1x20 _x40"},
    "SightlineCameraUnanswered": {
        S + 'camera_answered_timestamp_seconds{camera="gate",process="replica-0"}': "0+60x20 _x40",
        STATE % ("gate", "running"): "1x60",
        S + 'camera_quality{camera="gate",process="decoder-0"}': "1x60",
        ASKED % "gate": "1x60",
    },
    "SightlineControllerDown": {S + 'fleet_wanted{role="replica",process="controller"}': "1x20 _x40"},
    "SightlineGatewayDown": {S + 'build_info{process="gateway"}': "1x20 _x40"},
}


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def case(name, series, *, fires):
    """One of promtool's tests: the value of ALERTS after an hour."""
    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    return {
        "interval": "1m",
        "input_series": [{"series": labels, "values": values} for labels, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "1h", "exp_samples": [{"labels": "{}", "value": 1}] if fires else []}
        ],
    }


def written(folder, name, tests):
    """A test file of one alert, over that rule alone: each test evaluates all rules of its file every minute."""
    [rule] = [rule for rule in rules() if rule["alert"] == name]
    only = folder / f"{name}.rule.yaml"
    only.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(only)], "evaluation_interval": "1m", "tests": tests}))
    return str(file)


@needs_promtool
def test_every_alert_fires_and_does_not_fire(tmp_path):
    assert CASES.keys() == {rule["alert"] for rule in rules()}
    files = [
        written(tmp_path, name, [case(name, broken, fires=True), case(name, well, fires=False)])
        for name, (broken, well) in CASES.items()
    ]
    code, said = promtool("test", "rules", *files)
    assert code == 0, said


@needs_promtool
def test_alerts_see_what_is_absent(tmp_path):
    files = [written(tmp_path, name, [case(name, series, fires=True)]) for name, series in ABSENT.items()]
    code, said = promtool("test", "rules", *files)
    assert code == 0, said


# Other causes of the same alerts: an agent that is gone; replicas that are full while nothing lowers quality.
ALSO = {
    "SightlineCameraDown": {STATE % ("gate", "waiting"): "0x30 1x30", STATE % ("gate", "backoff"): "0x60"},
    "SightlineFull": {
        S + 'fleet_utilisation{replica="replica-0"}': "0.96x60",
        S + 'fleet_utilisation{replica="replica-1"}': "0.97x60",
    },
}


@needs_promtool
@pytest.mark.parametrize(("name", "series"), ALSO.items(), ids=ALSO)
def test_an_alert_fires_for_another_cause(tmp_path, name, series):
    code, said = promtool("test", "rules", written(tmp_path, name, [case(name, series, fires=True)]))
    assert code == 0, said


@needs_promtool
def test_answers_that_alerting_did_not_get_are_lost_alerts_and_those_of_watchers_are_none(tmp_path):
    name, lost = "SightlineAlertsLost", {S + "alerts_lost_total": "0x60"}
    cases = [
        case(name, lost | {S + f'answers_missed_total{{process="{process}"}}': "0x40 9x20"}, fires=fires)
        for process, fires in (("alerting", True), ("gateway", False))
    ]
    code, said = promtool("test", "rules", written(tmp_path, name, cases))
    assert code == 0, said


@needs_promtool
def test_whether_a_camera_is_answered_does_not_depend_on_its_replicas_clock(tmp_path):
    """Which is right, or ten minutes behind or ahead; the last was not answered for an hour."""
    name = "SightlineCameraUnanswered"
    cases = [
        case(
            name,
            {
                S + 'camera_answered_timestamp_seconds{camera="gate",process="replica-0"}': answered,
                STATE % ("gate", "running"): "1x60",
                S + 'camera_quality{camera="gate",process="decoder-0"}': "1x60",
                ASKED % "gate": "1x60",
            },
            fires=fires,
        )
        for answered, fires in (("0+60x60", False), ("-600+60x60", False), ("600+60x60", False), ("4200x60", True))
    ]
    code, said = promtool("test", "rules", written(tmp_path, name, cases))
    assert code == 0, said


@needs_promtool
def test_a_camera_that_is_not_asked_now_is_not_called_unanswered(tmp_path):
    """Its questions' ``when`` ended a minute in, or began again two minutes before the end."""
    name = "SightlineCameraUnanswered"
    cases = [
        case(
            name,
            {
                S + 'camera_answered_timestamp_seconds{camera="gate",process="replica-0"}': "0 60 _x58",
                STATE % ("gate", "running"): "1x60",
                S + 'camera_quality{camera="gate",process="decoder-0"}': "1x60",
                ASKED % "gate": asked,
            },
            fires=fires,
        )
        for asked, fires in (("1 0x59", False), ("1 0x56 1x3", False), ("1x60", True))
    ]
    code, said = promtool("test", "rules", written(tmp_path, name, cases))
    assert code == 0, said


def test_every_label_value_of_ours_can_be_emitted():
    """In the rules, and in the series that the cases above make up for them."""
    known = emitted()
    series = "\n".join(name for cases in (*CASES.values(), ABSENT.values()) for each in cases for name in each)
    assert unknown_values(RULES.read_text() + series, known) == set()
    unknown = ("sightline_memory_blocks_total", "event", "lost")
    assert unknown_values('rate(sightline_memory_blocks_total{event=~"stored|lost"}[5m])', known) == {unknown}


@needs_promtool
def test_a_wrong_expectation_is_found(tmp_path):
    """What tells the test above from one that cannot fail."""
    broken, _ = CASES["SightlineCameraDown"]
    file = written(tmp_path, "SightlineCameraDown", [case("SightlineCameraDown", broken, fires=False)])
    assert promtool("test", "rules", file)[0] != 0


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, anchor = rule["annotations"]["runbook_url"].split("#")
    assert anchor == rule["alert"].lower()
    assert re.search(rf"^#+ {rule['alert']}$", (ROOT / page).read_text(), re.M), f"{page} has no runbook of it"
