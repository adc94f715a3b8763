"""The published releases as the gateway sees them: verified, and watched for news."""

import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
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
    few,
)
from nobackfill.release.manifest import Manifest, is_plain
from nobackfill.release.routes import twin_of
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics

# Files of the publication folder as devices may fetch them: signed ones, and nothing else.

# A device gives up on a gateway that sends nothing for 10 s, so a piece must come through within
# them: a line of 7 kB a second will do.
CHUNK = 64 * 1024

# TUF metadata at the root, manifests, probes, and files of models.
_METADATA = re.compile(r"(timestamp|[0-9]+\.(root|targets|snapshot))\.json")


@dataclass(frozen=True)
class OpenPublication:
    """A file to send: its size in bytes, and its bytes from the offset on."""

    size: int
    chunks: Iterator[bytes]


def fetch(repo: Path, path: str, offset: int, signed: Callable[[str], bool]) -> OpenPublication:
    """Open one file from an offset on. `signed`: whether signed metadata names it.

    Raises InvalidInputError for a path that is none, NotFoundError, OutOfRangeError.
    """
    if not is_plain(path):
        raise InvalidInputError("path: expected a file of the publication folder, as signed")
    if not _METADATA.fullmatch(path) and not signed(path):
        raise NotFoundError(f"{path} is not published here")
    try:
        handle = (repo / path).open("rb")
    except OSError:
        raise NotFoundError(f"{path} is not published here") from None
    status = (repo / path).lstat()
    if not stat.S_ISREG(status.st_mode):
        handle.close()
        raise NotFoundError(f"{path} is not published here")
    if offset > status.st_size:
        handle.close()
        raise OutOfRangeError(f"{path} has {status.st_size} bytes, asked for offset {offset}")

    def chunks() -> Iterator[bytes]:
        with handle:
            handle.seek(offset)
            while chunk := handle.read(CHUNK):
                yield chunk

    return OpenPublication(status.st_size, chunks())


log = structlog.get_logger("server.catalog")

_EVERY_S = 1.0


