"""TLS of every port: certificates from files, read again when they change, so that a renewed one needs no restart."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from cluster.errors import ConfigError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server.

    * ``certificate``: its chain; ``key``: the private key
    * ``client_ca``: clients must show a certificate that this authority signed; ``None`` asks none of them
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> TlsFiles:
        """Itself, if certificate and key can be read and belong together.

        Raises:
            ConfigError: they cannot, or do not.
        """
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """For a server of Python's own. Raises ``ConfigError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read the files into ``context``; connections from then on use them. Raises ``ConfigError``."""
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"TLS cannot be had from certificate {self.certificate}, key {self.key}"
                f"{f' and client authority {self.client_ca}' if self.client_ca else ''}: {reason}"
            ) from None

    def stamp(self) -> Stamp:
        """Changes when a file does."""
        files = [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]
        return tuple((status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in files))


class Reloading:
    """Looks whether files have changed, and keeps what was there when the new ones are of no use."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files.check()
        self.context = files.context()
        self._stamp = files.stamp()
        self._lock = threading.Lock()

    def changed(self) -> bool:
        """Whether there are new files that work; from then on :attr:`context` has them."""
        with self._lock:
            try:
                stamp = self.files.stamp()
                if stamp == self._stamp:
                    return False
                # A renewal writes one file after the other: a pair that does not fit is looked at again.
                self.files.check()
                self.files.load(self.context)
            except (ConfigError, OSError) as error:
                log.warning("the certificate was not renewed: %s", error)
                return False
            self._stamp = stamp
            log.info("certificate %s was read again", self.files.certificate)
            return True


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a gRPC server; asked again with every connection.

    Raises:
        ConfigError: the files are missing or do not belong together.
    """
    reloading = Reloading(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(files) if reloading.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files), fetch, require_client_authentication=files.client_ca is not None
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    authority = files.client_ca.read_bytes() if files.client_ca is not None else None
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)


class PeerTls:
    """TLS between the processes of one cluster: each shows its certificate to every other, as server and as client.

    All certificates are for ``name``, and that is what is checked in place of the address at which a process is found:
    addresses come and go with processes. Files are read again when they change. What runs goes on over the connection
    it has; every new one uses the new certificate.

    Raises:
        ConfigError: the files are missing or do not belong together.
    """

    def __init__(self, files: TlsFiles, name: str = "sightline") -> None:
        self.files, self.name = files, name
        self._reloading = Reloading(files)
        self._lock = threading.Lock()
        self._renewals = 0
        self._read()

    def renewals(self) -> int:
        """How often the files were read again: a channel that was opened before the last time has an old one."""
        with self._lock:
            if self._reloading.changed():
                self._renewals += 1
                self._read()
            return self._renewals

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel to another process, with the newest certificate."""
        self.renewals()
        return self._credentials

    def options(self) -> list[tuple[str, str]]:
        """Channel options that go with :meth:`credentials`."""
        return [("grpc.ssl_target_name_override", self.name)]

    def server_context(self) -> ssl.SSLContext:
        """For a server of Python's own; ask for it with every connection."""
        self.renewals()
        return self._reloading.context

    def client_context(self) -> ssl.SSLContext:
        """For a client of Python's own, which must ask for :attr:`name` (``server_hostname``)."""
        self.renewals()
        return self._client

    def _read(self) -> None:
        authority = self.files.client_ca
        assert authority is not None
        self._credentials = grpc.ssl_channel_credentials(
            authority.read_bytes(), self.files.key.read_bytes(), self.files.certificate.read_bytes()
        )
        self._client = ssl.create_default_context(cafile=authority)
        self._client.load_cert_chain(self.files.certificate, self.files.key)
