"""Log lines: what they hold, what they never hold, and that they are counted."""

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import metrics
from cluster.logs import ALERTS, CountingHandler, JsonFormatter, TextFormatter
from cluster.redaction import redact, redact_log
from cluster.security.tokens import make_token

SECRETS = {
    "rtsp://admin:hunter2@10.0.0.7:554/h264": "hunter2",
    "rtsp://admin:p@ss/w0rd!@10.0.0.7/": "p@ss/w0rd!",
    "redis://:s3cr3t@redis:6379/0": "s3cr3t",
    "authorization: Bearer abcdefghijklmnop": "abcdefghijklmnop",
    "Authorization: Basic YWRtaW46aHVudGVyMg==": "YWRtaW46aHVudGVyMg==",
    '{"password": "correct horse"}': "correct horse",
    "{'token': 'battery'}": "battery",
    "https://host/hook?token=staple&x=1": "staple",
    "cookie: sightline_session=sl_0123456789abcdef": "sl_0123456789abcdef",
}


@pytest.fixture
def written():
    """Logs with a formatter and gives what was written."""

    def write(formatter, say):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.Logger("actors.replica")
        logger.addHandler(handler)
        say(logger)
        return stream.getvalue()

    return write


@pytest.mark.parametrize("text", SECRETS, ids=lambda text: text.split(":")[0])
@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter("replica-0")], ids=["text", "json"])
def test_no_secret_is_written_in_a_message_an_argument_or_a_traceback(written, text, formatter):
    def say(logger):
        logger.warning("lost: " + text)
        logger.warning("camera %s lost", text)
        try:
            raise ValueError(f"cannot open {text}")
        except ValueError:
            logger.exception("failed")

    line = written(formatter, say)
    assert SECRETS[text] not in line
    assert line.count("***") >= 3


def test_a_real_token_is_not_written(written):
    secret, _ = make_token("room", ["view"])
    for formatter in (TextFormatter(), JsonFormatter("gateway")):
        assert secret not in written(formatter, lambda logger: logger.info("who is %r?", secret))
    assert secret not in redact(f"no such token: {secret}.")


@given(
    st.text(alphabet=st.characters(exclude_characters=" \t\n\r\"'<>/?#@", exclude_categories=("Z", "C")), min_size=1)
)
def test_no_password_of_an_address_is_left(password):
    shown = redact_log(f"camera gate: rtsp://user:{password}@host.city:554/live failed")
    assert shown == "camera gate: rtsp://user:***@host.city:554/live failed"


def test_a_json_line_says_what_it_is_about(written):
    def say(logger):
        logger.info("camera %s: %d windows dropped, %s", "gate", 2, "late")
        logger.info("100%% done: window %d of camera %r failed", 7, "yard")
        logger.info("ready at %s", "gate", extra={"camera": "depot", "trace": "abc"})
        logger.info("nothing", extra={"window": 0})

    first, second, third, fourth = map(json.loads, written(JsonFormatter("replica-0"), say).splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "process": "replica-0",
        "logger": "actors.replica",
        "message": "camera gate: 2 windows dropped, late",
        "camera": "gate",
    }
    assert (second["window"], second["camera"]) == ("7", "yard")
    assert (third["camera"], third["trace"]) == ("depot", "abc")
    assert fourth["window"] == "0"
    assert "camera" not in fourth


def test_a_message_with_line_breaks_is_one_json_line(written):
    line = written(JsonFormatter("p"), lambda logger: logger.error("one\ntwo\r\u2028three"))
    assert line.count("\n") == 1
    assert json.loads(line)["message"] == "one\ntwo\r\u2028three"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter("p")], ids=["text", "json"])
def test_nobody_writes_a_line_of_somebody_else(written, formatter):
    """Paths and names of strangers are quoted in messages."""
    path = "/x\n2026-01-01 00:00:00,000 INFO actors.gateway: all is well\x1b[2J\x9b2J\x85\u2028\u202e"
    line = written(formatter, lambda logger: logger.info("request %s: 404", path))
    assert line.endswith("\n")
    assert line[:-1].isprintable()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter("p")], ids=["text", "json"])
def test_a_long_message_is_cut_between_words(written, formatter):
    """To look for secrets in what somebody wrote takes time that others wait for, and half a secret is not found."""
    secret = "rtsp://viewer:hunter2-hunter2@10.0.0.7/live"
    for text in ("x" * 2**20, "://@/@" * 2**18, "word " * 2**18, "w" * 1985 + f" {secret} more"):
        line = written(formatter, lambda logger, text=text: logger.info("%s", text))
        assert len(line) < 2500
        assert "hunter" not in line


def test_a_traceback_has_lines(written):
    def say(logger):
        try:
            raise ValueError("lost")
        except ValueError:
            logger.exception("failed\nagain")

    first, *more = written(TextFormatter(), say).splitlines()
    assert first.endswith(r"failed\nagain")
    assert more[-1] == "ValueError: lost"


def test_messages_are_counted_by_level_and_alerts_are_not():
    def count():
        return metrics.log_records.labels("error")._value.get()

    before = count()
    for name, records in (("actors.replica", 1), (ALERTS, 0)):
        logger = logging.Logger(name)
        logger.addHandler(CountingHandler())
        logger.error("x")
        assert count() - before == records
        before = count()
