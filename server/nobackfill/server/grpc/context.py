"""Know who calls, and for which call a thread works: tokens, roles, the current call, its errors.

Callers are authenticated by bearer tokens and authorised by role. A Call holds its caller, its
deadline, and whether it still waits. Long work calls `current().check()` between its parts. Work on
other threads takes the Call along, because they have none of their own. This module also turns
errors into gRPC statuses.
"""

import contextvars
import hashlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog
from google.protobuf import any_pb2
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from nobackfill.errors import (
    CancelledError,
    ConfigurationError,
    DeadlineError,
    NobackfillError,
    NotPermittedError,
    OverloadedError,
    UnauthenticatedError,
    join_few,
)
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.traces import CallTrace
from nobackfill.wire.statuses import find_status_row


class RateLimit:
    """Limit the calls of one name at one gateway: so many a second, and one second's worth
    at once.
    """

    def __init__(self, name: str, calls_per_second: float) -> None:
        """Start with a full allowance: a second's worth, at least one call.

        Args:
            name: the name, for the error.
            calls_per_second: calls a second, above 0.
        """
        self.calls_per_second = calls_per_second
        self._name = name
        self._lock = threading.Lock()
        # Calls that may come at once: a second's worth, at least one.
        self._capacity = max(1.0, calls_per_second)
        self._available = self._capacity
        self._updated = time.monotonic()

    def take(self) -> None:
        """Count one call; a refused one does not count. Never waits. Any thread may call it.

        Raises:
            OverloadedError: the rate is exceeded.
        """
        with self._lock:
            now = time.monotonic()
            self._available = min(
                self._capacity, self._available + (now - self._updated) * self.calls_per_second
            )
            self._updated = now
            if self._available < 1:
                raise OverloadedError(
                    f"expected at most {self.calls_per_second:g} calls a second under the name "
                    f"{self._name} of this token, got more; try again with a growing delay, or ask "
                    "the operator to raise rate=N in the tokens file"
                )
            self._available -= 1


access_log = structlog.get_logger("server.interceptor")


