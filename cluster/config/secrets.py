"""Loads the TLS files and the memory key named in the configuration."""

from hashlib import blake2b
from pathlib import Path

from cluster.config.security import SecurityConfig
from cluster.errors import ConfigError
from cluster.wire.tls import PeerTls, TlsFiles

_LEAST_SECRET_BYTES = 16


def tls_files(security: SecurityConfig) -> TlsFiles | None:
    """TLS files of the gateway's ports; ``None`` without TLS. Raises ``ConfigError``: they cannot be used."""
    tls = security.tls
    if tls.certificate is None or tls.key is None:
        return None
    files = TlsFiles(Path(tls.certificate), Path(tls.key), None if tls.client_ca is None else Path(tls.client_ca))
    files.context()
    return files


def memory_secret(security: SecurityConfig) -> bytes:
    """Key of the digests over stored memory, 32 bytes; empty if no file is configured. Raises ``ConfigError``: the file
    cannot be read, or holds less than 16 bytes after stripping white space."""
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
            f"security.memory_key_file {security.memory_key_file} holds {len(secret)} bytes; a secret needs at least "
            f"{_LEAST_SECRET_BYTES}: `openssl rand -hex 32` makes one"
        )
    return blake2b(secret, digest_size=32, person=b"sightline memory").digest()


def peer_tls(security: SecurityConfig) -> PeerTls | None:
    """Mutual TLS of one process with the cluster's others; ``None`` without TLS. Raises ``ConfigError``: the
    certificate cannot be used."""
    inner = security.internal_tls
    if inner.certificate is None or inner.key is None or inner.ca is None:
        return None
    return PeerTls(TlsFiles(Path(inner.certificate), Path(inner.key), Path(inner.ca)), inner.name)
