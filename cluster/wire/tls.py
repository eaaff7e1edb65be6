"""TLS of every port: certificate files are reloaded when they change, so that renewals need no restart."""

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Self, TypeVar

import grpc

from cluster import metrics
from cluster.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")


def expiry_s(certificate: Path) -> float:
    """Expiry of a PEM file's first certificate, seconds since 1970. Raises OSError and ValueError."""
    # Imported here, since the edge agent, which serves nothing, is installed without it.
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server.

    * ``certificate``: its certificate chain; ``key``: its private key
    * ``client_ca``: authority that must have signed clients' certificates; ``None`` requires none
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """TLS context for Python's own servers. Raises ``ConfigError``: certificate and key cannot be read, or do not
        match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            metrics.certificate_expiry.labels(str(self.certificate)).set(expiry_s(self.certificate))
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"TLS cannot use certificate {self.certificate}, key {self.key}"
                f"{f' and client authority {self.client_ca}' if self.client_ca else ''}: {reason}"
            ) from None
        return context

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Modification times and inodes, which change with the files."""
        files = [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]
        return tuple((status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in files))


class Reloading(Generic[T]):
    """Caches what ``make`` builds from files, rebuilding it when they change; the old value stays while that fails.

    A rebuild is a new object, since an authority once loaded into a context stays trusted there.
    """

    def __init__(self, files: TlsFiles, make: Callable[[], T]) -> None:
        self._files, self._make = files, make
        self._made, self._stamp = make(), files.stamp()
        self._lock, self._told = threading.Lock(), ""
        self.renewals = 0

    def newest(self) -> T:
        """The current value; call for every connection."""
        with self._lock:
            try:
                stamp = self._files.stamp()
                if stamp != self._stamp:
                    # A renewal writes one file after another: a pair that does not match yet is tried again.
                    self._made, self._stamp, self._told = self._make(), stamp, ""
                    self.renewals += 1
                    log.info("certificate %s was reloaded", self._files.certificate)
            except (ConfigError, OSError) as error:
                if self._told != str(error):
                    self._told = str(error)
                    log.warning("the certificate was not renewed: %s", error)
            return self._made


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a gRPC server, refreshed with every connection. Raises ``ConfigError``: the files are missing or
    do not match."""
    reloading = Reloading(files, lambda: _configuration(files))

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        before, newest = reloading.renewals, reloading.newest()
        return None if reloading.renewals == before else newest

    return grpc.dynamic_ssl_server_credentials(
        reloading.newest(), fetch, require_client_authentication=files.client_ca is not None
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    # Validates the files: gRPC accepts a certificate and key that do not match.
    files.context()
    authority = files.client_ca.read_bytes() if files.client_ca is not None else None
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)


class PeerTls:
    """Mutual TLS between the processes of one cluster, each of which is server and client.

    All certificates are for ``name``, which is verified instead of the address, since addresses change with processes.
    Files are reloaded when they change: established connections stay, new ones use the new certificate. Raises
    ``ConfigError``: the files are missing or do not match."""

    def __init__(self, files: TlsFiles, name: str = "sightline") -> None:
        self.files, self.name = files, name
        self._reloading = Reloading(files, self._read)

    def renewals(self) -> int:
        """Number of reloads; a channel opened before the last one has an old certificate."""
        self._reloading.newest()
        return self._reloading.renewals

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel to another process, with the newest certificate."""
        return self._reloading.newest()[0]

    def options(self) -> list[tuple[str, str]]:
        """Channel options that go with :meth:`credentials`."""
        return [("grpc.ssl_target_name_override", self.name)]

    def server_context(self) -> ssl.SSLContext:
        """TLS context for Python's own servers; call for every connection."""
        return self._reloading.newest()[1]

    def client_context(self) -> ssl.SSLContext:
        """TLS context for Python's own clients, which must set ``server_hostname`` to :attr:`name`."""
        return self._reloading.newest()[2]

    def _read(self) -> tuple[grpc.ChannelCredentials, ssl.SSLContext, ssl.SSLContext]:
        files, server = self.files, self.files.context()
        assert files.client_ca is not None
        credentials = grpc.ssl_channel_credentials(
            files.client_ca.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
        )
        client = ssl.create_default_context(cafile=files.client_ca)
        client.load_cert_chain(files.certificate, files.key)
        return credentials, server, client


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Credentials of a client.

    * ``token``: secret sent with every call; never without TLS to another machine
    * ``tls``: use TLS; ``authority``: PEM file of the authority of the server's certificate, ``None``: the system's
    * ``certificate``, ``key``: PEM files of the client certificate, if the server requires one
    """

    token: str = field(default="", repr=False)
    tls: bool = False
    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read ``SIGHTLINE_TOKEN`` or ``SIGHTLINE_TOKEN_FILE``, ``SIGHTLINE_TLS=1``, ``SIGHTLINE_CA``,
        ``SIGHTLINE_CERT`` and ``SIGHTLINE_KEY``; any of the last three implies TLS. Raises ``ConfigError``: the token
        file cannot be read, or only one of certificate and key is given."""
        paths = [Path(value) if (value := environment.get(f"SIGHTLINE_{name}")) else None for name in _FILES]
        authority, certificate, key = paths
        if (certificate is None) != (key is None):
            raise ConfigError("SIGHTLINE_CERT and SIGHTLINE_KEY go together; set both or none")
        token = environment.get("SIGHTLINE_TOKEN", "")
        if not token and (file := environment.get("SIGHTLINE_TOKEN_FILE")):
            token = _read(Path(file), "SIGHTLINE_TOKEN_FILE").decode("utf-8", "replace").strip()
        wanted = environment.get("SIGHTLINE_TLS", "") not in ("", "0", "false", "no")
        return cls(token, wanted or any(paths), authority, certificate, key)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a channel; ``None`` without TLS. Raises ``ConfigError``: a file cannot be read."""
        if not self.tls:
            return None
        authority, certificate, key = (
            None if path is None else _read(path, f"SIGHTLINE_{name}")
            for path, name in zip((self.authority, self.certificate, self.key), _FILES, strict=True)
        )
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def http_context(self) -> ssl.SSLContext | None:
        """TLS context for Python's HTTP clients; ``None`` without TLS. Raises ``ConfigError``: a file cannot be read,
        or is not a certificate or key."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.authority)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise ConfigError(
                f"the files of SIGHTLINE_CA, SIGHTLINE_CERT and SIGHTLINE_KEY are unusable: {error}"
            ) from None
        return context

    def metadata(self, *, loopback: bool) -> tuple[tuple[str, str], ...]:
        """Metadata of every call. Raises ``ConfigError``: the token would cross the network unencrypted."""
        if not self.token:
            return ()
        if not self.tls and not loopback:
            raise ConfigError(
                "a token must not go to another machine without TLS; set SIGHTLINE_TLS=1, or SIGHTLINE_CA to the "
                "authority that signed the gateway's certificate"
            )
        return (("authorization", f"Bearer {self.token}"),)


_FILES = ("CA", "CERT", "KEY")


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