class Role(StrEnum):
    """Name the roles of tokens."""

    READER = "reader"
    WRITER = "writer"
    DEVICE = "device"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Identify the caller.

    Attributes:
        name: the token's name; vault blobs belong to it.
        role: the role.
        galleries: galleries that the role is for; None means all.
        max_items: most items that these galleries may have in total, for puts of this caller; None
            means no limit.
    """

    name: str
    role: Role
    galleries: frozenset[str] | None = None
    max_items: int | None = None

    def may_use(self, gallery: str) -> bool:
        """Tell whether the role is for a gallery, whether or not it exists; True for a role without
        galleries.
        """
        return self.galleries is None or gallery in self.galleries


# Without a tokens file the gateway listens on loopback only, and trusts every caller.
LOCAL = Principal("local", Role.ADMIN)


# Roles that may be restricted to some galleries; the others concern no gallery, or all.
_BY_GALLERY = {Role.READER, Role.WRITER}
_GALLERIES = re.compile(r"[a-z0-9_-]{1,64}(,[a-z0-9_-]{1,64})*")


@dataclass(frozen=True)
class _Token:
    principal: Principal
    digest: bytes
    expires_at: datetime | None
    # Calls a second of all tokens of the name; None means no limit.
    calls_per_second: float | None


class Tokens:
    """Read the tokens file, again whenever it changes.

    A line is `NAME ROLE SHA256-OF-THE-TOKEN [EXPIRES] [rate=N] [items=N]`; '#' begins a comment.
    `rate` limits the calls a second of the name. ROLE may be restricted to some galleries, like
    `writer:photos,cats`; `items` limits their items in total when the token puts more. The file has
    digests only, so reading it gives nobody access. A change that cannot be read is logged, and the
    old tokens stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; later it is read again at a call, at most once a second, if it changed.

        An empty file has no tokens, so that every call is refused; that is logged. If a digest is
        there twice, its first line counts.

        Raises:
            ConfigurationError: the file cannot be read, or a line is not valid; the error names the
                line.
        """
        self._path = path
        self._lock = threading.Lock()
        self._stamp, self._tokens = _read_tokens_file(path)
        self._checked = time.monotonic()
        self._last_error = ""
        self._rates: dict[tuple[str, float], RateLimit] = {}

    def first_expiry(self) -> datetime | None:
        """Return when the first valid token expires, with its time zone; None if none expires.
        Reads a changed file again.

        It looks for a change at most once a second. If the changed file cannot be read, it logs
        that, and the old tokens count.
        """
        self._refresh()
        now = datetime.now(UTC)
        ends = [token.expires_at for token in self._tokens.values() if token.expires_at is not None]
        return min((end for end in ends if end > now), default=None)

    def identify_caller(self, authorization: str | None) -> Principal:
        """Return the caller of a call, and count the call for the rate of its name. Reads a changed
        file again.

        It looks for a change at most once a second. If the changed file cannot be read, it logs
        that, and the old tokens stay valid.

        Args:
            authorization: the header `Bearer TOKEN`; None without one.

        Raises:
            UnauthenticatedError: the header is missing or has another form, or the token is unknown
                or expired.
            OverloadedError: the name's rate is exceeded.
        """
        token = self._find(authorization)
        if token.calls_per_second is not None:
            key = token.principal.name, token.calls_per_second
            self._rates.setdefault(key, RateLimit(*key)).take()
        return token.principal

    def confirm(self, authorization: str | None, principal: Principal) -> None:
        """Check that a token still belongs to a caller; it is not counted for the rate. Reads a
        changed file again.

        It looks for a change at most once a second. If the changed file cannot be read, it logs
        that, and the old tokens stay valid.

        Args:
            authorization: the header `Bearer TOKEN`; None without one.
            principal: the caller, from `identify_caller`.

        Raises:
            UnauthenticatedError: the token was removed, has expired, or has another name, role,
                galleries or limit of items now.
        """
        if self._find(authorization).principal != principal:
            raise UnauthenticatedError(
                "the operator has changed the role or galleries of this token; call again"
            )

    def _find(self, authorization: str | None) -> _Token:
        self._refresh()
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise UnauthenticatedError(
                "expected call metadata `authorization: Bearer TOKEN`, got none or another form; "
                "send a token of this gateway"
            )
        digest = hashlib.sha256(token.encode()).digest()
        # Looked up by its hash, so that timing reveals nothing about a token.
        entry = self._tokens.get(digest)
        if entry is not None and (entry.expires_at is None or datetime.now(UTC) < entry.expires_at):
            return entry
        raise UnauthenticatedError(
            "the token is unknown to this gateway, or has expired; ask its operator for a new one"
        )

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < 1:
            return
        with self._lock:
            self._checked = now
            try:
                if _file_stamp(self._path) != self._stamp:
                    self._stamp, self._tokens = _read_tokens_file(self._path)
                    access_log.info("tokens read again", count=len(self._tokens))
            except (OSError, ConfigurationError) as error:
                if str(error) != self._last_error:
                    access_log.error(
                        "cannot read the changed tokens file; the old tokens stay valid",
                        error=str(error),
                    )
                self._last_error = str(error)
            else:
                self._last_error = ""


@dataclass(frozen=True)
class TokenRecheck:
    """Check that a caller may continue, whenever it is called.

    A call raises UnauthenticatedError once the token was removed, has expired, or has another name,
    role, galleries or limit of items. Rechecks of one token and caller compare equal.

    Attributes:
        tokens: the tokens.
        authorization: the header `Bearer TOKEN` of the call; None without one.
        principal: the caller as of the beginning of the call.
    """

    tokens: Tokens
    authorization: str | None
    principal: Principal

    def __call__(self) -> None:
        self.tokens.confirm(self.authorization, self.principal)


def _file_stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_tokens_file(path: Path) -> tuple[tuple[int, int, int], Mapping[bytes, _Token]]:
    """Read the file; returns its stamp, and its tokens by digest, the first of a digest."""
    try:
        stamp, lines = _file_stamp(path), path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(
            f"--tokens-file: cannot read the tokens file {path} ({reason}); check its name and "
            "permissions"
        ) from error
    tokens: dict[bytes, _Token] = {}
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            token = _parse_token_line(fields, f"{path}, line {number}")
            tokens.setdefault(token.digest, token)
    if not tokens:
        access_log.warning("the tokens file has no token; every call is refused", file=str(path))
    return stamp, tokens


def _parse_token_line(fields: list[str], where: str) -> _Token:
    expected = (
        "expected NAME ROLE[:GALLERY,...] SHA256 [EXPIRES as 2027-01-31T00:00:00+00:00] [rate=N] "
        "[items=N]"
    )
    bounds: dict[str, str] = {}
    while len(fields) > 3 and "=" in fields[-1]:
        what, _, number = fields.pop().partition("=")
        if what in bounds or what not in ("rate", "items"):
            raise ConfigurationError(
                f"{where}: {expected}; got {what[:32]!r}, which is an unknown word or occurs "
                "twice; correct the line"
            )
        bounds[what] = number
    if len(fields) not in (3, 4):
        count = "1 word" if len(fields) == 1 else f"{len(fields)} words"
        raise ConfigurationError(f"{where}: {expected}; got {count}; correct the line")
    name, role, digest = fields[:3]
    role, bound, names = role.partition(":")
    if role not in _ANY:
        raise ConfigurationError(
            f"{where}: expected one of the roles {', '.join(Role)}, got {role[:32]!r}; correct "
            "the line"
        )
    if bound and (role not in _BY_GALLERY or not _GALLERIES.fullmatch(names)):
        raise ConfigurationError(
            f"{where}: {expected}; got {fields[1][:80]!r}, but only the roles reader and writer "
            "may have galleries, with names of a-z, 0-9, '-' and '_'; correct the line"
        )
    galleries = frozenset(names.split(",")) if bound else None
    if "items" in bounds and (role != Role.WRITER or galleries is None):
        raise ConfigurationError(
            f"{where}: {expected}; items=N needs the role writer with galleries, as in "
            "writer:GALLERY; correct the line"
        )
    rate = _parse_rate(bounds["rate"], f"{where}: {expected}") if "rate" in bounds else None
    items = (
        _parse_item_limit(bounds["items"], f"{where}: {expected}") if "items" in bounds else None
    )
    if not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise ConfigurationError(
            f"{where}: expected the SHA-256 of a token, 64 hexadecimal digits, as the third word, "
            f"got {len(digest)} other characters; `sha256sum` computes it"
        )
    expires = _parse_expiry(fields[3], where) if len(fields) == 4 else None
    principal = Principal(name, Role(role), galleries, items)
    return _Token(principal, bytes.fromhex(digest), expires, rate)


def _parse_expiry(text: str, where: str) -> datetime:
    try:
        expires = datetime.fromisoformat(text)
    except ValueError:
        expires = None
    if expires is None or expires.tzinfo is None:
        raise ConfigurationError(
            f"{where}: expected the end of a token with its time zone, as "
            f"2027-01-31T00:00:00+00:00, got {text[:32]!r}; correct the line"
        )
    return expires


def _parse_rate(text: str, problem: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigurationError(
            f"{problem}; rate=N is a number of calls a second, above 0 and below 1e9, got "
            f"{text[:32]!r}; correct the line"
        )
    return number


def _parse_item_limit(text: str, problem: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise ConfigurationError(
            f"{problem}; items=N is a whole number of items, of 1 to 12 digits, got {text[:32]!r}; "
            "correct the line"
        )
    return int(text)


# One rule for each call, by role. A call without a rule is refused.

_READ = frozenset({Role.READER, Role.WRITER, Role.ADMIN})
_WRITE = frozenset({Role.WRITER, Role.ADMIN})
_DEVICE = frozenset({Role.DEVICE, Role.ADMIN})
_ANY = frozenset(Role)
_ADMIN = frozenset({Role.ADMIN})

_PACKAGE = "/nobackfill.v1."
# None: no token is needed.
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

# Calls that concern no gallery, open to roles for some galleries; ListGalleries shows only these.
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
    """Check that a caller may call a method, and count the call for its token's rate.

    This is decided before the request is read, so an answer never reveals whether an object exists.
    The galleries of the role are not checked; `check_gallery` checks them.

    Args:
        method: /package.Service/Method; with tokens, one without a rule is refused.
        tokens: the tokens; None accepts everybody.
        authorization: the header `Bearer TOKEN`; None without one.

    Returns:
        The caller; LOCAL, an administrator, without tokens or for a method that needs none.

    Raises:
        UnauthenticatedError: the header is missing or has another form, or the token is unknown or
            expired.
        NotPermittedError: the role may not call the method; the call was counted.
        OverloadedError: the name's rate is exceeded.
    """
    roles = RULES.get(method, frozenset())
    if roles is None or tokens is None:
        return LOCAL
    principal = tokens.identify_caller(authorization)
    if principal.role not in roles:
        permitted = ", ".join(sorted(roles)) or "nobody"
        raise NotPermittedError(
            f"the token's role {principal.role} may not call {method}; roles that may: "
            f"{permitted}. Use another token, or ask the operator for such a role"
        )
    return principal


def check_gallery(method: str, principal: Principal, request: Any) -> None:
    """Check that a caller's role is for the gallery of a request.

    The result is the same whether or not the gallery exists. A request names it in its field
    `gallery`, or `name` in GalleryService. A request without either field is refused for roles with
    galleries, unless its method is UNBOUND. An empty name passes, as in a stream only the first
    message names the gallery.

    Args:
        method: /package.Service/Method.
        principal: the caller.
        request: the request.

    Raises:
        NotPermittedError: the role is not for the gallery.
    """
    if principal.galleries is None or method in UNBOUND:
        return
    fields = request.DESCRIPTOR.fields_by_name
    field = next((field for field in ("gallery", "name") if field in fields), None)
    gallery = getattr(request, field) if field else None
    # In a stream only the first message names it; no gallery has an empty name.
    if gallery is None or (gallery and not principal.may_use(gallery)):
        raise NotPermittedError(
            f"the token is for {join_few(sorted(principal.galleries))} only, not for the gallery "
            f"of this {method} request; use another token, or ask the operator for one"
        )


# Longest wait (seconds) of a call, whatever its caller allows: gRPC and locks refuse the 292 years
# that a call without a deadline has left.
MAX_WAIT_SECONDS = 3600.0


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Call:
    """Describe one call.

    Attributes:
        principal: the caller.
        deadline: on the monotonic clock, in seconds.
        is_active: tells whether the caller still waits.
        canary_key: assigns the call in a canary: its `x-session`, else its token's name, else
            `request_id`.
        request_id: id of the request.
        trace: records its parts; None without traces.
    """

    principal: Principal
    deadline: float
    is_active: Callable[[], bool] = _always
    canary_key: str = ""
    request_id: str = ""
    trace: CallTrace | None = None

    @property
    def name(self) -> str:
        """The name of the caller's token; empty without tokens, or if the method needs none."""
        return "" if self.principal is LOCAL else self.principal.name

    def check(self) -> None:
        """Check that the caller still waits; long work calls it between its parts.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled it, or its stream was asked to end.
        """
        self.remaining()
        if not self.is_active():
            raise CancelledError("the caller has cancelled the call")

    def remaining(self) -> float:
        """Return the seconds left, above 0 and at most MAX_WAIT_SECONDS, for use as a timeout.

        Raises:
            DeadlineError: the call's time is over.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise DeadlineError(
                "the call's deadline passed before its answer was ready; allow more time, or "
                "request fewer items at once"
            )
        return min(seconds, MAX_WAIT_SECONDS)


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("call")
_UNTRACED: AbstractContextManager[None] = nullcontext()


def set_current_call(call: Call) -> None:
    """Set the call that this thread works for, until this is called again; it is not unset."""
    _current.set(call)


@dataclass(frozen=True)
class WatchContext:
    """The context of a watch that no call's thread works for: the role of its watchers."""

    role: Role