class Catalog:
    """One verified view of the publication folder, which may be empty or missing at first.

    Immutable snapshots: `releases` maps a number to why it was withdrawn, or None; `manifests`
    holds every release, `spaces` the same by space id. `changed` is notified whenever anything
    here, or the gateway's state, changes.
    """

    def __init__(self, repo: Path, state_dir: Path, root: bytes | None, metrics: Metrics) -> None:
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
        # Why the manifest of a release is not used.
        self._refused: Mapping[int, str] = {}
        self.releases: Mapping[int, str | None] = {}
        self.manifests: Mapping[int, Manifest] = {}
        self.spaces: Mapping[str, Manifest] = {}
        self.changed = Changed()

    def refresh(self) -> None:
        """Read and verify what is published now.

        Raises VerificationError, NotFoundError (nothing published), CannotWriteError; what was
        verified before stays.
        """
        with self._lock:
            if self._trust is None:
                self._trust = TrustedFolder(self._repo, self._state_dir, self._root)
            try:
                self._trust.refresh()
            finally:
                self._read(self._trust)
        self.changed.notify()

    def _read(self, trust: TrustedFolder) -> None:
        try:
            releases = trust.releases()
        except NotFoundError:
            return
        manifests: dict[int, Manifest] = {}
        refused: dict[int, str] = {}
        for number in releases:
            try:
                manifest = trust.manifest(number)
                if (twin := twin_of(manifest, manifests.values())) is not None:
                    raise UnfitError(twin)
                manifests[number] = manifest
            except (VerificationError, UnavailableError) as error:
                # The others are served all the same.
                refused[number] = str(error)
                if self._refused.get(number) != str(error):
                    log.error("manifest refused", release=number, error=str(error))
        self.manifests = manifests
        self.spaces = {manifest.space: manifest for manifest in self.manifests.values()}
        self._refused = refused
        self.releases = releases

    def expiries(self) -> Mapping[str, datetime]:
        """When the metadata of each role expires; nothing before there is any."""
        try:
            return self._trust.expiries() if self._trust is not None else {}
        except NotFoundError:
            return {}

    def newest(self) -> int | None:
        """The newest release that is not withdrawn and whose manifest can be used."""
        return max((n for n in self.manifests if self.releases.get(n) is None), default=None)

    def usable(self, source: int) -> Mapping[int, Manifest]:
        """What routes from `source` may lead through: nothing that was withdrawn."""
        return {
            number: manifest
            for number, manifest in self.manifests.items()
            if number == source or self.releases.get(number) is None
        }

    def manifest(self, release: int) -> Manifest:
        """Raises NotFoundError naming what is published, VerificationError where the manifest is
        refused."""
        try:
            return self.manifests[release]
        except KeyError:
            known = few(sorted(self.manifests, reverse=True)) or "none"
            if release in self._refused:
                raise VerificationError(self._refused[release]) from None
            raise NotFoundError(f"release {release} is not published; published: {known}") from None

    def find(self, release: int) -> Manifest:
        """Like `manifest`, but looks again for what was published a moment ago."""
        if release not in self.manifests:
            self.refresh()
        return self.manifest(release)

    def verified(self, release: int) -> Path:
        """The folder, once each file of the release has its signed digest. Raises
        VerificationError, NotFoundError."""
        with self._lock:
            if self._trust is None:
                raise NotFoundError("nothing is published yet; run training/export.py")
            return self._trust.verified(release)

    def signed(self, path: str) -> bool:
        """Whether signed metadata names this file; looks again at what was published just now."""
        if self._names(path):
            return True
        self.refresh()
        return self._names(path)

    def fetch(self, path: str, offset: int) -> OpenPublication:
        """Open a published file from an offset on. Raises as `catalog.fetch`."""
        return fetch(self._repo, path, offset, self.signed)

    def _names(self, path: str) -> bool:
        if self._trust is None:
            return False
        try:
            self._trust.target(path)
        except NotFoundError:
            return False
        return True

    def watch(self) -> None:
        """Follow the folder from a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._follow, name="catalog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            stamp = self._look()
            if stamp is None or stamp == self._stamp:
                continue
            with error_boundary(self._metrics, "catalog"):
                try:
                    self.refresh()
                except NobackfillError as error:
                    # Looked at again: a full disk, say, has room some time later.
                    if str(error) != self._trouble:
                        log.error("publication folder refused", error=str(error))
                    self._trouble = str(error)
                    continue
            self._stamp, self._trouble = stamp, ""

    def _look(self) -> tuple[int, int] | None:
        try:
            status = (self._repo / "timestamp.json").stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino


def open_catalog(repo: Path, state_dir: Path, root: Path | None, metrics: Metrics) -> Catalog:
    """Read what is published, from the root metadata in file `root`; None: trusted on first use.

    Raises ConfigurationError for a root that cannot be read, VerificationError for a publication
    that is refused where nothing was verified before, CannotWriteError.
    """
    try:
        known = None if root is None else root.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{root}: cannot be read ({error.strerror})") from error
    catalog = Catalog(repo, state_dir, known, metrics)
    try:
        catalog.refresh()
    except NotFoundError:
        log.warning("nothing is published yet; waiting for the first release")
    except VerificationError as error:
        # What was verified before an expiry or an attack goes on serving.
        if not catalog.manifests:
            raise
        log.error("publication folder refused, serving what was verified", error=str(error))
    return catalog


class Changed:
    """Counts changes, so that watchers can wait for the next."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """Changes so far."""
        return self._count

    def notify(self) -> None:
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout_s: float, gone: Callable[[], bool] = lambda: False) -> int:
        """Wait until the count is no longer `seen`, or the time is over; the count."""
        with self._condition:
            self._condition.wait_for(lambda: self._count != seen or gone(), timeout_s)
            return self._count
