"""Webhook and Alertmanager against real servers: signature, replies, a receiver that is killed and returns."""

import asyncio
import hmac
import json
import time
import urllib.request

import pytest
from sink_parts import Receiver, alertmanager

from cluster.alerts.sinks import DeliveryError
from cluster.alerts.sinks.http import SIGNATURE_HEADER, TIME_HEADER, AlertmanagerSink, WebhookSink, signature
from cluster.errors import ConfigError


def is_genuine(secret, headers, body, now_s, tolerance_s=300.0):
    """What a receiver checks: signed with ``secret``, and at most ``tolerance_s`` old."""
    stamp = headers.get(TIME_HEADER, "")
    if not stamp.isascii() or not stamp.isdigit() or abs(now_s - int(stamp)) > tolerance_s:
        return False
    return hmac.compare_digest(signature(secret, stamp, body), headers.get(SIGNATURE_HEADER, ""))


async def test_a_signed_post(make):
    event = make.event(text="jemand klettert: é")
    async with Receiver() as receiver:
        sink = WebhookSink(receiver.url, secret="key", headers={"Authorization": "Bearer t"})
        await sink.send(event)
        await sink.close()
    [(headers, body)] = receiver.got
    assert json.loads(body) == event.body()
    assert headers["Idempotency-Key"] == event.key
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer t"
    now = time.time()
    assert is_genuine("key", headers, body, now)
    assert not is_genuine("another", headers, body, now)
    assert not is_genuine("key", headers, body + b" ", now)
    assert not is_genuine("key", headers, body, now + 301)
    assert not is_genuine("key", {}, body, now)


def test_the_signature_is_the_documented_one():
    """Worked out with another program: printf '1700000000.{}' | openssl dgst -sha256 -hmac key."""
    assert signature("key", "1700000000", b"{}") == SIGNATURE


SIGNATURE = "v1=9d713ed406bb7076d4123f0dc2c39d2df5c654ed4b0cd56b52c8b4c940bd63ae"


async def test_without_a_secret_nothing_is_signed(make):
    async with Receiver() as receiver:
        sink = WebhookSink(receiver.url)
        await sink.send(make.event())
        await sink.close()
    assert not [name for name in receiver.got[0][0] if name.lower().startswith("sightline")]


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (404, False), (302, False), (429, True), (408, True), (500, True), (503, True)],
)
async def test_what_a_reply_means(make, status, retryable):
    async with Receiver() as receiver:
        receiver.reply = lambda request: status
        sink = WebhookSink(receiver.url)
        with pytest.raises(DeliveryError, match=f"answered {status}: said so") as failure:
            await sink.send(make.event())
        await sink.close()
    assert failure.value.retryable == retryable
    assert failure.value.after_s == (7 if status == 429 else 0)


async def test_a_receiver_that_never_answers(make):
    async with Receiver() as receiver:
        never = asyncio.Event()

        async def silent():
            await never.wait()
            return 204

        receiver.reply = lambda request: silent()
        sink = WebhookSink(receiver.url, timeout_s=0.2)
        with pytest.raises(DeliveryError, match=r"did not answer within 0\.2 s") as failure:
            await sink.send(make.event())
        assert failure.value.retryable
        never.set()
        await sink.close()


async def test_a_receiver_that_is_gone_and_returns(make):
    receiver = Receiver()
    sink = WebhookSink(receiver.url)
    with pytest.raises(DeliveryError) as failure:
        await sink.send(make.event(0))
    assert failure.value.retryable
    for number in range(3):
        await receiver.start()
        await sink.send(make.event(number))
        await receiver.stop()
    assert len(receiver.got) == 3
    await sink.close()


async def test_a_password_in_the_address_is_not_told(make):
    sink = WebhookSink("http://ann:geheim@127.0.0.1:9/hook", timeout_s=1.0)
    with pytest.raises(DeliveryError) as failure:
        await sink.send(make.event())
    assert "geheim" not in str(failure.value)
    assert "geheim" not in repr(WebhookSink("http://h/", secret="geheim"))
    await sink.close()


@pytest.mark.parametrize("url", ["", "hook", "ftp://h/", "http://", "http://h:99999/", "http://[::1"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="url must be an address like https"):
        WebhookSink(url)


@pytest.mark.parametrize("sink", [WebhookSink, AlertmanagerSink])
@pytest.mark.parametrize(("name", "value"), [("Authorization", "Bearer geheim\n"), ("X Token", "t"), ("", "t")])
def test_headers_that_no_client_sends(sink, name, value):
    """A secret that was mounted as a file ends with a line break."""
    with pytest.raises(ConfigError, match="its value one line") as refused:
        sink("http://h/", headers={name: value})
    assert "geheim" not in str(refused.value)


# -- Alertmanager -------------------------------------------------------------------------------
def alerts(server) -> list[dict]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/api/v2/alerts", timeout=5) as reply:
        return json.load(reply)


async def test_an_incident_is_one_alert(tmp_path, make):
    """Opened, told again, ended; the server is killed in between."""
    began = time.time() - 60
    opened = {"opened_s": began, "updated_s": began}
    with alertmanager(tmp_path) as server:
        sink = AlertmanagerSink(f"http://127.0.0.1:{server.port}/", labels={"site": "north"})
        await sink.send(make.event(1, at_s=time.time(), severity="critical", **opened))
        [alert] = await asyncio.to_thread(alerts, server)
        assert alert["labels"] == {
            "alertname": "SightlineIncident",
            "camera": "gate",
            "subject": "person",
            "severity": "critical",
            "incident": f"{1:016x}",
            "site": "north",
        }
        assert alert["status"]["state"] in ("active", "unprocessed")
        server.kill()
        with pytest.raises(DeliveryError) as failure:
            await sink.send(make.event(1, at_s=time.time(), event_kind="update", severity="critical", **opened))
        assert failure.value.retryable
        await asyncio.to_thread(server.start)
        await sink.send(make.event(1, at_s=time.time(), event_kind="update", severity="critical", **opened))
        await sink.send(make.event(2, at_s=time.time(), kind="health", subject="camera-offline", **opened))
        found = {each["labels"]["alertname"] for each in await asyncio.to_thread(alerts, server)}
        assert found == {"SightlineIncident", "SightlineCameraHealth"}
        ended = make.event(1, at_s=time.time(), severity="critical", ended_s=time.time(), **opened)
        await sink.send(ended)
        [alert] = await asyncio.to_thread(alerts, server)
        assert alert["labels"]["subject"] == "camera-offline"
        await sink.close()
