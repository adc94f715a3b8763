"""The SQLite file of one gallery on this device, and the files that belong to it.

    gallery.sqlite            items, vectors, state: the truth
    gallery.sqlite.models/    published files of the installed releases, and the trusted metadata
    gallery.sqlite.identity   the age secret key, made by the first push
    gallery.sqlite.outbox/    ciphertext that waits for its upload to the vault
    gallery.sqlite.reserve    disk space that gc can give back
    gallery.sqlite.thumbs/    thumbnails of images that pages have shown

Keys of the state in the SQLite file:

    source         address of the publication
    root           the root metadata that was trusted first
    floor          the newest metadata versions that were verified
    installed      release -> SHA-256 of its manifest
    held_back      release -> the reason why this device does not follow it
    held_digests   release -> SHA-256 of the manifest that is held back
    cohort         a random id made on this device, which never leaves it; its hash decides when a
                   staged rollout includes this device
    keep_original  whether vectors embedded from images outlive their release
    return_to      the space before the last upgrade
    carried        release -> when and along which routes a sync migrated the gallery there
    tried          version of the trial -> digests of the files that passed it
    last_sync      the summary that `report` sends
    vault          address of the vault
    identity       the public key of the identity file
    recipients     further public keys that every pushed image is encrypted to
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
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.gallery.sqlite_file import has_free_bytes
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.paths import manifest_path

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest
    from nobackfill.release.trust.trust import Fetcher, Trust

# The reason why the last sync changed nothing.
Failure = Literal["none", "no_route", "refused", "left_behind"]


def _is_text(value: Any) -> bool:
    """Check for a text; none that is stored has a zero byte, which no path may have."""
    return isinstance(value, str) and "\0" not in value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _by_release(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Make a check: an object whose keys are release numbers and whose values pass `kind`."""
    return lambda value: (
        isinstance(value, dict)
        and all(_RELEASE.fullmatch(key) is not None for key in value)
        and all(map(kind, value.values()))
    )


def _is_migration(value: Any) -> bool:
    try:
        # `browse` prints the routes.
        routes = value.get("routes", [])
        return (
            datetime.fromisoformat(value["at"]).tzinfo is not None
            and isinstance(routes, list)
            and all(isinstance(route, list) for route in routes)
        )
    except (TypeError, AttributeError, KeyError, ValueError):
        return False


def _is_sync(value: Any) -> bool:
    """Check a value's form, and that a report can hold its numbers."""
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

# Checks of the state's values by key; other keys may have any value.
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("source", "root", "cohort", "return_to", "vault", "identity"), _is_text),
    "floor": lambda value: isinstance(value, dict),
    "installed": _by_release(_is_text),
    "held_back": _by_release(_is_text),
    "held_digests": _by_release(lambda digest: digest is None or _is_text(digest)),
    "carried": _by_release(_is_migration),
    "tried": lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
    "last_sync": _is_sync,
    "keep_original": lambda value: isinstance(value, bool),
    "recipients": _is_texts,
}


def is_gateway_address(address: str) -> bool:
    """Return whether an address begins with grpc:// or grpcs://, in lower case. Checks no more."""
    return address.startswith(("grpc://", "grpcs://"))


def sidecar_path(gallery_file: Path, suffix: str) -> Path:
    """Return the path of a file that belongs to a gallery; nothing is created or checked.

    Args:
        gallery_file: the gallery file.
        suffix: the text after its name and a dot, such as "models".

    Returns:
        The path, in the gallery's folder. It is relative if `gallery_file` is.
    """
    return gallery_file.with_name(f"{gallery_file.name}.{suffix}")


