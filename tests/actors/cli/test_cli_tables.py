"""The camera table as it reaches a terminal and a pipe."""

import io

import pytest
from rich.console import Console

from actors.cli.output import cameras_table, memory, reasons, size, span
from cluster.types import CameraStatus, LastAnswer

CAMERAS = [
    CameraStatus(
        "gate",
        state="running",
        windows_done=3,
        memory_bytes=12_400_000,
        memory_frames=900,
        memory_oldest_s=7300.0,
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


def test_a_reason_is_a_line_of_its_own_without_the_password():
    assert reasons(CAMERAS) == ["depot: rtsp://u:***@10.0.0.1/x refused; tried again in 3 s"]


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_spans(seconds, text):
    assert span(seconds) == text
