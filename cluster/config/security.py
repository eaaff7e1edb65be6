"""``security:`` — who may call, and TLS of the ports."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from pydantic import Field, model_validator

from cluster.config.problems import Duration, Section
from cluster.errors import ConfigError
from cluster.wire.tls import PeerTls, TlsFiles


class TlsConfig(Section):
    """PEM files of a port. They are read again when they change."""

    certificate: str | None = Field(default=None, description="Certificate chain; null serves without TLS.")
    key: str | None = Field(default=None, description="Private key of the certificate.")
    client_ca: str | None = Field(
        default=None, description="Authority whose certificates clients must show (mutual TLS); null asks for none."
    )

    @model_validator(mode="after")
    def _complete(self) -> TlsConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together; give both or none")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key")
        return self


class InternalTlsConfig(Section):
    """PEM files of the processes of one cluster, each of which shows its certificate to every other (mutual TLS)."""

    certificate: str | None = Field(
        default=None, description="Certificate chain of every process; null has them talk without TLS."
    )
    key: str | None = Field(default=None, description="Private key of the certificate.")
    ca: str | None = Field(default=None, description="Authority that signed the certificates of all processes.")
    name: str = Field(
        default="sightline",
        min_length=1,
        description="DNS name that the certificates are for; it is checked in place of addresses, which come and go.",
    )

    @model_validator(mode="after")
    def _complete(self) -> InternalTlsConfig:
        if len({self.certificate is None, self.key is None, self.ca is None}) > 1:
            raise ValueError("certificate, key and ca go together; give all three or none")
        return self


class SecurityConfig(Section):
    """Tokens, TLS, rates and the audit log of the gateway."""

    tokens_file: str | None = Field(
        default=None,
        description="File of API tokens, as `sightline tokens create` writes it; null asks nobody for a token.",
    )
    tls: TlsConfig = Field(default_factory=TlsConfig, description="TLS of the gateway's gRPC and HTTP ports.")
    internal_tls: InternalTlsConfig = Field(
        default_factory=InternalTlsConfig, description="TLS between the processes of the cluster, metrics included."
    )
    memory_key_file: str | None = Field(
        default=None,
        description="File with a secret of 16 bytes or more, the same for all processes, that signs what cameras "
        "remember in tiers; needed with a Redis on another machine. null signs nothing: forgery goes unnoticed.",
    )
    allow_plain_inside: bool = Field(
        default=False,
        description="Let processes on several machines talk without TLS. Whoever reaches their network can then see "
        "what cameras see, and send frames and answers of his own.",
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="Open the gateway to other machines without tokens. Whoever reaches the port can then see, ask, "
        "add and remove every camera.",
    )
    calls_per_s: float = Field(default=50.0, gt=0, description="Calls one token may make each second, on average.")
    calls_burst: int = Field(default=200, ge=1, description="Calls one token may make at once.")
    audit_log: str | None = Field(
        default=None, description="File that tells who saw and asked what, a line of JSON each; null writes none."
    )
    audit_retention: Duration | None = Field(
        default=None,
        gt=0,
        description="How long the audit log is kept, as 90d; null keeps the newest 576 MiB of it, however old.",
    )


_LEAST_SECRET_BYTES = 16


def tls_files(security: SecurityConfig) -> TlsFiles | None:
    """The certificate of the gateway's ports; ``None``: they are without TLS.

    Raises:
        ConfigError: it cannot be used.
    """
    tls = security.tls
    if tls.certificate is None or tls.key is None:
        return None
    return TlsFiles(
        Path(tls.certificate), Path(tls.key), None if tls.client_ca is None else Path(tls.client_ca)
    ).check()


def memory_secret(security: SecurityConfig) -> bytes:
    """Key of the digests over what cameras remember, 32 bytes; empty where no file is named.

    Raises:
        ConfigError: the file cannot be read, or holds less than 16 bytes besides white space at its ends.
    """
    if security.memory_key_file is None:
        return b""
    try:
        secret = Path(security.memory_key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"security.memory_key_file {security.memory_key_file} cannot be read: {error.strerror or error}"
        ) from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConfigError(
            f"security.memory_key_file {security.memory_key_file} holds {len(secret)} bytes; a secret has "
            f"{_LEAST_SECRET_BYTES} or more: `openssl rand -hex 32` makes one"
        )
    return blake2b(secret, digest_size=32, person=b"sightline memory").digest()


def peer_tls(security: SecurityConfig) -> PeerTls | None:
    """TLS between the processes of the cluster, for one of them; ``None``: they talk without.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    inner = security.internal_tls
    if inner.certificate is None or inner.key is None or inner.ca is None:
        return None
    return PeerTls(TlsFiles(Path(inner.certificate), Path(inner.key), Path(inner.ca)), inner.name)
