"""The camera table as it reaches a terminal and a pipe."""

import contextlib
import io
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console

from actors.cli.cameras import add, list_cameras
from actors.cli.output import (
    JsonLines,
    cameras_table,
    console,
    memory,
    print_json,
    reasons,
    reconnecting,
    save,
    size,
)
from actors.cli.serve import changes, local, state_text, with_state
from actors.cli.watch import line as answer_line
from actors.cli.watch import silence_lines
from cluster.config import load_config
from cluster.errors import SightlineError, UnavailableError
from cluster.types import CameraStatus, LastAnswer

CAMERAS = [
    CameraStatus(
        "gate",
        state="running",
        windows_done=3,
        memory_bytes=12_400_000,
        memory_frames=900,
        memory_oldest_s=7300.0,
        decode="cpu",
        last_answers=(LastAnswer("a[b]", 0.75, True, 1),),
    ),
    CameraStatus("depot", state="backoff", reason="rtsp://u:hunter2@10.0.0.1/x refused", retry_in_s=3.0),
]


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=200).print(
        cameras_table(CAMERAS, 200), markup=False
    )
    return out.getvalue()


def test_a_pipe_gets_words_and_no_markup():
    text = shown(terminal=False)
    assert " running " in text
    assert " backoff " in text
    assert "[green]" not in text
    assert "\\" not in text
    assert "a[b] 0.75 yes" in text


def test_a_terminal_gets_colours():
    assert "\x1b[32mrunning" in shown(terminal=True)


def test_a_wide_terminal_says_where_a_camera_is_decoded():
    _, header, _, gate, depot = shown(terminal=False).splitlines()[:5]
    assert "decode" in header, header
    assert " cpu " in gate
    assert " cpu " not in depot


def test_a_reason_is_a_line_of_its_own_without_the_password():
    assert reasons(CAMERAS) == ["depot: rtsp://u:***@10.0.0.1/x refused; retrying in 3 s"]


def test_the_reason_of_hundreds_of_cameras_is_one_line():
    lowered = [CameraStatus(f"km-{n}", rung="prune", rung_reason="the replica is full") for n in range(400)]
    assert reasons([*lowered, CAMERAS[1]]) == [
        "km-0, km-1, km-2, and 397 more: quality prune: the replica is full",
        "depot: rtsp://u:***@10.0.0.1/x refused; retrying in 3 s",
    ]


def test_the_memory_is_a_column_where_there_is_room():
    assert " 12 MB, 2 h " in shown(terminal=False)
    narrow = io.StringIO()
    Console(file=narrow, width=100).print(cameras_table(CAMERAS, 100), markup=False)
    assert "memory" not in narrow.getvalue()


def test_a_memory_out_of_reach_is_marked_and_says_why():
    down = CameraStatus("gate", memory_state="redis: redis://u:hunter2@10.0.0.1 refused", memory_frames=1)
    assert memory(down) == "0 B, 0 s (degraded)"
    assert memory(CameraStatus("gate", memory_state="redis: down")) == "(degraded)"
    assert memory(CameraStatus("gate")) == ""
    assert reasons([down]) == ["gate: memory: redis: redis://u:***@10.0.0.1 refused"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (9.96e6, "10 MB"), (64 * 2**20, "67 MB"), (2.5e9, "2.5 GB")],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


def test_a_silent_camera_is_explained():
    statuses = [
        CameraStatus("gate", state="backoff", reason="rtsp://u:s3cret@h/1 refuses the connection", retry_in_s=3.0),
        CameraStatus("dock", state="waiting", reason="for a client that pushes"),
        CameraStatus("clip", state="ended"),
        CameraStatus("yard", state="running"),
        CameraStatus("roof", state="connecting"),
    ]
    assert silence_lines(statuses, ["roof"]) == ["roof: no video yet"]
    assert silence_lines(statuses, ["gate", "yard"]) == ["gate: rtsp://u:***@h/1 refuses the connection"]
    assert silence_lines(statuses, ["dock", "clip"]) == ["dock: for a client that pushes", "clip: its video has ended"]
    assert len(silence_lines(statuses, [])) == 4
    assert silence_lines([], []) == ["there is no camera; add one with `sightline cameras add NAME SOURCE`"]


def test_the_folder_of_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def state(option="", **config):
        return with_state(load_config(None, config), option)

    assert state().cluster.state_dir == f"{tmp_path}/sightline"
    assert state(cluster={"state_dir": "/var/lib/s"}).cluster.state_dir == "/var/lib/s"
    assert state("/tmp/here", cluster={"state_dir": "/var/lib/s"}).cluster.state_dir == "/tmp/here"
    # Ray's machines have each their own disk.
    elsewhere = {"ray_address": "10.0.0.1:6379"}
    assert state(cluster=elsewhere, security={"allow_plain_inside": True}).cluster.state_dir is None
    assert "are lost when this cluster ends, and so are incidents" in state_text(state("none"))
    assert "lost when this cluster ends; incidents are in /a; clips are in /a" in state_text(
        state("none", alerts={"folder": "/a"})
    )
    assert state_text(state("/b")).startswith("/b: cameras, incidents, clips; memories are lost when the cluster ends")
    assert "/b: cameras, incidents; clips are in /c" in state_text(state("/b", clips={"folder": "/c"}))
    both = state("/b", alerts={"folder": "/a"}, clips={"folder": "/c"})
    assert "/b: cameras; incidents are in /a; clips are in /c" in state_text(both)