def watcher_role(context: object) -> Role:
    """Return the role of the callers that a watch reports to.

    Args:
        context: the context that the service's method got: a WatchContext, or that of a call on its
            own thread.
    """
    return context.role if isinstance(context, WatchContext) else current_call().principal.role


@contextmanager
def work_until(deadline: float) -> Iterator[None]:
    """Work for several calls at once during a block, until the last of their deadlines.

    The block's call has the present caller, is never cancelled, and has no request id or trace. Its
    key is empty. Outside of any call, the caller is LOCAL. After the block the former call is back.

    Args:
        deadline: the last deadline, on the monotonic clock in seconds.
    """
    token = _current.set(Call(current_call().principal, deadline))
    try:
        yield
    finally:
        _current.reset(token)


def current_call() -> Call:
    """Return the call that this thread works for; outside of any call, a new one of LOCAL with an
    hour left.
    """
    return _current.get(None) or Call(LOCAL, time.monotonic() + MAX_WAIT_SECONDS)


def reading_call() -> Call | None:
    """Return the call that a store reads for, on this thread; None outside of any."""
    return _current.get(None)


def trace_part(name: str) -> AbstractContextManager[None]:
    """Record the block as a part of the call, if it is traced; otherwise, and outside of any call,
    do nothing.

    Args:
        name: a fixed word that names the part.
    """
    call = _current.get(None)
    return _UNTRACED if call is None or call.trace is None else call.trace.record_part(name)


