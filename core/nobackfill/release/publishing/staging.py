"""Where releases are put together: beside the publication folder, as Triton trips over any other
folder in it, and on its file system, so that what is complete can be renamed into it."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import BusyError

_DRAFT = "draft-"
_LOCK_SECONDS = 60.0


def staging(repo: Path) -> Path:
    """The folder."""
    return repo.absolute().parent / f"{repo.absolute().name}.staging"


def lock_path(repo: Path) -> Path:
    """The lock of whoever changes the publication, or what is staged for it."""
    return repo.absolute().parent / f"{repo.absolute().name}.lock"


def tidy(repo: Path) -> None:
    """Remove all that is staged but the drafts whose makers live, under the lock."""
    top = staging(repo)
    for path in sorted(top.iterdir()) if top.is_dir() else ():
        if not _in_use(path):
            durable.remove_tree(path)
    if top.is_dir() and not any(top.iterdir()):
        durable.remove_tree(top)


@contextlib.contextmanager
def drafting(repo: Path) -> Iterator[Path]:
    """A folder to put a release together in, removed at the end; that of a killed maker is removed
    by the next, or by the next publish.

    Raises BusyError while somebody publishes for long, CannotWriteError.
    """
    with contextlib.ExitStack() as held:
        with durable.lock(lock_path(repo), _LOCK_SECONDS):
            tidy(repo)
            folder = staging(repo) / f"{_DRAFT}{uuid.uuid4().hex}"
            durable.make_dir(folder)
            held.enter_context(durable.lock(folder / "lock"))
        try:
            yield folder
        finally:
            durable.remove_tree(folder)
            # Somebody else's publish tidies, too.
            with contextlib.suppress(BusyError), durable.lock(lock_path(repo)):
                tidy(repo)


def _in_use(path: Path) -> bool:
    """Whether a draft's maker holds its lock."""
    if not path.name.startswith(_DRAFT) or not (path / "lock").exists():
        return False
    try:
        with durable.lock(path / "lock"):
            return False
    except BusyError:
        return True
