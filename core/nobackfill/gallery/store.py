"""A gallery: one SQLite file with items, metadata, and one table of vectors a space.

The same on a server and on a phone. Items have an integer `label`, never used twice: putting an id
again with other content deletes the old label and makes a new one.

Threads: one writer connection under a lock, each reader with a connection of its own from a pool;
all methods may be called from any thread. Processes: several may have the file open; writers wait
for one another up to the busy timeout, then BusyError. Files are 0600, on a local disk.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self

from nobackfill.errors import DamagedError
from nobackfill.gallery import reading, writing
from nobackfill.gallery.change import Change
from nobackfill.gallery.connections import Connections, check_pages
from nobackfill.gallery.creation import create_file
from nobackfill.gallery.residents import Residents
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.stored_vectors import Item
from nobackfill.gallery.tables import find_space, read_spaces
from nobackfill.gallery.writing import NewVectors, PutResult
from nobackfill.vectors import Vectors

__all__ = ["Change", "Item", "Metadata", "NewVectors", "PutResult", "Store"]


class Store:
    """Items and vectors of a gallery file, and the transactions that change them; SqliteGallery
    is the class to use. Made by `create` or `open`; `close` it, or use it in a `with` statement.
    """

    def __init__(self, path: Path, residents: Residents | None = None) -> None:
        """See `open`."""
        self.path = path
        self._connections = Connections(path, residents)
        self._listeners: list[Callable[[Change], None]] = []
        # Held from before a commit until its listeners know, so that they hear commits in order.
        self._reporting = threading.RLock()
        self._unscrubbed = False

    @classmethod
    def create(cls, path: Path, spec: SpaceSpec) -> Self:
        """Make an empty gallery whose active space is `spec`.

        Raises AlreadyExistsError, CannotWriteError, BusyError.
        """
        create_file(path, spec)
        return cls(path)

    @classmethod
    def open(cls, path: Path, residents: Residents | None = None) -> Self:
        """Open a gallery; after an unclean end its pages are checked first. Where `residents` are
        given, they may close its files while nobody uses it.

        Raises NotFoundError, VerificationError for a damaged file or none of ours, BusyError.
        """
        return cls(path, residents)

    def close(self) -> None:
        """Close every connection, once nobody reads or writes. Twice is harmless. Raises BusyError
        when a statement does not end."""
        self._connections.close()

    def rest(self) -> bool:
        """Close every connection until one is needed; False if one is in use just now."""
        return self._connections.rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that sees one snapshot of the file, for reading only."""
        return self._connections.reading()

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction of the one writer, for tables of one's own: committed at the end, rolled
        back on an error. Not to be nested. Raises BusyError, CannotWriteError.
        """
        return self._connections.writing()

    @contextlib.contextmanager
    def changing(self) -> Iterator[tuple[Connection, list[Change]]]:
        """A transaction that changes vectors or spaces, for this room: the changes appended to the
        list are reported to the listeners once it is durable.
        """
        with self._connections.using(), self._reporting:
            changes: list[Change] = []
            before = after = -1
            try:
                with self._connections.writing() as connection:
                    before = _commits(connection)
                    connection.execute("UPDATE commits SET count = count + 1")
                    yield connection, changes
            finally:
                # An error can come after the commit, too: what is durable is reported.
                with self._connections.writer() as connection:
                    after = _commits(connection) if before >= 0 else before
                if after > before:
                    for change in changes:
                        for listener in list(self._listeners):
                            listener(change)
            if self._unscrubbed:
                self.scrub()

    def scrub(self) -> bool:
        """Empty the write-ahead log, so that no deleted byte stays in it.

        False, and tried again after the next change, if a reader prevents it just now.
        """
        self._unscrubbed = not self._connections.scrub()
        return not self._unscrubbed

    def compact(self, pages: int) -> None:
        """Give free pages back to the file system, so many a transaction. Raises BusyError."""
        self._connections.compact(pages)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each commit of this process, in order, in the writer's thread."""
        with self._reporting:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """End what `subscribe` began. Raises ValueError if it did not begin."""
        self._listeners.remove(listener)

    def spaces(self) -> list[SpaceInfo]:
        """All spaces, oldest table first; exactly one is active."""
        with self.reading() as connection:
            return read_spaces(connection)

    def active(self) -> SpaceInfo:
        """The space that queries are answered in."""
        active = [info for info in self.spaces() if info.state == "active"]
        if len(active) != 1:
            raise DamagedError(self.path, f"{len(active)} active spaces, expected one")
        return active[0]

    def space(self, space: str) -> SpaceInfo:
        """One space. Raises IncompatibleSpaceError if the gallery does not have it."""
        with self.reading() as connection:
            return find_space(connection, space)

    def put(
        self,
        ids: Sequence[str],
        vectors: Sequence[NewVectors],
        *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:
        """Store items, all or none, durably. Each space's vectors are for all `ids`, in order.

        An item whose digest (of its content: of the image's bytes, say) is the one stored keeps its
        label and vectors; only vectors of spaces it lacks are added, native ones take the place of
        carried ones, and metadata is set where some is given: {} removes it, None leaves it. Any
        other item that exists is replaced: its old label is gone from every space. Without a digest
        an item is always replaced.

        Raises InvalidInputError (vectors, ids not of 1 to 256 characters, an id twice, metadata
        that is not text, a finite number or a flag), IncompatibleSpaceError, BusyError,
        CannotWriteError.
        """
        batch = writing.check_batch(ids, digests, metadata)
        checked = [writing.check(self.space(new.space), new, len(ids)) for new in vectors]
        with self.changing() as (connection, changes):
            for new in vectors:
                find_space(connection, new.space)
            result, replaced, written = writing.insert(connection, batch, checked)
            with_metadata = metadata is not None
            changes.append(
                writing.put_change(checked, result, replaced, written, with_metadata=with_metadata)
            )
        return result

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items from every space, and their bytes from file and log. Returns how many.

        Raises BusyError, CannotWriteError.
        """
        return self.delete_chosen(lambda connection: writing.labels_of(connection, ids))

    def delete_chosen(self, choose: Callable[[Connection], Labels]) -> int:
        """Like `delete`, for the labels that `choose` finds in the same transaction."""
        with self.changing() as (connection, changes):
            labels = choose(connection)
            writing.delete_labels(connection, labels)
            changes.append(Change({}, labels))
            self._unscrubbed |= len(labels) > 0
        return len(labels)

    def get(self, item_id: str) -> Item | None:
        """One item by its id."""
        with self.reading() as connection:
            labels = writing.labels_of(connection, [item_id])
            return reading.items(connection, labels)[0] if len(labels) else None

    def items(self, labels: Sequence[int] | Labels, space: str | None = None) -> list[Item | None]:
        """Items in the order of `labels`; None where there is none (any more)."""
        with self.reading() as connection:
            return reading.items(connection, labels, space)

    def listing(self, after: int = 0, limit: int = 1000) -> list[Item]:
        """Items by increasing label, those after label `after`: a page."""
        with self.reading() as connection:
            return reading.page(connection, after, limit)

    def count(self, space: str | None = None) -> int:
        """Number of items, or of vectors in a space."""
        with self.reading() as connection:
            return reading.count(connection, space)

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """All vectors of a space in one snapshot: labels int64 [n] increasing, float32 [n, dim]."""
        with self.reading() as connection:
            return reading.load(connection, find_space(connection, space))

    def vector(self, label: int, space: str) -> Vectors | None:
        """One item's vector in a space, [1, dim]; None if it has none there."""
        with self.reading() as connection:
            return reading.vector(connection, label, find_space(connection, space))

    def check_pages(self) -> None:
        """Read every page, for rows that are not found are missed by nobody. Raises DamagedError.

        A part would not do: only among all can a page be seen that no table has any more.
        """
        with self.reading() as connection:
            check_pages(connection, self.path)

    def state_get(self, key: str) -> Any:
        """A small JSON value kept with the gallery; None if there is none."""
        with self.reading() as connection:
            return reading.state(connection, key)

    def state(self) -> dict[str, Any]:
        """All the small JSON values kept with the gallery."""
        with self.reading() as connection:
            return reading.states(connection)

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Keep small JSON values, all in one transaction; None removes."""
        with self.writing() as connection:
            reading.set_state(connection, values)


def _commits(connection: Connection) -> int:
    rows = connection.execute("SELECT count FROM commits").fetchall()
    if len(rows) != 1 or not isinstance(rows[0][0], int):
        raise DamagedError("the gallery file", "it does not count its commits any more")
    return int(rows[0][0])
