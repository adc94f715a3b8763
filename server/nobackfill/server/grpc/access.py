"""Who calls: bearer tokens, each with a name and a role, from a file of their digests."""

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509

from nobackfill.errors import (
    ConfigurationError,
    NotPermittedError,
    OverloadedError,
    UnauthenticatedError,
    few,
)
from nobackfill.server.settings import Settings

# Calls a second: so many on the average, and what was not used of a second at once.


class Rate:
    """Of the calls under one name, at one gateway."""

    def __init__(self, name: str, most: float) -> None:
        """`most`: calls a second."""
        self.most = most
        self._name = name
        self._lock = threading.Lock()
        # What may be called at once: a second's worth, one at least.
        self._full = max(1.0, most)
        self._left = self._full
        self._at = time.monotonic()

    def take(self) -> None:
        """Count one call. Raises OverloadedError where it is one too many."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._full, self._left + (now - self._at) * self.most)
            self._at = now
            if self._left < 1:
                raise OverloadedError(
                    f"expected at most {self.most:g} calls a second under the name {self._name}; "
                    "try again with a growing delay, or ask its operator for more"
                )
            self._left -= 1


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
        ends = [known.expires for known in self._tokens.values() if known.expires is not None]
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
        # Looked up by its hash, whose parts tell nobody a token.
        known = self._tokens.get(digest)
        if known is not None and (known.expires is None or datetime.now(UTC) < known.expires):
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


@dataclass(frozen=True)
class Confirmation:
    """Whether a caller may still go on: calls of one token compare equal. See `Tokens.confirm`."""

    tokens: Tokens
    authorization: str | None
    principal: Principal

    def __call__(self) -> None:
        self.tokens.confirm(self.authorization, self.principal)


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[tuple[int, int, int], Mapping[bytes, _Token]]:
    """The file's stamp, and its tokens by digest; of two with one digest the first."""
    try:
        stamp, lines = _stamp(path), path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the tokens file {path}: {error}") from error
    tokens: dict[bytes, _Token] = {}
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            token = _token(fields, f"{path}, line {number}")
            tokens.setdefault(token.digest, token)
    return stamp, tokens


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


# Who may call what: one rule a call, by role; default deny.

_READ = frozenset({Role.READER, Role.WRITER, Role.ADMIN})
_WRITE = frozenset({Role.WRITER, Role.ADMIN})
_DEVICE = frozenset({Role.DEVICE, Role.ADMIN})
_ANY = frozenset(Role)
_ADMIN = frozenset({Role.ADMIN})

_PACKAGE = "/nobackfill.v1."
# A call without a rule is refused. None: no token needed.
RULES: Mapping[str, frozenset[Role] | None] = {
    _PACKAGE + "SearchService/Search": _READ,
    _PACKAGE + "SearchService/SearchBatch": _READ,
    _PACKAGE + "SearchService/Feedback": _READ,
    _PACKAGE + "GalleryService/GetGallery": _READ,
    _PACKAGE + "GalleryService/ListGalleries": _READ,
    _PACKAGE + "GalleryService/GetItem": _READ,
    _PACKAGE + "GalleryService/ListItems": _READ,
    _PACKAGE + "GalleryService/CountItems": _READ,
    _PACKAGE + "GalleryService/CreateGallery": _WRITE,
    _PACKAGE + "GalleryService/UpdateGallery": _ADMIN,
    _PACKAGE + "GalleryService/DeleteGallery": _WRITE,
    _PACKAGE + "GalleryService/PutItems": _WRITE,
    _PACKAGE + "GalleryService/SetMetadata": _WRITE,
    _PACKAGE + "GalleryService/DeleteItems": _WRITE,
    _PACKAGE + "ReleaseService/ListReleases": _ANY,
    _PACKAGE + "ReleaseService/GetRelease": _ANY,
    _PACKAGE + "ReleaseService/WatchReleases": _ANY,
    _PACKAGE + "ReleaseService/FetchFile": _DEVICE,
    _PACKAGE + "ReleaseService/ReportSync": _DEVICE,
    _PACKAGE + "ReleaseService/ActivateRelease": _ADMIN,
    _PACKAGE + "ReleaseService/WatchCanary": _ADMIN,
    _PACKAGE + "ReleaseService/RollbackRelease": _ADMIN,
    _PACKAGE + "ReleaseService/RetireRelease": _ADMIN,
    _PACKAGE + "UpgradeService/EstimateUpgrade": _ADMIN,
    _PACKAGE + "UpgradeService/StartUpgrade": _ADMIN,
    _PACKAGE + "UpgradeService/WatchUpgrade": _READ,
    _PACKAGE + "UpgradeService/PauseUpgrade": _ADMIN,
    _PACKAGE + "VaultService/PutBlob": _DEVICE,
    _PACKAGE + "VaultService/GetBlob": _DEVICE,
    _PACKAGE + "VaultService/DeleteBlob": _DEVICE,
    _PACKAGE + "VaultService/ListBlobs": _DEVICE,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}

