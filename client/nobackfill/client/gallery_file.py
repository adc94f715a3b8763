"""One gallery on this device: its SQLite file, and what lies beside it.

    gallery.sqlite            items, vectors, state: the truth
    gallery.sqlite.models/    published files of the releases in use, and the trusted metadata
    gallery.sqlite.identity   the age secret key, made by the first push
    gallery.sqlite.outbox/    ciphertext on its way to the vault
    gallery.sqlite.reserve    room on the disk that gc gives back
    gallery.sqlite.thumbs/    small copies of images, as far as pages have shown them

State kept in the SQLite file: `source`, `root` (the root metadata trusted first), `floor` (the
newest metadata versions seen), `installed` (release -> SHA-256 of its manifest), `held_back`
(release -> why this device does not follow it), `held_digests` (release -> SHA-256 of the manifest
that is held back), `cohort` (a random id that this device made itself,
and that never leaves it: by its hash a release is for it or not yet), `keep_original` (whether
vectors that were embedded from images outlive their release), `return_to` (the space before the
last upgrade), `carried` (release -> when and along which routes a sync carried the gallery into its
space), `tried` (version of the trial -> digests of the files that passed it), `last_sync` (what
`report` sends), `vault` (where it is), `identity` (the public key of the identity file),
`recipients` (public keys that every pushed image is encrypted to, too).
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from nobackfill import durable
from nobackfill.errors import DamagedError, NotFoundError, VerificationError
from nobackfill.gallery.connections import has_room
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.paths import manifest_path

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest
    from nobackfill.release.trust.trust import Fetcher, Trust

# Why the last sync changed nothing.
Failure = Literal["none", "no_route", "refused", "left_behind"]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _by_release(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is an object whose keys are numbers of releases and whose values pass."""
    return lambda value: (
        isinstance(value, dict)
        and all(_RELEASE.fullmatch(key) is not None for key in value)
        and all(map(kind, value.values()))
    )


def _is_carried(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value["at"]).tzinfo is not None
    except (TypeError, KeyError, ValueError):
        return False


def _is_sync(value: Any) -> bool:
    """Check that a value is what the last sync left, and that a report can hold its numbers."""
    if not isinstance(value, dict) or not isinstance(value.get("failure"), str):
        return False
    share = value.get("neighbours_kept")
    return (
        _is_number(value.get("release"), 1, _LARGEST_RELEASE)
        and isinstance(value["release"], int)
        and isinstance(value.get("probes_passed"), bool)
        and _is_number(value.get("seconds"), 0, 1e9)
        and (share is None or _is_number(share, 0, 1))
        and value["failure"] in get_args(Failure)
    )


def _is_number(value: Any, least: float, most: float) -> bool:
    """Check a number's kind and range. JSON has numbers of any size, and NaN is in no range."""
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return is_number and least <= value <= most


_RELEASE = re.compile(r"[1-9][0-9]{0,6}")
_LARGEST_RELEASE = 9_999_999

# Allowed types of values of the state, by key; any value is taken for other keys.
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("source", "root", "cohort", "return_to", "vault", "identity"), _is_text),
    "floor": lambda value: isinstance(value, dict),
    "installed": _by_release(_is_text),
    "held_back": _by_release(_is_text),
    "held_digests": _by_release(lambda digest: digest is None or _is_text(digest)),
    "carried": _by_release(_is_carried),
    "tried": lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
    "last_sync": _is_sync,
    "keep_original": lambda value: isinstance(value, bool),
    "recipients": _is_texts,
}


def beside(gallery: Path, what: str) -> Path:
    """`gallery.sqlite` -> `gallery.sqlite.WHAT`."""
    return gallery.with_name(f"{gallery.name}.{what}")


