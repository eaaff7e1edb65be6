"""Sources show themselves without their secrets, and texts that quote them are freed of those."""

import base64
import pickle
import socket
import string
import subprocess
import sys
import threading
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec import NetworkSource
from cluster.errors import SourceError
from cluster.redaction import KnownSecrets, SourceAddress, redact
from cluster.redaction.address import openable, parse
from cluster.redaction.known_secrets import secret_forms

# Written by hand: what a person may see of each.
SHOWN = {
    "rtsp://viewer:hunter2@10.0.0.11:554/Streaming/Channels/101": "rtsp://viewer:***@10.0.0.11:554/Streaming/Channels/101",
    "RTSPS://viewer:p%40ss@cam.example/live": "RTSPS://viewer:***@cam.example/live",
    "rtsp://viewer:p@ss@cam.example/live": "rtsp://viewer:***@cam.example/live",
    "rtsp://viewer:pa/ss@cam.example/live": "rtsp://viewer:***@cam.example/live",
    "rtsp://viewer:12/34@10.0.0.11/live": "rtsp://viewer:***@10.0.0.11/live",
    "rtsp://viewer:pa?s#s@10.0.0.11/live": "rtsp://viewer:***@10.0.0.11/live",
    "rtsp://viewer:p@ss/w@[2001:db8::1]:554/live": "rtsp://viewer:***@[2001:db8::1]:554/live",
    "rtsp://viewer:pa?ss@cam.example/live": "rtsp://***",
    "rtsp://viewer:p@ss/w@cam.example/live": "rtsp://***",
    "rtsp://viewer:123/4@cam.example/live": "rtsp://***",
    "rtsp://t0ken@10.0.0.11/live": "rtsp://***@10.0.0.11/live",
    "rtsp://viewer%3Ahunter2@10.0.0.11/live": "rtsp://***@10.0.0.11/live",
    "rtsp://viewer:hunter2": "rtsp://***",
    "rtsp://10.0.0.11/cam/realmonitor?channel=1&subtype=0": "rtsp://10.0.0.11/cam/realmonitor?channel=1&subtype=0",
    "rtsp://10.0.0.11/live?User=a&pwd=b;channel=1": "rtsp://10.0.0.11/live?User=***&pwd=***;channel=1",
    "rtsp://10.0.0.11/live?password=a@10.0.0.12/b": "rtsp://10.0.0.11/live?password=***",
    "rtsp://cam.example/live?password=a@b": "rtsp://cam.example/live?password=***",
    "http://10.0.0.11/live?X-Api-Key=a&other=b&bare": "http://10.0.0.11/live?***&***&***",
    "http://10.0.0.11/live?api_key=a&p%61ss=b": "http://10.0.0.11/live?api_key=***&p%61ss=***",
    "rtsp://10.0.0.11/live#t0ken": "rtsp://10.0.0.11/live#***",
    "rtsp://10.0.0.11/user=a_password=b_/c_channel=1_stream=0.sdp?real_stream": (
        "rtsp://10.0.0.11/user=***_password=***_channel=1_stream=0.sdp?real_stream"
    ),
    "rtsp://10.0.0.11/viewer:pa/ss@live/1": "rtsp://10.0.0.11/***@live/1",
    "rtsp://10.0.0.11/viewer%3Ahunter2%40live/1": "rtsp://10.0.0.11/***/1",
    "rtsp://10.0.0.11/live;user=a;password=b": "rtsp://10.0.0.11/live;user=***;password=***",
    "rtsp://10.0.0.11/password/hunter2/live": "rtsp://10.0.0.11/password/***/live",
    "rtsps://10.0.0.11:7441/AbCdEf1234567890?enableSrtp": "rtsps://10.0.0.11:7441/***?enableSrtp",
    "rtmp://10.0.0.11/live/key/more": "rtmp://10.0.0.11/live/***",
    "srt://10.0.0.11:9000?mode=caller&passphrase=a&streamid=#!::u=b,s=c": (
        "srt://10.0.0.11:9000?mode=caller&passphrase=***&streamid=#***"
    ),
    "redis://:hunter2@redis:6379/0": "redis://:***@redis:6379/0",
    "unix:///run/redis.sock?password=a": "unix:///run/redis.sock?password=***",
    "viewer:hunter2@10.0.0.11/live": "viewer:***@10.0.0.11/live",
    "file:///videos/a=b/12:30.mp4?token=c": "file:///videos/a=b/12:30.mp4?token=***",
    "/videos/camera=1/12:30@gate.mp4": "/videos/camera=1/12:30@gate.mp4",
    "rtsp://viewer:${GATE_PASSWORD}@10.0.0.11/live": "rtsp://viewer:${GATE_PASSWORD}@10.0.0.11/live",
    "": "",
    "push": "push",
}


