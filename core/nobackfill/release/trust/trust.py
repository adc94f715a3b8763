"""Verify a publication as a reader, and fetch its files, on gateway and device.

A fetcher reads a folder or a static HTTP host; its bytes are untrusted. python-tuf (ngclient)
fetches and verifies TUF metadata in a temporary folder. Only a complete, verified set replaces the
trusted one, in one durable write (trusted.json). An attack or a kill therefore leaves the trusted
state unchanged, byte for byte.
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
from nobackfill.digests import is_in_share, sha256_bytes, sha256_file, share_digest
from nobackfill.errors import (
    CannotWriteError,
    ConfigurationError,
    NobackfillError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    UnfitError,
    VerificationError,
    join_few,
)
from nobackfill.pace import make_http_pool, read_paced
from nobackfill.release.manifest import (
    Converter,
    Manifest,
    converter_manifest_path,
    is_plain_path,
    join_validation_problems,
    parse_converter,
    parse_converter_number,
    parse_manifest,
)
from nobackfill.release.paths import manifest_path, release_of_manifest
from nobackfill.release.routes import explain_duplicate_space

_CHUNK = 2**16
# A source that is silent for so long is gone or malicious.
READ_TIMEOUT_SECONDS = 10.0
_REDIRECTS = 3
# Errors that a host can cause in the libraries: urllib3 does not translate all of them.
_LIBRARY_ERRORS = (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError)


class Fetcher(Protocol):
    """A source of a publication's files."""

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file in pieces.

        Args:
            url: The base URL and the published path.
            offset: The first byte, 0 or more.

        Raises:
            tuf.api.exceptions.DownloadHTTPError: At once or at any piece: 404 for no such file, 416
                for a file shorter than `offset`.
            tuf.api.exceptions.SlowRetrievalError: Nothing came in time.
            tuf.api.exceptions.DownloadError: Any other failure.
        """


class FolderFetcher:
    """Read a publication folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base_url = f"{folder}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file in the folder, in pieces of 64 KiB.

        An offset at or beyond the end yields nothing.

        The file is opened at the first `next`, and closed when the iterator ends. Percent escapes
        in the path are decoded. Paths are not checked: the caller passes signed or fixed ones.

        Args:
            url: The base URL and the published path.
            offset: The first byte, 0 or more.

        Raises:
            tuf.api.exceptions.DownloadHTTPError: With status 404: no such file, or a part of its
                path is a file.
            tuf.api.exceptions.DownloadError: The path is a folder, the file cannot be read, or
                `offset` is negative.
        """
        path = self._folder / unquote(url.removeprefix(self.base_url))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while piece := file.read(_CHUNK):
                    yield piece
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DownloadHTTPError(f"the file {path} is not there", 404) from error
        except OSError as error:
            raise DownloadError(f"the file {path} cannot be read ({error.strerror})") from error


class HttpFetcher:
    """Read a static HTTP(S) host, with ranges if it serves them.

    $NOBACKFILL_CA_FILE may name the certificate of its authority (PEM, by default the system's).
    """

    def __init__(self) -> None:
        self._pool = make_http_pool(
            timeout=urllib3.Timeout(READ_TIMEOUT_SECONDS),
            ca_certs=os.environ.get("NOBACKFILL_CA_FILE") or None,
            # urllib3 would sleep for a host's Retry-After, however long it is.
            retries=urllib3.Retry(2, respect_retry_after_header=False),
        )
        weakref.finalize(self, self._pool.clear)

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file from the host, in pieces.

        Connects at the first `next`, and tries twice more if the connection fails or no answer
        begins within 10 s. Up to 3 redirects are followed. A host that does not serve ranges sends
        the whole file; the bytes before `offset` are skipped. The bytes are not decompressed or
        checked.

        Closing the iterator early closes the connection. Several threads may call it.

        Args:
            url: The base URL and the published path.
            offset: The first byte, 0 or more. An offset at or beyond the end yields nothing where
                the host does not serve ranges.

        Raises:
            tuf.api.exceptions.DownloadHTTPError: The host answers with another status than 200 or
                206, such as 404, or 416 for an offset at or beyond the end.
            tuf.api.exceptions.SlowRetrievalError: Nothing came for READ_TIMEOUT_SECONDS during the
                answer.
            tuf.api.exceptions.DownloadError: The host cannot be reached, the answer breaks off, or
                it redirects too often or from https to http.
        """
        try:
            response = self._answer(quote(url, safe=":/@%?=&[]"), offset)
        except _LIBRARY_ERRORS as error:
            raise DownloadError(f"{url}: {_sentence(error)}") from error
        complete = False
        try:
            if response.status not in (200, 206):
                raise DownloadHTTPError(
                    f"{url}: the host answered with the HTTP status {response.status}",
                    response.status,
                )
            # A host that ignores Range sends everything: skip the bytes that are here already.
            skip = offset if response.status == 200 else 0
            # read1 returns the bytes that have arrived, so that the caller notices a slow host.
            while piece := response.read1(_CHUNK):
                if len(piece) > skip:
                    yield piece[skip:]
                skip = max(0, skip - len(piece))
            complete = True
        except urllib3.exceptions.TimeoutError as error:
            raise SlowRetrievalError(
                f"{url}: the host sent nothing for {READ_TIMEOUT_SECONDS:g} s"
            ) from error
        except _LIBRARY_ERRORS as error:
            raise DownloadError(f"{url}: {error}") from error
        finally:
            # The connection is reused only after a complete file; otherwise unread bytes would
            # follow.
            if not complete:
                response.close()
            response.release_conn()

    def _answer(self, url: str, offset: int) -> urllib3.BaseHTTPResponse:
        # The signature covers the bytes as they are stored: do not decompress.
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
            origin, url = url, urljoin(url, location)
            if not url.startswith(("https://", origin.partition("//")[0] + "//")):
                raise DownloadError(
                    f"{origin}: the host redirects to {url}, which is not https; use an address "
                    "that does not redirect there"
                )
        raise DownloadError(
            f"{url}: expected at most {_REDIRECTS} redirects, got more; use the address that they "
            "lead to"
        )


def _sentence(error: Exception) -> str:
    """Explain a failed request to a person, without the pools and retries of the library."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    text = str(cause)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate comes from an unknown authority; set NOBACKFILL_CA_FILE to the "
            "authority's certificate (PEM)"
        )
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        return "no host of that name; check the address"
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return "nothing answers there; check the address and that the server runs"
    # The event follows the last colon; objects of the library stand before it.
    return text.rpartition(": ")[2] if "object at 0x" in text or "Pool(" in text else text


def fetcher_for(source: str) -> tuple[Fetcher, str]:
    """Return the fetcher and the base URL of a source; nothing is read yet.

    Addresses with http:// are read without encryption; signatures protect the content. For https://
    the variable NOBACKFILL_CA_FILE is read now; it may name the authority.

    Args:
        source: A folder, or an address with http:// or https://. Whether it exists is not checked.
            Any other text, such as HTTP://, names a folder.

    Returns:
        The fetcher, and its base URL with a slash at its end.
    """
    if source.startswith(("http://", "https://")):
        return HttpFetcher(), source.rstrip("/") + "/"
    folder = FolderFetcher(Path(source))
    return folder, folder.base_url


# The verified view of a publication, the same on gateway and device.

Version = Annotated[int, Field(ge=0)]


# A share is signed in millionths: canonical JSON has no fractions.
MILLION = 1_000_000
_SHARE = "share_in_a_million"

_Signed = TypeVar("_Signed", Root, Targets, Snapshot, Timestamp)


class VersionFloor(BaseModel):
    """Versions below which no metadata is accepted.

    A client stores it as small JSON in the database transaction that installs a release. So an
    attacker cannot go back, even if the state folder was lost or metadata never reached the disk.

    Attributes:
        root: Version of the root metadata.
        timestamp: Version of the timestamp metadata.
        snapshot: Version of the snapshot metadata.
        targets: Version of the targets metadata.
        keys: Digest of the keys of each role. The counter of a role restarts when root metadata
            gives it other keys; otherwise one stolen online key could block all publishing
            (fast-forward attack, TUF 5.3.11).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Version
    timestamp: Version
    snapshot: Version
    targets: Version
    keys: dict[str, str]


ROLE_FILES = ("timestamp", "snapshot", "targets")


class _StateFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int
    anchor: str
    refresh_time: datetime = Field(alias="seen")
    root: str
    timestamp: str
    snapshot: str
    targets: str


class TrustedState:
    """Root, timestamp, snapshot and targets metadata that were verified together.

    Attributes:
        anchor: SHA-256 of the root metadata that was trusted first.
        refresh_time: Time of the latest successful refresh; a clock that is set back does not
            revive expired metadata.
        metadata_bytes: The metadata of each role, in bytes.
    """

    def __init__(self, anchor: str, refresh_time: datetime, texts: dict[str, bytes]) -> None:
        """Check the signatures, and that the metadata fits together.

        Expiry and versions are not checked.

        Args:
            anchor: SHA-256 of the root metadata that was trusted first.
            refresh_time: Time of the latest successful refresh, UTC.
            texts: The metadata of each role: root, timestamp, snapshot and targets.

        Raises:
            VerificationError: A signature is wrong, or a digest differs. The root metadata must
                sign itself.
            KeyError: A role is missing in `texts`.
        """
        self.anchor = anchor
        self.refresh_time = refresh_time
        self.metadata_bytes = texts
        self.root = verify_metadata(Root, texts["root"], None, "trusted root metadata")
        self.timestamp = verify_metadata(
            Timestamp, texts["timestamp"], self.root, "trusted timestamp"
        )
        self.snapshot = verify_metadata(Snapshot, texts["snapshot"], self.root, "trusted snapshot")
        self.targets = verify_metadata(Targets, texts["targets"], self.root, "trusted targets")
        try:
            self.timestamp.snapshot_meta.verify_length_and_hashes(texts["snapshot"])
            self.snapshot.meta["targets.json"].verify_length_and_hashes(texts["targets"])
        except (RepositoryError, KeyError) as error:
            raise VerificationError(
                f"the stored metadata of a publication contradicts itself ({error}), so none of "
                "it is trusted; remove the file trusted.json in the folder where this program "
                "stores the metadata, to start again from the root metadata"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the state from a file.

        Expiry, the number of the format and the anchor are not checked.

        Returns:
            None if the file does not exist.

        Raises:
            VerificationError: The file is damaged, cannot be read, or its signatures are wrong.
        """
        try:
            stored = _StateFile.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            why = join_validation_problems(error) if isinstance(error, ValidationError) else error
            raise VerificationError(
                f"{path}: this file of trusted metadata is damaged ({why}); remove it to start "
                "again from the root metadata"
            ) from error
        roles = ("root", *ROLE_FILES)
        # Invalid text was not written by this program; its signature fails.
        texts = {role: str(getattr(stored, role)).encode(errors="replace") for role in roles}
        return cls(stored.anchor, stored.refresh_time, texts)

    def save(self, path: Path) -> None:
        """Replace the file durably, with mode 0644 less the umask; no lock is taken.

        Raises:
            CannotWriteError: The file cannot be written, or its folder is missing. The old file
                stays, unless only the folder could not be synced: then the new one is there.
        """
        texts = {role: data.decode() for role, data in self.metadata_bytes.items()}
        stored = {
            "format": 1,
            "anchor": self.anchor,
            "seen": self.refresh_time.isoformat(),
            **texts,
        }
        durable.write_file(path, json.dumps(stored, indent=1).encode())

    def expiries(self) -> dict[str, datetime]:
        """Return when the metadata of each role expires, UTC."""
        return {role: getattr(self, role).expires for role in ("root", *ROLE_FILES)}

    def version_floor(self) -> VersionFloor:
        """Return the versions of this state, with digests of the keys that may sign each role. Root
        has no such digest, and thresholds are not part of one."""
        return VersionFloor(
            root=self.root.version,
            timestamp=self.timestamp.version,
            snapshot=self.snapshot.version,
            targets=self.targets.version,
            keys={
                role: sha256_bytes(",".join(sorted(self.root.roles[role].keyids)).encode())
                for role in ROLE_FILES
            },
        )

    def check_floor(self, floor: VersionFloor) -> None:
        """Check that no metadata is older than a floor.

        Equal versions pass. A role whose keys differ from the floor's is not compared; root always
        is. Targets are compared only if the keys of snapshot and targets are both the same.

        Raises:
            VerificationError: The publication was rolled back; the message names the first such
                role.
        """
        own = self.version_floor()
        unchanged = {role for role in ROLE_FILES if own.keys[role] == floor.keys.get(role)}
        compared = [("root", own.root, floor.root)]
        if "timestamp" in unchanged:
            compared.append(("timestamp", own.timestamp, floor.timestamp))
        if "snapshot" in unchanged:
            compared.append(("snapshot", own.snapshot, floor.snapshot))
        # The snapshot pins the version of the targets: new keys of either role free it.
        if {"snapshot", "targets"} <= unchanged:
            compared.append(("targets", own.targets, floor.targets))
        for role, version, least in compared:
            if version < least:
                raise VerificationError(
                    f"expected {role} metadata of version {least} or later, which was seen before, "
                    f"got {version}: this publication was rolled back to an older state; nothing "
                    "was changed. Ask its publisher to restore the newest files"
                )

    def check_expiry(self, time: datetime) -> None:
        """Check that no metadata has expired.

        Args:
            time: The time to compare with, UTC with its time zone (TypeError without). Metadata
                that expires at this moment has expired.

        Raises:
            VerificationError: Some has expired; the message names the first in the order root,
                timestamp, snapshot, targets.
        """
        for name, end in self.expiries().items():
            if time >= end:
                raise VerificationError(
                    expiry_message(f"{name} metadata expired on {end:%Y-%m-%d}")
                )


def expiry_message(what: str) -> str:
    """Return a message about expired metadata with what to do about it.

    It shows today's date by this machine's clock.

    Args:
        what: The beginning of the message.
    """
    return (
        f"{what}; this machine's clock says {datetime.now(UTC):%Y-%m-%d}. If the clock is and was "
        "right, the publisher must run `publication resign`; nothing was changed"
    )


# Longest time for all metadata of one refresh.
METADATA_SECONDS = 30.0

_CONFIG = UpdaterConfig(prefix_targets_with_hash=False)


def fetch_metadata(
    fetcher: Fetcher, base_url: str, root: bytes, trusted: dict[str, bytes]
) -> dict[str, bytes]:
    """Fetch and verify the newest root, timestamp, snapshot and targets metadata.

    Takes at most METADATA_SECONDS. Works in a temporary folder that is removed; nothing else is
    written.

    Args:
        fetcher: The source.
        base_url: The base URL of the source.
        root: The trusted root metadata; newer versions are fetched from it on, each signed by its
            predecessor.
        trusted: The last timestamp, snapshot and targets metadata, by role; other keys are ignored.
            Older metadata is refused. An entry that the newest root does not verify is ignored.
            Empty: nothing was fetched before.

    Returns:
        The metadata of root, timestamp, snapshot and targets by role.

    Raises:
        VerificationError: A signature, digest or version is wrong, or it has expired.
        UnavailableError: The source does not answer, is too slow, or the time is over.
        NotFoundError: A file is missing.
        CannotWriteError: The temporary folder cannot be written.
        NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nobackfill-") as temporary:
            return _refresh_in(Path(temporary), fetcher, base_url, root, trusted)
    except (DownloadError, RepositoryError) as error:
        raise translate_tuf_errors(error, base_url) from error
    except OSError as error:
        raise CannotWriteError(
            f"{error.filename}: cannot be written ({error.strerror}); free some space in the "
            "folder for temporary files, or name another with TMPDIR"
        ) from error


def _refresh_in(
    folder: Path, fetcher: Fetcher, base_url: str, root: bytes, trusted: dict[str, bytes]
) -> dict[str, bytes]:
    for role in ROLE_FILES:
        if role in trusted:
            (folder / f"{role}.json").write_bytes(trusted[role])
    paced = DeadlineFetcher(fetcher)
    Updater(str(folder), base_url, fetcher=paced, config=_CONFIG, bootstrap=root).refresh()
    return {role: (folder / f"{role}.json").read_bytes() for role in ("root", *ROLE_FILES)}


def translate_tuf_errors(error: DownloadError | RepositoryError, source: str) -> NobackfillError:
    """Return, without raising it, an error of python-tuf as one of this project.

    Args:
        error: The error.
        source: The address or file, for the message.

    Returns:
        NotFoundError for a missing file, UnavailableError for a source that is slow, cannot be
        reached or answers with another HTTP status. VerificationError for everything else:
        expired metadata, more bytes than were signed, or a wrong signature or version.
    """
    unchanged = "nothing was changed"
    match error:
        case DownloadLengthMismatchError():
            return VerificationError(
                f"{source}: the host sends more bytes than were signed ({error}); {unchanged}"
            )
        case DownloadHTTPError(status_code=404):
            return NotFoundError(
                f"{source}: the publication is missing or incomplete there ({error}); {unchanged}. "
                "Check the address"
            )
        case SlowRetrievalError():
            return UnavailableError(
                f"{source}: the publication's host is too slow ({error}); {unchanged}, try again"
            )
        case DownloadError():
            return UnavailableError(
                f"{source}: the publication cannot be reached ({error}); {unchanged}, try again"
            )
        case ExpiredMetadataError():
            return VerificationError(expiry_message(f"{source}: {error}"))
        case _:
            return VerificationError(
                f"{source}: its metadata has no valid signature of the trusted root, or is older "
                f"than the trusted one ({error}); {unchanged}. Check that the root metadata is of "
                "this publication"
            )


class DeadlineFetcher(FetcherInterface):
    """A fetcher for python-tuf with one deadline for all files, METADATA_SECONDS after its
    creation."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._end = time.monotonic() + METADATA_SECONDS

    def _fetch(self, url: str) -> Iterator[bytes]:
        fetched = self._fetcher.fetch_from
        return read_paced(lambda: fetched(url, 0), self._end, slow_error=SlowRetrievalError)


PARTIAL_SUFFIX = ".part"

_BLOCK = 2**20


def download_signed_file(
    fetcher: Fetcher, base_url: str, target: TargetFile, destination: Path
) -> None:
    """Download a signed file, resuming a partial download.

    The bytes go into a file with the suffix .part next to `destination`. It gets its name after its
    digest was checked.

    A partial download stays after a kill, too. A resumed download with a wrong digest is tried once
    more from the beginning. Calls for one destination must not overlap. There is no time limit,
    only a lowest speed.

    Args:
        fetcher: The source.
        base_url: The base URL of the source.
        target: The signed entry of the file.
        destination: Where to put it; its folder is made. Nothing is done if the right file is
            there, and another one is replaced.

    Raises:
        VerificationError: The host sends another file, or more bytes than were signed; the partial
            download is removed.
        UnavailableError: The host is gone, too slow or stopped early; the partial download stays,
            and the next call resumes it.
        CannotWriteError: The file or its folder cannot be written.
        NotFoundError: The host does not have the file.
        NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
        OSError: An existing file or partial download cannot be read.
    """
    if destination.is_file() and _is_complete(destination, target):
        return
    durable.make_dir(destination.parent)
    part = destination.parent / f"{destination.name}{PARTIAL_SUFFIX}"
    resumed = part.is_file() and 0 < part.stat().st_size <= target.length
    if not resumed:
        durable.remove_tree(part)
    _fetch(fetcher, base_url, target, part)
    if not _is_complete(part, target):
        durable.remove_tree(part)
        if resumed:
            # The old part may have been wrong: try once more from the beginning.
            _fetch(fetcher, base_url, target, part)
        if not part.exists() or not _is_complete(part, target):
            durable.remove_tree(part)
            raise VerificationError(
                f"{target.path}: the host sends a file that differs from the signed one; nothing "
                "was changed. Try again later, or tell its publisher"
            )
    durable.replace_file(part, destination)


def _fetch(fetcher: Fetcher, base_url: str, target: TargetFile, part: Path) -> None:
    size = part.stat().st_size if part.exists() else 0
    if size == target.length:
        return
    block = bytearray()
    url, offset = base_url + target.path, size
    try:
        for piece in read_paced(
            lambda: fetcher.fetch_from(url, offset), slow_error=SlowRetrievalError
        ):
            block += piece
            if size + len(block) > target.length:
                durable.remove_tree(part)
                raise VerificationError(
                    f"{target.path}: the host sends more than the {target.length} bytes that were "
                    "signed; nothing was changed. Try again later, or tell its publisher"
                )
            if len(block) >= _BLOCK:
                durable.append_bytes(part, bytes(block))
                size += len(block)
                block.clear()
    except DownloadError as error:
        raise translate_tuf_errors(error, target.path) from error
    finally:
        if block and size + len(block) <= target.length:
            durable.append_bytes(part, bytes(block))
            size += len(block)
    if size < target.length:
        raise UnavailableError(
            f"{target.path}: the host stopped after {size} of {target.length} bytes; try again, "
            "which resumes there"
        )


def _is_complete(path: Path, target: TargetFile) -> bool:
    return path.stat().st_size == target.length and sha256_file(path) == target.hashes.get("sha256")


_ROOT_BYTES = 512_000
_LOCK_SECONDS = 60.0
# The stored time is written again once it is this old.
_SEEN_AGE = timedelta(days=1)


def fetch_first_root(fetcher: Fetcher, base_url: str) -> bytes:
    """Fetch the first root metadata of a publication; show its fingerprint to a person before
    trusting it.

    Nothing is stored. Expiry is not checked. Takes at most METADATA_SECONDS.

    Args:
        fetcher: The source.
        base_url: The base URL of the source.

    Raises:
        NotFoundError: Nothing is published there.
        UnavailableError: The source does not answer, or is too slow.
        VerificationError: It has more than 512,000 bytes, or is not signed by itself.
        NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
    """
    url = f"{base_url}1.root.json"
    data = bytearray()
    try:
        for piece in DeadlineFetcher(fetcher).fetch(url):
            data += piece
            if len(data) > _ROOT_BYTES:
                raise VerificationError(
                    f"{url}: expected root metadata of at most {_ROOT_BYTES} bytes, got more; "
                    "check that this is the address of a publication"
                )
    except DownloadError as error:
        raise translate_tuf_errors(error, url) from error
    verify_metadata(Root, bytes(data), None, url)
    return bytes(data)


def format_root_fingerprint(root: bytes) -> str:
    """Format the SHA-256 of root metadata for a person: 64 hex digits in groups of four."""
    digest = sha256_bytes(root)
    return " ".join(digest[i : i + 4] for i in range(0, len(digest), 4))


class Trust:
    """The verified view of a remote publication.

    Only `refresh` and downloads need the source. Everything else works offline on the last verified
    metadata, even after it expired: expiry stops updates, not use.
    """

    def __init__(
        self,
        state_dir: Path,
        fetcher: Fetcher,
        base_url: str,
        root: bytes | None = None,
        floor: VersionFloor | None = None,
    ) -> None:
        """Open the trusted state; nothing is fetched or written.

        Args:
            state_dir: Folder of the trusted state; `refresh` makes it.
            fetcher: The source.
            base_url: The base URL of the source.
            root: The root metadata to trust first; None: the one in the state. Where a state
                exists, it must be the root that the state began with or has now, or a newer
                version.
            floor: The newest versions ever seen, which the caller stores elsewhere: `refresh`
                accepts nothing older, even if the state folder was lost. None: no such versions.

        Raises:
            NotFoundError: Neither root metadata nor a state.
            VerificationError: The state is damaged, cannot be read or began with another root, or
                `root` is not validly signed. Without a state, `refresh` checks `root`.
        """
        self._folder = state_dir
        self._fetcher = fetcher
        self._base_url = base_url
        self._root = root
        self._floor = floor
        self._state = self._load()
        if self._state is None and root is None:
            raise NotFoundError(
                f"{state_dir}: no trusted metadata is stored here yet; name the publication's "
                "root metadata, its file 1.root.json (commands: --root)"
            )

    def refresh(self) -> bool:
        """Fetch and verify the published metadata, and store it durably if it changed.

        Makes the state folder with a lock file, and removes temporary files of killed processes.
        Waits up to a minute for another process or thread that refreshes the same state. It
        continues from the stored state, which another process may have refreshed. Files of releases
        are not fetched. After an error this object still has the state that it had before. Without
        a change, the stored time is written again once it is a day old.

        Returns:
            Whether any metadata differs from the stored state, or was fetched for the first time.

        Raises:
            VerificationError: An invalid signature, expired metadata, a rollback, a mix of
                versions, or a damaged state; nothing changes.
            UnavailableError: The source does not answer within 30 s, or is too slow.
            NotFoundError: Nothing is published there.
            CannotWriteError: The state or a temporary folder cannot be written.
            BusyError: Another process refreshes for more than a minute.
            NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
        """
        durable.make_dir(self._folder, mode=0o700)
        with durable.lock_file(self._folder / "lock", _LOCK_SECONDS):
            durable.remove_temporary_files(self._folder)
            old = self._load()
            trusted = old.metadata_bytes if old else {}
            root = trusted.get("root", self._root or b"")
            texts = fetch_metadata(self._fetcher, self._base_url, root, trusted)
            time = datetime.now(UTC)
            refresh_time = max(time, old.refresh_time) if old else time
            anchor = old.anchor if old else sha256_bytes(root)
            new = TrustedState(anchor, refresh_time, texts)
            new.check_expiry(refresh_time)
            if self._floor is not None:
                new.check_floor(self._floor)
            news = old is None or old.metadata_bytes != texts
            if news or (old is not None and refresh_time - old.refresh_time > _SEEN_AGE):
                new.save(self._folder / "trusted.json")
            self._state = new
            return news

    def version_floor(self) -> VersionFloor:
        """Return the trusted versions, for the caller to store with its installed release.

        Reads memory only.

        Raises:
            NotFoundError: Nothing was fetched yet.
        """
        return self._trusted().version_floor()

    def expiries(self) -> dict[str, datetime]:
        """Return when the trusted metadata of each role expires, UTC.

        Raises:
            NotFoundError: Nothing was fetched yet.
        """
        return self._trusted().expiries()

    def root(self) -> bytes:
        """Return the trusted root metadata, for the caller to store in case the state is lost.

        It is the newest version, not the first.

        Raises:
            NotFoundError: Nothing was fetched yet.
        """
        return self._trusted().metadata_bytes["root"]

    def releases(self) -> dict[int, str | None]:
        """Return the numbers of all releases, ascending, each with the reason of its withdrawal or
        None; empty if nothing was released.

        Reads memory only.

        Raises:
            NotFoundError: Nothing was fetched yet.
        """
        targets = self._trusted().targets.targets
        numbers = [(release_of_manifest(path), path) for path in targets]
        releases = sorted((number, path) for number, path in numbers if number is not None)
        return {number: withdrawal_reason(targets[path]) for number, path in releases}

    def is_offered_to(self, release: int, device_id: str) -> bool:
        """Tell whether a release is offered to a device.

        Whether it was withdrawn is not considered. The answer for one device and share is always
        the same, and stays yes as the share grows.

        Args:
            release: Number of the release.
            device_id: The random id of the device.

        Raises:
            NotFoundError: No such release, or nothing was fetched yet.
        """
        return is_in_share(share_digest(release, device_id), self.offered_share(release))

    def offered_share(self, release: int) -> float:
        """Return the share of devices that a release is offered to, 0 to 1; 1 without a declared
        share.

        An invalid share counts as 0. A withdrawn release counts as 1, because a withdrawal removes
        its share.

        Raises:
            NotFoundError: No such release, or nothing was fetched yet.
        """
        return read_offered_share(self.signed_entry(manifest_path(release)))

    def newest_release(self, device_id: str | None = None) -> int | None:
        """Return the newest usable release: not withdrawn, and this program can use it.

        Its manifest is fetched unless it is stored, and so are those of newer releases that cannot
        be used.

        Args:
            device_id: Prefer the newest release that is offered to the device with this id. Without
                one, the newest of the others counts. None for no preference.

        Returns:
            Its number; None if nothing is published or every release was withdrawn.

        Raises:
            UnfitError: This program can use none of the releases that were not withdrawn; the error
                is of the first one tried.
            VerificationError: The host sends another file, or the state folder has a link that
                leads out of it in place of a manifest.
            NotFoundError: Nothing was fetched yet, or the host lacks a manifest.
            UnavailableError: The source does not answer, is too slow or stopped early.
            CannotWriteError: The manifest cannot be written.
            NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
            OSError: A stored manifest cannot be read.
        """
        unfit: UnfitError | None = None
        good = [n for n, reason in self.releases().items() if reason is None]
        first = [n for n in good if device_id is None or self.is_offered_to(n, device_id)]
        for release in sorted(first, reverse=True) + sorted(set(good) - set(first), reverse=True):
            try:
                return self.manifest(release).release
            except UnfitError as error:
                unfit = unfit or error
        if unfit is not None:
            raise unfit
        return None

    def manifest(self, release: int) -> Manifest:
        """Return the manifest of a release.

        It is fetched once into the state folder, and then read offline. Its digest is checked at
        each call; a damaged file is fetched again. First calls for one release must not overlap. A
        withdrawn release has its manifest, too.

        Raises:
            NotFoundError: No such release, nothing was fetched yet, or the host lacks the file.
            VerificationError: The host sends another file, or the state folder has a link that
                leads out of it in place of the manifest.
            UnfitError: This program cannot use the release, or its manifest names a file that is
                not signed with this digest.
            UnavailableError: The source does not answer, is too slow or stopped early.
            CannotWriteError: The file cannot be written.
            NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
            OSError: The stored manifest cannot be read.
        """
        path = manifest_path(release)
        manifest = parse_manifest(self.download(path, self._folder).read_bytes(), release)
        for file in manifest.files():
            target = self._trusted().targets.targets.get(file.path)
            if target is None:
                raise UnfitError(
                    f"{path}: this manifest names {file.path}, which the publication's metadata "
                    "does not sign; the publisher must publish a new release"
                )
            if (target.length, target.hashes.get("sha256")) != (file.length, file.sha256):
                raise UnfitError(
                    f"{path}: this manifest names {file.path} with another digest than the "
                    "publication's metadata signs; the publisher must publish a new release"
                )
        return manifest

    def manifests(self) -> dict[int, Manifest]:
        """Return the manifests of all usable releases by ascending number, for planning routes.

        A release is left out if it was withdrawn or if this program cannot use it (UnfitError). It
        is also left out if an older usable release has the same space. Missing manifests are
        fetched.

        Returns:
            The manifests by number; empty without usable releases.

        Raises:
            VerificationError: The host sends another file, or the state folder has a link that
                leads out of it in place of a manifest.
            NotFoundError: Nothing was fetched yet, or the host lacks a manifest.
            UnavailableError: The source does not answer, is too slow or stopped early.
            CannotWriteError: A manifest cannot be written.
            NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
            OSError: A stored manifest cannot be read.
        """
        manifests: dict[int, Manifest] = {}
        for release, reason in self.releases().items():
            if reason is None:
                with contextlib.suppress(UnfitError):
                    manifest = self.manifest(release)
                    if explain_duplicate_space(manifest, manifests.values()) is None:
                        manifests[release] = manifest
        return manifests

    def signed_paths(self) -> list[str]:
        """Return the published paths of all signed files, sorted.

        Files of withdrawn releases are among them. Metadata files are not.

        Raises:
            NotFoundError: Nothing was fetched yet.
        """
        return sorted(self._trusted().targets.targets)

    def signed_entry(self, path: str) -> TargetFile:
        """Return the signed length and digest of a published file.

        Metadata files themselves have no entry. The entry belongs to the trusted state, so do not
        change it; `refresh` may replace it.

        Raises:
            NotFoundError: No such file, the path is not plain, or nothing was fetched yet.
        """
        target = self._trusted().targets.targets.get(path) if is_plain_path(path) else None
        if target is None:
            raise NotFoundError(
                f"{path}: the publication has no such file; check the number of the release, or "
                "refresh the metadata first (on a device: `edge-client sync`)"
            )
        return target

    def download(self, path: str, folder: Path) -> Path:
        """Download a published file to `folder`/`path`, resuming a partial download.

        Never reads more than the signed length. The file gets its name only after its digest was
        checked, and is then durable. Nothing is fetched if the right file is there; another one is
        replaced. Missing folders are made. Calls for one file must not overlap. There is no time
        limit, only a lowest speed.

        Args:
            path: The published path.
            folder: The folder.

        Returns:
            The path of the file.

        Raises:
            NotFoundError: No such file, nothing was fetched yet, or the host lacks it.
            VerificationError: The host sends another file, or the path leads out of the folder,
                also by a link.
            UnavailableError: The host is gone, too slow or stopped early; the partial download
                stays.
            CannotWriteError: The file cannot be written.
            NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
            OSError: An existing file or partial download cannot be read.
        """
        destination = folder / path
        if not destination.resolve().is_relative_to(folder.resolve()):
            raise VerificationError(
                f"{path}: this published path leads out of {folder}, so the file is refused; tell "
                "the publisher"
            )
        download_signed_file(self._fetcher, self._base_url, self.signed_entry(path), destination)
        return destination

    def _trusted(self) -> TrustedState:
        if self._state is None:
            raise NotFoundError(
                f"{self._folder}: no metadata of the publication was fetched yet; call refresh() "
                "first"
            )
        return self._state

    def _load(self) -> TrustedState | None:
        state = TrustedState.load(self._folder / "trusted.json")
        if state is not None and self._root is not None:
            root = verify_metadata(Root, self._root, None, "given root metadata")
            if root.version <= state.root.version and sha256_bytes(self._root) not in (
                state.anchor, sha256_bytes(state.metadata_bytes["root"]),
            ):  # fmt: skip
                raise VerificationError(
                    f"{self._folder}: the trusted metadata in this folder began with other root "
                    "metadata than the file that you name now; remove the folder to start again "
                    "with the file"
                )
        return state


class TrustedFolder(Trust):
    """The verified view of a publication folder on this machine, for a gateway."""

    def __init__(self, repo: Path, state_dir: Path, root: bytes | None = None) -> None:
        """Open the trusted state of a folder; nothing is written.

        Args:
            repo: The publication folder.
            state_dir: Folder of the trusted state; `refresh` makes it.
            root: The root metadata to trust first; None: the one in the state, otherwise the
                folder's own 1.root.json (trust on first use).

        Raises:
            NotFoundError: Nothing is published there, and there is no state.
            VerificationError: The state is damaged or cannot be read, began with another root, or
                root metadata is not validly signed.
            UnavailableError: The folder cannot be read, or not within 30 s.
            OSError: This user may not search the folder of the state.
        """
        self.repo = repo
        fetcher = FolderFetcher(repo)
        if root is None and not (state_dir / "trusted.json").exists():
            root = fetch_first_root(fetcher, fetcher.base_url)
        super().__init__(state_dir, fetcher, fetcher.base_url, root)

    def manifest(self, release: int) -> Manifest:
        """Return the manifest of a release, whose file must be unchanged in the publication folder.

        A copy of the file is kept in the state folder.

        Raises:
            NotFoundError: No such release, or nothing was fetched yet.
            VerificationError: The file is missing, is a link, or differs from the signed one.
            UnfitError: This program cannot use the release, or its manifest names a file that is
                not signed with this digest.
            UnavailableError: The folder cannot be read.
            CannotWriteError: The state folder cannot be written.
            OSError: The copy in the state folder cannot be read.
        """
        self._check_in_place(manifest_path(release))
        return super().manifest(release)

    def verify_files(self, release: int) -> Path:
        """Check that every file of a release in the folder has its signed digest.

        Also refuses links, and unsigned files in the release's model folders. Reads every file
        whole, at each call. A side encoder that an older release published is checked, too.

        Returns:
            The publication folder.

        Raises:
            NotFoundError: No such release, nothing was fetched yet, or no metadata signs a
                configuration of its models.
            VerificationError: A file is missing or differs, or an unsigned file is there.
            UnfitError: This program cannot use the release, or its manifest names a file that is
                not signed with this digest.
            UnavailableError: The folder cannot be read.
            CannotWriteError: The state folder cannot be written.
            OSError: A manifest's copy in the state folder cannot be read.
        """
        manifest = self.manifest(release)
        paths = {file.path for file in manifest.files()} | manifest.triton_configs().keys()
        paths.add(manifest_path(release))
        for path in sorted(paths):
            self._check_in_place(path)
        for model in sorted({path.split("/")[0] for path in paths if "/" in path}):
            signed = self._trusted().targets.targets
            for member in (self.repo / model).rglob("*"):
                name = member.relative_to(self.repo).as_posix()
                if member.is_symlink() or (not member.is_dir() and name not in signed):
                    raise VerificationError(
                        f"{name}: this file lies in a release's folder of the publication, but no "
                        "metadata signs it; remove the file"
                    )
        return self.repo

    def _check_in_place(self, path: str) -> None:
        target, file = self.signed_entry(path), self.repo / path
        try:
            inside = file.resolve(strict=True) == self.repo.resolve() / path
            good = inside and file.is_file() and file.stat().st_size == target.length
            good = good and sha256_file(file) == target.hashes.get("sha256")
        except OSError as error:
            raise VerificationError(
                f"{path}: this published file cannot be read ({error.strerror}); restore it from a "
                "copy of the publication"
            ) from error
        if not good:
            raise VerificationError(
                f"{path}: this published file differs from the one that was signed; restore it "
                "from a copy of the publication, or publish the model as a new release"
            )


def converter_numbers(trust: Trust) -> list[int]:
    """Return the numbers of the published converters, ascending; empty if there are none.

    Withdrawn ones are among them.

    Raises:
        NotFoundError: Nothing was fetched yet.
    """
    numbers = (parse_converter_number(path) for path in trust.signed_paths())
    return sorted(number for number in numbers if number is not None)


def describe_published_converters(trust: Trust) -> str:
    """List the published converters in words, for an error, such as "1, 2". Withdrawn ones are
    among them.

    Without any, the words point to the releases; without those, they are "none".

    Raises:
        NotFoundError: Nothing was fetched yet.
    """
    if numbers := converter_numbers(trust):
        return ", ".join(map(str, numbers))
    releases = ", ".join(map(str, trust.releases()))
    return (
        "none"
        if not releases
        else (
            f"releases ({releases}), whose upgrades migrate galleries: use `gateway upgrade` or "
            "`edge-client sync`"
        )
    )


def refuse_withdrawn_converter(trust: Trust, converter_number: int) -> None:
    """Refuse a converter that its publisher has withdrawn.

    Returns without an effect for any other.

    Args:
        trust: The publication.
        converter_number: Number of the converter.

    Raises:
        PreconditionError: It is withdrawn; the message has the reason.
        NotFoundError: No such converter, or nothing was fetched yet.
    """
    reason = withdrawal_reason(trust.signed_entry(converter_manifest_path(converter_number)))
    if reason is not None:
        raise PreconditionError(
            f"converter {converter_number} was withdrawn by its publisher ({reason}); use another "
            "converter of the publication, or fit a map to your own vectors by `nobackfill fit`"
        )


def download_converter_manifest(trust: Trust, converter_number: int, folder: Path) -> Converter:
    """Download and parse the manifest of a converter.

    The file is fetched once and then read offline; its digest is checked at each call. Whether the
    converter was withdrawn is not checked: `refuse_withdrawn_converter` does that. Calls for one
    folder must not overlap.

    Args:
        trust: The publication.
        converter_number: Number of the converter.
        folder: Where to put the file; it is made if missing.

    Raises:
        NotFoundError: No such converter, nothing was fetched yet, or the host lacks the file.
        VerificationError: The host sends another file, or the path leads out of the folder by a
            link.
        UnfitError: This program cannot use it.
        UnavailableError: The source does not answer, is too slow or stopped early; the partial
            download stays.
        CannotWriteError: The file cannot be written.
        NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
        OSError: An existing file or partial download cannot be read.
    """
    path = converter_manifest_path(converter_number)
    try:
        trust.signed_entry(path)
    except NotFoundError as error:
        raise NotFoundError(
            f"converter {converter_number} is not in this publication, which has "
            f"{describe_published_converters(trust)}; check the number"
        ) from error
    return parse_converter(trust.download(path, folder).read_bytes(), converter_number)


def download_converter_file(trust: Trust, manifest: Converter, folder: Path) -> Path:
    """Download the ONNX file of a converter, resuming a partial download.

    Whether the converter was withdrawn is not checked. Calls for one folder must not overlap.

    Args:
        trust: The publication.
        manifest: Manifest of the converter.
        folder: Where to put the file; it is made if missing. Nothing is fetched if the right file
            is there.

    Returns:
        The path of the file.

    Raises:
        UnfitError: The manifest and the signed entry differ.
        NotFoundError: The file is not published, nothing was fetched yet, or the host lacks it.
        VerificationError: The host sends another file, or the path leads out of the folder by a
            link.
        UnavailableError: The host is gone, too slow or stopped early; the partial download stays.
        CannotWriteError: The file cannot be written.
        NobackfillError: An error that the fetcher itself raises, such as NotPermittedError.
        OSError: An existing file or partial download cannot be read.
    """
    file, target = manifest.file, trust.signed_entry(manifest.file.path)
    if (target.length, target.hashes.get("sha256")) != (file.length, file.sha256):
        path = converter_manifest_path(manifest.converter)
        raise UnfitError(
            f"{path}: this manifest names {file.path} with another digest than the publication's "
            "metadata signs; the publisher must publish a new converter"
        )
    return trust.download(file.path, folder)


@dataclass(frozen=True)
class Publication:
    """The verified manifests of all releases, and the numbers of the withdrawn ones."""

    manifests: Mapping[int, Manifest]
    withdrawn_releases: frozenset[int]


def read_publication(model_repo: Path, state_folder: Path | None = None) -> Publication:
    """Read the manifests of a publication folder, after checking every file.

    Withdrawn releases are included. Models are not loaded. Reads every file of every release whole.

    Args:
        model_repo: The publication folder. Without `timestamp.json` in it, the result is empty.
        state_folder: Folder of the trusted state, made if missing; None: a temporary one, so that
            the folder's own root metadata is trusted.

    Raises:
        VerificationError: A file or signature is wrong, an unsigned file lies in a model's folder,
            or metadata has expired. Or the stored state is damaged.
        UnfitError: This program cannot use a release, also a withdrawn one.
        NotFoundError: A file of the metadata is missing, or no metadata signs a configuration of a
            release's models.
        UnavailableError: The folder cannot be read.
        BusyError: Another process uses the state folder for more than a minute.
        CannotWriteError: The state cannot be written.
        OSError: No temporary folder can be made, or a file of the state folder cannot be read.
    """
    if not (model_repo / "timestamp.json").is_file():
        return Publication({}, frozenset())
    with nullcontext(state_folder) if state_folder else tempfile.TemporaryDirectory() as place:
        folder = TrustedFolder(model_repo, Path(place))
        folder.refresh()
        reasons = folder.releases()
        for release in reasons:
            folder.verify_files(release)
        manifests = {release: folder.manifest(release) for release in reasons}
    return Publication(manifests, frozenset(n for n, why in reasons.items() if why is not None))


def find_published_manifest(release: int, published: Mapping[int, Manifest]) -> Manifest:
    """Return the manifest of a published release.

    Args:
        release: Number of the release.
        published: The releases that may be used, by number.

    Raises:
        ConfigurationError: No such release; the message lists those that exist.
    """
    if release not in published:
        raise ConfigurationError(
            f"release {release} is not published; the publication folder has "
            f"{join_few(sorted(published, reverse=True)) or 'no release'}"
        )
    return published[release]


def withdrawal_reason(target: TargetFile) -> str | None:
    """Return the reason of a withdrawal from the signed entry of a manifest, or None if it is not
    withdrawn.

    An empty reason counts as a withdrawal; another value than text is returned as text.
    """
    custom = target.custom
    reason = custom.get("withdrawn") if isinstance(custom, dict) else None
    return None if reason is None else str(reason)


def read_offered_share(target: TargetFile) -> float:
    """Return the share of devices from the signed entry of a manifest, 0 to 1; 1 if it has none. An
    invalid share counts as 0."""
    custom = target.custom
    parts = custom.get(_SHARE, MILLION) if isinstance(custom, dict) else MILLION
    # An invalid share counts as 0: the publisher meant to hold the release back.
    good = isinstance(parts, int) and not isinstance(parts, bool) and 0 < parts <= MILLION
    return parts / MILLION if good else 0.0


def with_offered_share(target: TargetFile, path: str, share: float) -> TargetFile:
    """Return a copy of a manifest's entry with a share of the devices, which is signed in
    millionths.

    A withdrawal in the entry is dropped. `target` is not changed.

    Args:
        target: The entry.
        path: The published path of the manifest.
        share: Above 0, at most 1; this is not checked. At least one millionth is written.

    Raises:
        ValueError: The share is NaN; infinity raises OverflowError.
    """
    custom = {_SHARE: max(1, round(share * MILLION))}
    return TargetFile.from_dict({**target.to_dict(), "custom": custom}, path)


def verify_metadata(kind: type[_Signed], data: bytes, root: Root | None, name: str) -> _Signed:
    """Parse metadata and check its signature.

    Expiry and version are not checked.

    Args:
        kind: The expected class.
        data: The metadata.
        root: The root metadata whose keys must have signed it; None: root metadata that signs
            itself, and any other kind is refused.
        name: The name of the metadata, for the message.

    Raises:
        VerificationError: It is no metadata, has another type, or has fewer valid signatures than
            the root metadata demands.
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
        raise VerificationError(
            f"{name}: this metadata is not validly signed ({error}); restore the file from a "
            "backup of the publication, or check that it belongs to this publication"
        ) from error
    return signed
