"""TLS of the gateway's ports: strangers' certificates, clients' certificates, renewal while it runs."""

import asyncio
import http.client
import ssl

import pytest
from certificates import Authority
from security_parts import guarded_gateway

from cluster.client import GatewayClient
from cluster.errors import ConfigError, UnavailableError
from cluster.security.roles import Role
from cluster.wire.tls import ClientCredentials, TlsFiles


@pytest.fixture
def authority():
    return Authority()


def tls_keys(authority, folder, **keys):
    certificate, key = authority.issue(folder, "gateway")
    return {"certificate": str(certificate), "key": str(key), **keys}


def names_seen(address, credentials):
    with GatewayClient(address, credentials=credentials, deadline_s=3.0) as client:
        return [status.name for status in client.cameras_list()]


def page(address, ca, secret, shown=None):
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(*shown)
    connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {secret}"})
    status = connection.getresponse().status
    connection.close()
    return status


async def test_both_ports_speak_tls_and_only_tls(monkeypatch, tmp_path, authority):
    ca = authority.write(tmp_path / "ca.crt")
    stranger = Authority("stranger").write(tmp_path / "stranger.crt")
    keys = tls_keys(authority, tmp_path)
    async with guarded_gateway(monkeypatch, tmp_path, tls=keys) as (_, addresses, _, secrets):
        secret = secrets[Role.VIEW]
        known = ClientCredentials(secret, tls=True, authority=ca)
        assert await asyncio.to_thread(names_seen, addresses.rpc, known) == ["gate", "yard"]
        assert await asyncio.to_thread(page, addresses.metrics, ca, secret) == 200
        for wrong, said in (
            (ClientCredentials(secret), "closes connections; if it speaks TLS, set SIGHTLINE_CA or SIGHTLINE_TLS=1"),
            (ClientCredentials(secret, tls=True, authority=stranger), "fails: certificate verify failed; see"),
        ):
            with pytest.raises(UnavailableError, match=said):
                await asyncio.to_thread(names_seen, addresses.rpc, wrong)
        other_name = addresses.rpc.replace("127.0.0.1", "0.0.0.0")
        with pytest.raises(UnavailableError, match="fails: its certificate is for another name"):
            await asyncio.to_thread(names_seen, other_name, known)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(page, addresses.metrics, stranger, secret)


async def test_questions_over_https_find_their_way_inside(monkeypatch, tmp_path, authority):
    """The gateway reaches itself beside its own certificate, and asks for the same tokens there."""
    ca = authority.write(tmp_path / "ca.crt")
    keys = tls_keys(authority, tmp_path)
    async with guarded_gateway(monkeypatch, tmp_path, tls=keys) as (_, addresses, _, secrets):

        def describe(secret):
            host, _, port = addresses.metrics.rpartition(":")
            context = ssl.create_default_context(cafile=ca)
            connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
            connection.request("GET", "/v1/memory/gate", headers={"Authorization": f"Bearer {secret}"})
            status = connection.getresponse().status
            connection.close()
            return status

        assert await asyncio.to_thread(describe, secrets[Role.INGEST]) == 403
        # There is no replica in this test.
        assert await asyncio.to_thread(describe, secrets[Role.VIEW]) == 503


async def test_clients_show_certificates_where_they_are_asked_to(monkeypatch, tmp_path, authority):
    ca = authority.write(tmp_path / "ca.crt")
    certificate, key = authority.issue(tmp_path, "client")
    foreign = Authority("stranger").issue(tmp_path, "foreign")
    keys = tls_keys(authority, tmp_path, client_ca=str(ca))
    async with guarded_gateway(monkeypatch, tmp_path, tls=keys) as (_, addresses, _, secrets):
        secret = secrets[Role.VIEW]
        shown = ClientCredentials(secret, True, ca, certificate, key)
        assert await asyncio.to_thread(names_seen, addresses.rpc, shown) == ["gate", "yard"]
        for wrong in (ClientCredentials(secret, True, ca), ClientCredentials(secret, True, ca, *foreign)):
            with pytest.raises(UnavailableError):
                await asyncio.to_thread(names_seen, addresses.rpc, wrong)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(page, addresses.metrics, ca, secret)


