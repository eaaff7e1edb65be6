"""``sightline scenes`` as a user runs it."""

import os
import signal
import time

import pytest

from cluster.lab.scenes.truth import truth_path


def test_make_then_show(cli, small_cameras):
    out = cli.folder / "deep" / "scenes"
    command = ("make", "--out", out, "--count", 1, "--seed", 4, "--split", "train", "--event", "fight")
    command += ("--seconds", 24, "--jobs", 1, "--sheet")
    done = cli("scenes", *command)
    assert done.returncode == 0, done.stderr
    assert "1 scene made: " in done.stdout
    assert (out / "sheet.png").stat().st_size > 10_000
    again = cli("scenes", *command)
    assert "0 scenes made, 1 already existed" in again.stdout
    for name in ("train-400000.mp4", "train-400000.json"):
        shown = cli("scenes", "show", out / name)
        assert shown.returncode == 0, shown.stderr
        assert "train-400000, 24 s" in shown.stdout
        assert any("Are people fighting?" in line and "yes" in line for line in shown.stdout.splitlines())
        assert "How many people were seen?" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["make", "--out", "x", "--count", "0"], "the number of scenes must be between 1"),
        (["make", "--out", "x", "--event", "flood"], "unknown event 'flood'; there are: any, none, fall"),
        (["make", "--out", "x", "--split", "dev"], "unknown split 'dev'"),
        (["make", "--out", "x", "--seconds", "3"], "at least 24 s, not 3"),
        (["make", "--out", "x", "--jobs", "0"], "'--jobs' / '-j': Input should be greater"),
        (["make", "--out", "/dev/null", "--count", "1"], "/dev/null is not a directory"),
        (["make"], "Missing option '--out'"),
        (["show", "nowhere.mp4"], "cannot read nowhere.json: No such file"),
        (["show", "."], "is a directory; name one clip in it"),
    ],
)
def test_wrong_command_lines_end_with_one_sentence(cli, arguments, says):
    done = cli("scenes", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(cli.folder.glob("x/*.mp4"))


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["to all, as a terminal does", "to the parent alone"])
def test_ctrl_c_leaves_whole_clips_and_no_process(cli, send):
    out = cli.folder / "scenes"
    # The first scenes of this seed are smaller than most.
    few = ("--split", "train", "--seed", "61", "--seconds", "24")
    process, log = cli.start("scenes", "make", "--out", out, "--count", "8", *few, "--jobs", "2")
    deadline = time.monotonic() + 90
    while not list(out.glob("*.mp4")) and time.monotonic() < deadline:
        time.sleep(0.05)
    send(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in log.read_text()
    assert cli.orphans() == []
    clips = list(out.glob("*.mp4"))
    assert clips
    assert all(truth_path(clip).exists() for clip in clips)
    assert not list(out.glob(".*.part"))


def test_a_kill_leaves_no_process(cli):
    out = cli.folder / "scenes"
    process, _ = cli.start("scenes", "make", "--out", out, "--count", "8", "--split", "train", "--jobs", "2")
    deadline = time.monotonic() + 90
    while not list(out.glob(".*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(out.glob(".*.part"))
    process.kill()
    assert cli.orphans() == []