def test_numbers_that_json_does_not_know_are_null(capsys):
    def read():
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    print_json("-", [CameraStatus("gate", latency_s=math.nan, expected_lag_s=math.inf, windows_per_s=0.1)])
    [camera] = read()
    assert (camera["latency_s"], camera["expected_lag_s"], camera["windows_per_s"]) == (None, None, 0.1)
    with JsonLines("-") as lines:
        lines.write({"camera": "NaN", "score": -math.inf})
    assert read() == {"camera": "NaN", "score": None}


def test_a_picture_makes_no_folders(tmp_path):
    with pytest.raises(SightlineError, match=r"cannot write .*No such file"):
        save(tmp_path / "nowhere" / "gate.jpg", [b"x"], 1, "gate")
    assert not (tmp_path / "nowhere").exists()


def test_a_gateway_that_listens_on_all_addresses_is_shown_by_one_that_works():
    shown = ["localhost:50051", "localhost:1", "10.0.0.5:50051", "127.0.0.1:9464"]
    assert [local(each) for each in ("0.0.0.0:50051", "[::]:1", *shown[2:])] == shown


class Gateway:
    """Is there at some of the times that it is asked."""

    def __init__(self, there):
        self.there = iter(there)

    def cameras_list(self):
        if not next(self.there):
            raise UnavailableError("no gateway answers")


def test_a_stream_goes_on_where_the_gateway_restarts(capsys, monkeypatch):
    def broken():
        yield from (1, 2)
        raise UnavailableError("socket closed")

    streams = iter([broken(), broken(), iter([3])])
    gateway = Gateway([True, False, False, True, False, True])
    assert list(reconnecting(gateway, lambda: next(streams), 0.0)) == [1, 2, 1, 2, 3]
    assert capsys.readouterr().err.count("socket closed; retrying for 180 s") == 2
    with pytest.raises(UnavailableError, match="no gateway answers"):
        list(reconnecting(Gateway([False]), lambda: [1], 0.0))
    monkeypatch.setattr("actors.cli.output.AGAIN_S", -1.0)
    with pytest.raises(UnavailableError, match="no gateway answers"):
        list(reconnecting(Gateway([True, False]), broken, 0.0))


def test_a_gateway_that_hangs_is_waited_for_until_it_is_restarted(monkeypatch):
    """Two minutes, the default of cluster.stall_timeout_s, and its start; each attempt takes the client's 10 s."""
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s, sleep=lambda _: None)
    monkeypatch.setattr("actors.cli.output.time", clock)

    class Hanging(Gateway):
        def cameras_list(self):
            clock.now_s += 10.0
            super().cameras_list()

    def broken():
        yield 1
        raise UnavailableError("ping timeout")

    streams = iter([broken(), iter([2])])
    gateway = Hanging([True, *[False] * 14, True])
    assert list(reconnecting(gateway, lambda: next(streams), 0.0)) == [1, 2]


