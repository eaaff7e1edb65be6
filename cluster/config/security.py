"""``security:`` — authentication, TLS, rate limits and the audit log."""

from ipaddress import IPv4Network
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from cluster.config.problems import Duration, Section
from cluster.hosts import is_loopback
from cluster.security.roles import Role


class TlsConfig(Section):
    """PEM files of a port, reloaded when they change."""

    certificate: str | None = None
    """Certificate chain; null serves without TLS."""
    key: str | None = None
    """Private key of the certificate."""
    client_ca: str | None = None
    """Authority that must have signed clients' certificates (mutual TLS); null requires none."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together; give both or none")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key")
        return self


class InternalTlsConfig(Section):
    """PEM files of the processes of one cluster, which authenticate each other by certificate (mutual TLS)."""

    certificate: str | None = None
    """Certificate chain of every process; null disables TLS between them."""
    key: str | None = None
    """Private key of the certificate."""
    ca: str | None = None
    """Authority that signed the certificates of all processes."""
    name: str = Field(default="sightline", min_length=1)
    """DNS name of the certificates, verified instead of addresses, which change."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len({self.certificate is None, self.key is None, self.ca is None}) > 1:
            raise ValueError("certificate, key and ca go together; give all three or none")
        return self


class GroupConfig(Section):
    """Permissions of one of the provider's groups."""

    group: str = Field(min_length=1)
    """Name or id of the group, as in groups_claim."""
    roles: list[Annotated[Role, WithJsonSchema({"type": "string", "enum": list(Role)})]] = Field(min_length=1)
    """Roles of its members."""
    cameras: list[str] = Field(default=["*"], min_length=1)
    """Cameras its members may access, as patterns with * and ?."""


class OidcConfig(Section):
    """OpenID Connect: sign-in to the console at a provider (authorization code with PKCE)."""

    issuer: str
    """Issuer, exactly as in the provider's metadata, like https://sso.example/city."""
    client_id: str = Field(min_length=1)
    """Client id registered at the provider."""
    client_secret_file: str | None = None
    """File with the client secret; null for a public client, protected by PKCE alone."""
    url: str
    """Public address of the console, like https://sightline.example; the redirect URI to register is this followed by
    /v1/sign-in/callback."""
    scopes: list[str] = Field(default=["openid", "profile", "groups"])
    """Scopes to request, including openid."""
    name_claim: str = Field(default="preferred_username", min_length=1)
    """Claim with the user's name, for the audit log; sub if a user has none."""
    groups_claim: str = Field(default="groups", min_length=1)
    """Claim with the user's groups; a dot descends into an object, as in realm_access.roles."""
    groups: list[GroupConfig] = Field(min_length=1)
    """Groups with their roles and cameras. The first that a user belongs to applies; users in none are refused."""
    session: Duration = Field(default=12 * 3600.0, ge=60, le=7 * 86_400)
    """Session lifetime, after which the user must sign in again: like 1h."""
    bearer_audience: str | None = Field(default=None, min_length=1)
    """Audience for which JWTs of the issuer are accepted as bearer tokens, over gRPC and HTTP; null accepts none."""
    clock_skew_s: Duration = Field(default=30.0, ge=0, le=300)
    """Tolerated clock skew between the provider and this cluster."""
    ca_file: str | None = None
    """PEM file of the authority that signed the provider's certificate; null uses the system's authorities."""

    @field_validator("issuer", "url")
    @classmethod
    def _address(cls, address: str) -> str:
        try:
            parts = urlsplit(address)
            host = parts.hostname or ""
        except ValueError:
            host = ""
        if not host or parts.scheme not in ("https", "http") or parts.query or parts.fragment:
            raise ValueError(f"must be an address like https://host/path, not {address!r}")
        if parts.scheme == "http" and not is_loopback(host):
            raise ValueError(f"must begin with https:// on another machine, not {address!r}")
        return address

    @field_validator("scopes")
    @classmethod
    def _openid(cls, scopes: list[str]) -> list[str]:
        if "openid" not in scopes:
            raise ValueError("must include openid")
        return scopes


class SecurityConfig(Section):
    """Authentication, TLS, rate limits and the audit log of the gateway."""

    tokens_file: str | None = None
    """File of API tokens written by `sightline tokens create`; null disables tokens and, without oidc,
    authentication."""
    oidc: OidcConfig | None = None
    """Sign-in at an OpenID Connect provider, in addition to tokens; null disables it."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """TLS of the gateway's gRPC and HTTP ports."""
    internal_tls: InternalTlsConfig = Field(default_factory=InternalTlsConfig)
    """TLS between the processes of the cluster, metrics included."""
    memory_key_file: str | None = None
    """File with a secret of at least 16 bytes, shared by all processes, that authenticates memories in the tiers;
    required with a Redis on another machine. null signs nothing: forgery goes unnoticed."""
    allow_plain_inside: bool = False
    """Allow processes on several machines to communicate without TLS. Anyone on their network can then read frames and
    answers, and inject their own."""
    allow_unauthenticated: bool = False
    """Open the gateway to other machines without authentication. Anyone who reaches the port can then view, query, add
    and remove every camera."""
    file_roots: list[str] | None = None
    """Folders on the decoders' machines whose video files (for /dev: USB cameras) may be sources of cameras added at
    run time; [] allows none. null allows the folder where the cluster was started, or none with cluster.ray_address.
    Files named in this configuration are always allowed."""
    follow_redirects: bool = False
    """Follow redirects from cameras to other addresses; never from RTSP cameras with credentials."""
    discovery_networks: list[IPv4Network] = Field(default=[])
    """Networks, like 10.0.0.0/24, that administrators of all cameras may scan for ONVIF cameras from the decoders'
    machines; [] allows none."""
    calls_per_s: float = Field(default=50.0, gt=0)
    """Sustained rate limit of one token, calls per second."""
    calls_burst: int = Field(default=200, ge=1)
    """Burst limit of one token, calls."""
    audit_log: str | None = None
    """Audit log of calls, one line of JSON each; null disables it."""
    audit_retention: Duration | None = Field(default=None, gt=0)
    """Retention of the audit log, like 90d; null keeps the newest 576 MiB."""

    @property
    def guarded(self) -> bool:
        """Whether callers must authenticate."""
        return self.tokens_file is not None or self.oidc is not None
