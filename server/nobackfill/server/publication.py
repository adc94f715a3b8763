"""Files of the publication folder as devices may fetch them: signed ones, and nothing else."""

import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import InvalidInputError, NotFoundError, OutOfRangeError
from nobackfill.release.paths import is_plain

# A device gives up on a gateway that sends nothing for 10 s, so a piece must come through within
# them: a line of 7 kB a second will do.
CHUNK = 64 * 1024

# TUF metadata at the root, manifests, probes, and files of models.
_METADATA = re.compile(r"(timestamp|[0-9]+\.(root|targets|snapshot))\.json")


@dataclass(frozen=True)
class Opened:
    """A file to send: its size in bytes, and its bytes from the offset on."""

    size: int
    chunks: Iterator[bytes]


def fetch(repo: Path, path: str, offset: int, signed: Callable[[str], bool]) -> Opened:
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

    return Opened(status.st_size, chunks())