async def test_a_renewed_certificate_needs_no_restart(monkeypatch, tmp_path, authority):
    keys = tls_keys(authority, tmp_path)
    renewed = Authority("renewed")
    new_ca = renewed.write(tmp_path / "new.crt")
    async with guarded_gateway(monkeypatch, tmp_path, tls=keys) as (_, addresses, _, secrets):
        secret = secrets[Role.VIEW]
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(names_seen, addresses.rpc, ClientCredentials(secret, True, new_ca))
        # Half a renewal: the key no longer fits, and what was there goes on.
        old_ca = authority.write(tmp_path / "ca.crt")
        (tmp_path / "gateway.key").write_bytes(renewed.issue(tmp_path, "other")[1].read_bytes())
        known = ClientCredentials(secret, True, old_ca)
        assert await asyncio.to_thread(names_seen, addresses.rpc, known) == ["gate", "yard"]
        renewed.issue(tmp_path, "gateway")
        fresh = ClientCredentials(secret, True, new_ca)
        assert await asyncio.to_thread(names_seen, addresses.rpc, fresh) == ["gate", "yard"]
        assert await asyncio.to_thread(page, addresses.metrics, new_ca, secret) == 200


async def test_a_client_authority_that_was_replaced_is_trusted_no_longer(monkeypatch, tmp_path, authority):
    ca, clients = authority.write(tmp_path / "ca.crt"), tmp_path / "clients.crt"
    signers = [Authority("before"), Authority("after")]
    shown = [signer.issue(tmp_path, f"client {number}") for number, signer in enumerate(signers)]
    keys = tls_keys(authority, tmp_path, client_ca=str(signers[0].write(clients)))
    async with guarded_gateway(monkeypatch, tmp_path, tls=keys) as (_, addresses, _, secrets):
        secret = secrets[Role.VIEW]
        for number, signer in enumerate(signers):
            signer.write(clients)
            assert await asyncio.to_thread(page, addresses.metrics, ca, secret, shown[number]) == 200
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(page, addresses.metrics, ca, secret, shown[1 - number])


def test_files_that_do_not_belong_together(tmp_path, authority):
    certificate, _ = authority.issue(tmp_path, "one")
    _, key = authority.issue(tmp_path, "two")
    with pytest.raises(ConfigError, match="TLS cannot use certificate"):
        TlsFiles(certificate, key).context()
    with pytest.raises(ConfigError, match="No such file"):
        TlsFiles(tmp_path / "none.crt", key).context()


def test_what_the_environment_says(tmp_path):
    (tmp_path / "token").write_text("sl_x\n")
    found = ClientCredentials.from_environment({"SIGHTLINE_TOKEN_FILE": str(tmp_path / "token"), "SIGHTLINE_CA": "ca"})
    assert (found.token, found.tls, str(found.authority)) == ("sl_x", True, "ca")
    assert "sl_x" not in repr(found)
    assert ClientCredentials.from_environment({}) == ClientCredentials()
    assert ClientCredentials.from_environment({"SIGHTLINE_TLS": "1"}).tls
    with pytest.raises(ConfigError, match="go together"):
        ClientCredentials.from_environment({"SIGHTLINE_CERT": "x"})
    with pytest.raises(ConfigError, match="SIGHTLINE_CA: ca cannot be read"):
        found.channel_credentials()


def test_a_token_does_not_travel_in_the_clear():
    with pytest.raises(ConfigError, match="without TLS"):
        GatewayClient("10.0.0.1:5", credentials=ClientCredentials("sl_x"))
    GatewayClient("127.0.0.1:5", credentials=ClientCredentials("sl_x")).close()
    GatewayClient("10.0.0.1:5", credentials=ClientCredentials("sl_x", tls=True)).close()