@pytest.mark.parametrize("address", SHOWN)
def test_what_is_shown_of_an_address(address):
    assert str(SourceAddress(address)) == SHOWN[address]


# Passwords of letters that stand nowhere in the address around them, with every mark.
secrets = st.text(st.sampled_from("XYZ89" + string.punctuation + " äß"), min_size=1, max_size=16)
hosts = st.sampled_from(["10.0.0.11", "10.0.0.11:554", "[2001:db8::1]", "[fe80::1%eth0]:554", "localhost"])
paths = st.sampled_from(["/live", "/Streaming/Channels/101", "/cam/main/av", ""])
names = st.sampled_from(["user", "pwd", "PASSWORD", "token", "api-key", "streamKey", "nobody-knows-this"])


@given(secrets, hosts, paths, st.booleans())
def test_nothing_of_a_password_is_left_and_the_rest_is(secret, host, path, escaped):
    """In front of a host that no password is taken for, whatever the password."""
    written = quote(secret, safe="") if escaped else secret
    assert str(SourceAddress(f"rtsp://viewer:{written}@{host}{path}")) == f"rtsp://viewer:***@{host}{path}"


@given(secrets, st.sampled_from(["cam.example", "cam", "cam.example:554"]), paths, names)
def test_nothing_of_a_password_is_left_whatever_the_host(secret, host, path, name):
    for address in (
        f"rtsp://viewer:{secret}@{host}{path}",
        f"rtsp://viewer:{secret}@{host}{path}?{name}={secret}",
        f"rtsp://{host}{path}?{name}={secret}",
        f"rtsp://{host}{path}?channel=1;{name}={quote(secret, safe='')}#{secret}",
    ):
        assert not set("XYZ89") & set(str(SourceAddress(address)))


@given(secrets, hosts, paths.filter(bool), names)
def test_a_query_is_hidden_and_host_and_path_are_not(secret, host, path, name):
    shown = str(SourceAddress(f"rtsp://{host}{path}?{name}={secret}"))
    assert shown.startswith(f"rtsp://{host}{path}?")
    assert not set("XYZ") & set(shown)


@given(st.text(max_size=60), st.sampled_from(["", "rtsp://", "file://", "rtmp://a/"]))
def test_any_text_is_parsed_whole_and_what_is_shown_shows_the_same(text, scheme):
    address = scheme + text
    assert "".join(piece.text for piece in parse(address)) == address
    shown = str(SourceAddress(address))
    assert str(SourceAddress(shown)) == shown


def test_halves_of_characters_are_hidden_too():
    source = SourceAddress("rtsp://u:\ud800/\udcff@10.0.0.11/live?token=\ud800")
    assert str(source) == "rtsp://u:***@10.0.0.11/live?token=***"
    assert openable("rtsp://u:\ud800/@10.0.0.11/live") == "rtsp://u:%ED%A0%80%2F@10.0.0.11/live"


@given(st.text("abcXYZ123/@:?#&%+ =", min_size=8, max_size=20))
def test_what_libraries_quote_of_a_known_source_is_removed(secret):
    known = KnownSecrets()
    known.add(secret_forms(parse(f"rtsp://viewer:{quote(secret, safe='')}@10.0.0.11/live")))
    header = base64.b64encode(f"viewer:{secret}".encode()).decode()
    for quoted in (secret, quote(secret, safe=""), repr(secret)[1:-1], header):
        assert known.hide(f"<<{quoted}>>") == "<<***>>"


