"""Who calls: bearer tokens, each with a name and a role, from a file of their digests."""

import hashlib
import hmac
import re
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import structlog

from nobackfill.errors import ConfigurationError, UnauthenticatedError
from nobackfill.server.grpc.rates import Rate

log = structlog.get_logger("server.interceptor")


class Role(StrEnum):
    READER = "reader"
    WRITER = "writer"
    DEVICE = "device"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Who calls. `name` owns vault blobs; it is the token's name, not the token.

    `galleries` are those that the role is for; None: all. `items`: the most that they may hold
    together, as far as this caller puts some; None: as many as there is room for.
    """

    name: str
    role: Role
    galleries: frozenset[str] | None = None
    items: int | None = None

    def may_use(self, gallery: str) -> bool:
        """Whether the role is for this gallery, be there one or not."""
        return self.galleries is None or gallery in self.galleries


# Without a tokens file the gateway listens on loopback only, and whoever gets there is trusted.
LOCAL = Principal("local", Role.ADMIN)


# Roles that may be for some galleries only: the others are about no gallery, or about all.
_BY_GALLERY = {Role.READER, Role.WRITER}
_GALLERIES = re.compile(r"[a-z0-9_-]{1,64}(,[a-z0-9_-]{1,64})*")


@dataclass(frozen=True)
class _Token:
    principal: Principal
    digest: bytes
    expires: datetime | None
    # Calls a second of all tokens of the name; None: as many as there are threads for.
    rate: float | None


class Tokens:
    """The tokens file: `NAME ROLE SHA256-OF-THE-TOKEN [EXPIRES] [rate=N] [items=N]` a line, '#'
    begins a comment.

    `rate` bounds the calls a second under the name; more are refused for a moment. ROLE may be for
    some galleries only, like `writer:photos,cats`; `items` bounds what these hold together when the
    token puts more. The file holds digests only, so reading it gives nobody access. It is read
    again when it changes; a change that cannot be read is logged, and leaves the tokens as they
    were.
    Raises ConfigurationError at the start when a line is wrong, naming it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp, self._tokens = _read(path)
        self._looked = time.monotonic()
        self._trouble = ""
        self._rates: dict[tuple[str, float], Rate] = {}

    def first_expiry(self) -> datetime | None:
        """When the first token that is still good expires, if one does."""
        self._refresh()
        now = datetime.now(UTC)
        ends = [known.expires for known in self._tokens if known.expires is not None]
        return min((end for end in ends if end > now), default=None)

    def principal(self, authorization: str | None) -> Principal:
        """Who the header `Bearer TOKEN` belongs to. Raises UnauthenticatedError,
        OverloadedError for more calls than the token's rate."""
        known = self._known(authorization)
        if known.rate is not None:
            self._rate(known.principal.name, known.rate).take()
        return known.principal

    def confirm(self, authorization: str | None, principal: Principal) -> None:
        """Raises UnauthenticatedError where the header is no longer the principal's: its token was
        removed or changed, or it has expired."""
        if self._known(authorization).principal != principal:
            raise UnauthenticatedError("the token means another role now; call again")

    def _known(self, authorization: str | None) -> _Token:
        self._refresh()
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnauthenticatedError("expected metadata `authorization: Bearer TOKEN`")
        digest = hashlib.sha256(token.encode()).digest()
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                if known.expires is not None and datetime.now(UTC) >= known.expires:
                    break
                return known
        raise UnauthenticatedError("the token is unknown or has expired; ask for a new one")

    def _rate(self, name: str, most: float) -> Rate:
        return self._rates.setdefault((name, most), Rate(name, most))

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < 1:
            return
        with self._lock:
            self._looked = now
            try:
                if _stamp(self._path) != self._stamp:
                    self._stamp, self._tokens = _read(self._path)
            except (OSError, ConfigurationError) as error:
                if str(error) != self._trouble:
                    log.error("tokens not read again, the old ones go on", error=str(error))
                self._trouble = str(error)
            else:
                self._trouble = ""


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[tuple[int, int, int], tuple[_Token, ...]]:
    try:
        stamp, lines = _stamp(path), path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the tokens file {path}: {error}") from error
    tokens = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            tokens.append(_token(fields, f"{path}, line {number}"))
    return stamp, tuple(tokens)


def _token(fields: list[str], where: str) -> _Token:
    expected = (
        "expected NAME ROLE[:GALLERY,...] SHA256 [EXPIRES as 2027-01-31T00:00:00+00:00] [rate=N] "
        "[items=N]"
    )
    bounds: dict[str, str] = {}
    while len(fields) > 3 and "=" in fields[-1]:
        what, _, number = fields.pop().partition("=")
        if what in bounds or what not in ("rate", "items"):
            raise ConfigurationError(f"{where}: {expected}, got {what[:32]!r} or twice the same")
        bounds[what] = number
    if len(fields) not in (3, 4):
        raise ConfigurationError(f"{where}: {expected}")
    name, role, digest = fields[:3]
    role, bound, names = role.partition(":")
    if bound and (role not in _BY_GALLERY or not _GALLERIES.fullmatch(names)):
        raise ConfigurationError(f"{where}: {expected}, galleries after reader or writer only")
    galleries = frozenset(names.split(",")) if bound else None
    if "items" in bounds and (role != Role.WRITER or galleries is None):
        raise ConfigurationError(f"{where}: {expected}, items after a writer of named galleries")
    rate = _rate(bounds["rate"], f"{where}: {expected}") if "rate" in bounds else None
    items = _items(bounds["items"], f"{where}: {expected}") if "items" in bounds else None
    try:
        expires = datetime.fromisoformat(fields[3]) if len(fields) == 4 else None
        principal = Principal(name, Role(role), galleries, items)
        token = _Token(principal, bytes.fromhex(digest), expires, rate)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {expected}; {error}") from error
    if len(token.digest) != 32 or (expires is not None and expires.tzinfo is None):
        raise ConfigurationError(f"{where}: {expected}, 64 hex digits and a time zone")
    return token


def _rate(text: str, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigurationError(f"{expected}, a number of calls a second, got rate={text[:32]}")
    return number


def _items(text: str, expected: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise ConfigurationError(f"{expected}, a number of items, got items={text[:32]}")
    return int(text)