def test_a_table_that_is_watched_outlives_the_gateway_s_restart_and_any_reason(monkeypatch):
    """FFmpeg's reasons have brackets, which are no markup."""
    told = iter([[], [], UnavailableError("socket closed"), [], CAMERAS])

    class Fleet:
        def cameras_list(self):
            found = next(told, KeyboardInterrupt())
            if isinstance(found, BaseException):
                raise found
            return [replace(each, reason="[v4l2 @ 0x5] [/dev/video0] is busy") for each in found]

    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("actors.cli.cameras.connect", lambda _: contextlib.nullcontext(Fleet()))
    monkeypatch.setattr("actors.cli.cameras.console", lambda: screen)
    monkeypatch.setattr("actors.cli.output.time.sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        list_cameras(watch=True, interval=0.1)
    assert "gate: [v4l2 @ 0x5] [/dev/video0] is busy" in screen.file.getvalue()
    told = iter([[], []])
    list_cameras(watch=False)
    assert "no cameras; add one" in screen.file.getvalue()
    monkeypatch.setenv("SIGHTLINE_TOKEN", "sl_secret")
    list_cameras(watch=False)
    assert "no cameras that this token may see; add one" in screen.file.getvalue()


def test_a_watched_table_of_thousands_of_cameras_is_a_screenful(monkeypatch):
    """All of them take seconds to render, every second."""
    fleet = Mock()
    fleet.cameras_list.return_value = [CameraStatus(f"km-{number:04}") for number in range(5000)]
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    monkeypatch.setattr("actors.cli.cameras.connect", lambda _: contextlib.nullcontext(fleet))
    monkeypatch.setattr("actors.cli.cameras.console", lambda: screen)
    monkeypatch.setattr("actors.cli.cameras.time.sleep", Mock(side_effect=KeyboardInterrupt))
    began_s = time.thread_time()
    with pytest.raises(KeyboardInterrupt):
        list_cameras(watch=True)
    assert time.thread_time() - began_s < 0.6
    assert "km-0000" in screen.file.getvalue()


def test_a_camera_that_was_added_is_no_failure_where_the_gateway_is_gone_a_moment_later(monkeypatch, capsys):
    client = Mock()
    client.camera_add.return_value = CameraStatus("gate", state="connecting", replica="replica-1")
    client.camera_get.side_effect = UnavailableError("socket closed")
    monkeypatch.setattr("actors.cli.cameras.connect", lambda _: contextlib.nullcontext(client))
    add("gate", "rtsp://10.0.0.11/stream1")
    assert "gate: connecting\naccepted by replica-1" in capsys.readouterr().out


def test_what_changes_in_a_running_cluster_is_a_line_each():
    before = {"gateway": "runs (process 7)", "replica-0": "runs (process 8)", "memory of replica-0": ""}
    assert changes({}, before) == [], "the first look"
    assert changes(before, before) == []
    dead = before | {"replica-0": "died", "memory of replica-0": "redis: nobody answers"}
    assert changes(before, dead) == ["replica-0: died", "memory of replica-0: redis: nobody answers"]
    back = dead | {"replica-0": "runs (process 9)", "memory of replica-0": ""}
    assert changes(dead, back) == ["replica-0: runs (process 9)", "memory of replica-0: works again"]
    # Between two looks.
    assert changes(before, before | {"gateway": "runs (process 9)"}) == ["gateway: died, and runs (process 9)"]
    more = before | {f"decoder-{number}": "runs (process 9)" for number in range(14)} | {"memory of replica-1": ""}
    assert changes(before, more) == [
        *(f"decoder-{number}: runs (process 9)" for number in range(10)),
        "and 4 more changes",
    ]
    del more["replica-0"]
    assert changes(more, before | {"replica-0": "died"})[0] == "replica-0: died"
    assert changes(before, {"gateway": before["gateway"]}) == ["replica-0: ended", "memory of replica-0: ended"]


@pytest.mark.parametrize("state", ["backoff", "error", "connecting"])
def test_an_added_camera_that_does_not_answer_is_a_failure_of_its_own_code(monkeypatch, capsys, state):
    client = Mock()
    client.camera_add.return_value = CameraStatus("gate", state="connecting")
    client.camera_get.return_value = CameraStatus("gate", state=state, reason="rtsp://u:s3cret@h/1 refuses")
    monkeypatch.setattr("actors.cli.cameras.connect", lambda _: contextlib.nullcontext(client))
    monkeypatch.setattr("actors.cli.cameras.CONNECT_S", 0.1)
    with pytest.raises(typer.Exit) as ended:
        add("gate", "rtsp://h/1")
    assert ended.value.exit_code == 3
    assert "gate was added, but does not answer: rtsp://u:***@h/1 refuses" in capsys.readouterr().err
    client.camera_get.reset_mock()
    add("gate", "rtsp://h/1", no_wait=True)
    client.camera_get.assert_not_called()
    assert capsys.readouterr().err == ""


def test_in_a_pipe_tables_are_whole_unless_columns_limits_them(monkeypatch, capsys):
    long = replace(CAMERAS[0], tokens_full=10_000, tokens_kept=2_690, tokens_computed=901, latency_s=0.5)
    for columns, widest in (("80", 80), ("60", 60), (None, 200)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        screen = console()
        screen.print(cameras_table([long], screen.width), markup=False)
        screen.print("x" * 300)
        *table, line, end = capsys.readouterr().out.split("\n")
        assert (line, end) == ("x" * 300, ""), "text is never cut"
        assert max(map(len, table)) <= widest
        assert any("gate" in each for each in table)
        assert any("decode" in each for each in table) == (columns is None), "what matters most is shown"


def test_an_explanation_is_in_quotes_beside_the_verdict_and_a_bare_yes_or_no_is_not_said_twice():
    counts = {"start": 0, "end": 40_000_000, "score": 0.12, "positive": False, "gated": True, "lag_s": 0.1}
    said = answer_line(Mock(stream="gate", question="fence", text="no, a cat", **counts))
    assert said.endswith('0.12 [dim]no [/]  0.0–40.0 s  [dim]nothing moved[/]  "no, a cat"')
    for text in ("", "no", "yes"):
        assert '"' not in answer_line(Mock(stream="gate", question="fence", text=text, **counts))