# Calls about no gallery, that a role for some of them may make; of ListGalleries it learns its own.
UNBOUND = frozenset(
    {
        _PACKAGE + "GalleryService/ListGalleries",
        _PACKAGE + "ReleaseService/ListReleases",
        _PACKAGE + "ReleaseService/GetRelease",
        _PACKAGE + "ReleaseService/WatchReleases",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)


def authorize(method: str, tokens: Tokens | None, authorization: str | None) -> Principal:
    """Let `method` pass for the caller, or raise UnauthenticatedError or NotPermittedError.

    Decided before the request is read, so an answer never reveals whether an object exists.
    """
    roles = RULES.get(method, frozenset())
    if roles is None or tokens is None:
        return LOCAL
    principal = tokens.principal(authorization)
    if principal.role not in roles:
        allowed = ", ".join(sorted(roles)) or "nobody"
        raise NotPermittedError(
            f"role {principal.role} may not call {method}; it is for: {allowed}"
        )
    return principal


def check_gallery(method: str, principal: Principal, request: Any) -> None:
    """Raises NotPermittedError for a request about a gallery that the caller's role is not for.

    The same with and without such a gallery. Requests name theirs as `gallery`, GalleryService's
    own as `name`; what names none is refused to roles of some galleries, unless it is UNBOUND.
    """
    if principal.galleries is None or method in UNBOUND:
        return
    fields = request.DESCRIPTOR.fields_by_name
    field = next((field for field in ("gallery", "name") if field in fields), None)
    gallery = getattr(request, field) if field else None
    # In a stream, only the first message names it. No gallery is called "".
    if gallery is None or (gallery and not principal.may_use(gallery)):
        raise NotPermittedError(
            f"the token is for {few(sorted(principal.galleries))} only, not for what "
            f"{method} asks for"
        )


# Transport credentials: TLS, and client certificates where an authority is given.
#
# The files are looked at again when somebody connects, so a renewed certificate needs no restart.

_EVERY_S = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """A certificate with its key, and the authority of clients if there is one.

    Files that do not fit together, as when one of them was replaced and the other is yet to be,
    change nothing: what was read last goes on. Raises ConfigurationError at the start.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._trouble = ""
        self._stamp, self._configuration = self._read()
        self._looked = time.monotonic()

    def credentials(self) -> grpc.ServerCredentials:
        """What a port listens with; it follows the files."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._client_ca),
        )

    def expiries(self) -> Mapping[str, datetime]:
        """When the certificates that are there now expire, those that can be read."""
        files = {"server": self._cert, "client_ca": self._client_ca}
        found = {}
        for name, path in files.items():
            try:
                chain = x509.load_pem_x509_certificates(path.read_bytes()) if path else []
            except (OSError, ValueError):
                continue
            if chain:
                found[name] = min(one.not_valid_after_utc for one in chain)
        return found

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake; None: as before."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _EVERY_S:
                return None
            self._looked = now
            try:
                if self._stamps() == self._stamp:
                    return None
                self._stamp, self._configuration = self._read()
            except (OSError, ConfigurationError) as error:
                if str(error) != self._trouble:
                    log.error("certificates not read again, the old ones go on", error=str(error))
                self._trouble = str(error)
                return None
            self._trouble = ""
            log.info("certificates read again")
            return self._configuration

    def _read(self) -> tuple[_Stamp, grpc.ServerCertificateConfiguration]:
        try:
            stamp = self._stamps()
            # gRPC takes any bytes, and then fails every handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
            pair = self._key.read_bytes(), self._cert.read_bytes()
            authority = self._client_ca.read_bytes() if self._client_ca else None
            if self._stamps() != stamp:
                raise ConfigurationError(f"{self._cert}: is being replaced")
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"{self._cert}, {self._key}: expected a certificate and its key in PEM ({error})"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename}: cannot be read ({error.strerror})"
            ) from error
        return stamp, grpc.ssl_server_certificate_configuration([pair], authority)

    def _stamps(self) -> _Stamp:
        paths = (self._cert, self._key, self._client_ca)
        found = [path.stat() for path in paths if path is not None]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)


def _no_password() -> bytes:
    """For a sealed key: refused, where OpenSSL would ask on the terminal."""
    return b""


def certificates(settings: Settings) -> Certificates | None:
    """None where no certificate is set. Raises ConfigurationError for files that are none."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
