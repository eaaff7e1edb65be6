"""Passwords of cameras and tokens appear in no log line, reason, status or error, whatever goes wrong."""

import logging
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec import Backoff, open_source
from cluster.codec.source import CameraState
from cluster.config import camera_settings, load_config, parse_camera
from cluster.control.directory import Directory
from cluster.decoder.pipeline import CameraPipeline, PipelineSettings
from cluster.errors import SightlineError
from cluster.redaction import redact, redact_log
from cluster.security.tokens import make_token
from cluster.types import PatchGeometry
from cluster.wire.convert import status_to_proto

GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
QUESTION = {"id": "fence", "text": "Is anyone climbing the fence?"}
SECRET = "hunter2-Geheim"

SOURCES = [
    f"rtsp://admin:{SECRET}@127.0.0.1:1/stream",
    f"rtsps://admin:{SECRET}@127.0.0.1:1/stream?x=1",
    f"rtsp://admin:{SECRET}%40@no-such-host.invalid/stream",
    f"rtsp://admin:p@{SECRET}@127.0.0.1:1/stream",
    f"rtsp://admin:{SECRET}@127.0.0.1:99999/stream",
    f"rtsp://admin:{SECRET}@[::1/stream",
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_camera_that_cannot_be_reached(source, caplog):
    caplog.set_level(logging.DEBUG)
    told = []
    try:
        opened = open_source(source, connect_timeout_s=2.0)
        pipeline = CameraPipeline(
            "gate",
            opened,
            GEOMETRY,
            PipelineSettings(backoff=Backoff(first_s=30.0, jitter=0.0)),
            lambda *_: None,
            lambda status: told.append(repr(status)),
        )
        pipeline.start()
        until = time.monotonic() + 15
        while pipeline.status().state in (CameraState.WAITING, CameraState.CONNECTING) and time.monotonic() < until:
            time.sleep(0.02)
        told.append(repr(pipeline.status()))
        assert pipeline.status().reason
        pipeline.stop()
        told += [repr(opened), str(opened)]
    except SightlineError as error:
        told.append(f"{error} {error!r}")
    # As they are when a handler writes them, traceback included.
    told += [logging.Formatter().format(record) for record in caplog.records]
    assert told
    assert not [line for line in told if SECRET in line]


@pytest.mark.parametrize("source", SOURCES[:4])
def test_what_clients_are_shown(source):
    config = load_config(None, {"questions": [QUESTION]})
    directory = Directory()
    directory.add(camera_settings(config, parse_camera("gate", source)), 0.0)
    status = directory.status("gate")
    assert SECRET not in str(status_to_proto(status))
    assert "127.0.0.1" in status.source or "no-such-host" in status.source


password = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(password, st.sampled_from(["rtsp", "rtsps", "redis", "mqtt", "https"]))
def test_no_password_in_an_address_is_shown(password, scheme):
    written = f"SECRET{quote(password, safe='')}SECRET"
    for sentence in (f"{scheme}://user:{written}@host/x", f"cannot reach {scheme}://user:{written}@host:1 (refused)"):
        for shown in (redact(sentence), redact_log(sentence)):
            assert "SECRET" not in shown
            assert "host" in shown


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["priority", "window", "sampling", "questions", "memory", "privacy_masks", "nothing"]))
def test_settings_that_are_wrong_do_not_tell_the_source(key):
    with pytest.raises(SightlineError) as caught:
        parse_camera("gate", f"rtsp://admin:{SECRET}@10.0.0.1/x", (), {key: 7})
    assert SECRET not in str(caught.value)


def test_tokens():
    from cluster.security.roles import Role

    secret, token = make_token("room", [Role.VIEW])
    assert secret not in repr(token)
    assert secret[5:] not in redact_log(f"Authorization: Bearer {secret}")
    assert secret[5:] not in redact(f"the token {secret} is not known")
