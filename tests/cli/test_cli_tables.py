"""The camera table as it reaches a terminal and a pipe."""

import io

from rich.console import Console

from actors.cli.tables import cameras_table, reasons
from cluster.types import CameraStatus, LastAnswer

CAMERAS = [
    CameraStatus("gate", state="running", windows_done=3, last_answers=(LastAnswer("a[b]", 0.75, True, 1),)),
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
