"""Downloads of published files: resumed, never longer than signed, durable when complete."""

from pathlib import Path

from tuf.api.exceptions import DownloadError, SlowRetrievalError
from tuf.api.metadata import TargetFile

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.errors import UnavailableError, VerificationError
from nobackfill.pace import paced
from nobackfill.release.trust.fetchers import Fetcher
from nobackfill.release.trust.refresh import translated

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
        for piece in paced(lambda: fetcher.fetch_from(url, offset), slow=SlowRetrievalError):
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
        raise translated(error, target.path) from error
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
