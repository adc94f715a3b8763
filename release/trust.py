"""What may be believed of a publication: the view that gateway and device share.

TUF metadata is fetched and verified by python-tuf (ngclient) in a temporary folder. Only a whole,
verified set replaces the trusted one, in one durable write (trusted.json), so that an attack or a
kill leaves the trusted state byte for byte as it was.
"""

from collections.abc import Mapping
from pathlib import Path

from release.fetchers import Fetcher
from release.floor import Floor
from release.manifest import Manifest


def first_root(fetcher: Fetcher, base_url: str) -> bytes:
    """The publication's first root metadata, to be shown to a person before it is trusted.

    Raises NotFoundError if nothing is published there, UnavailableError.
    """
    raise NotImplementedError


def fingerprint(root: bytes) -> str:
    """Root metadata as a person compares it: the SHA-256 in groups of four hex digits."""
    raise NotImplementedError


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

        `root` is the trusted first root metadata; None: what the state holds already. `floor` is
        the newest that was ever seen, kept by the caller elsewhere: nothing older is accepted, even
        if the state folder was lost. Raises NotFoundError when there is neither root nor state,
        VerificationError for a damaged state or root.
        """
        raise NotImplementedError

    def refresh(self) -> bool:
        """Fetch and verify what is published now; True if it is news.

        Raises VerificationError (signature, expiry, rollback, mix-and-match …; nothing changes),
        UnavailableError, NotFoundError if nothing is published there, CannotWriteError.
        """
        raise NotImplementedError

    def floor(self) -> Floor:
        """The versions seen, for the caller to keep with its installed release."""
        raise NotImplementedError

    def releases(self) -> dict[int, str | None]:
        """Release numbers, ascending, each with the reason why it was withdrawn, or None."""
        raise NotImplementedError

    def newest(self) -> int | None:
        """The newest release that is not withdrawn."""
        raise NotImplementedError

    def manifest(self, release: int) -> Manifest:
        """A release's manifest, fetched once. Raises NotFoundError, VerificationError,
        UnavailableError."""
        raise NotImplementedError

    def manifests(self) -> Mapping[int, Manifest]:
        """The manifests of every release that is not withdrawn, for planning routes."""
        raise NotImplementedError

    def download(self, path: str, folder: Path) -> Path:
        """Bring a published file to `folder`/`path`; a part that is there is not read again.

        Never more than the signed length is read; the file appears under its name only once its
        digest is right, and is then durable. Raises NotFoundError, VerificationError,
        UnavailableError (host gone or slower than 1 KiB/s; the part is kept), CannotWriteError.
        """
        raise NotImplementedError


class TrustedFolder(Trust):
    """The verified view of a publication folder of this machine, for the gateway."""

    def __init__(self, repo: Path, state_dir: Path, root: bytes | None = None) -> None:
        """`root` None: what the state holds, else the folder's own 1.root.json, trusted on first
        use. Raises like Trust."""
        raise NotImplementedError

    def verified(self, release: int) -> Path:
        """The publication folder, once every file of the release in it has the signed digest.

        Also refuses links and files that nobody signed in the release's model folders. Raises
        NotFoundError, VerificationError.
        """
        raise NotImplementedError
