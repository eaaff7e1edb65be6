"""Messages to people, against real servers: SMTP, and HTTP that holds requests against what the services publish."""

import asyncio
import base64
import json
import ssl
from contextlib import asynccontextmanager
from email import message_from_bytes, policy

import pytest
from aiohttp import web
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from alert_parts import configuration, running
from apprise.plugins.email import NotifyEmail
from apprise.plugins.slack import NotifySlack
from apprise.plugins.telegram import NotifyTelegram
from certificates import Authority
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cluster.alerts.sinks import DeliveryError
from cluster.alerts.sinks.notify import NotifySink
from cluster.errors import ConfigError, UnavailableError
from cluster.lab.bench.processes import free_port

JPEG = b"\xff\xd8\xff\xe0" + b"picture" * 50 + b"\xff\xd9"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Apprise waits for seconds from one message to the next."""
    for service in (NotifyEmail, NotifySlack):
        monkeypatch.setattr(service, "request_rate_per_sec", 0)


async def picture(_incident):
    return JPEG


class Mailbox:
    def __init__(self):
        self.got = []

    async def handle_DATA(self, _server, _session, envelope):
        self.got.append(
            (envelope.mail_from, envelope.rcpt_tos, message_from_bytes(envelope.content, policy=policy.default))
        )
        return "250 OK"


@asynccontextmanager
async def smtp_server(**options):
    mailbox = Mailbox()
    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port(), **options)
    await asyncio.to_thread(controller.start)
    try:
        yield mailbox, controller.port
    finally:
        await asyncio.to_thread(controller.stop)


@asynccontextmanager
async def http_server(answer, tls=None):
    """``(url, requests)``; ``answer(request, body)`` makes the reply."""
    got = []

    async def take(request):
        fields = {}
        if request.content_type.startswith("multipart/"):
            async for part in await request.multipart():
                fields[part.name] = (part.filename, bytes(await part.read()))
            body = b""
        else:
            body = await request.read()
        got.append((request, body, fields))
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", got
    finally:
        await runner.cleanup()


async def test_an_e_mail_has_what_was_seen_and_its_picture(make):
    async with smtp_server() as (mailbox, port):
        sink = NotifySink(f"mailto://127.0.0.1:{port}?from=cams@city.example&to=ann@city.example,ben@city.example")
        sink.use_pictures(picture)
        told = {"question": "Is a person there?", "text": "jemand klettert: é", "snapshot_url": "https://s/x.jpg"}
        await sink.send(make.event(severity="critical", **told))
        await sink.send(make.event(event_kind="end", ended_s=1_030.0))
        await sink.close()
    [*letters, _, last] = mailbox.got
    assert {to for _, tos, _ in letters for to in tos} == {"ann@city.example", "ben@city.example"}
    sender, _, mail = letters[0]
    assert (sender, mail["Subject"]) == ("cams@city.example", "gate: person (critical)")
    text = mail.get_body(("plain",)) or mail.get_body(("html",))
    for part in ("Is a person there?", "jemand klettert: é", "score 0.75", "https://s/x.jpg"):
        assert part in text.get_content(), part
    [attached] = mail.iter_attachments()
    assert attached.get_content_type() == "image/jpeg"
    assert attached.get_content() == JPEG
    assert last[2]["Subject"] == "gate: person is over"
    assert "for 30 s" in last[2].get_body(("plain", "html")).get_content()


async def test_a_wrong_password_is_said_and_not_shown(make, caplog):
    caplog.set_level("DEBUG")

    def nobody(*_):
        return AuthResult(success=False, handled=False)

    async with smtp_server(authenticator=nobody, auth_required=True, auth_require_tls=False) as (mailbox, port):
        sink = NotifySink(f"mailto://ann:ge%3Aheim-77@127.0.0.1:{port}?from=a@b.example&to=ann@b.example")
        with pytest.raises(DeliveryError) as failure:
            await sink.send(make.event())
    assert failure.value.retryable
    assert not mailbox.got
    for text in (str(failure.value), caplog.text, repr(sink)):
        assert "heim-77" not in text
    assert "apprise" in {record.name for record in caplog.records}


async def test_telegram_gets_a_photo_as_its_api_wants_it(make, monkeypatch):
    """https://core.telegram.org/bots/api#sendphoto: multipart, chat_id, caption, photo."""
    token = "123456789:abcdefg_hijklmnop-qrstuvwxyz12345678"
    ok = lambda _: web.json_response({"ok": True, "result": {"message_id": 1}})  # noqa: E731
    async with http_server(ok) as (url, got):
        monkeypatch.setattr(NotifyTelegram, "notify_url", f"{url}/bot")
        sink = NotifySink(f"tgram://{token}/12315544/")
        sink.use_pictures(picture)
        await sink.send(make.event(text="a person"))
        photo, *others = [each for each in got if each[0].path.endswith("/sendPhoto")]
        assert not others
        request, _, fields = photo
        assert request.path == f"/bot{token}/sendPhoto"
        assert fields["chat_id"][1] == b"12315544"
        assert fields["photo"][1] == JPEG
        told = b"".join(each[1] for each in fields.values()) + b"".join(body for _, body, _ in got)
        assert b"gate: person" in told
        assert b"a person" in told


