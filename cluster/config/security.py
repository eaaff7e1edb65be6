"""``security:`` — authentication, TLS, rate limits and the audit log."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.config.problems import Duration, Section


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
    """PEM files of the processes of one cluster, which authenticate each other by certificate (mutual TLS)."""

    certificate: str | None = Field(
        default=None, description="Certificate chain of every process; null disables TLS between them."
    )
    key: str | None = Field(default=None, description="Private key of the certificate.")
    ca: str | None = Field(default=None, description="Authority that signed the certificates of all processes.")
    name: str = Field(
        default="sightline",
        min_length=1,
        description="DNS name of the certificates, verified instead of addresses, which change.",
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
        description="File of API tokens, as `sightline tokens create` writes it; null disables authentication.",
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
        description="Allow processes on several machines without TLS. Whoever reaches their network can then see "
        "what cameras see, and send frames and answers of his own.",
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="Open the gateway to other machines without tokens. Whoever reaches the port can then see, ask, "
        "add and remove every camera.",
    )
    file_roots: list[str] | None = Field(
        default=None,
        description="Folders whose video files (and /dev, whose USB cameras) cameras added at run time may open on the "
        "decoders' machines; [] allows none. null: where the cluster was started, or none with cluster.ray_address. "
        "Files of cameras in this configuration are always allowed.",
    )
    follow_redirects: bool = Field(
        default=False,
        description="Follow redirects of cameras to other addresses; never those of RTSP cameras with credentials.",
    )
    calls_per_s: float = Field(default=50.0, gt=0, description="Mean rate limit of one token, calls per second.")
    calls_burst: int = Field(default=200, ge=1, description="Burst limit of one token, calls.")
    audit_log: str | None = Field(
        default=None, description="Audit log of calls, a line of JSON each; null disables it."
    )
    audit_retention: Duration | None = Field(
        default=None,
        gt=0,
        description="Retention of the audit log, like 90d; null keeps the newest 576 MiB.",
    )
