"""One refresh by python-tuf's client, in a temporary folder, on top of what is trusted already."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
    SlowRetrievalError,
)
from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface

from nobackfill.errors import (
    CannotWriteError,
    NobackfillError,
    NotFoundError,
    UnavailableError,
    VerificationError,
)
from nobackfill.pace import paced
from nobackfill.release.trust.fetchers import Fetcher
from nobackfill.release.trust.state import ROLE_FILES, expired

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
        raise translated(error, base_url) from error
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


def translated(error: DownloadError | RepositoryError, source: str) -> NobackfillError:
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
        return paced(lambda: fetched(url, 0), self._end, slow=SlowRetrievalError)
