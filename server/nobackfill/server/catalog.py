"""Know the published releases: verify them, and watch the publication folder for changes."""

import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
    UnfitError,
    VerificationError,
    join_few,
)
from nobackfill.release.manifest import Manifest, is_plain_path
from nobackfill.release.routes import explain_duplicate_space
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics

# A device gives up after 10 s without bytes, so a piece must arrive within 10 s: at 7 kB a second
# it does.
CHUNK = 64 * 1024

# Names of TUF metadata files.
_METADATA = re.compile(r"(timestamp|[0-9]+\.(root|targets|snapshot))\.json")


@dataclass(frozen=True)
class OpenPublishedFile:
    """Hold an open file to send.

    Attributes:
        size: size of the whole file in bytes.
        chunks: its bytes from the offset, in pieces of at most CHUNK bytes; reading them to the end
            closes the file.
    """

    size: int
    chunks: Iterator[bytes]


log = structlog.get_logger("server.catalog")

_CHECK_SECONDS = 1.0


class Catalog:
    """Keep one verified view of the publication folder, which may be empty or missing at first.

    Each attribute is replaced, never changed. `withdrawal_by_release` maps a number to the reason
    of its withdrawal, or None. `manifests` has every usable release by number, withdrawn ones
    included; `manifest_by_space` has the same by space id. `change_counter` is notified when
    anything here, or the gateway's state, changes.
    """

    def __init__(self, repo: Path, state_dir: Path, root: bytes | None, metrics: Metrics) -> None:
        """Start with an empty view; `refresh` reads the folder.

        No thread is started, and nothing is read or written.

        Args:
            repo: publication folder.
            state_dir: folder for verified metadata.
            root: first root metadata to trust; None trusts the folder's own at first use.
            metrics: counts unexpected errors.
        """
        self._metrics = metrics
        self._repo = repo
        self._state_dir = state_dir
        self._root = root
        self._lock = threading.Lock()
        self._trust: TrustedFolder | None = None
        self._stamp: tuple[int, int] | None = None
        self._trouble = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # By release, why its manifest is not used.
        self._refusals: Mapping[int, str] = {}
        self.withdrawal_by_release: Mapping[int, str | None] = {}
        self.manifests: Mapping[int, Manifest] = {}
        self.manifest_by_space: Mapping[str, Manifest] = {}
        self.change_counter = ChangeCounter()

    def refresh(self) -> None:
        """Read and verify the publication again, and notify the watchers, also if nothing has
        changed.

        On an error the last verified view stays, and watchers are not notified. Manifests are read
        again even then, so that one that is damaged now is left out. A release whose manifest
        cannot be used is logged and left out; the others are served. Another call waits meanwhile.

        Raises:
            VerificationError: the publication is not valid, has expired, or is older than the last
                view; or the stored metadata is damaged or began with another root.
            NotFoundError: nothing is published.
            UnavailableError: the folder cannot be read.
            CannotWriteError: the verified metadata cannot be stored.
            BusyError: another process reads the publication into the same folder.
            OSError: the folder of the verified metadata cannot be read.
        """
        with self._lock:
            if self._trust is None:
                self._trust = TrustedFolder(self._repo, self._state_dir, self._root)
            try:
                self._trust.refresh()
            finally:
                self._read_releases(self._trust)
        self.change_counter.notify()

    def _read_releases(self, trust: TrustedFolder) -> None:
        try:
            releases = trust.releases()
        except NotFoundError:
            return
        manifests: dict[int, Manifest] = {}
        refusals: dict[int, str] = {}
        for number in releases:
            try:
                manifest = trust.manifest(number)
                if (twin := explain_duplicate_space(manifest, manifests.values())) is not None:
                    raise UnfitError(twin)
                manifests[number] = manifest
            except (VerificationError, UnavailableError) as error:
                # The other releases are served.
                refusals[number] = str(error)
                if self._refusals.get(number) != str(error):
                    log.error(
                        "a published release is refused, and the others are served; its publisher "
                        "must publish another one",
                        release=number,
                        error=str(error),
                    )
        self.manifests = manifests
        self.manifest_by_space = {manifest.space: manifest for manifest in self.manifests.values()}
        self._refusals = refusals
        self.withdrawal_by_release = releases

    def metadata_expiries(self) -> Mapping[str, datetime]:
        """Return when the metadata of each role expires, in UTC.

        The roles are root, timestamp, snapshot and targets of the last verified view. Before the
        first publication the mapping is empty.
        """
        try:
            return self._trust.expiries() if self._trust is not None else {}
        except NotFoundError:
            return {}

    def newest_release(self) -> int | None:
        """Return the number of the newest usable release that is not withdrawn, by the last
        verified view; None without one.
        """
        return max(
            (n for n in self.manifests if self.withdrawal_by_release.get(n) is None), default=None
        )

    def manifests_for_routes(self, from_release: int) -> Mapping[int, Manifest]:
        """Return the releases that routes from a release may use: itself, and those not withdrawn.

        An unknown `from_release` adds nothing. The mapping is new and shows the last verified view,
        without releases whose manifest cannot be used.
        """
        return {
            number: manifest
            for number, manifest in self.manifests.items()
            if number == from_release or self.withdrawal_by_release.get(number) is None
        }

    def manifest(self, release: int) -> Manifest:
        """Return the manifest of a release, withdrawn or not, from the last verified view.

        Raises:
            NotFoundError: it is not published; the error lists published releases.
            VerificationError: it is published, but its manifest cannot be used.
        """
        try:
            return self.manifests[release]
        except KeyError:
            published = join_few(sorted(self.manifests, reverse=True)) or "none"
            if release in self._refusals:
                raise VerificationError(self._refusals[release]) from None
            raise NotFoundError(
                f"release {release} is not published; published releases: {published}. `gateway "
                "releases` lists them"
            ) from None

    def find_manifest(self, release: int) -> Manifest:
        """Return the manifest of a release, also of one that was published a moment ago.

        An unknown release, and one whose manifest cannot be used, makes the folder be read again at
        each call, which wakes the watchers.

        Raises:
            NotFoundError: it is not published, or nothing is.
            VerificationError: the publication or its manifest is not valid, has expired, or is
                older than the last view.
            UnavailableError: the folder cannot be read.
            CannotWriteError: the verified metadata cannot be stored.
            BusyError: another process reads the publication into the same folder.
            OSError: the folder of the verified metadata cannot be read.
        """
        if release not in self.manifests:
            self.refresh()
        return self.manifest(release)

    def verify_files(self, release: int) -> Path:
        """Check each file of a release against its signed digest; returns the publication folder.

        It reads all files of the release, which takes seconds for large models; a refresh waits
        meanwhile. The last verified view counts: the metadata is not read again.

        Raises:
            NotFoundError: the release is not published.
            VerificationError: a file is missing or does not match, an unsigned file or a link is in
                the release's folders, or this program cannot use the release (UnfitError).
            UnavailableError: the folder cannot be read.
            CannotWriteError: the verified metadata cannot be stored.
            OSError: the folder of the verified metadata cannot be read.
        """
        with self._lock:
            if self._trust is None:
                raise NotFoundError(
                    f"{self._repo}: nothing is published in this folder yet; publish a release "
                    "with training/export.py, or make a sample with `gateway sample`"
                )
            return self._trust.verify_files(release)

    def is_signed(self, path: str) -> bool:
        """Tell whether signed metadata names a file, also one that was published a moment ago.

        An unknown file makes the folder be read again at each call, which wakes the watchers.
        Whether the file exists is not checked.

        Raises:
            NotFoundError: nothing is published.
            VerificationError: the publication is not valid, has expired, or is older than the last
                view.
            UnavailableError: the folder cannot be read.
            CannotWriteError: the verified metadata cannot be stored.
            BusyError: another process reads the publication into the same folder.
            OSError: the folder of the verified metadata cannot be read.
        """
        if self._is_signed(path):
            return True
        self.refresh()
        return self._is_signed(path)

    def open_file(self, path: str, offset: int) -> OpenPublishedFile:
        """Open a published file, also one that was published a moment ago.

        Reading a chunk may raise OSError. If chunks were read, but not to the end, closing their
        iterator closes the file. If no chunk was read, the file closes once the iterator is
        dropped.

        Args:
            path: path in the publication folder, with forward slashes.
            offset: first byte to send, 0 or more; the file's size gives no bytes.

        Raises:
            InvalidInputError: the path is absolute, or leads out of the folder.
            NotFoundError: the file is not published, is missing, cannot be read, or is a link.
            OutOfRangeError: the offset is above the file's size.
            VerificationError, UnavailableError, CannotWriteError, BusyError, OSError: the file was
                unknown, and the publication cannot be read again; see `is_signed`.
        """
        if not is_plain_path(path):
            raise InvalidInputError(
                "path: expected a relative path of a published file, such as release-1.json, got "
                f"{path[:80]!r}; the manifest of a release names its files"
            )
        missing = NotFoundError(
            f"path: this gateway's publication has no file {path}; the manifest of a release names "
            "its files"
        )
        if not _METADATA.fullmatch(path) and not self.is_signed(path):
            raise missing
        try:
            handle = (self._repo / path).open("rb")
        except OSError:
            raise missing from None
        status = (self._repo / path).lstat()
        if not stat.S_ISREG(status.st_mode):
            handle.close()
            raise missing
        if offset > status.st_size:
            handle.close()
            raise OutOfRangeError(
                f"{path}: expected an offset of at most {status.st_size}, the size of the file, "
                f"got {offset}; request the file again from its start"
            )

        def chunks() -> Iterator[bytes]:
            with handle:
                handle.seek(offset)
                while chunk := handle.read(CHUNK):
                    yield chunk

        return OpenPublishedFile(status.st_size, chunks())

    def _is_signed(self, path: str) -> bool:
        with suppress(NotFoundError):
            if self._trust is not None:
                self._trust.signed_entry(path)
                return True
        return False

    def watch(self) -> None:
        """Look for changes of the folder every second in a thread, until `close`; call it once.

        A publication that cannot be used is logged, and tried again at each look.

        The first look always reads the folder, if it has a timestamp.json. Later, only a new
        timestamp.json counts as a change. After an unexpected error, which is logged and counted,
        the next change is waited for.

        Raises:
            RuntimeError: the system has no thread left.
        """
        self._thread = threading.Thread(target=self._follow, name="catalog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread of `watch`, if there is one; returns once it has ended.

        It waits for a refresh without a limit; a second call does nothing. The view stays readable.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._stopping.wait(_CHECK_SECONDS):
            stamp = self._timestamp_stamp()
            if stamp is None or stamp == self._stamp:
                continue
            with error_boundary(self._metrics, "catalog"):
                try:
                    self.refresh()
                except NobackfillError as error:
                    # Tried again: a full disk, for example, may have room later.
                    if str(error) != self._trouble:
                        log.error(
                            "cannot read changes of the publication folder; the releases that "
                            "were read before are served",
                            error=str(error),
                        )
                    self._trouble = str(error)
                    continue
            self._stamp, self._trouble = stamp, ""

    def _timestamp_stamp(self) -> tuple[int, int] | None:
        try:
            status = (self._repo / "timestamp.json").stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino


def open_catalog(repo: Path, state_dir: Path, root: Path | None, metrics: Metrics) -> Catalog:
    """Open the catalog of a publication, and read it once; `watch` follows later changes.

    If nothing is published yet, or the publication is not valid but an earlier one was, that is
    logged, and the catalog is returned. Every other error is raised, also if an earlier publication
    was verified.

    Args:
        repo: publication folder; it may be missing.
        state_dir: folder for verified metadata; it is created.
        root: file with the first root metadata to trust; None trusts the folder's own at first use.
        metrics: counts unexpected errors.

    Raises:
        ConfigurationError: `root` cannot be read.
        VerificationError: the publication is not valid, and none was verified before; or the stored
            metadata is damaged or began with another root.
        UnavailableError: the folder cannot be read.
        CannotWriteError: the verified metadata cannot be stored.
        BusyError: another process reads the publication into the same folder.
        OSError: the folder of the verified metadata cannot be read.
    """
    try:
        root_bytes = None if root is None else root.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"--root: the root metadata {root} cannot be read ({error.strerror}); check its name "
            "and permissions"
        ) from error
    catalog = Catalog(repo, state_dir, root_bytes, metrics)
    try:
        catalog.refresh()
    except NotFoundError:
        log.warning("nothing is published yet; waiting for the first release", folder=str(repo))
    except VerificationError as error:
        # The last verified view stays in use after an expiry or an attack.
        if not catalog.manifests:
            raise
        log.error(
            "cannot use the publication folder; the last verified releases are served",
            error=str(error),
        )
    return catalog


class ChangeCounter:
    """Count changes, so that watchers can wait for the next one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def change_count(self) -> int:
        """The number of changes so far; read without a lock."""
        return self._count

    def notify(self) -> None:
        """Count a change, and wake all watchers; never waits for them. Any thread may call it."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_for_change(self, known_count: int, timeout_s: float) -> int:
        """Wait until there is a change, or the time is over.

        Args:
            known_count: the count that the caller knows; another present count returns at once.
            timeout_s: longest wait in seconds; 0 or less does not wait.

        Returns:
            The present count; equal to `known_count` if the time is over.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._count != known_count, timeout_s)
            return self._count
