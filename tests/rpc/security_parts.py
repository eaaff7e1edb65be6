"""Certificates made on the spot, and a gateway without Ray whose door is guarded."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from actors import gateway
from cluster.config import load_config
from cluster.errors import UnavailableError, UnknownCameraError
from cluster.scheduling.reports import ReplicaStatus
from cluster.security.roles import Role
from cluster.security.tokens import make_token, write_tokens
from cluster.types import CameraStatus


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._sign(self._name, self._key.public_key(), authority=True)

    def write(self, path: Path) -> Path:
        path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Files of a certificate and its key; they replace what was there, one after the other as renewals do."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths

    def _sign(self, subject, public_key, *, authority=False):
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


@dataclass
class Route:
    replica_address: str | None = None
    decoder_address: str | None = None


class Directory:
    """What the controller says: three cameras, at one replica."""

    NAMES = ("gate", "yard", "depot")

    def __init__(self) -> None:
        self.address: str | None = None
        self.added: list[str] = []

    async def where(self, name):
        if name not in self.NAMES:
            raise UnknownCameraError(f"there is no camera {name!r}")
        return Route(self.address)

    async def list(self):
        return [CameraStatus(name) for name in self.NAMES]

    async def get(self, name):
        await self.where(name)
        return CameraStatus(name)

    async def add(self, name, source, questions, settings, force=False):
        self.added.append(name)
        return CameraStatus(name)

    async def remove(self, name):
        self.added.remove(name)

    async def list_replicas(self):
        return [ReplicaStatus("replica-0", held=3)]

    async def drain(self, name, undo):
        return ReplicaStatus(name, draining=not undo)

    async def replicas(self, known, timeout_s):
        raise UnavailableError("not asked in this test")

    async def metrics_addresses(self):
        return {}


@contextlib.asynccontextmanager
async def guarded_gateway(monkeypatch, folder: Path, **security):
    """``(gateway, its addresses, directory, secrets by role)``; each secret is for cameras ``gate`` and ``y*``."""
    directory = Directory()
    monkeypatch.setattr(gateway, "ControllerDirectory", lambda config: directory)
    monkeypatch.setattr(gateway, "configure_logging", lambda process, log_dir: None)
    made = {role: make_token(f"{role}-token", [role], ["gate", "y*"]) for role in Role}
    write_tokens(folder / "tokens.json", [token for _, token in made.values()])
    security = {
        "tokens_file": str(folder / "tokens.json"),
        "audit_log": str(folder / "audit.jsonl"),
        "calls_burst": 1000,
        **security,
    }
    running = gateway.Gateway(load_config(None, {"gateway": {"port": 0, "metrics_port": 0}, "security": security}))
    try:
        yield running, await running.ready(), directory, {role: secret for role, (secret, _) in made.items()}
    finally:
        await running.stop()
