"""What may be believed of a publication, and where its files come from, on gateway and device.

A fetcher reads a folder or a static HTTP host; what it gives is untrusted. TUF metadata is fetched
and verified by python-tuf (ngclient) in a temporary folder. Only a whole, verified set replaces the
trusted one, in one durable write (trusted.json), so that an attack or a kill leaves the trusted
state byte for byte as it was.
"""

import contextlib
import http.client
import json
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Protocol, Self, TypeVar
from urllib.parse import quote, unquote, urljoin

import urllib3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
    SlowRetrievalError,
)
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface

from nobackfill import durable
from nobackfill.digests import in_share, sha256_bytes, sha256_file, share_digest
from nobackfill.errors import (
    CannotWriteError,
    ConfigurationError,
    NobackfillError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    UnfitError,
    VerificationError,
    few,
)
from nobackfill.pace import pool_manager, read_paced
from nobackfill.release.manifest import (
    Converter,
    Manifest,
    converter_manifest_path,
    is_plain,
    number_of_converter,
    parse_converter,
    parse_manifest,
)
from nobackfill.release.paths import manifest_path, release_of_manifest
from nobackfill.release.routes import twin_of

_CHUNK = 2**16
# A source that sends nothing for so long has gone, or means harm.
SILENCE_SECONDS = 10.0
_REDIRECTS = 3
# What a host can make the libraries raise: urllib3 lets some of theirs through.
_TROUBLE = (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError)


class Fetcher(Protocol):
    """Reads a file of a publication."""

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """The bytes of `url` from `offset` on, in pieces.

        Raises, at once or at any piece, tuf's DownloadHTTPError (404: not there, 416: shorter than
        `offset`), SlowRetrievalError when nothing comes, DownloadError for other trouble.
        """
        ...


class FolderFetcher:
    """A publication folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base_url = f"{folder}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        path = self._folder / unquote(url.removeprefix(self.base_url))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while piece := file.read(_CHUNK):
                    yield piece
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DownloadHTTPError(f"{path}: is not there", 404) from error
        except OSError as error:
            raise DownloadError(f"{path}: cannot be read ({error.strerror})") from error


class HttpFetcher:
    """Any static HTTP(S) host, with ranges where it serves them.

    $NOBACKFILL_CA_FILE may name its authority's certificate (PEM, else the system's).
    """

    def __init__(self) -> None:
        self._pool = pool_manager(
            timeout=urllib3.Timeout(SILENCE_SECONDS),
            ca_certs=os.environ.get("NOBACKFILL_CA_FILE") or None,
            # A host's Retry-After would be slept through, however long it is.
            retries=urllib3.Retry(2, respect_retry_after_header=False),
        )
        weakref.finalize(self, self._pool.clear)

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        try:
            response = self._answer(quote(url, safe=":/@%?=&[]"), offset)
        except _TROUBLE as error:
            raise DownloadError(f"{url}: {_sentence(error)}") from error
        complete = False
        try:
            if response.status not in (200, 206):
                raise DownloadHTTPError(f"{url}: HTTP {response.status}", response.status)
            # A host that ignores Range sends everything: pass by what is here already.
            skip = offset if response.status == 200 else 0
            # read1 gives what has come, so that the caller notices a host that drips.
            while piece := response.read1(_CHUNK):
                if len(piece) > skip:
                    yield piece[skip:]
                skip = max(0, skip - len(piece))
            complete = True
        except urllib3.exceptions.TimeoutError as error:
            raise SlowRetrievalError(f"{url}: nothing came for {SILENCE_SECONDS:g} s") from error
        except _TROUBLE as error:
            raise DownloadError(f"{url}: {error}") from error
        finally:
            # After a complete file its connection is used again; else the rest is in the way.
            if not complete:
                response.close()
            response.release_conn()

    def _answer(self, url: str, offset: int) -> urllib3.BaseHTTPResponse:
        # What was signed are the bytes as they lie there: nothing is unpacked.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        for _ in range(1 + _REDIRECTS):
            response = self._pool.request(
                "GET",
                url,
                headers=headers,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            location = response.get_redirect_location()
            if not location:
                return response
            response.close()
            response.release_conn()
            before, url = url, urljoin(url, location)
            if not url.startswith(("https://", before.partition("//")[0] + "//")):
                raise DownloadError(f"{before}: redirects to {url}; expected https there")
        raise DownloadError(f"{url}: redirects more than {_REDIRECTS} times")


def _sentence(error: Exception) -> str:
    """What a person can use of a failed request, without the pools and retries of the library."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    text = str(cause)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate is of no authority that is known here; name the authority's "
            "certificate (PEM) in NOBACKFILL_CA_FILE"
        )
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        return "no host of that name is known; check the address"
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return "nothing answers there; check the address, and that the host runs"
    # What follows the last colon is what happened; before it stand objects of the library.
    return text.rpartition(": ")[2] if "object at 0x" in text or "Pool(" in text else text


