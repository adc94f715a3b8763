"""Store a gallery in PostgreSQL: items, spaces, vectors and state in one schema."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import AlreadyExistsError, IncompatibleSpaceError, NotFoundError
from nobackfill.gallery.edits import merge_metadata
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, Origin, SpaceInfo, SpaceSpec, select_space
from nobackfill.gallery.sqlite_file import StoredItem, item_from_row
from nobackfill.gallery.staging import check_uncertainty
from nobackfill.gallery.store import (
    Change,
    CheckedVectors,
    NewVectors,
    PutResult,
    change_after_put,
    check_batch,
    check_new_vectors,
    storable_ids,
)
from nobackfill.server.state import OutdatedPlanError
from nobackfill.server.stores.postgresql import rows, schema, writes
from nobackfill.server.stores.postgresql.conditions import sql_condition
from nobackfill.server.stores.postgresql.database import Connection, Database, execute, scalar
from nobackfill.server.stores.postgresql.leading import notify_gateways, record_gallery_change
from nobackfill.server.stores.postgresql.reads import Reads
from nobackfill.server.stores.postgresql.schema import schema_name, table_name
from nobackfill.server.stores.postgresql.writes import advance_frontier

_NONE = np.empty(0, np.int64)
_SPACES_CHANGED = Change({}, _NONE, spaces_changed=True)
Result = TypeVar("Result")
# Tries of a transaction that shares the gate with other writers.
_SHARED_TRIES = 3


class GallerySnapshot(NamedTuple):
    """Hold the spaces and state of a gallery, and their epoch, which grows with each change."""

    epoch: int
    spaces: tuple[SpaceInfo, ...]
    state: Mapping[str, Any]


class PostgresqlGallery(Reads):
    """Store one gallery; implements GalleryStore."""

    def __init__(self, database: Database, gallery_number: int) -> None:
        super().__init__(database, schema_name(gallery_number))
        self.number = gallery_number
        self._listeners: list[Callable[[Change], None]] = []
        self._reporting = threading.Lock()

    def missing_table(self) -> str | None:
        """Return the name of a table that is missing although its gallery and space exist; None if
        none is.

        It checks twice, because another gateway may delete a space meanwhile. A gallery that was
        deleted misses nothing: None. If several are missing, it names one.

        Raises:
            GalleryDeletedError: the gallery was deleted during the check.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> str | None:
            exists = "SELECT true FROM nobackfill.galleries WHERE number = %s"
            if execute(connection, exists, [self.number]).fetchone() is None:
                return None
            names = [f"{self.schema}.{name}" for name in ("items", "spaces", "state", "gate")]
            lookup = "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NULL"
            if missing := execute(connection, lookup, [names]).fetchone():
                return str(missing[0])
            numbers = execute(connection, f"SELECT number FROM {self.schema}.spaces")
            tables = [table_name(self.schema, number) for (number,) in numbers]
            missing = execute(connection, lookup, [tables]).fetchone()
            return None if missing is None else str(missing[0])

        # CheckedVectors twice: another gateway may delete a space between two statements.
        return self.database.read(work) and self.database.read(work)

    def close(self) -> None:
        """Do nothing: the connections belong to the database.

        Later calls of other methods still work.
        """

    def reopen(self) -> None:
        """Do nothing: `close` closes nothing."""

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` with the change after each commit of this process, in order; see
        GalleryStore.subscribe.

        The listener runs in the thread that committed; others that report wait. Its error passes to
        the caller of the write, which is committed. One that is subscribed twice is called twice. A
        listener that calls `subscribe` or `unsubscribe` waits for ever.
        """
        with self._reporting:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """Stop calling a listener; see GalleryStore.unsubscribe.

        Do not call it in a listener: that would wait for ever. A listener that is subscribed twice
        is called once from then on.

        Raises:
            ValueError: it is not subscribed.
        """
        with self._reporting:
            self._listeners.remove(listener)

    def announce_external_writes(self, labels: Labels) -> None:
        """Tell the listeners that another process has written vectors.

        They get a change whose `metadata_labels` has the labels; nothing is written. Within
        `Database.transact` it waits for the commit.

        Args:
            labels: int64 [n].

        Raises:
            Exception: an error of a listener; later listeners are not called.
        """
        self._report(Change({}, _NONE, metadata_labels=labels))

    def _report(self, change: Change) -> None:
        def notify_listeners() -> None:
            with self._reporting:
                for listener in self._listeners:
                    listener(change)

        self.database.after_commit(notify_listeners)

    def _shared(self, work: Callable[[Connection], Result]) -> Result:
        """Run a transaction while others write, and nobody changes the spaces.

        If it collides with others too often, it runs alone.
        """
        tries = count(1)

        def body(connection: Connection) -> Result:
            share = next(tries) <= _SHARED_TRIES
            (writes.lock_gallery_shared if share else writes.lock_gallery_exclusive)(
                connection, self.schema
            )
            return work(connection)

        return self.database.write(body)

    def _exclusive(self, work: Callable[[Connection], Result]) -> Result:
        """Run a transaction that changes spaces, while nobody else writes."""

        def body(connection: Connection) -> Result:
            writes.lock_gallery_exclusive(connection, self.schema)
            result = work(connection)
            record_gallery_change(connection, self.number)
            return result

        result = self.database.write(body)
        self._report(_SPACES_CHANGED)
        return result

    def put(
        self, ids: Sequence[str], vectors: Sequence[NewVectors], *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None, epoch: int | None = None,
    ) -> PutResult:  # fmt: skip
        """Store items durably, all or none; see GalleryStore.put.

        An item with the same digest keeps its label and vectors, and gets those of spaces that it
        lacks. Any other existing item is replaced. Listeners are called after the commit.

        Args:
            ids: ids of the items, without repeats; may be empty.
            vectors: their vectors, by space, each space once; may be empty.
            digests: digest of each item's content; None replaces existing items.
            metadata: metadata of each item; None, for one or for all, keeps what unchanged items
                have.
            epoch: the gallery's epoch for which the vectors were made; None skips the check.

        Returns:
            The labels, and which items are new or replaced.

        Raises:
            OutdatedPlanError: spaces or state have changed since that epoch.
            InvalidInputError: invalid vectors, ids or metadata, or a repeated id.
            IncompatibleSpaceError: the gallery lacks a space, and `epoch` is None.
            NotFoundError: the gallery was deleted.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
            ValueError: vectors are nested lists of unequal lengths.
            TypeError, AttributeError: an id or a key of metadata is no text.
            UnusableRowsError: as an InvalidInputError: a vector is not finite, or has another norm
                than the space; no item is stored.
        """
        batch = check_batch(ids, digests, metadata)
        checked = self._check_vectors(vectors, len(ids), outdated=epoch is not None)

        def work(connection: Connection) -> tuple[PutResult, Labels, list[NDArray[np.bool_]]]:
            if epoch is not None and rows.read_epoch(connection, self.number) != epoch:
                raise OutdatedPlanError(
                    "another gateway has changed the gallery's spaces or settings since the items "
                    "were embedded; try again"
                )
            for new in vectors:
                rows.find_space(connection, self.schema, new.space)
            return writes.insert_items(connection, self.schema, batch, checked)

        result, replaced, written = self._shared(work)
        with_metadata = metadata is not None
        self._report(
            change_after_put(checked, result, replaced, written, with_metadata=with_metadata)
        )
        return PutResult(result.labels, result.changed_mask)

    def _check_vectors(
        self, vectors: Sequence[NewVectors], count: int, *, outdated: bool
    ) -> list[CheckedVectors]:
        spaces = self.spaces()
        try:
            return [
                check_new_vectors(select_space(spaces, new.space), new, count) for new in vectors
            ]
        except IncompatibleSpaceError as error:
            if outdated:
                raise OutdatedPlanError(
                    "another gateway has retired the release that these items were embedded "
                    "with, and deleted that release's vectors in the gallery; try again"
                ) from error
            raise

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items from every space; return how many existed. Unknown ids are skipped, and
        repeated ones count once; see GalleryStore.delete.

        It is one transaction. Listeners are called after the commit.

        Raises:
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        return self._delete_where("id = ANY(%s)", [storable_ids(ids)])

    def delete_passing(self, labels: Labels, filtered: Filter | None) -> int:
        """Delete items that exist and pass the filter now; others are skipped; see
        EditableStore.delete_passing.

        Args:
            labels: int64 [n].
            filtered: the filter; None lets all pass.

        Returns:
            How many were deleted.

        Raises:
            InvalidInputError: the filter is too large or invalid.
            TypeError: a part of the filter is no filter, such as a mapping.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        condition = sql_condition(filtered)
        where = f"label = ANY(%s) AND ({condition.sql})"
        return self._delete_where(where, [labels.tolist(), *condition.parameters])

    def _delete_where(self, where: str, values: Sequence[Any]) -> int:
        def work(connection: Connection) -> Labels:
            labels = writes.lock_items(connection, self.schema, where, values)
            writes.delete_labels(connection, self.schema, labels)
            return labels

        deleted = self._shared(work)
        self._report(Change({}, deleted))
        return len(deleted)

    def change_some_metadata(
        self,
        labels: Labels,
        filtered: Filter | None,
        values_to_set: Metadata,
        keys_to_remove: Collection[str],
    ) -> int:
        """Change the metadata of items that exist and pass the filter now; others are skipped; see
        EditableStore.change_some_metadata.

        All changes are one transaction.

        Args:
            labels: int64 [n].
            filtered: the filter; None lets all pass.
            values_to_set: values by key that are set; other keys stay.
            keys_to_remove: keys that are removed first; missing ones are ignored.

        Returns:
            How many items passed, also those that did not change; for 0 `values_to_set` is not
            checked.

        Raises:
            InvalidInputError: the filter is too large, or the new metadata is invalid; nothing has
                changed.
            TypeError: a part of the filter is no filter, such as a mapping.
            AttributeError: a key of `values_to_set` is no text.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        condition = sql_condition(filtered)

        def work(connection: Connection) -> Labels:
            cursor = execute(
                connection,
                f"SELECT i.label, i.id, i.digest, i.metadata, NULL, NULL FROM {self.schema}.items i"
                f" WHERE i.label = ANY(%s) AND ({condition.sql}) ORDER BY i.label FOR UPDATE",
                [labels.tolist(), *condition.parameters],
            )
            items = [item_from_row(row) for row in cursor]
            present = {item.label: (item.id, item.metadata) for item in items}
            writes.write_metadata(
                connection, self.schema, merge_metadata(present, values_to_set, keys_to_remove)
            )
            return np.array([*present], np.int64)

        changed = self._shared(work)
        self._report(Change({}, _NONE, metadata_labels=changed))
        return len(changed)

    def update_state(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values in one transaction; None removes a value; see
        GalleryStore.update_state.

        Other keys stay. The gallery's epoch grows, so that other gateways plan again; listeners are
        not called. A key that is missing already is no error.

        Raises:
            TypeError: a value cannot be written as JSON.
            ValueError: a value contains NaN or infinity.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            rows.set_state(connection, self.schema, values)
            record_gallery_change(connection, self.number)

        self.database.write(work)

    def add_staging_space(self, spec: SpaceSpec) -> None:
        """Add a staging space, unless it exists; see UpgradableStore.add_staging_space.

        It waits for all puts, and keeps others waiting meanwhile. A space that exists stays as it
        is, but listeners are called, and the epoch grows.

        Raises:
            InvalidInputError: it exists with another release, dimension, metric, norm or side
                space, or has too many dimensions for pgvector.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        self._exclusive(
            lambda connection: writes.create_staging_space(connection, self.schema, spec)
        )

    def write_vectors(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        """Write vectors of existing items into a space, in one durable transaction; see
        UpgradableStore.write_vectors.

        Deleted items are skipped, and items that have a vector there, unless `replace` is set.

        Args:
            space: id of the space.
            labels: int64 [n], distinct, in any order.
            embedding: float32 [n, dim], in the order of `labels`.
            side: side-information, float32 [n, side_dim], or None.
            uncertainty: float32 [n], or None.
            origin: how the vectors were made.
            replace: replace existing vectors.

        Returns:
            The labels written, int64, increasing; empty if none was.

        Raises:
            InvalidInputError: invalid vectors, or another number of rows.
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
            ValueError: vectors or uncertainties are nested lists of unequal lengths.
            IndexError: `uncertainty` is a single number.
            UnusableRowsError: as an InvalidInputError: a vector or an uncertainty is not finite, or
                a vector has another norm than the space; none is written.
        """
        new = NewVectors(space, embedding, side, origin)
        checked = check_new_vectors(self.space(space), new, len(labels))
        doubt = check_uncertainty(uncertainty, len(labels))
        written, vectors = self._shared(
            lambda connection: writes.write_vectors(
                connection, self.schema, checked, labels, doubt, replace=replace
            )
        )
        self._report(Change({space: (written, vectors)}, _NONE))
        return written

    def advance_frontier(self, space: str) -> None:
        """Record up to which label every item has a vector in a space, so that a flip checks only
        later ones.

        It stops before the first item without one, and never moves back. It waits for running
        writers, and holds up new ones for a moment.

        It does nothing within `Database.transact`.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            BusyError: the database is busy.
            UnavailableError: it does not answer.
            CannotWriteError: the database is full or read-only.
            GalleryDeletedError: the gallery was deleted.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        number = self.space(space).table_number
        self.database.run_outside_transaction(
            lambda connection: advance_frontier(connection, self.schema, number)
        )

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make a space the active one; the active one becomes previous; see GalleryStore.flip.

        If the space is active already, only `state` is stored. Without `leave_behind`, most items
        are checked before others must wait.

        Args:
            space: id of the space.
            leave_behind: allow items without a vector in it; searches no longer find them.
            state: values to store in the same transaction; None as a value removes a key.

        Raises:
            PreconditionError: items lack a vector there, and `leave_behind` is False.
            IncompatibleSpaceError: the gallery does not have the space.
            TypeError, ValueError: a value of `state` is not JSON.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        if not leave_behind:
            self.advance_frontier(space)

        def work(connection: Connection) -> None:
            writes.flip(connection, self.schema, space, leave_behind=leave_behind)
            rows.set_state(connection, self.schema, state or {})

        self._exclusive(work)

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        """Return to the previous space; the present one becomes staging and keeps its vectors; see
        GalleryStore.rollback.

        Args:
            leave_behind: allow items without a vector in the previous space; searches no longer
                find them.
            state: values to store in the same transaction; None as a value removes a key.

        Returns:
            The id of the space that is active now.

        Raises:
            NotFoundError: there is no previous space.
            PreconditionError: items lack a vector there, and `leave_behind` is False.
            TypeError, ValueError: a value of `state` is not JSON.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        if not leave_behind:
            self.advance_frontier(writes.previous_space(self.spaces()).spec.space)

        def work(connection: Connection) -> str:
            space = writes.rollback(connection, self.schema, leave_behind=leave_behind)
            rows.set_state(connection, self.schema, state or {})
            return space

        return self._exclusive(work)

    def drop_space(self, space: str) -> None:
        """Remove a space with all its vectors; see GalleryStore.drop_space.

        It waits for all puts.

        Raises:
            PreconditionError: it is the active one.
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: an error of a listener; the change stays committed, and later listeners are
                not called.
        """
        self._exclusive(lambda connection: writes.drop_space(connection, self.schema, space))

    def read_snapshot(self) -> GallerySnapshot:
        """Read what plans are made from, in one snapshot.

        Raises:
            NotFoundError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self.database.read(
            lambda connection: GallerySnapshot(
                rows.read_epoch(connection, self.number),
                tuple(rows.read_spaces(connection, self.schema)),
                rows.read_state_values(connection, self.schema),
            ),
            snapshot=True,
        )

    def find_migrated(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of `ids` whose vector in a space was migrated; see
        GalleryStore.find_migrated.

        Returns:
            Items by falling uncertainty; an unknown one comes last, equal ones by label. Unknown
            ids are skipped. An id that repeats counts once.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        rows_found = self.database.fetch(
            "SELECT i.label, i.id, i.digest, i.metadata, v.origin, v.uncertainty"
            f" FROM {self.schema}.items i JOIN {self._table(space)} v USING (label)"
            " WHERE i.id = ANY(%s) AND v.origin = 'upgraded'"
            " ORDER BY v.uncertainty DESC NULLS LAST, label",
            [storable_ids(ids)],
        )
        return [item_from_row(row) for row in rows_found]

    def active(self) -> SpaceInfo:
        """Return the active space.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return next(info for info in self.spaces() if info.state == "active")


class PostgresqlGalleries:
    """Create, open and delete the galleries of a database, each in one transaction; implements
    Stores.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def names(self) -> list[str]:
        """Return the names of all galleries, in order; see GalleryStorage.names.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        query = "SELECT name FROM nobackfill.galleries ORDER BY name"
        return [name for (name,) in self.database.fetch(query)]

    def open(self, name: str) -> PostgresqlGallery:
        """Open a gallery; see GalleryStorage.open.

        Whether its tables exist is not checked; see `missing_table`.

        Raises:
            NotFoundError: no gallery has this name.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        number = self.database.read(lambda connection: _gallery_number(connection, name))
        if number is None:
            raise NotFoundError(
                f"the database has no gallery {name!r}; create it with `gateway gallery create`"
            )
        return PostgresqlGallery(self.database, number)

    def create(
        self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]
    ) -> PostgresqlGallery:
        """Create a gallery atomically; see GalleryStorage.create.

        Each space gets a graph, unless it has too many dimensions. Other gateways are notified. The
        name is not checked.

        Args:
            name: its name.
            specs: its spaces, at least one (IndexError without any); the last one is active, the
                others previous.
            state: its first state.

        Returns:
            The gallery, with a number that no other gallery had.

        Raises:
            AlreadyExistsError: a gallery has this name.
            InvalidInputError: a space has too many dimensions for pgvector, or two have one id and
                differ.
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            TypeError, ValueError: a value of `state` is not JSON; nothing is created.
        """

        def work(connection: Connection) -> int:
            if _gallery_number(connection, name) is not None:
                raise AlreadyExistsError(
                    f"gallery {name!r} exists already in this database; choose another name"
                )
            insert = "INSERT INTO nobackfill.galleries (name) VALUES (%s) RETURNING number"
            number = scalar(connection, insert, [name])
            schema_name = schema.schema_name(number)
            schema.create_gallery(connection, number, specs[0])
            for spec in specs[1:]:
                writes.create_staging_space(connection, schema_name, spec)
                writes.flip(connection, schema_name, spec.space, leave_behind=False)
            for info in rows.read_spaces(connection, schema_name):
                for statement in schema.index_statements(schema_name, info.table_number, info.spec):
                    execute(connection, statement)
            rows.set_state(connection, schema_name, state)
            notify_gateways(connection)
            return int(number)

        return PostgresqlGallery(self.database, self.database.write(work))

    def delete(self, name: str) -> None:
        """Delete a gallery with all its tables; an unknown name is ignored.

        Other gateways are notified. It waits for transactions that use its tables. Objects that
        were opened before then raise GalleryDeletedError.

        Raises:
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            remove = "DELETE FROM nobackfill.galleries WHERE name = %s RETURNING number"
            row = execute(connection, remove, [name]).fetchone()
            if row is not None:
                schema.drop_gallery(connection, row[0])
                notify_gateways(connection)

        self.database.write(work)


def _gallery_number(connection: Connection, name: str) -> int | None:
    query = "SELECT number FROM nobackfill.galleries WHERE name = %s"
    row = execute(connection, query, [name]).fetchone()
    return None if row is None else int(row[0])
