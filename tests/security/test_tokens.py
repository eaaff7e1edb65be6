"""Tokens, roles, scopes, rates and the audit log."""

import json
import os
import stat
import threading
import time
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import CapacityError, ConfigError, ForbiddenError, UnauthenticatedError
from cluster.security.audit import AuditLog, QueuedAuditLog
from cluster.security.limits import RateLimit
from cluster.security.roles import ANYBODY, Principal, Role, in_scope
from cluster.security.tokens import PREFIX, TokenFile, make_token, read_tokens, write_tokens


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_secret_opens_only_its_own_door_and_is_not_in_the_file(tmp_path):
    path = tmp_path / "keys" / "tokens.json"
    secret, token = make_token("room", [Role.ASK], ["gate-*"])
    other, another = make_token("edge", [Role.INGEST])
    write_tokens(path, [token, another])
    assert secret.startswith(PREFIX)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().replace(token.digest, token.digest.upper()))
    tokens = TokenFile(path)
    assert tokens.verify(secret) == Principal("room", frozenset({Role.ASK}), ("gate-*",))
    assert tokens.verify(other).name == "edge"
    for wrong in ("", secret[:-1], secret + "x", "\udcff", token.digest):
        with pytest.raises(UnauthenticatedError, match="not known"):
            tokens.verify(wrong)


def test_an_expired_token_says_when(tmp_path, clock):
    path = tmp_path / "tokens.json"
    secret, token = make_token("room", [Role.VIEW], expires_s=clock.now + 10)
    write_tokens(path, [token])
    tokens = TokenFile(path, clock=clock)
    assert tokens.verify(secret).name == "room"
    clock.now += 10
    with pytest.raises(UnauthenticatedError, match="'room' expired on 1970-01-12"):
        tokens.verify(secret)