def fetcher_for(source: str) -> tuple[Fetcher, str]:
    """The fetcher and base URL of a folder, `http://` or `https://` source."""
    if source.startswith(("http://", "https://")):
        return HttpFetcher(), source.rstrip("/") + "/"
    folder = FolderFetcher(Path(source))
    return folder, folder.base_url


# What may be believed of a publication: the view that gateway and device share.
#
# TUF metadata is fetched and verified by python-tuf (ngclient) in a temporary folder. Only a whole,
# verified set replaces the trusted one, in one durable write (trusted.json), so that an attack or a
# kill leaves the trusted state byte for byte as it was.

Version = Annotated[int, Field(ge=0)]


# A share is signed as a number of millionths: canonical JSON has no fractions.
MILLION = 1_000_000
_SHARE = "share_in_a_million"

_Signed = TypeVar("_Signed", Root, Targets, Snapshot, Timestamp)


class Floor(BaseModel):
    """Versions below which nothing is accepted: small JSON, kept with the installed release.

    A client keeps it in the same database transaction as the release it installs, so that neither a
    lost state folder nor metadata that never reached the disk lets an attacker go back. `keys` are
    digests of the keys of each role: the counters of a role start anew when the root metadata
    gives it other keys, else one stolen online key could end all publishing (fast-forward attack,
    TUF 5.3.11).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Version
    timestamp: Version
    snapshot: Version
    targets: Version
    keys: dict[str, str]


ROLE_FILES = ("timestamp", "snapshot", "targets")


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int
    anchor: str
    seen: datetime
    root: str
    timestamp: str
    snapshot: str
    targets: str


class TrustedState:
    """Root, timestamp, snapshot and targets metadata that were verified together.

    `anchor` is the digest of the root metadata that was trusted first, `seen` the latest time of a
    refresh that succeeded: a clock that is set back does not make expired metadata fresh.
    """

    def __init__(self, anchor: str, seen: datetime, texts: dict[str, bytes]) -> None:
        """Raises VerificationError unless the metadata is signed and fits together."""
        self.anchor = anchor
        self.seen = seen
        self.texts = texts
        self.root = verified(Root, texts["root"], None, "trusted root metadata")
        self.timestamp = verified(Timestamp, texts["timestamp"], self.root, "trusted timestamp")
        self.snapshot = verified(Snapshot, texts["snapshot"], self.root, "trusted snapshot")
        self.targets = verified(Targets, texts["targets"], self.root, "trusted targets")
        try:
            self.timestamp.snapshot_meta.verify_length_and_hashes(texts["snapshot"])
            self.snapshot.meta["targets.json"].verify_length_and_hashes(texts["targets"])
        except (RepositoryError, KeyError) as error:
            raise VerificationError(f"trusted metadata does not fit together ({error})") from error

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None if there is none. Raises VerificationError for a damaged one."""
        try:
            stored = _Stored.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise VerificationError(
                f"{path}: is damaged ({error}); remove it to begin anew from the root metadata"
            ) from error
        roles = ("root", *ROLE_FILES)
        # What is no text was not written by us; it fails its signature.
        texts = {role: str(getattr(stored, role)).encode(errors="replace") for role in roles}
        return cls(stored.anchor, stored.seen, texts)

    def save(self, path: Path) -> None:
        """Replace the file durably. Raises CannotWriteError."""
        texts = {role: data.decode() for role, data in self.texts.items()}
        stored = {"format": 1, "anchor": self.anchor, "seen": self.seen.isoformat(), **texts}
        durable.write_file(path, json.dumps(stored, indent=1).encode())

    def expiries(self) -> dict[str, datetime]:
        """When the metadata of each role expires."""
        return {
            "root": self.root.expires,
            "timestamp": self.timestamp.expires,
            "snapshot": self.snapshot.expires,
            "targets": self.targets.expires,
        }

    def floor(self) -> Floor:
        """The versions of this state, with the keys that they were signed by."""
        return Floor(
            root=self.root.version,
            timestamp=self.timestamp.version,
            snapshot=self.snapshot.version,
            targets=self.targets.version,
            keys={
                role: sha256_bytes(",".join(sorted(self.root.roles[role].keyids)).encode())
                for role in ROLE_FILES
            },
        )

    def check_floor(self, floor: Floor) -> None:
        """Raises VerificationError if anything is older than `floor`."""
        own = self.floor()
        kept = {role for role in ROLE_FILES if own.keys[role] == floor.keys.get(role)}
        compared = [("root", own.root, floor.root)]
        if "timestamp" in kept:
            compared.append(("timestamp", own.timestamp, floor.timestamp))
        if "snapshot" in kept:
            compared.append(("snapshot", own.snapshot, floor.snapshot))
        # The snapshot is what pins the targets' version, so new keys for it free that, too.
        if {"snapshot", "targets"} <= kept:
            compared.append(("targets", own.targets, floor.targets))
        for role, got, least in compared:
            if got < least:
                raise VerificationError(
                    f"expected {role} metadata of version {least} or later, got {got}: this "
                    "publication was rolled back; nothing was changed"
                )

    def check_expiry(self, now: datetime) -> None:
        """Raises VerificationError if any of the metadata has expired by `now`."""
        for name, signed in (
            ("root", self.root), ("timestamp", self.timestamp),
            ("snapshot", self.snapshot), ("targets", self.targets),
        ):  # fmt: skip
            if signed.is_expired(now):
                raise VerificationError(
                    expired(f"{name} metadata expired on {signed.expires:%Y-%m-%d}")
                )


