"""Who may call what: bearer tokens with roles from a file, one rule a call, default deny."""

import hashlib
import hmac
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

from nobackfill.errors import ConfigurationError, NotPermittedError, UnauthenticatedError

log = structlog.get_logger("server.border")


class Role(StrEnum):
    READER = "reader"
    WRITER = "writer"
    DEVICE = "device"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Who calls. `name` owns vault blobs; it is the token's name, not the token.

    `galleries` are those that the role is for; None: all.
    """

    name: str
    role: Role
    galleries: frozenset[str] | None = None

    def may_use(self, gallery: str) -> bool:
        """Whether the role is for this gallery, be there one or not."""
        return self.galleries is None or gallery in self.galleries


# Without a tokens file the gateway listens on loopback only, and whoever gets there is trusted.
LOCAL = Principal("local", Role.ADMIN)

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
    _PACKAGE + "ReleaseService/ActivateRelease": _ADMIN,
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
# Roles that may be for some galleries only: the others are about no gallery, or about all.
_BY_GALLERY = {Role.READER, Role.WRITER}
_GALLERIES = re.compile(r"[a-z0-9_-]{1,64}(,[a-z0-9_-]{1,64})*")


@dataclass(frozen=True)
class _Token:
    principal: Principal
    digest: bytes
    expires: datetime | None


class Tokens:
    """The tokens file: `NAME ROLE SHA256-OF-THE-TOKEN [EXPIRES]` a line, '#' begins a comment.

    ROLE may be for some galleries only, like `writer:photos,cats`. The file holds digests only, so
    reading it gives nobody access. It is read again when it changes; a change that cannot be read
    is logged, and leaves the tokens as they were.
    Raises ConfigurationError at the start when a line is wrong, naming it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp, self._tokens = _read(path)
        self._looked = time.monotonic()
        self._trouble = ""

    def first_expiry(self) -> datetime | None:
        """When the first token that is still good expires, if one does."""
        self._refresh()
        now = datetime.now(UTC)
        ends = [known.expires for known in self._tokens if known.expires is not None]
        return min((end for end in ends if end > now), default=None)

    def principal(self, authorization: str | None) -> Principal:
        """Who the header `Bearer TOKEN` belongs to. Raises UnauthenticatedError."""
        self._refresh()
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnauthenticatedError("expected metadata `authorization: Bearer TOKEN`")
        digest = hashlib.sha256(token.encode()).digest()
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                if known.expires is not None and datetime.now(UTC) >= known.expires:
                    break
                return known.principal
        raise UnauthenticatedError("the token is unknown or has expired; ask for a new one")

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


def authorize(method: str, tokens: Tokens | None, authorization: str | None) -> Principal:
    """Let `method` pass for the caller, or raise UnauthenticatedError or NotPermittedError.

    Decided before the request is read, so an answer never tells whether an object exists.
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
            f"the token is for {', '.join(sorted(principal.galleries)[:3])} only, not for what "
            f"{method} asks for"
        )


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
    expected = "expected NAME ROLE[:GALLERY,...] SHA256 [EXPIRES as 2027-01-31T00:00:00+00:00]"
    if len(fields) not in (3, 4):
        raise ConfigurationError(f"{where}: {expected}")
    name, role, digest = fields[:3]
    role, bound, names = role.partition(":")
    if bound and (role not in _BY_GALLERY or not _GALLERIES.fullmatch(names)):
        raise ConfigurationError(f"{where}: {expected}, galleries after reader or writer only")
    galleries = frozenset(names.split(",")) if bound else None
    try:
        expires = datetime.fromisoformat(fields[3]) if len(fields) == 4 else None
        token = _Token(Principal(name, Role(role), galleries), bytes.fromhex(digest), expires)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {expected}; {error}") from error
    if len(token.digest) != 32 or (expires is not None and expires.tzinfo is None):
        raise ConfigurationError(f"{where}: {expected}, 64 hex digits and a time zone")
    return token