def test_a_short_secret_is_hidden_as_a_word_and_one_of_three_letters_in_addresses_only():
    known = KnownSecrets()
    known.add(["main", "abc"])
    assert known.hide("main: domain, mainly abc (main)") == "***: domain, mainly abc (***)"
    assert redact("rtsp://u:abc@h/abc") == "rtsp://u:***@h/abc"


def test_what_was_met_longest_ago_is_forgotten_first():
    known = KnownSecrets(limit=2)
    known.add(["first-one", "second-one"])
    known.add(["first-one", "third-one"])
    assert known.hide("first-one second-one third-one") == "*** second-one ***"


def test_a_source_goes_to_other_processes_whole_and_is_equal_by_its_secret():
    source = SourceAddress("rtsp://viewer:hunter2@10.0.0.11/live")
    again = pickle.loads(pickle.dumps(source))
    assert (again, again.reveal(), hash(again)) == (source, "rtsp://viewer:hunter2@10.0.0.11/live", hash(source))
    assert source != SourceAddress("rtsp://viewer:hunter3@10.0.0.11/live")
    assert f"{source} {source!r} {[source]}".count("rtsp://viewer:***@10.0.0.11/live") == 3
    assert not SourceAddress("")


@pytest.mark.parametrize(
    ("written", "opened"),
    [
        ("rtsp://viewer:pa/s?s#@10.0.0.11/live", "rtsp://viewer:pa%2Fs%3Fs%23@10.0.0.11/live"),
        ("rtsp://viewer:p%2Fa/s@cam.example/live", "rtsp://viewer:p%2Fa%2Fs@cam.example/live"),
        ("rtsp://viewer:p@ss@10.0.0.11/live", "rtsp://viewer:p@ss@10.0.0.11/live"),
        ("rtsp://cam.example:554/live?mail=a@10.0.0.12", "rtsp://cam.example:554/live?mail=a@10.0.0.12"),
        ("rtsp://cam.example/a:b@c", "rtsp://cam.example/a:b@c"),
    ],
)
def test_a_password_is_escaped_only_where_no_other_reading_is_left(written, opened):
    assert openable(written) == opened


def test_a_camera_is_asked_with_a_password_that_nobody_escaped():
    server = socket.create_server(("127.0.0.1", 0))
    port, asked = server.getsockname()[1], []

    def answer() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as file:
            number = b""
            for line in file:
                if line.lower().startswith(b"cseq:"):
                    number = line.split(b":")[1].strip()
                if line.lower().startswith(b"authorization:"):
                    asked.append(line.split()[2])
                if not line.strip():
                    head = b'RTSP/1.0 401 Unauthorized\r\nCSeq: %s\r\nWWW-Authenticate: Basic realm="r"\r\n\r\n'
                    file.write(head % number)
                    file.flush()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with server, pytest.raises(SourceError) as refused:
        NetworkSource(f"rtsp://viewer:hun/ter@2@127.0.0.1:{port}/live").open()
    assert str(refused.value) == f"rtsp://viewer:***@127.0.0.1:{port}/live refuses this user or password"
    thread.join(10.0)
    assert base64.b64decode(asked[0]) == b"viewer:hun/ter@2"


def test_what_nobody_caught_is_redacted_in_every_thread():
    script = """
import logging, threading
from cluster.redaction import SourceAddress
from cluster.redaction.known_secrets import redact_tracebacks
redact_tracebacks()
source = SourceAddress("rtsp://viewer:hunter2-hunter2@10.0.0.11/live")
def fail():
    raise ValueError("cannot open " + source.reveal() + " with hunter2-hunter2")
logging.getLogger("x").warning("%d", source.reveal())
logging.getLogger("x").warning("lost %s", source.reveal())
thread = threading.Thread(target=fail, name="reader")
thread.start()
thread.join()
fail()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: cannot open rtsp://viewer:***@10.0.0.11/live with ***") == 2
    assert "thread reader ended by an exception" in done.stderr
    assert "lost rtsp://viewer:***@10.0.0.11/live" in done.stderr
    assert "hunter2-" not in done.stderr + done.stdout