def expired(what: str) -> str:
    """What to do about expired metadata."""
    return (
        f"{what}; this machine's clock says {datetime.now(UTC):%Y-%m-%d}. If the clock is and was "
        "right, the publisher has to run `publication resign`; nothing was changed"
    )


# For all metadata of one refresh together.
METADATA_SECONDS = 30.0

_CONFIG = UpdaterConfig(prefix_targets_with_hash=False)


def fetch_metadata(
    fetcher: Fetcher, base_url: str, root: bytes, trusted: dict[str, bytes]
) -> dict[str, bytes]:
    """The newest verified root, timestamp, snapshot and targets metadata, by role.

    `root` is the trusted root metadata, `trusted` the timestamp, snapshot and targets metadata seen
    last, or nothing: what comes must not be older. Raises VerificationError, UnavailableError,
    NotFoundError, CannotWriteError.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nobackfill-") as temporary:
            return _refreshed(Path(temporary), fetcher, base_url, root, trusted)
    except (DownloadError, RepositoryError) as error:
        raise translate_tuf_errors(error, base_url) from error
    except OSError as error:
        raise CannotWriteError(
            f"{error.filename}: cannot be written ({error.strerror}); the temporary folder needs "
            "a little space"
        ) from error


def _refreshed(
    folder: Path, fetcher: Fetcher, base_url: str, root: bytes, trusted: dict[str, bytes]
) -> dict[str, bytes]:
    for role in ROLE_FILES:
        if role in trusted:
            (folder / f"{role}.json").write_bytes(trusted[role])
    paced = Paced(fetcher)
    Updater(str(folder), base_url, fetcher=paced, config=_CONFIG, bootstrap=root).refresh()
    return {role: (folder / f"{role}.json").read_bytes() for role in ("root", *ROLE_FILES)}


def translate_tuf_errors(error: DownloadError | RepositoryError, source: str) -> NobackfillError:
    """An error of python-tuf as one of ours."""
    unchanged = "nothing was changed"
    match error:
        case DownloadLengthMismatchError():
            return VerificationError(f"{source}: sends more than was signed ({error}); {unchanged}")
        case DownloadHTTPError(status_code=404):
            return NotFoundError(f"{source}: is not there or not complete ({error}); {unchanged}")
        case SlowRetrievalError():
            return UnavailableError(f"{source}: is too slow ({error}); {unchanged}, try again")
        case DownloadError():
            return UnavailableError(
                f"{source}: cannot be reached ({error}); {unchanged}, try again"
            )
        case ExpiredMetadataError():
            return VerificationError(expired(f"{source}: {error}"))
        case _:
            return VerificationError(
                f"{source}: its metadata is not what was signed, or older than what was seen here "
                f"({error}); {unchanged}"
            )


class Paced(FetcherInterface):
    """A fetcher for python-tuf; all that it fetches has one deadline, from when it is made."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._end = time.monotonic() + METADATA_SECONDS

    def _fetch(self, url: str) -> Iterator[bytes]:
        fetched = self._fetcher.fetch_from
        return read_paced(lambda: fetched(url, 0), self._end, slow=SlowRetrievalError)