async def test_what_telegram_refuses_is_said_without_the_token(make, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    token = "123456789:abcdefg_hijklmnop-qrstuvwxyz12345678"
    no = lambda _: web.json_response({"ok": False, "error_code": 401, "description": "Unauthorized"}, status=401)  # noqa: E731
    async with http_server(no) as (url, _):
        monkeypatch.setattr(NotifyTelegram, "notify_url", f"{url}/bot")
        with pytest.raises(DeliveryError) as failure:
            await NotifySink(f"tgram://{token}/12315544/", picture=False).send(make.event())
    assert str(failure.value).startswith("tgram: ")
    assert "nauthor" in str(failure.value) or "401" in str(failure.value)
    # Not counting the log of Telegram's own server.
    logged = [record.getMessage() for record in caplog.records if record.name != "aiohttp.access"]
    assert logged
    assert "qrstuvwxyz" not in str(failure.value) + "\n".join(logged)


async def test_slack_gets_a_message_and_a_file_as_its_api_wants_them(make, monkeypatch):
    """https://docs.slack.dev/messaging/working-with-files: getUploadURLExternal, the file, completeUploadExternal."""
    token = "xoxb-1234-1234-abc124def456"
    replies = {}

    def answer(request):
        if request.path.endswith("files.getUploadURLExternal"):
            return web.json_response({"ok": True, "upload_url": f"{replies['url']}/upload", "file_id": "F1"})
        return web.json_response({"ok": True, "channel": "C1", "ts": "1.0", "files": [{"id": "F1"}]})

    async with http_server(answer) as (url, got):
        replies["url"] = url
        monkeypatch.setattr(NotifySlack, "api_url", url + "/api/{}")
        sink = NotifySink(f"slack://{token}/#alerts")
        sink.use_pictures(picture)
        await sink.send(make.event(text="a person"))
        paths = [request.path for request, _, _ in got]
        message = next(each for each in got if each[0].path == "/api/chat.postMessage")
        assert message[0].headers["Authorization"] == f"Bearer {token}"
        assert json.loads(message[1])["channel"] == "#alerts"
        assert "a person" in message[1].decode()
        asked = paths.index("/api/files.getUploadURLExternal")
        assert paths[asked + 1 :] == ["/upload", "/api/files.completeUploadExternal"]
        assert JPEG in got[asked + 1][1] or JPEG in [data for _, data in got[asked + 1][2].values()]


def _unb64(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _decrypted(body, private, secret):
    """RFC 8291 and 8188, by hand."""
    salt, size, length = body[:16], int.from_bytes(body[16:20], "big"), body[20]
    sender = body[21 : 21 + length]
    assert len(body) <= size + 21 + length
    mine = private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    shared = private.exchange(ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), sender))
    key = HKDF(SHA256(), 32, secret, b"WebPush: info\0" + mine + sender).derive(shared)
    content = HKDF(SHA256(), 16, salt, b"Content-Encoding: aes128gcm\0").derive(key)
    nonce = HKDF(SHA256(), 12, salt, b"Content-Encoding: nonce\0").derive(key)
    return AESGCM(content).decrypt(nonce, body[21 + length :], None).rstrip(b"\0").removesuffix(b"\2")


