"""Parses a source address into public and secret pieces.

Covers RFC 3986 and common deviations: passwords with unescaped ``/``, ``?``, ``#`` or ``@``; credentials in the query,
the fragment or the path. Ambiguous pieces and unknown parameters are hidden: showing a password is worse than showing
too little of an address.
"""

import re
from enum import Enum
from typing import NamedTuple
from urllib.parse import quote, unquote

HIDDEN = "***"


class Kind(Enum):
    """``PLAIN`` may be shown; ``UNKNOWN`` may hold a secret; ``SECRET`` is one."""

    PLAIN = 0
    UNKNOWN = 1
    SECRET = 2


class Piece(NamedTuple):
    """A part of an address, which is the concatenation of its pieces' texts."""

    text: str
    kind: Kind = Kind.PLAIN

    @property
    def shown(self) -> str:
        """The text, masked if it may be a secret; references to variables never are."""
        hidden = self.kind is not Kind.PLAIN and self.text and not _REFERENCE.fullmatch(self.text)
        return HIDDEN if hidden else self.text


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# RFC 3986, plus host names with an underscore or in another script.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+)(?::\d{0,5})?")
# A host that cannot be part of a password.
_CERTAIN_HOST = re.compile(
    r"(?:\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?\]|\d{1,3}(?:\.\d{1,3}){3}|localhost)(?::\d{0,5})?(?=[/?#]|$)"
)
_AUTHORITY = re.compile(r"[^/?#]*")
_USER = re.compile(r"[\w.~ -]+")
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*\}")

# ``/user=admin_password=secret_channel=1_stream=0.sdp`` (XMEye); ``/live;user=admin;password=secret``.
_PATH_NAME = re.compile(r"(?:(?<=[_&;,/])|^)([A-Za-z][A-Za-z0-9-]*)=")
# A key instead of a path (UniFi Protect: ``rtsps://10.0.0.1:7441/AbCdEf1234567890``).
_PATH_KEY = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9]{16,}")

_USER_NAMES = _words("user usr username login loginuse account")
_SECRET_NAMES = _words(
    "password passwd passphrase pass pwd psw pw loginpas loginpass token accesstoken authtoken jwt bearer key apikey "
    "accesskey auth authorization authbasic credential credentials secret sig signature hmac hash session sessionid "
    "sid ticket nonce streamkey streamid pin"
)
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "pwd", "pass", "token", "secret", "key", "signature", "auth")
_PLAIN_NAMES = _words(
    "channel ch chn chid chnid channelid subtype stream streamtype streamno streamnum substream realstream profile "
    "profileid profiletoken proto protocol transport transportmode unicast multicast mode latency audio video vcodec "
    "acodec codec videocodec audiocodec resolution width height fps framerate bitrate quality compression camera cam "
    "source src track trackid line inst media enablesrtp tcp udp timeout pktsize db"
)
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9.,_-]{0,32}")

_STREAM_KEYS = frozenset({"rtmp", "rtmps", "rtmpt", "rtmpe", "rtmpte", "rtmpts"})
"""Schemes whose path ends with a stream key: ``/application/key``."""


def parse(text: str) -> list[Piece]:
    """The pieces of an address or of a path; never raises."""
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return _local(text)
    if scheme.lower() == "file":
        return [Piece(scheme + separator), *_local(rest)]
    start = _host_start(rest)
    if start is None:
        return [Piece(scheme + separator), Piece(rest, Kind.SECRET)]
    pieces = [Piece(scheme + separator), *_userinfo(rest[:start])]
    host = _authority(rest[start:])
    pieces.append(Piece(host, Kind.SECRET if host and not _HOST.fullmatch(host) else Kind.PLAIN))
    path, query, fragment = _split(rest[start + len(host) :])
    pieces += _path(path, keyed=scheme.lower() in _STREAM_KEYS)
    if query:
        pieces += [Piece("?"), *_query(query[1:])]
    if fragment:
        pieces += [Piece("#"), Piece(fragment[1:], Kind.UNKNOWN)]
    return pieces


def openable(text: str) -> str:
    """The address in a form that libraries parse correctly: a bare ``/``, ``?`` or ``#`` in a password, which would end
    the host, is escaped if no other reading makes sense."""
    scheme, separator, rest = text.partition("://")
    start = _host_start(rest) if separator else None
    authority = _authority(rest)
    if start is None or start <= len(authority) or _HOST.fullmatch(authority):
        return text
    userinfo = quote(rest[: start - 1], safe=":%!$&'()*+,;=~", errors="surrogatepass")
    return f"{scheme}://{userinfo}@{rest[start:]}"


def _authority(rest: str) -> str:
    """The part up to the end of the host, user and password included."""
    match = _AUTHORITY.match(rest)
    assert match is not None
    return match.group()