def test_a_revoked_token_ends_and_a_broken_file_locks_nobody_out(tmp_path, clock, caplog):
    path = tmp_path / "tokens.json"
    secret, token = make_token("room", [Role.VIEW])
    kept, keeper = make_token("keeper", [Role.VIEW])
    write_tokens(path, [token, keeper])
    stale = []
    tokens = TokenFile(path, clock=clock, on_stale=stale.append)
    path.write_text("{")
    clock.now += 2
    assert tokens.verify(secret).name == "room"
    clock.now += 2
    tokens.verify(secret)
    [said] = [each.getMessage() for each in caplog.records]
    assert "not a token file" in said
    assert said.endswith("; the tokens stay as they were")
    assert set(stale) == {True}
    path.write_bytes('{"tokens": ["Zoë"]}'.encode("latin-1"))
    clock.now += 2
    assert tokens.verify(secret).name == "room"
    assert "not UTF-8" in caplog.text
    write_tokens(path, [keeper])
    clock.now += 2
    with pytest.raises(UnauthenticatedError):
        tokens.verify(secret)
    assert tokens.verify(kept).name == "keeper"
    assert stale.pop() is False
    away = path.rename(tmp_path / "away")
    clock.now += 2
    assert tokens.verify(kept).name == "keeper"
    assert stale.pop() is True
    away.rename(path)
    clock.now += 2
    assert tokens.verify(kept).name == "keeper"
    assert stale.pop() is False, "it is back as it was"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a token file"),
        ('{"tokens": [{"name": "a", "sha256": "00", "roles": ["view"]}]}', "lacks roles or a digest"),
        (json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": []}]}), "lacks roles"),
        (json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": ["king"]}]}), "king"),
        (json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": ["view"], "secret": "x"}]}), "secret"),
        (json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": ["view"], "cameras": "*"}]}), "patterns"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused(tmp_path, text, why):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why):
        read_tokens(path)


def test_a_file_that_everybody_may_read_is_refused(tmp_path):
    path = tmp_path / "tokens.json"
    write_tokens(path, [])
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tokens(path)


def test_two_tokens_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'room' already"):
        write_tokens(tmp_path / "t", [make_token("room", [Role.VIEW])[1], make_token("room", [Role.ASK])[1]])


def test_no_token_passes_for_a_person_who_signed_in(tmp_path):
    path = tmp_path / "tokens.json"
    with pytest.raises(ConfigError, match="'oidc:ann' is reserved for people"):
        make_token("oidc:ann", [Role.VIEW])
    write_tokens(path, [make_token("ann", [Role.VIEW])[1]])
    path.write_text(path.read_text().replace('"ann"', '"oidc:ann"'))
    with pytest.raises(ConfigError, match="'oidc:ann' is reserved for people"):
        read_tokens(path)


MAY = {
    Role.INGEST: {Role.INGEST},
    Role.VIEW: {Role.VIEW},
    Role.ASK: {Role.VIEW, Role.ASK},
    Role.ADMIN: set(Role),
}


@pytest.mark.parametrize("own", list(Role))
@pytest.mark.parametrize("wanted", list(Role))
def test_roles(own, wanted):
    assert Principal("p", frozenset({own})).may(wanted) == (wanted in MAY[own])


def test_a_camera_out_of_scope_is_refused_by_pattern():
    principal = Principal("p", frozenset({Role.VIEW}), ("gate-*", "depot"))
    principal.require(Role.VIEW, ["gate-1", "depot"])
    for camera in ("depot2", "GATE-1", "xgate-1"):
        with pytest.raises(ForbiddenError, match="not among"):
            principal.require(Role.VIEW, ["gate-1", camera])
    with pytest.raises(ForbiddenError, match="role ask; 'p' has: view"):
        principal.require(Role.ASK)
    ANYBODY.require(Role.ADMIN, ["anything"])


NAMES = st.text("ab-*?[]!", max_size=4)


@given(NAMES, st.lists(NAMES, max_size=4))
def test_a_scope_is_the_cameras_of_any_of_its_patterns(camera, patterns):
    assert in_scope(camera, patterns) == any(fnmatchcase(camera, pattern) for pattern in patterns)


@pytest.mark.parametrize(("pattern", "seen"), [("line-{:03}", 200), ("line-{:03}*", 1200)])
def test_a_token_for_a_group_of_cameras_does_not_slow_down_a_list_of_thousands(pattern, seen):
    """The gateway's event loop filters each list and event; pattern by pattern that took it a third of a second."""
    group = Principal("north", frozenset(Role), tuple(pattern.format(number) for number in range(200)))
    began_s = time.thread_time()
    assert sum(map(group.sees, (f"line-{number:03}" for number in range(5000)))) == 200 * (
        1 if "*" not in pattern else 6
    )
    assert time.thread_time() - began_s < 0.15


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60), st.integers(1, 5), st.floats(0.2, 4.0))
def test_a_rate_lets_no_more_through_than_it_says(pauses, burst, per_s):
    clock = Clock()
    limit = RateLimit(per_s, burst, clock=clock)
    began, passed = clock.now, 0
    for pause in pauses:
        clock.now += pause
        try:
            limit.acquire("p")
            passed += 1
        except CapacityError:
            pass
        assert passed <= burst + (clock.now - began) * per_s + 1e-6
    limit.acquire("another is not held up by it")


def test_what_costs_more_than_a_burst_comes_through_with_all_of_it():
    clock = Clock()
    limit = RateLimit(1.0, 2, clock=clock)
    limit.acquire("p", 5.0)
    with pytest.raises(CapacityError, match=r"again in 1\.0 s"):
        limit.acquire("p")
    clock.now += 2
    limit.acquire("p", 5.0)


def test_who_waits_long_enough_comes_through():
    clock = Clock()
    limit = RateLimit(0.5, 1, clock=clock)
    limit.acquire("p")
    with pytest.raises(CapacityError, match=r"try again in 2\.0 s"):
        limit.acquire("p")
    clock.now += 2.0
    limit.acquire("p")


def test_a_disk_that_hangs_keeps_nobody_waiting_for_the_tokens(tmp_path, monkeypatch):
    path, clock = tmp_path / "tokens.json", Clock()
    secret, token = make_token("room", [Role.ASK])
    write_tokens(path, [token])
    tokens = TokenFile(path, clock=clock)
    ends = threading.Event()

    def hang(_path):
        assert ends.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr("cluster.security.tokens._stamp", hang)
        for _ in range(3):
            clock.now += 2.0
            assert tokens.verify(secret).name == "room"
        assert tokens._looking.is_alive(), "nobody has waited for it, and one waits for the disk"
        ends.set()
        tokens._looking.join(30)
    write_tokens(path, [])
    clock.now += 2.0
    with pytest.raises(UnauthenticatedError):
        tokens.verify(secret)


def test_the_audit_log_turns_its_files_over_and_loses_no_line(tmp_path):
    lost = []
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=2200, files=3, on_lost=lambda: lost.append(1))
    for number in range(60):
        log.write("room", "/x/Ask", cameras=["gate"], outcome="ok", text=f"question {number} \u2028 \udcff")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    lines = [json.loads(line) for n in (".3", ".2", ".1", "") for line in (tmp_path / f"audit.jsonl{n}").open()]
    numbers = [int(line["text"].split()[1]) for line in lines]
    assert numbers == list(range(numbers[0], 60))
    assert len(numbers) > 30
    assert not lost


def test_a_disk_that_takes_nothing_costs_lines_and_no_call(tmp_path):
    lost = []
    log = AuditLog(tmp_path / "audit.jsonl", on_lost=lambda: lost.append(1))
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    log.write("room", "/x/Ask", cameras=[], outcome="ok")
    log.write("room", "/x/Ask", cameras=[], outcome="ok")
    assert len(lost) == 2


def test_a_disk_that_hangs_costs_lines_and_no_call(tmp_path, monkeypatch):
    hangs, ends = threading.Event(), threading.Event()
    lost = []

    def make(folder):
        hangs.set()
        assert ends.wait(60)
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr("cluster.security.audit.make_private_folder", make)
    log = QueuedAuditLog(tmp_path / "audit.jsonl", most=3, on_lost=lambda: lost.append(1))
    for number in range(6):
        log.write("room", "/x/Ask", cameras=[], outcome="ok", text=str(number))
        # The first one is what it hangs with.
        assert number or hangs.wait(30)
    assert len(lost) == 2
    ends.set()
    log.close()
    assert [json.loads(line)["text"] for line in (tmp_path / "audit.jsonl").open()] == ["0", "1", "2", "3"]


def test_a_disk_that_is_too_slow_is_told_once(tmp_path, monkeypatch, caplog):
    takes = threading.Semaphore(0)
    write, lost = AuditLog._append, []

    def slow(self, line):
        assert takes.acquire(timeout=30)
        write(self, line)

    monkeypatch.setattr(AuditLog, "_append", slow)
    log = QueuedAuditLog(tmp_path / "audit.jsonl", most=2, on_lost=lambda: lost.append(1))
    for number in range(20):
        # Of three lines that come, it takes one.
        for _ in range(3):
            log.write("room", "/x/Ask", cameras=[], outcome="ok", text=str(number))
        takes.release()
        until_s = time.monotonic() + 30
        while log._queue.full() and time.monotonic() < until_s:
            time.sleep(0.001)
    takes.release(100)
    log.close()
    assert len(lost) > 30
    assert [each.levelname for each in caplog.records] == ["ERROR"]


def test_a_line_of_the_audit_log_is_one_line_that_steers_no_terminal(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    text = "Wer ist im Hof? 誰 \x85\u2028\u2029\x9b2J\x7f\u202e\ud800"
    log.write("ann", "a call", cameras=["gate\x9b"], outcome="ok", text=text)
    [written] = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert written.isprintable()
    assert "Wer ist im Hof? 誰" in written
    line = json.loads(written)
    assert (line["text"], line["cameras"]) == (text, ["gate\x9b"])


def test_an_audit_log_that_is_deleted_begins_anew(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    for call in ("before", "after"):
        log.write("ann", call, cameras=[], outcome="ok")
        lines = (tmp_path / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["call"] for line in lines] == [call]
        (tmp_path / "audit.jsonl").unlink()


@pytest.mark.parametrize("ahead_s", [0.0, 365 * 86_400.0])
def test_the_audit_log_forgets_what_is_past_its_retention(tmp_path, ahead_s):
    """Also where the clock was a year ahead at first."""
    day, path = 86_400.0, tmp_path / "audit.jsonl"
    clock = Clock()
    clock.now = time.time() - 5 * day + ahead_s
    log = AuditLog(path, retention_s=2 * day, clock=clock)
    if ahead_s:
        log.write("room", "/x/Ask", cameras=["gate"], outcome="ok")
        clock.now -= ahead_s
    for _ in range(5 * 24 * 2):
        log.write("room", "/x/Ask", cameras=["gate"], outcome="ok")
        for file in tmp_path.iterdir():
            # Files are as old as their last line.
            last = json.loads(file.read_text().splitlines()[-1])["at"]
            os.utime(file, (last, last))
        clock.now += day / 48
    kept = [json.loads(line)["at"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    kept = [at for at in kept if at <= clock.now]
    # A file goes when its last line is past its time, and holds a day.
    assert clock.now - max(kept) < day / 24
    assert 2 * day - day / 24 < clock.now - min(kept) < 3 * day + day / 12


def test_the_audit_log_keeps_every_day_of_a_long_retention(tmp_path):
    """Which has more days than files would be kept without one."""
    day, path = 86_400.0, tmp_path / "audit.jsonl"
    clock = Clock()
    clock.now = time.time() - 100 * day
    log = AuditLog(path, retention_s=90 * day, clock=clock)
    written = []
    for _ in range(100 * 2):
        log.write("room", "/x/Ask", cameras=["gate"], outcome="ok")
        written.append(round(clock.now, 3))
        os.utime(path, (clock.now, clock.now))
        clock.now += day / 2
    kept = [json.loads(line)["at"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    wanted = [at for at in written if at > clock.now - 90 * day]
    assert sorted(kept)[-len(wanted) :] == wanted
    assert len(kept) <= len(wanted) + 2 * 2


def test_an_audit_log_that_somebody_wrote_into_is_turned_over(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text("not ours\n")
    log = AuditLog(path, retention_s=86_400.0)
    log.write("room", "/x/Ask", cameras=["gate"], outcome="ok")
    assert (tmp_path / "audit.jsonl.1").read_text() == "not ours\n"
    assert json.loads(path.read_text())["who"] == "room"
