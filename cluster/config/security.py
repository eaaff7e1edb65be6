"""``security:`` — authentication, TLS, rate limits and the audit log."""

from ipaddress import IPv4Network
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from cluster.config.problems import Duration, Section
from cluster.hosts import is_loopback
from cluster.security.roles import Role


class TlsConfig(Section):
    """PEM files of a port. They are read again when they change."""

    certificate: str | None = None
    """Certificate chain; null serves without TLS."""
    key: str | None = None
    """Private key of the certificate."""
    client_ca: str | None = None
    """Authority whose certificates clients must show (mutual TLS); null asks for none."""

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
    """What the members of one group of the provider may do."""

    group: str = Field(min_length=1)
    """Name or id of the group, as the provider has it in groups_claim."""
    roles: list[Annotated[Role, WithJsonSchema({"type": "string", "enum": list(Role)})]] = Field(min_length=1)
    """Roles of its members."""
    cameras: list[str] = Field(default=["*"], min_length=1)
    """Cameras of its members, as patterns with * and ?."""


class OidcConfig(Section):
    """OpenID Connect: people sign in to the console at a provider (authorization code with PKCE)."""

    issuer: str
    """Issuer of the provider, exactly as it names itself, like https://sso.example/city."""
    client_id: str = Field(min_length=1)
    """Id of this client at the provider."""
    client_secret_file: str | None = None
    """File with the client's secret; null: a public client, which PKCE protects alone."""
    url: str
    """Address of the console as people reach it, like https://sightline.example; the redirect URI to register is this
    with /v1/sign-in/callback."""
    scopes: list[str] = Field(default=["openid", "profile", "groups"])
    """Scopes that are asked for; with openid."""
    name_claim: str = Field(default="preferred_username", min_length=1)
    """Claim with the person's name, for the audit log; sub where a person has none."""
    groups_claim: str = Field(default="groups", min_length=1)
    """Claim with the person's groups; a dot leads into an object, as in realm_access.roles."""
    groups: list[GroupConfig] = Field(min_length=1)
    """Groups with their roles and cameras. The first of them that a person is in decides; a person in none is
    refused."""
    session: Duration = Field(default=12 * 3600.0, ge=60, le=7 * 86_400)
    """Length of a session, after which the provider is asked again: like 1h."""
    bearer_audience: str | None = Field(default=None, min_length=1)
    """Accept JWTs of the issuer for this audience as bearer tokens, over gRPC and HTTP; null: none."""
    clock_skew_s: Duration = Field(default=30.0, ge=0, le=300)
    """Tolerated difference of the provider's clock from ours."""
    ca_file: str | None = None
    """Authority of the provider's certificate, PEM; null: those of the system."""

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
            raise ValueError("must have openid among them")
        return scopes


class SecurityConfig(Section):
    """Tokens, TLS, rates and the audit log of the gateway."""

    tokens_file: str | None = None
    """File of API tokens, as `sightline tokens create` writes it; null: there are none, and without oidc nobody is
    asked who they are."""
    oidc: OidcConfig | None = None
    """Signing in at an OpenID Connect provider, beside tokens; null: none."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """TLS of the gateway's gRPC and HTTP ports."""
    internal_tls: InternalTlsConfig = Field(default_factory=InternalTlsConfig)
    """TLS between the processes of the cluster, metrics included."""
    memory_key_file: str | None = None
    """File with a secret of 16 bytes or more, the same for all processes, that signs what cameras remember in tiers;
    needed with a Redis on another machine. null signs nothing: forgery goes unnoticed."""
    allow_plain_inside: bool = False
    """Allow processes on several machines without TLS. Whoever reaches their network can then see what cameras see, and
    send frames and answers of his own."""
    allow_unauthenticated: bool = False
    """Open the gateway to other machines without tokens. Whoever reaches the port can then see, ask, add and remove
    every camera."""
    file_roots: list[str] | None = None
    """Folders whose video files (and /dev, whose USB cameras) cameras added at run time may open on the decoders'
    machines; [] allows none. null: where the cluster was started, or none with cluster.ray_address. Files of cameras in
    this configuration are always allowed."""
    follow_redirects: bool = False
    """Follow redirects of cameras to other addresses; never those of RTSP cameras with credentials."""
    discovery_networks: list[IPv4Network] = Field(default=[])
    """Networks, like 10.0.0.0/24, that administrators of all cameras may search for ONVIF cameras from the decoders'
    machines; [] allows none."""
    calls_per_s: float = Field(default=50.0, gt=0)
    """Mean rate limit of one token, calls per second."""
    calls_burst: int = Field(default=200, ge=1)
    """Burst limit of one token, calls."""
    audit_log: str | None = None
    """Audit log of calls, a line of JSON each; null disables it."""
    audit_retention: Duration | None = Field(default=None, gt=0)
    """Retention of the audit log, like 90d; null keeps the newest 576 MiB."""

    @property
    def guarded(self) -> bool:
        """Whether callers are asked who they are."""
        return self.tokens_file is not None or self.oidc is not None