async def test_a_browser_can_read_its_web_push(make, tmp_path, monkeypatch):
    """RFC 8030, 8291 and 8292: the subscription's endpoint gets a record that its key decrypts."""
    private = ec.generate_private_key(ec.SECP256R1())
    secret = b"0123456789abcdef"
    point = private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    encode = lambda data: base64.urlsafe_b64encode(data).rstrip(b"=").decode()  # noqa: E731
    authority = Authority()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.write(tmp_path / "ca.crt")))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.issue(tmp_path, "push"))
    async with http_server(lambda _: web.Response(status=201), tls) as (url, got):
        keys = {"p256dh": encode(point), "auth": encode(secret)}
        phone = {"ann@city.example": {"endpoint": f"{url}/push/abc", "keys": keys}}
        (tmp_path / "subscriptions.json").write_text(json.dumps(phone))
        from apprise.utils.pem import ApprisePEMController

        assert ApprisePEMController(path=str(tmp_path)).keygen(name="vapid")
        [pem] = tmp_path.glob("*private*")
        subscriptions = f"keyfile={pem}&subfile={tmp_path}/subscriptions.json"
        sink = NotifySink(f"vapid://cams@city.example/ann@city.example?{subscriptions}")
        await sink.send(make.event(text="a person"))
        [(request, body, _)] = got
        assert request.path == "/push/abc"
        assert request.headers["Content-Encoding"] == "aes128gcm"
        assert int(request.headers["TTL"]) >= 0
        assert request.headers["Authorization"].lower().startswith("vapid t=")
        assert b"a person" in _decrypted(body, private, secret)


async def test_a_new_incident_waits_for_its_picture_and_not_for_ever(make):
    looks = 0

    async def late(_incident):
        nonlocal looks
        looks += 1
        return JPEG if looks >= 3 else None

    async def never(_incident):
        return None

    async with smtp_server() as (mailbox, port):
        sink = NotifySink(f"mailto://127.0.0.1:{port}?from=a@b.example&to=c@d.example", picture_wait_s=5.0)
        sink.use_pictures(late)
        await sink.send(make.event())
        assert (looks, len(list(mailbox.got[0][2].iter_attachments()))) == (3, 1)
        sink.picture_wait_s = 0.5
        sink.use_pictures(never)
        await sink.send(make.event())
        assert not list(mailbox.got[1][2].iter_attachments())


@pytest.mark.parametrize("kind", ["new", "end"])
async def test_a_message_goes_out_although_the_disk_of_its_picture_hangs(make, kind):
    async def hangs(_incident):
        await asyncio.Event().wait()

    async with smtp_server() as (mailbox, port):
        address = f"mailto://127.0.0.1:{port}?from=a@b.example&to=c@d.example"
        sink = NotifySink(address, picture_wait_s=0.2, timeout_s=20.0)
        sink.use_pictures(hangs)
        await sink.send(make.event(event_kind=kind, ended_s=1_030.0))
        [(_, _, mail)] = mailbox.got
        assert not list(mail.iter_attachments())


async def test_nobody_there_is_tried_again(make):
    with pytest.raises(DeliveryError) as failure:
        await NotifySink(f"mailto://127.0.0.1:{free_port()}?from=a@b.example&to=c@d.example").send(make.event())
    assert failure.value.retryable


@pytest.mark.parametrize("url", ["", "ann@city.example", "nothing://x", "tgram://not-a-token/1", "mailto://"])
def test_what_is_no_address_is_refused_without_being_repeated(url):
    with pytest.raises(ConfigError, match="one Apprise URL") as refusal:
        NotifySink(url)
    assert "not-a-token" not in str(refusal.value)


async def test_a_test_message(tmp_path, make, monkeypatch):
    """`alerts test`: to the sink that is named, and what it said."""

    async def broken(_):
        raise RuntimeError("out of luck")

    async with smtp_server() as (mailbox, port):
        address = f"mailto://127.0.0.1:{port}?from=a@b.example&to=c@d.example"
        dead = f"mailto://127.0.0.1:{free_port()}?from=a@b.example&to=c@d.example"
        sinks = [
            {"name": "mail", "kind": "notify", "options": {"url": address}, "events": ["new"]},
            {"name": "dead", "kind": "notify", "options": {"url": dead}, "events": ["new"]},
        ]
        async with running(configuration(sinks=sinks), tmp_path) as service:
            service.routes.use_pictures(picture)
            await service.routes.test("mail")
            with pytest.raises(Exception, match="sink 'dead': mailto: "):
                await service.routes.test("dead")
            with pytest.raises(Exception, match="there is no sink 'mial'; there are: mail, dead"):
                await service.routes.test("mial")
            monkeypatch.setattr(service.routes.sinks["mail"], "send", broken)
            with pytest.raises(UnavailableError, match="sink 'mail': RuntimeError: out of luck"):
                await service.routes.test("mail")
        [(_, _, mail)] = mailbox.got
        assert mail["Subject"] == "test: test (info)"
        assert "nothing has happened" in mail.get_body(("plain", "html")).get_content()
        assert [each.get_content_type() for each in mail.iter_attachments()] == ["image/jpeg"]
