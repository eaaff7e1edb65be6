"""``security:`` — who may call, and TLS of the ports."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.config.base import Section


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


class SecurityConfig(Section):
    """Tokens, TLS, rates and the audit log of the gateway."""

    tokens_file: str | None = Field(
        default=None,
        description="File of API tokens, as `sightline tokens create` writes it; null asks nobody for a token.",
    )
    tls: TlsConfig = Field(default_factory=TlsConfig, description="TLS of the gateway's gRPC and HTTP ports.")
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
