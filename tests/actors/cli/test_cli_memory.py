"""``ask``, ``forget`` and ``memory`` against a scripted gateway: what they send, print, write and end with."""

import json
import os
import pty
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import actors.cli
from actors.cli.ask import Shown, _show_all, printable
from actors.cli.options import parse_duration, spoken
from cluster.errors import ConfigError
from cluster.types import AskResult, AskSpec, CameraStatus, DeletedMemory, MemoryStatus, Moment
from cluster.wire.memory_wire import AskAllProgress, AskOutcome, CameraOutcome

MOMENTS = (Moment(277_000_000, 285_000_000, 0.31), Moment(990_000_000, 990_500_000, 0.12))
STATUS = MemoryStatus(
    camera="gate",
    frames=120,
    tokens=4_000,
    oldest=100_000_000,
    newest=1_000_000_000,
    cap_bytes=64 * 2**20,
    tier_bytes={"recent": 1024, "arena": 16 * 2**20},
    compressor="infinipot_v",
    organiser="mosaic",
    retriever="two_stage",
    counts={"frames": 500, "frames_dropped": 2, "lost": 0},
    tier_states={"arena": "", "redis": "nobody answers [there]"},
)


class Scripted:
    """A replica's memory and a controller that knows one camera."""

    def __init__(self):
        self.asked = []
        self.forgotten = []
        self.error = None
        self.degraded = False
        self.text = "A red truck."
        self.stuck = threading.Event()
        self.stuck.set()
        self.cancelled = threading.Event()

    async def ask(self, ask):
        import asyncio

        self.asked.append(ask)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        yield "A red "
        try:
            await asyncio.to_thread(self.stuck.wait, 30)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield "truck\x1b[2J."
        yield AskResult(
            ask.stream, self.text, MOMENTS, 0, 1_000_000_000, 40_000, 1_200, 3 * 2**20, 0.42, 1.5, self.degraded
        )

    async def delete_memory(self, camera, ago_s, *, only_here=False):
        self.forgotten.append((camera, ago_s))
        return DeletedMemory(1, 36_000_000)

    async def describe(self, camera):
        return STATUS

    async def pictures(self, camera, moments):
        return [b"\xff\xd8jpeg", b""]

    async def get_camera(self, name):
        from cluster.errors import UnknownCameraError

        if name != "gate":
            raise UnknownCameraError(f"there is no camera {name!r}")
        return CameraStatus(name)