PART = ".part"

_BLOCK = 2**20


def download(fetcher: Fetcher, base_url: str, target: TargetFile, destination: Path) -> None:
    """Bring a signed file to `destination`, going on from a part that is there.

    Raises VerificationError (the host sends something else), UnavailableError (gone, too slow or
    ended early: the part is kept), CannotWriteError.
    """
    if destination.is_file() and _is_whole(destination, target):
        return
    durable.make_dir(destination.parent)
    part = destination.parent / f"{destination.name}{PART}"
    resumed = part.is_file() and 0 < part.stat().st_size <= target.length
    if not resumed:
        durable.remove_tree(part)
    _fetch(fetcher, base_url, target, part)
    if not _is_whole(part, target):
        durable.remove_tree(part)
        if resumed:
            # The part may have been the bad half: once more, from the beginning.
            _fetch(fetcher, base_url, target, part)
        if not part.exists() or not _is_whole(part, target):
            durable.remove_tree(part)
            raise VerificationError(
                f"{target.path}: the host sends another file than the one that was signed; "
                "nothing was changed"
            )
    durable.replace(part, destination)


def _fetch(fetcher: Fetcher, base_url: str, target: TargetFile, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have == target.length:
        return
    block = bytearray()
    url, offset = base_url + target.path, have
    try:
        for piece in read_paced(lambda: fetcher.fetch_from(url, offset), slow=SlowRetrievalError):
            block += piece
            if have + len(block) > target.length:
                durable.remove_tree(part)
                raise VerificationError(
                    f"{target.path}: the host sends more than the {target.length} bytes that were "
                    "signed; nothing was changed"
                )
            if len(block) >= _BLOCK:
                durable.append(part, bytes(block))
                have += len(block)
                block.clear()
    except DownloadError as error:
        raise translate_tuf_errors(error, target.path) from error
    finally:
        if block and have + len(block) <= target.length:
            durable.append(part, bytes(block))
            have += len(block)
    if have < target.length:
        raise UnavailableError(
            f"{target.path}: the host ended after {have} of {target.length} bytes; they are kept, "
            "try again"
        )


def _is_whole(path: Path, target: TargetFile) -> bool:
    return path.stat().st_size == target.length and sha256_file(path) == target.hashes.get("sha256")


_ROOT_BYTES = 512_000
_LOCK_SECONDS = 60.0
# How old the remembered time may get before it is worth a write.
_SEEN_AGE = timedelta(days=1)


def first_root(fetcher: Fetcher, base_url: str) -> bytes:
    """The publication's first root metadata, to be shown to a person before it is trusted.

    Raises NotFoundError if nothing is published there, UnavailableError, VerificationError.
    """
    url = f"{base_url}1.root.json"
    data = bytearray()
    try:
        for piece in Paced(fetcher).fetch(url):
            data += piece
            if len(data) > _ROOT_BYTES:
                raise VerificationError(f"{url}: is longer than {_ROOT_BYTES} bytes")
    except DownloadError as error:
        raise translate_tuf_errors(error, url) from error
    verified(Root, bytes(data), None, url)
    return bytes(data)


def fingerprint(root: bytes) -> str:
    """Root metadata as a person compares it: the SHA-256 in groups of four hex digits."""
    digest = sha256_bytes(root)
    return " ".join(digest[i : i + 4] for i in range(0, len(digest), 4))


class Trust:
    """The verified view of a remote publication.

    Everything but `refresh` and downloads works offline, on what the last refresh has verified,
    also after its expiry: expiry stops news, not use.
    """

    def __init__(
        self,
        state_dir: Path,
        fetcher: Fetcher,
        base_url: str,
        root: bytes | None = None,
        floor: Floor | None = None,
    ) -> None:
        """`state_dir` holds the trusted state (made if missing).

        `root` is the root metadata trusted first; None: what the state holds already. `floor` is
        the newest that was ever seen, kept by the caller elsewhere: nothing older is accepted, even
        if the state folder was lost. Raises NotFoundError when there is neither root nor state,
        VerificationError for a damaged state, or one that began with another root.
        """
        self._folder = state_dir
        self._fetcher = fetcher
        self._base_url = base_url
        self._root = root
        self._floor = floor
        self._state = self._load()
        if self._state is None and root is None:
            raise NotFoundError(f"{state_dir}: nothing is trusted yet; expected root metadata")

    def refresh(self) -> bool:
        """Fetch and verify what is published now; True if it is news.

        Raises VerificationError (signature, expiry, rollback, mix-and-match …; nothing changes),
        UnavailableError, NotFoundError if nothing is published there, CannotWriteError, BusyError.
        """
        durable.make_dir(self._folder, mode=0o700)
        with durable.lock(self._folder / "lock", _LOCK_SECONDS):
            durable.sweep(self._folder)
            before = self._load()
            trusted = before.texts if before else {}
            root = trusted.get("root", self._root or b"")
            texts = fetch_metadata(self._fetcher, self._base_url, root, trusted)
            now = datetime.now(UTC)
            seen = max(now, before.seen) if before else now
            anchor = before.anchor if before else sha256_bytes(root)
            after = TrustedState(anchor, seen, texts)
            after.check_expiry(seen)
            if self._floor is not None:
                after.check_floor(self._floor)
            news = before is None or before.texts != texts
            if news or (before is not None and seen - before.seen > _SEEN_AGE):
                after.save(self._folder / "trusted.json")
            self._state = after
            return news

    def floor(self) -> Floor:
        """The versions seen, for the caller to keep with its installed release."""
        return self._trusted().floor()

    def expiries(self) -> dict[str, datetime]:
        """When the trusted metadata of each role expires. Raises NotFoundError before any."""
        return self._trusted().expiries()

    def root(self) -> bytes:
        """The trusted root metadata of today, for the caller to keep in case the state is lost."""
        return self._trusted().texts["root"]

    def releases(self) -> dict[int, str | None]:
        """Release numbers, ascending, each with the reason why it was withdrawn, or None."""
        targets = self._trusted().targets.targets
        numbers = {release_of_manifest(path): path for path in targets}
        return {n: withdrawn(targets[path]) for n, path in sorted(_known(numbers).items())}

    def belongs(self, release: int, device: str) -> bool:
        """Whether a release is for the device that made itself this id, by its signed share."""
        return in_share(share_digest(release, device), self.share(release))

    def share(self, release: int) -> float:
        """The share of devices that a release is for, 0 to 1."""
        return share_of(self.target(manifest_path(release)))

    def newest(self, device: str | None = None) -> int | None:
        """The newest release that is neither withdrawn nor unfit, None where nothing is published;
        where `device` belongs to the share of one, the newest of those.

        Raises UnfitError if all are unfit; else like `manifest`.
        """
        unfit: UnfitError | None = None
        good = [n for n, reason in self.releases().items() if reason is None]
        first = [n for n in good if device is None or self.belongs(n, device)]
        for release in sorted(first, reverse=True) + sorted(set(good) - set(first), reverse=True):
            try:
                return self.manifest(release).release
            except UnfitError as error:
                unfit = unfit or error
        if unfit is not None:
            raise unfit
        return None

    def manifest(self, release: int) -> Manifest:
        """A release's manifest, fetched once, then read offline.

        Raises NotFoundError, VerificationError, UnfitError for one that is as it was signed and
        cannot be used, UnavailableError, CannotWriteError.
        """
        path = manifest_path(release)
        manifest = parse_manifest(self.download(path, self._folder).read_bytes(), release)
        for file in manifest.files():
            target = self._trusted().targets.targets.get(file.path)
            if target is None:
                raise UnfitError(f"{path}: {file.path} is not signed")
            if (target.length, target.hashes.get("sha256")) != (file.length, file.sha256):
                raise UnfitError(f"{path}: {file.path} is signed with another digest")
        return manifest

    def manifests(self) -> dict[int, Manifest]:
        """The manifests of every release that is neither withdrawn nor unfit, to plan routes."""
        manifests: dict[int, Manifest] = {}
        for release, reason in self.releases().items():
            if reason is None:
                with contextlib.suppress(UnfitError):
                    manifest = self.manifest(release)
                    if twin_of(manifest, manifests.values()) is None:
                        manifests[release] = manifest
        return manifests

    def paths(self) -> list[str]:
        """Of every signed file. Raises NotFoundError before anything was fetched."""
        return sorted(self._trusted().targets.targets)

    def target(self, path: str) -> TargetFile:
        """The signed length and digest of a published file. Raises NotFoundError."""
        target = self._trusted().targets.targets.get(path) if is_plain(path) else None
        if target is None:
            raise NotFoundError(f"{path}: is not published")
        return target

    def download(self, path: str, folder: Path) -> Path:
        """Bring a published file to `folder`/`path`; a part that is there is not read again.

        Never more than the signed length is read; the file appears under its name only once its
        digest is right, and is then durable. Raises NotFoundError, VerificationError,
        UnavailableError (host gone, too slow, incomplete; the part is kept), CannotWriteError.
        """
        destination = folder / path
        if not destination.resolve().is_relative_to(folder.resolve()):
            raise VerificationError(f"{path}: leads out of {folder}")
        download(self._fetcher, self._base_url, self.target(path), destination)
        return destination

    def _trusted(self) -> TrustedState:
        if self._state is None:
            raise NotFoundError(f"{self._folder}: nothing was fetched yet; refresh first")
        return self._state

    def _load(self) -> TrustedState | None:
        state = TrustedState.load(self._folder / "trusted.json")
        if state is not None and self._root is not None:
            given = verified(Root, self._root, None, "given root metadata")
            if given.version <= state.root.version and sha256_bytes(self._root) not in (
                state.anchor, sha256_bytes(state.texts["root"]),
            ):  # fmt: skip
                raise VerificationError(
                    f"{self._folder}: trusts another root than the one given; remove the folder if "
                    "you mean to begin anew"
                )
        return state


class TrustedFolder(Trust):
    """The verified view of a publication folder of this machine, for the gateway."""

    def __init__(self, repo: Path, state_dir: Path, root: bytes | None = None) -> None:
        """`root` None: what the state holds, else the folder's own 1.root.json, trusted on first
        use. Raises like Trust."""
        self.repo = repo
        fetcher = FolderFetcher(repo)
        if root is None and not (state_dir / "trusted.json").exists():
            root = first_root(fetcher, fetcher.base_url)
        super().__init__(state_dir, fetcher, fetcher.base_url, root)

    def manifest(self, release: int) -> Manifest:
        """A release's manifest, which must be complete in its place. Raises like Trust.manifest."""
        self._check_in_place(manifest_path(release))
        return super().manifest(release)

    def verified(self, release: int) -> Path:
        """The publication folder, once every file of the release in it has the signed digest.

        Also refuses links, and files that nobody signed in the release's model folders. Raises
        NotFoundError, VerificationError.
        """
        manifest = self.manifest(release)
        paths = {file.path for file in manifest.files()} | manifest.triton_configs().keys()
        paths.add(manifest_path(release))
        for path in sorted(paths):
            self._check_in_place(path)
        for model in sorted({path.split("/")[0] for path in paths if "/" in path}):
            signed = self._trusted().targets.targets
            for found in (self.repo / model).rglob("*"):
                name = found.relative_to(self.repo).as_posix()
                if found.is_symlink() or (not found.is_dir() and name not in signed):
                    raise VerificationError(
                        f"{name}: is in a release's folder, but nobody signed it"
                    )
        return self.repo

    def _check_in_place(self, path: str) -> None:
        target, file = self.target(path), self.repo / path
        try:
            inside = file.resolve(strict=True) == self.repo.resolve() / path
            good = inside and file.is_file() and file.stat().st_size == target.length
            good = good and sha256_file(file) == target.hashes.get("sha256")
        except OSError as error:
            raise VerificationError(f"{path}: cannot be read ({error.strerror})") from error
        if not good:
            raise VerificationError(
                f"{path}: is not the file that was signed; publish the release anew or restore it"
            )


def _known(numbers: dict[int | None, str]) -> dict[int, str]:
    return {number: path for number, path in numbers.items() if number is not None}


def converter_numbers(trust: Trust) -> list[int]:
    """Of those that the trusted metadata name, ascending."""
    found = (number_of_converter(path) for path in trust.paths())
    return sorted(number for number in found if number is not None)


def known_converters(trust: Trust) -> str:
    """Which there are, in words; of releases it says what carries by them."""
    if numbers := converter_numbers(trust):
        return ", ".join(map(str, numbers))
    releases = ", ".join(map(str, trust.releases()))
    return (
        "none"
        if not releases
        else (
            f"releases ({releases}), whose upgrades read what a gallery keeps beside its vectors: "
            "`gateway upgrade` and `edge-client sync` carry by them"
        )
    )


def refuse_withdrawn(trust: Trust, number: int) -> None:
    """Raises PreconditionError for one that its publisher has taken back."""
    reason = withdrawn(trust.target(converter_manifest_path(number)))
    if reason is not None:
        raise PreconditionError(f"converter {number} was withdrawn by its publisher: {reason}")


def read_converter(trust: Trust, number: int, folder: Path) -> Converter:
    """Its manifest, downloaded into `folder`, as it was signed.

    Raises NotFoundError, VerificationError, UnfitError, UnavailableError, CannotWriteError.
    """
    path = converter_manifest_path(number)
    try:
        trust.target(path)
    except NotFoundError as error:
        raise NotFoundError(
            f"converter {number} is not published there, only {known_converters(trust)}"
        ) from error
    return parse_converter(trust.download(path, folder).read_bytes(), number)


def converter_file(trust: Trust, manifest: Converter, folder: Path) -> Path:
    """Its ONNX file, downloaded into `folder`. Raises as `read_converter`."""
    file, target = manifest.file, trust.target(manifest.file.path)
    if (target.length, target.hashes.get("sha256")) != (file.length, file.sha256):
        path = converter_manifest_path(manifest.converter)
        raise UnfitError(f"{path}: {file.path} is signed with another digest")
    return trust.download(file.path, folder)


@dataclass(frozen=True)
class Publication:
    """Verified manifests of every release, and which of them were withdrawn."""

    manifests: Mapping[int, Manifest]
    withdrawn: frozenset[int]


def read_publication(model_repo: Path, state: Path | None = None) -> Publication:
    """What is published, every file checked in place; empty where nothing is.

    `state` holds what is found trustworthy; None: a temporary folder. Raises VerificationError.
    """
    if not (model_repo / "timestamp.json").is_file():
        return Publication({}, frozenset())
    with nullcontext(state) if state else tempfile.TemporaryDirectory() as place:
        folder = TrustedFolder(model_repo, Path(place))
        folder.refresh()
        reasons = folder.releases()
        for release in reasons:
            folder.verified(release)
        manifests = {release: folder.manifest(release) for release in reasons}
    return Publication(manifests, frozenset(n for n, why in reasons.items() if why is not None))


def require_release(number: int, published: Mapping[int, Manifest]) -> Manifest:
    """A published release by number. Raises ConfigurationError naming those there are."""
    if number not in published:
        raise ConfigurationError(
            f"release {number} is not published; published: "
            f"{few(sorted(published, reverse=True)) or 'none'}"
        )
    return published[number]


def withdrawn(target: TargetFile) -> str | None:
    """The reason why a manifest's release was withdrawn, or None."""
    custom = target.custom
    reason = custom.get("withdrawn") if isinstance(custom, dict) else None
    return None if reason is None else str(reason)


def share_of(target: TargetFile) -> float:
    """The share of devices that a manifest's release is for, 0 to 1; 1 where none is signed."""
    custom = target.custom
    parts = custom.get(_SHARE, MILLION) if isinstance(custom, dict) else MILLION
    # What is no share is for nobody: a publisher meant to hold it back.
    good = isinstance(parts, int) and not isinstance(parts, bool) and 0 < parts <= MILLION
    return parts / MILLION if good else 0.0


def for_share(target: TargetFile, path: str, share: float) -> TargetFile:
    """The same manifest, its release for a share of the devices, told to the millionth."""
    custom = {_SHARE: max(1, round(share * MILLION))}
    return TargetFile.from_dict({**target.to_dict(), "custom": custom}, path)


def verified(kind: type[_Signed], data: bytes, root: Root | None, name: str) -> _Signed:
    """Metadata of a kind, signed as `root` demands (None: root metadata, by itself).

    Raises VerificationError, which names it `name`.
    """
    try:
        metadata = Metadata[_Signed].from_bytes(data)
        if metadata.signed.type != kind.type:
            raise RepositoryError(f"expected {kind.type} metadata, got {metadata.signed.type}")
        signed: _Signed = metadata.signed
        delegator = root if root is not None else signed
        if not isinstance(delegator, Root):
            raise RepositoryError("expected root metadata")
        delegator.verify_delegate(kind.type, metadata.signed_bytes, metadata.signatures)
    except RepositoryError as error:
        raise VerificationError(f"{name}: is not validly signed ({error})") from error
    return signed
