"""Creation of a gallery file: its pages, its log, its tables."""

import contextlib
import os
import uuid
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import AlreadyExistsError, CannotWriteError
from nobackfill.gallery.access import connect, has_room
from nobackfill.gallery.file_format import APPLICATION
from nobackfill.gallery.file_lock import lock_path
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.tables import add_space
from nobackfill.sqlite_errors import refusing_sqlite

# Bulk writes are twice as fast as with SQLite's 4 KiB, of which a vector row leaves much empty.
PAGE_BYTES = 16384


def create_file(path: Path, spec: SpaceSpec) -> None:
    """Make an empty gallery, which appears as the last step. Raises like `Store.create`."""
    durable.make_dir(path.parent, mode=0o700)
    with durable.lock(lock_path(path)):
        if path.exists():
            raise AlreadyExistsError(f"{path}: exists already; choose another name or open it")
        refuse_leftovers(path)
        for stale in path.parent.glob(f"{durable.TEMPORARY}{path.name}-*"):
            durable.remove_tree(stale)
        temporary = path.parent / f"{durable.TEMPORARY}{path.name}-{uuid.uuid4().hex}"
        try:
            make_empty(temporary, spec)
            durable.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def refuse_leftovers(path: Path) -> None:
    """Raises AlreadyExistsError where a log lies beside `path` and its gallery does not: SQLite
    would write that gallery's last changes into whatever is put there.
    """
    for end in ("-wal", "-journal"):
        log = path.with_name(path.name + end)
        if log.exists() and log.stat().st_size:
            raise AlreadyExistsError(
                f"{log}: holds the last changes of a gallery that was called {path.name}; put it "
                "back beside that gallery, remove it, or choose another name"
            )


def make_empty(path: Path, spec: SpaceSpec | None) -> None:
    """Make a gallery file whose active space is `spec`; without, it has none yet.

    Raises CannotWriteError, and leaves what there is of it.
    """
    # Imported here because it costs the edge a large part of a search's start.
    from nobackfill.gallery.schema import migrate

    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CannotWriteError(f"{path.parent}: cannot write there ({error.strerror})") from error
    if not has_room(path.parent):
        raise CannotWriteError(f"{path.parent}: no room for a gallery; free some space")
    with refusing_sqlite(path), contextlib.closing(connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # Free pages can be given back a few at a time, where VACUUM would copy the file.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise CannotWriteError(f"{path}: no write-ahead log possible here; use a local disk")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        migrate(connection)
        if spec is not None:
            with durable.transaction(connection):
                add_space(connection, spec, "active")
