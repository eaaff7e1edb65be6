"""How a client shows who it is and knows whom it talks to: a token, and TLS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """What a client brings along.

    * ``token``: secret sent with every call; never over a connection without TLS to another machine
    * ``tls``: talk TLS; ``authority``: PEM file of who signed the server's certificate, ``None`` the system's own
    * ``certificate``, ``key``: PEM files of the client's own, where the server asks for one
    """

    token: str = field(default="", repr=False)
    tls: bool = False
    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ClientCredentials:
        """``SIGHTLINE_TOKEN`` or ``SIGHTLINE_TOKEN_FILE``, ``SIGHTLINE_TLS=1``, ``SIGHTLINE_CA``, ``SIGHTLINE_CERT``
        and ``SIGHTLINE_KEY``; any of the last three means TLS.

        Raises:
            ConfigError: the token's file cannot be read, or one of certificate and key is missing.
        """
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
        """For a channel; ``None``: without TLS.

        Raises:
            ConfigError: a file cannot be read.
        """
        if not self.tls:
            return None
        authority, certificate, key = (
            None if path is None else _read(path, f"SIGHTLINE_{name}")
            for path, name in zip((self.authority, self.certificate, self.key), _FILES, strict=True)
        )
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def metadata(self, *, loopback: bool) -> tuple[tuple[str, str], ...]:
        """What goes along with every call.

        Raises:
            ConfigError: the token would be readable on the way.
        """
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