class GalleryFile:
    """An open gallery file: its store, its state, its releases, its locks.

    Every method may raise DamagedError (the gallery file is damaged) and BusyError (another process
    holds it). Close a gallery, or use it in a `with` statement.

    Attributes:
        path: the gallery file.
        models: the folder of its downloaded models and manifests.
        store: its items and vectors.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a gallery file; after an unclean end, check its pages first.

        Its files for SQLite (-wal, -shm, .lock) are created next to it. The caller closes the
        gallery.

        Raises:
            NotFoundError: there is no file at `path`.
            VerificationError: the file is damaged, is no gallery, or has a newer format.
            BusyError: another process has the file for itself, for 5 seconds.
            CannotWriteError: the file cannot be read, or the disk has no room for SQLite's files.
            OSError: this user may not look into the folder.
        """
        path = Path(path)
        if not path.is_file():
            raise NotFoundError(
                f"{path}: there is no gallery; make one with `edge-client --gallery {path} init "
                "--from SOURCE`, or name another file with --gallery"
            )
        self.path = path
        self.models = sidecar_path(path, "models")
        self.store = SqliteGallery.open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, once no thread reads or writes; a second call does nothing.

        Later calls that read or write raise NotFoundError.

        Raises:
            BusyError: a statement of another thread does not end within a minute; the file stays
                open.
        """
        self.store.close()

    # Take the locks in this order. Reading, searching and adding take none.

    def sync_lock(self) -> AbstractContextManager[None]:
        """Lock the use of the source, for any length of time.

        The lock is taken when the `with` block begins, and the end of the process frees it.

        Raises:
            BusyError: another sync has the lock; this does not wait.
            CannotWriteError: the lock file cannot be created.
        """
        return durable.lock_file(self.models / "sync.lock")

    def vault_lock(self) -> AbstractContextManager[None]:
        """Lock the use of the vault, for any length of time.

        The lock is taken when the `with` block begins, and the end of the process frees it.

        Raises:
            BusyError: another push or pull has the lock; this does not wait.
            CannotWriteError: the lock file cannot be created.
        """
        return durable.lock_file(self.models / "vault.lock")

    def change_lock(self, timeout_s: float = 0.0) -> AbstractContextManager[None]:
        """Lock the change of spaces and releases; never wait for the network under this lock.

        The lock is taken when the `with` block begins, and the end of the process frees it. It is
        not reentrant: a second call in the same thread waits for the first.

        Args:
            timeout_s: how long to wait for the lock, in seconds; 0 does not wait.

        Raises:
            BusyError: another process held the lock for `timeout_s` seconds.
            CannotWriteError: the lock file cannot be created.
        """
        return durable.lock_file(self.models / "change.lock", timeout_s)

    def state(self, key: str, default: Any = None) -> Any:
        """Return a value of the gallery's state.

        Args:
            key: a key of the state; the docstring of this module lists them. The values of other
                keys are not checked.
            default: returned if the state has no such key, or None there. A stored value is new at
                each call, and changing it stores nothing.

        Raises:
            DamagedError: the value has the wrong form, or the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        value = self.store.read_state_value(key)
        if value is not None and key in _KINDS and not _KINDS[key](value):
            raise DamagedError(self.path, f"its state has an unusable value of {key!r}")
        return default if value is None else value

    def trust(self, fetcher: "Fetcher", base_url: str) -> "Trust":
        """Return the verified view of this gallery's publication, as it was when last fetched.

        The first root and the newest versions are read from the gallery file. A damaged or lost
        models folder therefore costs downloads, but no security. Nothing is fetched. A file of
        trusted metadata that fails its checks is deleted, and the view begins again from the root.

        Args:
            fetcher: fetches files of the source.
            base_url: the base URL in front of the published paths.

        Raises:
            VerificationError: the gallery's state is damaged, or its root metadata is not validly
                signed. Metadata that is older than the gallery's versions is refused later, by
                `refresh`.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file of trusted metadata cannot be deleted, or the gallery cannot
                be opened.
            NotFoundError: the gallery was closed.
        """
        from nobackfill.release.trust.trust import Trust, VersionFloor

        root = str(self.state("root")).encode()
        try:
            floor = VersionFloor.model_validate(self.state("floor"))
        except ValueError as error:
            raise DamagedError(self.path, "its state has an unusable value of 'floor'") from error
        try:
            return Trust(self.models, fetcher, base_url, root, floor)
        except VerificationError:
            durable.remove_tree(self.models / "trusted.json")
            return Trust(self.models, fetcher, base_url, root, floor)

    def manifest(self, release: int) -> "Manifest":
        """Return the manifest of an installed release; its file is read and verified at each call.

        Args:
            release: the number of the release.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: the file is missing, was changed or cannot be read, or the gallery is
                damaged.
            UnfitError: this program cannot use the release.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        from nobackfill.release.manifest import parse_manifest

        return parse_manifest(self.manifest_text(release), release)

    def manifest_text(self, release: int) -> bytes:
        """Return the manifest of an installed release, byte for byte as it was verified.

        The file is read and compared with its stored SHA-256 at each call.

        Args:
            release: the number of the release.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: the file is missing, was changed or cannot be read, or the gallery is
                damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        digest = self.state("installed", {}).get(str(release))
        path = self.models / manifest_path(release)
        if digest is None:
            raise NotFoundError(
                f"{self.path}: release {release} is not installed for this gallery; run "
                "`edge-client sync`"
            )
        try:
            text = path.read_bytes()
        except OSError as error:
            raise VerificationError(
                f"{path}: this file of the release cannot be read ({error.strerror}); download it "
                "again with `edge-client sync`"
            ) from error
        if hashlib.sha256(text).hexdigest() != digest:
            raise VerificationError(
                f"{path}: this file of the release was changed after its download; download it "
                "again with `edge-client sync`"
            )
        return text

    def active_manifest(self) -> "Manifest":
        """Return the manifest of the active release.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: the manifest is missing, was changed or cannot be read, or the
                gallery is damaged or does not have exactly one active space.
            UnfitError: this program cannot use the release.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        return self.manifest(self.store.active().spec.release)

    def embedding_manifests(self) -> "list[Manifest]":
        """Return the manifests of the releases that embed new items.

        Returns:
            That of the active release, and, if there is one, that of the release that a rollback
            returns to.

        Raises:
            NotFoundError: a release is not installed, or the gallery was closed.
            VerificationError: a manifest is missing, was changed or cannot be read, or the gallery
                is damaged or does not have exactly one active space.
            UnfitError: this program cannot use a release.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        spaces = [self.store.active(), self.previous_space()]
        return [self.manifest(space.spec.release) for space in spaces if space is not None]

    def previous_space(self) -> SpaceInfo | None:
        """Return the space that a rollback returns to.

        Returns:
            None before the first upgrade, after a rollback, and once the release is confirmed.

        Raises:
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        space_id = self.state("return_to")
        return next((one for one in self.store.spaces() if one.spec.space == space_id), None)


# Disk space held by a file, so that `gc` can begin on a full disk. It covers the log of dropping a
# small space and of shortening the gallery file.
RESERVE_BYTES = 2 << 20
# The reserve is made only while the disk has this much room.
_PLENTY = 4 * RESERVE_BYTES


def create_reserve(gallery_file: Path) -> None:
    """Create the reserve file of a gallery, RESERVE_BYTES long.

    Does nothing if the disk has less than four times as much room, or if the file cannot be
    written: a later command tries again. An existing reserve is completed to that length. A part of
    the file may stay if the disk is full.
    """
    path = sidecar_path(gallery_file, "reserve")
    with contextlib.suppress(OSError):
        if has_free_bytes(gallery_file.parent, _PLENTY):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, RESERVE_BYTES)
            finally:
                os.close(handle)


def free_reserve(gallery_file: Path) -> None:
    """Delete the reserve file of a gallery if the disk has less room than RESERVE_BYTES.

    Does nothing if there is no such file, or if it cannot be deleted. The next `create_reserve`
    creates it again.
    """
    with contextlib.suppress(OSError):
        if not has_free_bytes(gallery_file.parent, RESERVE_BYTES):
            sidecar_path(gallery_file, "reserve").unlink(missing_ok=True)
