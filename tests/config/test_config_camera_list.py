"""Lists of cameras to import: what each line is, or why it is none."""

import pytest

from cluster.config.camera_list import parse_camera_list
from cluster.errors import ConfigError

CSV = """name, source, priority, question
gate, rtsp://10.0.0.1/s, critical, "Is a van, red or not, parked here?"

yard,rtsp://10.0.0.2/s,,
bad,rstp://10.0.0.3/s,,
gate,rtsp://10.0.0.4/s,,
,rtsp://10.0.0.5/s,,
loud,rtsp://10.0.0.6/s,shouting,
dock,rtsp://10.0.0.7/s,normal,Is it open, or is it shut?
"""
YAML = """
cameras:
  - name: gate
    source: rtsp://10.0.0.1/s
    questions:
      - {id: fence, text: "Is anyone climbing the fence?", threshold: 0.6}
  - name: yard
    source: rtsp://10.0.0.2/s
    window: {stride_s: -1}
  - just text
  - name: env
    source: rtsp://u:${HOME}@10.0.0.2/s
"""


def errors(text: str) -> dict[int, str]:
    return {each.line: each.error for each in parse_camera_list(text) if each.error}


def test_csv_with_errors_by_line() -> None:
    found = parse_camera_list(CSV)
    assert [(each.line, each.name) for each in found if each.entry is not None] == [(2, "gate"), (4, "yard")]
    assert found[0].entry is not None
    assert found[0].entry.priority == "critical"
    assert [each.text for each in found[0].entry.questions or []] == ["Is a van, red or not, parked here?"]
    wrong = errors(CSV)
    assert wrong.keys() == {5, 6, 7, 8, 9}
    assert "unknown scheme" in wrong[5]
    assert wrong[6] == "line 2 already has this name"
    assert wrong[7] == "a camera needs a name"
    assert "priority" in wrong[8]
    assert "quotes" in wrong[9] or "columns" in wrong[9]
    # As spreadsheets write it.
    assert parse_camera_list("\ufeff" + CSV.replace("\n", "\r\n")) == found


def test_paused_is_said_as_in_a_configuration_and_nothing_else_is_taken_for_no() -> None:
    said = {"yes": True, "TRUE": True, "on": True, "y": True, "1": True, "no": False, "off": False, "0": False}
    rows = [f"c{number},demo://gate,{each}" for number, each in enumerate(said)]
    found = parse_camera_list("\n".join(["name,source,paused", *rows]))
    assert [each.entry.paused for each in found if each.entry is not None] == list(said.values())
    assert "paused" in errors("name,source,paused\ngate,demo://gate,ja\n")[2]


def test_yaml_with_errors_by_line_and_no_variables_of_the_gateway() -> None:
    found = parse_camera_list(YAML)
    assert [each.name for each in found if each.entry is not None] == ["gate"]
    wrong = errors(YAML)
    assert wrong.keys() == {7, 10, 11}
    assert "stride_s" in wrong[7]
    assert "variables" in wrong[11]


@pytest.mark.parametrize(
    "text", ['[{"name": "gate", "source": "demo://gate"}]', "- name: gate\n  source: demo://gate\n"]
)
def test_a_bare_list(text: str) -> None:
    [camera] = parse_camera_list(text)
    assert (camera.line, camera.name, camera.error) == (1, "gate", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no `cameras:`|no camera"),
        ("name,source\n", "no camera"),
        ("name,sauce\nx,y\n", "line 1: unknown column 'sauce'"),
        ("cameras: {", "not valid YAML"),
        ("hello there", "mapping of sections|no `cameras:`"),
        ("name,source\n" + "a,demo://gate\n" * 5001, "in parts"),
    ],
)
def test_what_is_no_list_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_camera_list(text)
