"""Who may call what: one rule a call, by role; default deny."""

from collections.abc import Mapping
from typing import Any

from nobackfill.errors import NotPermittedError, few
from nobackfill.server.grpc.tokens import LOCAL, Principal, Role, Tokens

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