def _host_start(rest: str) -> int | None:
    """Index of the host in the text after ``://``; ``None`` if ambiguous."""
    starts = [0, *(at + 1 for at, letter in enumerate(rest) if letter == "@")]
    authority = _authority(rest)
    inside = [start for start in starts if start <= len(authority)]
    if len(inside) == len(starts):
        return starts[-1]
    likely = _HOST.fullmatch(authority) is not None
    certain = next((start for start in starts if _CERTAIN_HOST.match(rest, start)), None)
    if certain is not None and (certain <= len(authority) or not likely or ":" in authority):
        return certain
    before = re.split(r"[?#]", rest, maxsplit=1)[0]
    if likely and ":" not in authority:
        # No password starts before the first slash.
        return certain if certain is not None and certain <= len(before) else 0
    # A single @ after something that is not a port: an unescaped password.
    if not likely and len(inside) == 1 and len(starts) == 2 and starts[1] <= len(before):
        return starts[1]
    return None


def _userinfo(info: str) -> list[Piece]:
    """``user:password@``; a name alone may be a token."""
    if not info:
        return []
    user, colon, password = info[:-1].partition(":")
    if colon and (not user or _USER.fullmatch(user)):
        return [Piece(user + colon), Piece(password, Kind.SECRET), Piece("@")]
    return [Piece(info[:-1], Kind.SECRET), Piece("@")]


def _split(tail: str) -> tuple[str, str, str]:
    """Path, query and fragment, the latter two including their ``?`` and ``#``."""
    tail, mark, fragment = tail.partition("#")
    path, question, query = tail.partition("?")
    return path, question + query, mark + fragment


def _local(text: str) -> list[Piece]:
    """A local path or an address without a scheme; only values named as secrets are hidden."""
    head, at, tail = text.rpartition("@")
    pieces = []
    if at and ":" in head and not text.startswith(("/", ".")):
        pieces, text = _userinfo(head + at), tail
    path, query, fragment = _split(text)
    pieces += _named(path, lenient=True)
    if query:
        pieces += [Piece("?"), *_query(query[1:], lenient=True)]
    return [*pieces, Piece(fragment)] if fragment else pieces


def _path(path: str, *, keyed: bool) -> list[Piece]:
    pieces: list[Piece] = []
    credentials, at, tail = path.rpartition("@")
    if at and ":" in credentials:
        # ``/user:password@...``
        pieces = [Piece("/"), Piece(credentials[1:], Kind.SECRET), Piece("@")]
        path = tail
    if keyed and path.count("/") > 1:
        application = path.index("/", 1) + 1
        return [*pieces, Piece(path[:application]), Piece(path[application:], Kind.SECRET)]
    return pieces + _named(path)


def _named(path: str, *, lenient: bool = False) -> list[Piece]:
    """A path that may end in parameters."""
    names = list(_PATH_NAME.finditer(path))
    if not names:
        return [Piece(path)] if lenient else _segments(path)
    first = names[0].start()
    pieces = [Piece(path[:first])] if lenient else _segments(path[:first])
    for name, following in zip(names, [*names[1:], None], strict=True):
        # Up to the separator before the next name.
        end = len(path) if following is None else following.start() - 1
        pieces += _parameter(name[1], "=", path[name.end() : end], lenient=lenient)
        pieces.append(Piece(path[end : end + 1]))
    return pieces


def _segments(path: str) -> list[Piece]:
    pieces: list[Piece] = []
    before = ""
    for number, segment in enumerate(path.split("/")):
        pieces.append(Piece("/" if number else ""))
        name, colon, value = segment.partition(":")
        decoded = unquote(segment)
        if _squeezed(before) in _SECRET_NAMES or (decoded != segment and any(mark in decoded for mark in ":@=")):
            pieces.append(Piece(segment, Kind.SECRET))
        elif _PATH_KEY.fullmatch(segment):
            pieces.append(Piece(segment, Kind.UNKNOWN))
        else:
            pieces += [Piece(name + colon), Piece(value, Kind.SECRET)]
        before = segment
    return pieces


def _query(query: str, *, lenient: bool = False) -> list[Piece]:
    pieces = []
    for part in re.split(r"([&;])", query):
        name, equals, value = part.partition("=")
        pieces += [Piece(part)] if part in ("&", ";") else _parameter(name, equals, value, lenient=lenient)
    return pieces


def _parameter(name: str, equals: str, value: str, *, lenient: bool) -> list[Piece]:
    """``name=value``, or ``name`` alone. Unless ``lenient``, an unknown name is hidden with its value: both may be the
    rest of a password with a bare ``&``."""
    word = _squeezed(name)
    if word in _PLAIN_NAMES and (lenient or _PLAIN_VALUE.fullmatch(value)):
        return [Piece(name + equals + value)]
    if word in _SECRET_NAMES or (word in _USER_NAMES and ":" in unquote(value)):
        return [Piece(name + equals), Piece(value, Kind.SECRET)]
    if word in _USER_NAMES or word in _PLAIN_NAMES:
        return [Piece(name + equals), Piece(value, Kind.UNKNOWN)]
    if value and word.endswith(_SECRET_ENDINGS):
        return [Piece(name + equals + value, Kind.SECRET)]
    return [Piece(name + equals + value, Kind.PLAIN if lenient else Kind.UNKNOWN)]


def _squeezed(name: str) -> str:
    """``X-Api%5FKey`` -> ``xapikey``."""
    return re.sub(r"[\W_]", "", unquote(name)).lower()