DOMAIN = "nobackfill.v1"
_FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/:]+/)+")


def status_code_of(error: Exception) -> StatusCode:
    """Return the gRPC status code of an error, by its class, or its nearest ancestor, in
    wire/statuses.py.

    Another OSError or sqlite3.OperationalError gives UNAVAILABLE, and any other error INTERNAL.
    """
    row = find_status_row(type(error))
    if row is not None:
        return row.code
    # A full or failing disk, or a locked file, below the errors of our own.
    storage = isinstance(error, OSError | sqlite3.OperationalError)
    return StatusCode.UNAVAILABLE if storage else StatusCode.INTERNAL


def grpc_status_of(error: Exception, request_id: str) -> Status:
    """Make the gRPC status of an error: code, message, and ErrorInfo with a reason for machines.

    Only our own errors are shown: they have no vectors and no tokens. Folders of this machine are
    cut from paths.

    Args:
        error: the error.
        request_id: id of the request, named in the message of other errors.

    Returns:
        The status; it has ErrorInfo only if the error's class has a reason.
    """
    code = status_code_of(error)
    is_own = isinstance(error, NobackfillError)
    message = without_folders(str(error)) if is_own else _generic_message(code, request_id)
    status = Status(code=code.value[0], message=message)
    row = find_status_row(type(error))
    if row is not None and row.reason:
        detail = any_pb2.Any()
        detail.Pack(ErrorInfo(reason=row.reason, domain=DOMAIN))
        status.details.append(detail)
    return status


