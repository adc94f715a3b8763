"""What may be believed of a publication: the view that gateway and device share.

TUF metadata is fetched and verified by python-tuf (ngclient) in a temporary folder. Only a whole,
verified set replaces the trusted one, in one durable write (trusted.json), so that an attack or a
kill leaves the trusted state byte for byte as it was.
"""

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tuf.api.exceptions import DownloadError
from tuf.api.metadata import Root, TargetFile

from nobackfill import durable
from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import NotFoundError, UnfitError, VerificationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.parsing import parse_manifest
from nobackfill.release.paths import is_plain, manifest_path, release_of_manifest
from nobackfill.release.publishing.metadata import share_of, verified, withdrawn
from nobackfill.release.routes import twin_of
from nobackfill.release.triton_config import configs
from nobackfill.release.trust.download import download
from nobackfill.release.trust.fetchers import Fetcher, FolderFetcher
from nobackfill.release.trust.minimum_versions import Floor
from nobackfill.release.trust.refresh import Paced, fetch_metadata, translated
from nobackfill.release.trust.state import State
from nobackfill.shares import digest, in_share

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
        raise translated(error, url) from error
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
            after = State(anchor, seen, texts)
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
        return in_share(digest(release, device), self.share(release))

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

    def _trusted(self) -> State:
        if self._state is None:
            raise NotFoundError(f"{self._folder}: nothing was fetched yet; refresh first")
        return self._state

    def _load(self) -> State | None:
        state = State.load(self._folder / "trusted.json")
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
        paths = {file.path for file in manifest.files()} | set(configs(manifest))
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
