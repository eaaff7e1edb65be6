"""API tokens: random secrets of which only hashes are stored, in a file that is reloaded when it changes.

A secret has 256 random bits, so a plain SHA-256 can be neither guessed nor looked up; slow hashes are for passwords
that people choose.
"""

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, UnauthenticatedError
from cluster.files import replacing
from cluster.security.private_files import make_private_folder, open_private
from cluster.security.roles import PERSON, Principal, Role

log = logging.getLogger(__name__)

PREFIX = "sl_"
"""Prefix of every secret, by which secret scanners recognise one."""

DAY_S = 86_400.0
LOOK_S = 0.2
"""Maximum seconds that a caller waits for the file to be checked."""


@dataclass(frozen=True, slots=True)
class Token:
    """A stored token. ``expires_s``: Unix time; ``None``: never. Raises ``ConfigError``: the name is a person's."""

    name: str
    digest: str
    roles: frozenset[Role]
    cameras: tuple[str, ...] = ("*",)
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.name.startswith(PERSON):
            raise ConfigError(f"the name of token {self.name!r} is reserved for people who sign in; choose another")


def make_token(
    name: str, roles: Iterable[Role], cameras: Iterable[str] = ("*",), *, expires_s: float | None = None
) -> tuple[str, Token]:
    """Create a secret, which is never stored, and its token. Raises ``ConfigError``: no name or a person's, no role, or
    no camera pattern."""
    token = Token(name, "", frozenset(roles), tuple(cameras), expires_s)
    if not name or not token.roles or not token.cameras:
        raise ConfigError("a token needs a name, at least one role, and at least one camera pattern ('*' for all)")
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, replace(token, digest=_digest(secret))


class TokenFile:
    """Tokens in a JSON file that only its owner may read.

    :meth:`verify` checks at most once per ``check_s`` whether the file has changed, so that tokens are revoked without
    a restart. While the file is unreadable the last tokens stay valid, revoked ones included, so that an editing
    mistake locks nobody out; this is logged, and ``on_stale`` is called with whether the file is unreadable.
    """

    def __init__(
        self,
        path: Path,
        *,
        check_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        on_stale: Callable[[bool], object] = bool,
    ) -> None:
        self.path = path
        self._trouble = ""
        self._on_stale = on_stale
        self._check_s = check_s
        self._clock = clock
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._stamp = _stamp(path)
        self._checked_s = clock()
        self._tokens = read_tokens(path)

    def verify(self, secret: str) -> Principal:
        """Principal of a secret. Raises ``UnauthenticatedError``: unknown or expired."""
        self._refresh()
        digest = _digest(secret)
        # Compare with all tokens, each in constant time, so that timing leaks nothing.
        found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if not found:
            raise UnauthenticatedError("this token is not known here; ask for a new one")
        token = found[0]
        if token.expires_s is not None and token.expires_s <= self._clock():
            when = time.strftime("%Y-%m-%d", time.gmtime(token.expires_s))
            raise UnauthenticatedError(f"the token {token.name!r} expired on {when}; ask for a new one")
        return Principal(token.name, token.roles, token.cameras)

    def _refresh(self) -> None:
        """Check the file on another thread; the caller waits at most :data:`LOOK_S` for the disk."""
        with self._lock:
            now = self._clock()
            if abs(now - self._checked_s) < self._check_s or (self._looking is not None and self._looking.is_alive()):
                return
            self._checked_s = now
            self._looking = looking = threading.Thread(target=self._look, name="tokens", daemon=True)
            looking.start()
        looking.join(LOOK_S)

    def _look(self) -> None:
        stamp = _stamp(self.path)
        # An unchanged file that has become readable again, as after a remount, also ends the trouble.
        if stamp == self._stamp and not self._trouble:
            return
        try:
            self._tokens = read_tokens(self.path)
            self._trouble = ""
            self._stamp = stamp
        except ConfigError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                log.warning("%s; the tokens stay as they were", error)
        self._on_stale(bool(self._trouble))


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read the tokens of a file. Raises ``ConfigError``: it cannot be read, others may read it, or it is not a token
    file."""
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the tokens in {path} cannot be read: {error.strerror}; create the file with `sightline tokens create`"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a token file: it is not UTF-8 ({error.reason})") from None
    if mode & 0o007:
        raise ConfigError(f"the tokens in {path} are readable by everybody; run chmod 600 on it")
    try:
        return tuple(_token(entry) for entry in json.loads(text)["tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a token file: {type(error).__name__} {error}") from None


def write_tokens(path: Path, tokens: Iterable[Token]) -> None:
    """Replace the file atomically, readable by its owner only. Raises ``ConfigError``: two tokens with the same name,
    or the file cannot be written."""
    kept = sorted(tokens, key=lambda token: token.name)
    for one, other in pairwise(kept):
        if one.name == other.name:
            raise ConfigError(f"a token {one.name!r} already exists; revoke it first, or choose another name")
    try:
        make_private_folder(path.parent)
        with replacing(path) as part, open(part, "w", encoding="utf-8", opener=open_private) as file:
            json.dump({"tokens": [_entry(token) for token in kept]}, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"the tokens cannot be written to {path}: {error.strerror}") from None


def _token(entry: dict[str, Any]) -> Token:
    unknown = entry.keys() - {"name", "sha256", "roles", "cameras", "expires_s"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    roles = frozenset(Role(role) for role in entry["roles"])
    # Normalised as :func:`_digest` writes it: some tools use capitals.
    digest = bytes.fromhex(entry["sha256"]).hex()
    if not roles or not isinstance(entry["name"], str) or len(digest) != 64:
        raise ValueError(f"token {entry['name']!r} lacks roles or a digest")
    cameras = entry.get("cameras", ["*"])
    if not isinstance(cameras, list) or not all(isinstance(pattern, str) for pattern in cameras):
        raise ValueError(f"the cameras of token {entry['name']!r} are not a list of patterns")
    expires = entry.get("expires_s")
    return Token(entry["name"], digest, roles, tuple(cameras), None if expires is None else float(expires))


def _entry(token: Token) -> dict[str, Any]:
    return {
        "name": token.name,
        "sha256": token.digest,
        "roles": sorted(token.roles),
        "cameras": list(token.cameras),
        "expires_s": token.expires_s,
    }


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)