def without_folders(sentence: str) -> str:
    """Cut the folders from absolute paths in a sentence, because clients must not see them.

    `/a/b/c.sqlite` becomes `c.sqlite`. Relative paths and addresses stay as they are, and so does
    `/c`, which has no folder. Folders from the first one with a blank or a colon on stay.
    """
    return _FOLDERS.sub("", sentence)


def _generic_message(code: StatusCode, request_id: str) -> str:
    if code is StatusCode.UNAVAILABLE:
        return (
            "the gateway's storage failed; try again later. The gateway's log has the details of "
            f"request {request_id}"
        )
    return (
        "unexpected failure of the gateway; report it to the operator, whose log has the details "
        f"of request {request_id}"
    )


log = structlog.get_logger("server.survival")


@contextmanager
def error_boundary(metrics: Metrics, thread_label: str) -> Iterator[None]:
    """Log and count an unexpected error in one turn of a thread's work, so that the thread goes on.

    The error ends the block, and is not raised; the log has its traceback. KeyboardInterrupt and
    SystemExit pass. Every other exception counts as unexpected, also a NobackfillError.

    Args:
        metrics: counts the error.
        thread_label: label of nobackfill_unforeseen_errors_total: a fixed word, never a name from
            outside.
    """
    try:
        yield
    except Exception as error:
        log.exception("unexpected error, going on", thread=thread_label, error=type(error).__name__)
        metrics.unexpected_errors.labels(thread_label).inc()