@pytest.fixture
def gateway(monkeypatch):
    from rpc_serving import serving_in_thread

    from cluster.gateway import directory
    from cluster.replica import memory_service as memory

    scripted = Scripted()
    with serving_in_thread(memory.MemoryServicer(scripted), directory.CamerasServicer(scripted)) as scripted.address:
        monkeypatch.setenv("SIGHTLINE_GATEWAY", scripted.address)
        yield scripted
        scripted.stuck.set()


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """``(exit code, standard output, standard error)`` of one command in this process, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: PTH123, SIM115

    def call(*arguments):
        code = actors.cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.parametrize("command", ["ask", "forget", "memory"])
def test_every_command_explains_itself_with_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Usage: sightline {command}" in out
    assert f"$ sightline {command}" in out


# -- ask ----------------------------------------------------------------------------------------


def test_ask_prints_the_answer(gateway, run):
    assert run("ask", "gate", "What came in?") == (0, "A red truck[2J.\n", "")
    assert gateway.asked == [AskSpec("gate", "What came in?")]


def test_ask_explains(gateway, run):
    gateway.degraded = True
    code, out, err = run("ask", "gate", "What?", "--since", "1h30m", "--max-tokens", 9, "--explain")
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "A red truck[2J.",
        "12 min 03 s ago 8 s long 31 % of attention",
        "10 s ago 0.5 s long 12 % of attention",
        "looks back over 16 min 40 s",
        "read 1.2k of 40k tokens (3 %), 3.1 MB",
        "first token after 0.42 s, 1.50 s in total",
    ]
    assert "part of the memory was unreachable" in err
    assert gateway.asked == [AskSpec("gate", "What?", (), 5400.0, 9)]
    conversation = err.split("conversation ")[1].strip()
    assert run("ask", "gate", "Sure?", "--conversation", conversation)[0] == 0
    assert gateway.asked[1].turns == (("What?", "A red truck."),)


@pytest.mark.parametrize(("question", "told"), [("What came in?", True), ("Did anything come in?", False)])
def test_an_answer_of_one_word_to_more_than_that_is_said(gateway, run, question, told):
    gateway.text = "Yes."
    code, _, err = run("ask", "gate", question)
    assert (code, "answered no more than that" in err) == (0, told)


def test_ask_writes_pictures_and_json(gateway, run, tmp_path):
    code, out, _ = run("ask", "gate", "What?", "--pictures", "out/door", "--json", "-")
    assert code == 0
    body = json.loads(out)
    assert body["camera"] == "gate"
    assert body["text"] == "A red truck."
    assert [(m["ago_s"], m["picture"]) for m in body["moments"]] == [(723.0, "out/door/gate-277.000s.jpg"), (10.0, "")]
    assert [path.name for path in (tmp_path / "out/door").iterdir()] == ["gate-277.000s.jpg"]
    assert (tmp_path / "out/door/gate-277.000s.jpg").read_bytes() == b"\xff\xd8jpeg"
    code, out, _ = run("ask", "gate", "What?", "--json", "a.json")
    assert (code, out) == (0, "A red truck[2J.\n")
    assert "picture" not in json.loads((tmp_path / "a.json").read_text())["moments"][0]


WRONG = {
    "no question": (["ask", "gate"], 2, "no question; write one after the camera"),
    "empty question": (["ask", "gate", "  "], 2, "the question is empty"),
    "control characters": (["ask", "gate", "a\x07"], 2, "the question is not text"),
    "no duration": (["ask", "gate", "q", "--since", "10"], 2, "--since '10' is not a duration; write it as in 90s"),
    "no timeout": (["ask", "gate", "q", "--timeout", "soon"], 2, "--timeout 'soon' is not a duration"),
    "no conversation": (["ask", "gate", "q", "--conversation", "x"], 1, "there is no conversation 'x'"),
    "unwritable": (["ask", "gate", "q", "--pictures", "/dev/null/x"], 1, "cannot write /dev/null/x"),
    "a camera": (["cameras", "remove", "gate"], 2, "this deletes everything that camera 'gate' has seen; add --yes"),
    "everything": (["forget", "gate"], 2, "everything that camera 'gate' has seen; add --yes, or --before"),
    "before when": (["forget", "gate", "--before", "-1h"], 2, "--before '-1h' is not a duration"),
    "nobody": (["memory", "gate", "-g", "127.0.0.1:1"], 1, "no Sightline gateway answers at 127.0.0.1:1"),
}


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_goes_wrong_is_one_line_and_a_code(gateway, run, arguments, code, message):
    found, _, err = run(*arguments)
    assert found == code, err
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err
    assert gateway.forgotten == []


def test_an_answer_that_does_not_end_in_time(gateway, run):
    gateway.stuck.clear()
    code, _, err = run("ask", "gate", "q", "--timeout", "1s")
    assert code == 1
    assert "the answer was not complete after 1 s; allow more time, or ask about less" in err


def test_answers_that_fail_are_closed(gateway, run):
    class Events:
        closed = 0

        def __iter__(self):
            return self

        def __next__(self):
            raise KeyboardInterrupt

        def close(self):
            self.closed += 1

    events = Events()
    with pytest.raises(KeyboardInterrupt):
        Shown(explain=False, pictures=None, json=None).answer("Is it?", events)
    assert events.closed == 1


def test_a_question_to_all_that_is_stopped_shows_what_came(capsys):
    def events(*came):
        yield from came
        raise KeyboardInterrupt

    assert not _show_all(events(), pictures=None, json=None)
    assert not _show_all(events(AskAllProgress(9, 3, 0, 6, 20, False)), pictures=None, json=None)
    said = capsys.readouterr()
    assert (said.out, said.err.count("stopped")) == ("3 of 9 cameras answered\n", 2)


def test_pictures_of_thousands_of_cameras_go_to_the_disk_as_they_come(tmp_path, capsys):
    """Held until the end, as many as 5,000 cameras have need a gigabyte, and a killed command leaves none."""

    def events():
        for number in range(100):
            assert len(list(tmp_path.glob("*.jpg"))) == number
            result = AskResult(f"km-{number}", "No.", MOMENTS[:1], 0, 10**9, 1, 1, 1, 0.1, 0.1, yes=0.1)
            outcome = AskOutcome(result, "", (bytes(100_000),))
            yield CameraOutcome(result.stream, outcome, incidents=("",))
        yield AskAllProgress(100, 100, 0, 0, 100, True)

    report = tmp_path / "answers.json"
    tracemalloc.start()
    try:
        assert _show_all(events(), pictures=tmp_path, json=str(report))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    shown = json.loads(report.read_text())["answers"]
    assert [each["moments"][0]["picture"] for each in shown] == [f"{tmp_path}/km-{n}-277.000s.jpg" for n in range(100)]


# -- the prompt ---------------------------------------------------------------------------------


OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
# In the new process: its standard input is its terminal, and Ctrl-C reaches it whoever started the tests.


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, cli, *arguments):
        import subprocess

        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *cli.command(arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=cli.environment | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def until(self, text):
        """Everything shown since the last time, up to and with ``text``."""
        import select

        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], 30)
            assert ready, f"{text!r} never came: {self.shown!r}"
            self.shown += os.read(self.master, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text):
        # What comes between a prompt and the reading behind it may be lost, as nobody types that fast: Python looks for
        # a Ctrl-C before it begins to read, and not again.
        time.sleep(0.3)
        os.write(self.master, text.encode())

    def end(self):
        code = self.process.wait(30)
        os.close(self.master)
        return code


@pytest.fixture
def terminal(cli, gateway):
    cli.environment["SIGHTLINE_GATEWAY"] = gateway.address
    opened = []

    def start(*arguments):
        opened.append(Terminal(cli, *arguments))
        return opened[-1]

    yield start
    for each in opened:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait(10)


def test_a_prompt_keeps_the_conversation_until_the_end_of_input(gateway, terminal):
    from cluster.errors import NotReadyError

    screen = terminal("ask", "gate")
    screen.until("? ")
    screen.type("Who?\n")
    assert "A red truck" in screen.until("? ")[len("Who?") :]
    screen.type("\n")
    screen.until("? ")
    screen.type("Sure?\n")
    screen.until("A red truck")
    screen.until("? ")
    # An answer that is stopped is not part of it.
    gateway.stuck.clear()
    screen.type("Long?\n")
    screen.until("A red ")
    screen.type("\x03")
    screen.until("stopped")
    screen.until("? ")
    # The prompt does not wait for the gateway to hear of it: an answer that ends first is part of the conversation.
    assert gateway.cancelled.wait(30)
    gateway.stuck.set()
    screen.type("And?\n")
    screen.until("A red truck")
    screen.until("? ")
    # A conversation that is over begins anew.
    gateway.error = NotReadyError("the conversation is over")
    screen.type("Still?\n")
    screen.until("error: the conversation is over")
    screen.until("? ")
    screen.type("New?\n")
    screen.until("A red truck")
    screen.until("? ")
    screen.type("\x04")
    assert screen.end() == 0
    said = [("Who?", "A red truck."), ("Sure?", "A red truck."), ("And?", "A red truck.")]
    assert [list(spec.turns) for spec in gateway.asked] == [[], said[:1], said[:2], said[:2], said, []]


def test_the_prompt_ends_with_ctrl_c_and_for_an_unknown_camera(terminal):
    screen = terminal("ask", "gate")
    screen.until("? ")
    screen.type("\x03")
    assert screen.end() == 130
    screen = terminal("ask", "gatr")
    screen.until("error: there is no camera 'gatr'")
    assert screen.end() == 1


def test_forgetting_everything_is_asked_for_first(gateway, terminal):
    screen = terminal("forget", "gate")
    screen.until("Delete everything that camera 'gate' has seen? [y/N]: ")
    screen.type("n\n")
    assert screen.end() == 1
    screen = terminal("forget", "gate")
    screen.until("[y/N]: ")
    screen.type("\x03")
    assert screen.end() == 130
    assert gateway.forgotten == []
    screen = terminal("forget", "gate")
    screen.until("[y/N]: ")
    screen.type("y\n")
    screen.until("gate: deleted 1 frame, 36 MB")
    assert screen.end() == 0
    assert gateway.forgotten == [("gate", None)]


# -- forget, memory -----------------------------------------------------------------------------


def test_forget(gateway, run):
    assert run("forget", "gate", "--before", "2h") == (
        0,
        "gate: deleted 1 frame, 36 MB of memory; 0 files, 0 B of footage; 0 incidents, 0 alerts\n",
        "",
    )
    told = json.loads(run("forget", "gate", "--yes", "--json", "-")[1])
    assert told == {"frames": 1, "bytes": 36000000, "files": 0, "file_bytes": 0, "incidents": 0, "alerts": 0}
    assert gateway.forgotten == [("gate", 7200.0), ("gate", None)]


def test_memory(gateway, run):
    code, out, _ = run("memory", "gate")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines() if line.strip()]
    assert lines[:3] == [
        "gate: 120 frames over 15 min 00 s, 4k tokens",
        "compressor infinipot_v, organiser mosaic, retriever two_stage",
        "so far: frames 500, frames dropped 2",
    ]
    assert lines[-3:] == ["recent 1.0 kB 0 %", "arena 17 MB 25 % works", "redis nobody answers [there]"]
    assert json.loads(run("memory", "gate", "--json", "-")[1])["tier_bytes"] == STATUS.tier_bytes


# -- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), (" 1.5H ", 5400), ("0.5s", 0.5)],
)
def test_durations(text, seconds):
    assert parse_duration(text, "--since") == seconds


@pytest.mark.parametrize(
    "text", ["", "10", "m", "10 m", "1h1h", "-1h", "1e3s", "10min", "0s", "99999d", "1m 2s", "١s", "1h!"]
)
def test_no_durations(text):
    with pytest.raises(ConfigError, match="--since"):
        parse_duration(text, "--since")


@given(st.integers(1, 59), st.integers(0, 23), st.integers(0, 59), st.integers(0, 3649))
def test_durations_add_up(seconds, hours, minutes, days):
    written = f"{days}d{hours}h{minutes}m{seconds}s"
    assert parse_duration(written, "--since") == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.5, "0.5 s"),
        (8.0, "8 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (723, "12 min 03 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86399, "1 d 00 h"),
        (90000, "1 d 01 h"),
    ],
)
def test_spoken_durations(seconds, words):
    assert spoken(seconds) == words


def test_a_model_cannot_move_the_cursor():
    assert printable("a\x1b[2J\rb\tc\nd é\u202e") == "a[2Jb\tc\nd é"