class GalleryFile:
    """An opened gallery: the store in its file, its state, its releases, its locks."""

    def __init__(self, path: str | Path) -> None:
        """Open. Raises NotFoundError where there is no gallery, VerificationError, BusyError."""
        path = Path(path)
        if not path.is_file():
            raise NotFoundError(
                f"{path}: no gallery there; make one with `edge-client --gallery {path} init "
                "--from SOURCE`, or name another with --gallery"
            )
        self.path = path
        self.models = beside(path, "models")
        self.store = SqliteGallery.open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.store.close()

    # Locks are taken in this order. Reading, searching and adding take none of them.

    def following(self) -> AbstractContextManager[None]:
        """Alone in talking to the source, however long that takes. Raises BusyError."""
        return durable.lock(self.models / "sync.lock")

    def vaulting(self) -> AbstractContextManager[None]:
        """Alone in talking to the vault, however long that takes. Raises BusyError."""
        return durable.lock(self.models / "vault.lock")

    def changing(self, timeout_s: float = 0.0) -> AbstractContextManager[None]:
        """Alone in changing spaces and releases; no host is waited for in it. Raises BusyError."""
        return durable.lock(self.models / "change.lock", timeout_s)

    def state(self, key: str, default: Any = None) -> Any:
        """A value of the state that this module's docstring lists, or `default`.

        Raises DamagedError for a value of another kind.
        """
        value = self.store.state_get(key)
        if value is not None and key in _KINDS and not _KINDS[key](value):
            raise DamagedError(self.path, f"state {key} is not as it was written")
        return default if value is None else value

    def trust(self, fetcher: "Fetcher", base_url: str) -> "Trust":
        """The verified view of this gallery's publication, anchored in the gallery file itself.

        A damaged or lost models folder costs downloads, and lowers no guard: the first root and the
        versions seen are in the SQLite file.
        """
        from nobackfill.release.trust.trust import Floor, Trust

        root = str(self.state("root")).encode()
        try:
            floor = Floor.model_validate(self.state("floor"))
        except ValueError as error:
            raise DamagedError(self.path, "state floor is not as it was written") from error
        try:
            return Trust(self.models, fetcher, base_url, root, floor)
        except VerificationError:
            durable.remove_tree(self.models / "trusted.json")
            return Trust(self.models, fetcher, base_url, root, floor)

    def manifest(self, release: int) -> "Manifest":
        """The manifest of an installed release. Raises like manifest_text."""
        from nobackfill.release.manifest import parse_manifest

        return parse_manifest(self.manifest_text(release), release)

    def manifest_text(self, release: int) -> bytes:
        """The manifest of an installed release, byte for byte as it was verified when it came.

        Raises NotFoundError if it is not installed, VerificationError if the file was changed.
        """
        digest = self.state("installed", {}).get(str(release))
        path = self.models / manifest_path(release)
        if digest is None:
            raise NotFoundError(f"release {release} is not installed here; run `edge-client sync`")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise VerificationError(
                f"{path}: cannot be read ({error.strerror}); run `edge-client sync`"
            ) from error
        if hashlib.sha256(text).hexdigest() != digest:
            raise VerificationError(f"{path}: was changed after it came; run `edge-client sync`")
        return text

    def active(self) -> "Manifest":
        """The manifest of the release that answers."""
        return self.manifest(self.store.active().spec.release)

    def previous(self) -> SpaceInfo | None:
        """The space that a rollback returns to; None once the release after it is confirmed."""
        wanted = self.state("return_to")
        kept = (space for space in self.store.spaces() if space.spec.space == wanted)
        return next(kept, None)


# Room that a file holds on the disk, so that `gc` can begin where there is none: what dropping a
# small space and shortening the file write to the log.
RESERVE_BYTES = 2 << 20
# It is taken only from a disk that does not miss it.
_PLENTY = 4 * RESERVE_BYTES


def keep_reserve(gallery: Path) -> None:
    """Hold room for a gallery, unless it is held already or the disk has little."""
    path = beside(gallery, "reserve")
    with contextlib.suppress(OSError):
        # Not urgent, and no data: where it cannot be made, a later command tries again.
        if has_room(gallery.parent, _PLENTY):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, RESERVE_BYTES)
            finally:
                os.close(handle)


def free_reserve(gallery: Path) -> None:
    """Free it where the disk has less."""
    with contextlib.suppress(OSError):
        if not has_room(gallery.parent, RESERVE_BYTES):
            beside(gallery, "reserve").unlink(missing_ok=True)
