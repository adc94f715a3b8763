"""Reading a gallery in PostgreSQL: each method is one statement, or one snapshot."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import (
    ListingPosition,
    MetadataGroup,
    build_metadata_group,
    check_page_limit,
)
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec, plan_side_passes
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors, StoredWindow
from nobackfill.gallery.staging import Estimate, Runner, RunnerResult, UpgradeOrder
from nobackfill.gallery.store import is_storable_text, storable_ids
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.server.stores.postgresql import rows
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE, SqlCondition
from nobackfill.server.stores.postgresql.database import Connection, Database, execute
from nobackfill.server.stores.postgresql.rows import (
    copy_in,
    copy_out,
    find_space,
    label_column,
    labels_condition,
    read_spaces,
)
from nobackfill.server.stores.postgresql.schema import table_name
from nobackfill.server.stores.postgresql.search import PostgresqlMatches
from nobackfill.server.stores.postgresql.writes import (
    count_items_without_vector,
    labels_in_table,
    read_frontier,
)
from nobackfill.vectors import Vectors

# Labels that are read at once: few enough that several workers get some.
_LABELS = 16_384


class PostgresqlWindows:
    """Find the items that an upgrade must still do; implements Windows.

    Labels become visible out of order, because transactions do: one pass by rising label misses
    some. So passes are repeated until one finds nothing; a flip makes another pass with the gate
    held.
    """

    def __init__(
        self, database: Database, schema: str, source: str, target: SpaceSpec, needs_side: bool
    ) -> None:
        """Find the spaces.

        The spaces and the target's frontier are read once, here.

        Args:
            database: the database.
            schema: schema of the gallery.
            source: id of the source space.
            target: the target space, which may not exist yet.
            needs_side: the upgrade reads side-information.

        Raises:
            IncompatibleSpaceError: the gallery has no such source.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._database = database
        self._source = database.read(lambda connection: find_space(connection, schema, source))
        spaces = database.read(lambda connection: read_spaces(connection, schema))
        target_numbers = [info.table_number for info in spaces if info.spec.space == target.space]
        self._table = table_name(schema, self._source.table_number)
        self._target, self._frontier = "", 0
        if target_numbers:
            self._target = table_name(schema, target_numbers[0])
            self._frontier = database.read(lambda c: read_frontier(c, schema, target_numbers[0]))
        self._passes = plan_side_passes(self._source.spec, target, needs_side=needs_side)

    def chunks(
        self, order: UpgradeOrder, items_per_chunk: int
    ) -> Iterator[tuple[Labels, Vectors, Vectors | None]]:
        """Yield labels, embeddings and side-information of `items_per_chunk` items at a time, until
        none is missing.

        Within a chunk, items come by increasing label, whatever the order; it may have fewer than
        `items_per_chunk` items. It repeats passes until one finds nothing. The caller must write
        each chunk before it takes the next; otherwise the same items come again, without end.

        Args:
            order: "label", or "uncertainty" for the least certain first.
            items_per_chunk: most items of a chunk, at least 1.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        has_items = True
        while has_items:
            has_items = False
            for labels, with_side in self.pieces(order, items_per_chunk):
                chunk = self.read(labels, with_side)
                if len(chunk[0]):
                    has_items = True
                    yield chunk

    def pieces(self, order: UpgradeOrder, items_per_piece: int) -> Iterator[tuple[Labels, bool]]:
        """Make one pass over the missing items; yield labels, and whether to read side-information.

        Items with side-information come first, if the upgrade reads it. With the order
        "uncertainty" all labels of a pass are read at once. A label may be deleted before it is
        read.

        Args:
            order: "label", or "uncertainty" for the least certain first; unknown ones come last.
            items_per_piece: most labels of a piece, at least 1.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        for with_side in self._passes:
            for labels in self._missing_labels(order, with_side):
                for start in range(0, len(labels), items_per_piece):
                    yield labels[start : start + items_per_piece], bool(with_side)

    def all_labels(self) -> Labels:
        """Return every label that `chunks` would yield now.

        Returns:
            int64 [n]; those with side-information first, if the upgrade reads it, each part by
            label.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        pieces = [piece for side in self._passes for piece in self._missing_labels("label", side)]
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def _missing_labels(self, order: UpgradeOrder, with_side: bool | None) -> Iterator[Labels]:
        """Yield labels that the target lacks, with or without side-information (None: both)."""
        query = f"SELECT s.label FROM {self._table} s WHERE " + {
            None: "TRUE", True: "s.side IS NOT NULL", False: "s.side IS NULL"
        }[with_side]  # fmt: skip
        if order == "uncertainty":
            # All at once: the order is not by label, so there are no pages.
            condition = self._missing_condition(self._frontier)
            query += f"{condition} ORDER BY s.uncertainty DESC NULLS LAST, s.label"
            yield self._database.read(lambda c: label_column(execute(c, query)))
            return
        last = self._frontier
        while True:

            def page(connection: Connection, label: int = last) -> Labels:
                condition = f"{self._missing_condition(label)} ORDER BY s.label LIMIT {_LABELS}"
                return label_column(execute(connection, query + condition))

            labels = self._database.read(page)
            if not len(labels):
                return
            last = int(labels[-1])
            yield labels

    def _missing_condition(self, label: int) -> str:
        """Make the condition for a row `s` of the source that is above a label and missing in the
        target.

        Both tables have the bound, so that rows before a page are not read for it.
        """
        bound = f" AND s.label > {label:d}"
        if not self._target:
            return bound
        return (
            f"{bound} AND NOT EXISTS (SELECT 1 FROM {self._target} t WHERE t.label = s.label"
            f" AND t.label > {label:d})"
        )

    def read(self, labels: Labels, with_side: bool) -> tuple[Labels, Vectors, Vectors | None]:
        """Read the items of some labels that still exist.

        Args:
            labels: the labels, in any order; repeated ones count once.
            with_side: read side-information, and leave out items without it.

        Returns:
            Labels, int64, increasing; embeddings, float32 [n, dim]; and side-information, float32
            [n, side_dim], or None. n may be smaller than `labels`, and 0.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        spec, where = self._source.spec, labels_condition(labels)
        if with_side:
            # It may have been put again without side-information.
            where += " AND side IS NOT NULL"
        side_dim = spec.side_dim if with_side else 0
        return self._database.read(
            lambda connection: copy_out(connection, self._table, where, spec.dim, side_dim)
        )


# Chunks that an estimate upgrades, after a few rows that warm up the models.
_CHUNKS, _FIRST_ROWS = 2, 8


class Reads:
    """Read a gallery in PostgreSQL; the methods implement GalleryStore."""

    def __init__(self, database: Database, schema: str) -> None:
        self.database = database
        self.schema = schema

    def spaces(self) -> list[SpaceInfo]:
        """Return all spaces, oldest first; exactly one is active; see GalleryStore.spaces.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self.database.read(lambda connection: rows.read_spaces(connection, self.schema))

    def space(self, space: str) -> SpaceInfo:
        """Return a space; see GalleryStore.space.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self.database.read(
            lambda connection: rows.find_space(connection, self.schema, space)
        )

    def _table(self, space: str) -> str:
        return table_name(self.schema, self.space(space).table_number)

    def labels_of(self, ids: Sequence[str]) -> Labels:
        """Return the labels of the ids that exist, int64, increasing; others are skipped; see
        EditableStore.labels_of.

        An id that PostgreSQL cannot store, as with a zero byte, is skipped, too. A repeated id
        gives its label once.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        query = f"SELECT label FROM {self.schema}.items WHERE id = ANY(%s) ORDER BY label"
        return rows.label_column(self.database.fetch(query, [storable_ids(ids)]))

    def get(self, item_id: str) -> StoredItem | None:
        """Return an item by its id, without origin and uncertainty; None if it does not exist; see
        GalleryStore.get.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        found = self._items_where("i.id = ANY(%s)", [storable_ids([item_id])], 1)
        return found[0] if found else None

    def _items_where(self, where: str, values: Sequence[Any], limit: int) -> list[StoredItem]:
        return self.database.read(
            lambda connection: rows.read_items_where(connection, self.schema, where, values, limit)
        )

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Return items in the order of `labels`; None where an item does not exist (any more); see
        UpgradableStore.items.

        Args:
            labels: labels in any order; repeats are allowed.
            space: id of the space whose origin and uncertainty the items get; None leaves both
                None.

        Returns:
            An item without a vector in the space has neither origin nor uncertainty.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self.database.read(
            lambda connection: rows.read_items(connection, self.schema, labels, space)
        )

    def count(self, space: str | None = None) -> int:
        """Return the number of items, or of vectors in a space; see UpgradableStore.count.

        It counts all rows. None counts items.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        table = f"{self.schema}.items" if space is None else self._table(space)
        ((total,),) = self.database.fetch(f"SELECT count(*) FROM {table}")
        return int(total)

    def load_vectors(self, space: str) -> tuple[Labels, Vectors]:
        """Return all vectors of a space in one snapshot: labels int64 [n], increasing, and float32
        [n, dim]; see GalleryStore.load_vectors.

        All vectors are in memory at once. A read of more than 60 s raises BusyError.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        info = self.space(space)
        table = table_name(self.schema, info.table_number)
        return self.database.read(
            lambda connection: copy_out(connection, table, "TRUE", info.spec.dim)
        )[:2]

    def vector(self, label: int, space: str) -> Vectors | None:
        """Return an item's vector in a space, float32 [1, dim]; None if it has none there; see
        GalleryStore.vector.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        found = self._read_vectors(np.array([label], np.int64), self.space(space))
        return found if len(found) else None

    def _read_vectors(self, labels: Labels, info: SpaceInfo) -> Vectors:
        table = table_name(self.schema, info.table_number)
        return self.database.read(
            lambda connection: copy_out(connection, table, labels_condition(labels), info.spec.dim)
        )[1]

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        """Return the rows that a space has for some items, by increasing label; see
        GalleryStore.stored_vectors.

        Items without a row there are skipped.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        info = self.space(space)
        return self.database.read(lambda c: rows.stored_rows(c, self.schema, labels, info))

    def iterate_snapshot(
        self, spaces: Sequence[str], items_per_window: int
    ) -> Iterator[StoredWindow]:
        """Yield every item by increasing label, with its vectors in some spaces, from one snapshot;
        see GalleryStore.iterate_snapshot.

        It holds a connection outside the pool until the iterator ends or is closed. Meanwhile
        deleted rows are not vacuumed. Every statement may take 60 s, and later changes are not
        seen.

        Args:
            spaces: ids of the spaces; may be empty.
            items_per_window: items of a window, at least 1.

        Yields:
            Windows of at most `items_per_window` items, with the vectors in the order of `spaces`;
            none for an empty gallery. An item without a vector in a space is missing in that
            space's rows.

        Raises:
            IncompatibleSpaceError: the gallery lacks a space; raised at the first window.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        with self.database.snapshot() as connection:
            infos = [rows.find_space(connection, self.schema, space) for space in spaces]
            after = 0
            while items := rows.read_items_where(
                connection, self.schema, "i.label > %s", [after], items_per_window
            ):
                after = items[-1].label
                labels = np.array([item.label for item in items], np.int64)
                stored = [rows.stored_rows(connection, self.schema, labels, info) for info in infos]
                yield StoredWindow(items, stored)

    def list_page(
        self,
        space: str,
        limit: int,
        *,
        start_after: ListingPosition | None = None,
        matches: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[StoredItem, ListingPosition]], ListingPosition | None]:
        """Return a page of items; see GalleryStore.list_page.

        Items that are deleted between its two reads are left out, so that a page may be short.

        Args:
            space: origin and uncertainty of the items are those of this space.
            limit: most items, at least 1.
            start_after: the position that the previous page returned; None for the first page. It
                must come from a call with the same `least_certain`.
            matches: only items that pass; None for all.
            least_certain: only items with an uncertainty in the space, the largest first, then by
                label; otherwise all items by label.

        Returns:
            The items with their positions, and the position for the next page; None at the end. A
            full last page has a position, too; the page after it is empty.

        Raises:
            InvalidInputError: `limit` is below 1.
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        check_page_limit(limit)
        condition = _matches_condition(matches)
        if least_certain:
            table = self._table(space)
            last = ListingPosition(0, float("inf")) if start_after is None else start_after
            query = (
                f"SELECT v.label, v.uncertainty FROM {table} v JOIN {self.schema}.items i"
                f" USING (label) WHERE v.uncertainty IS NOT NULL AND ({condition.sql})"
                " AND (v.uncertainty < %s OR v.uncertainty = %s AND v.label > %s)"
                " ORDER BY v.uncertainty DESC, v.label LIMIT %s"
            )
            values = [*condition.parameters, last.uncertainty, last.uncertainty, last.label, limit]
        else:
            query = (
                f"SELECT i.label, NULL FROM {self.schema}.items i WHERE i.label > %s"
                f" AND ({condition.sql}) ORDER BY i.label LIMIT %s"
            )
            values = [0 if start_after is None else start_after.label, *condition.parameters, limit]
        is_filtered = condition is not ALWAYS_TRUE
        found_rows = self.database.fetch(query, values, plans_for_values=is_filtered)
        places = [ListingPosition(*row) for row in found_rows]
        items = self.items([place.label for place in places], space)
        found = [(item, place) for item, place in zip(items, places, strict=True) if item]
        return found, places[-1] if len(places) == limit else None

    def group_by_value(self, key: str, space: str) -> list[MetadataGroup]:
        """Group the items by the value of a metadata key; see GalleryStore.group_by_value.

        Flags come first, then numbers, then texts, each by rising value; text order is the
        database's. No item with the key gives no groups. A key that PostgreSQL cannot store gives
        none, too. An item with several values is in a group for each. An item without a vector in
        the space counts, but its label is left out.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        if not is_storable_text(key):
            return []
        query = (
            "SELECT f.kind, e.value, v.label, v.origin"
            f" FROM {self.schema}.items i CROSS JOIN LATERAL"
            " (VALUES ('flag', 'b'), ('number', 'n'), ('text', 's')) AS f (kind, short)"
            " CROSS JOIN LATERAL (SELECT DISTINCT value FROM"
            " jsonb_array_elements(i.facets -> %s -> f.short)) e"
            f" LEFT JOIN {self._table(space)} v ON v.label = i.label"
            " WHERE i.facets ? %s ORDER BY f.kind, e.value, i.label"
        )
        found = self.database.fetch(query, [key, key])
        return [
            build_metadata_group(kind, value, [row[2:] for row in members])
            for (kind, value), members in groupby(found, key=lambda row: row[:2])
        ]

    def state(self) -> dict[str, Any]:
        """Return all small JSON values that are stored with the gallery; see GalleryStore.state.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return self.database.read(
            lambda connection: rows.read_state_values(connection, self.schema)
        )

    def windows_of_missing_vectors(
        self, source: str, target: SpaceSpec, needs_side: bool
    ) -> PostgresqlWindows:
        """Return the vectors that `source` has and `target` lacks; see
        UpgradableStore.windows_of_missing_vectors.

        The target need not exist.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return PostgresqlWindows(self.database, self.schema, source, target, needs_side)

    def count_items_without_vector(self, space: str) -> int:
        """Return the number of items without a vector in a space; see
        UpgradableStore.count_items_without_vector.

        An item that has no vector in any space counts, too.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        info = self.space(space)
        return self.database.read(
            lambda connection: count_items_without_vector(
                connection, self.schema, info.table_number
            )
        )

    def items_without_vector(self, space: str, limit: int = 1000) -> list[StoredItem]:
        """Return the first items without a vector in a space, by increasing label; see
        GalleryStore.items_without_vector.

        The items have neither origin nor uncertainty.

        Args:
            limit: most items.
            space: id of the space.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        number = self.space(space).table_number

        def work(connection: Connection) -> list[StoredItem]:
            last = read_frontier(connection, self.schema, number)
            table = table_name(self.schema, number)
            there = f"SELECT 1 FROM {table} v WHERE v.label = i.label AND v.label > %s"
            where = f"i.label > %s AND NOT EXISTS ({there})"
            return rows.read_items_where(connection, self.schema, where, [last, last], limit)

        return self.database.read(work)

    def sample_pairs(
        self, space: str, other_space: str, count: int
    ) -> tuple[Labels, Vectors, Vectors]:
        """Draw about `count` items that have a vector in both spaces, at random; see
        GalleryStore.sample_pairs.

        The draw is not reproducible. Both vectors come from one snapshot.

        Args:
            space: id of the first space.
            other_space: id of the second space, from which labels are drawn.
            count: most items, at least 1; fewer come if items lack a vector in `space`.

        Returns:
            Labels int64 [n], increasing, and their vectors float32 [n, dim] in each space; n may be
            0.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        first, second = self.space(space), self.space(other_space)

        tables = [table_name(self.schema, info.table_number) for info in (first, second)]

        def work(connection: Connection) -> tuple[Labels, Vectors, Vectors]:
            drawn = rows.random_labels(connection, tables[1], count)
            labels = labels_in_table(connection, tables[0], drawn)
            where = labels_condition(labels)
            vectors = copy_out(connection, tables[0], where, first.spec.dim)[1]
            return labels, vectors, copy_out(connection, tables[1], where, second.spec.dim)[1]

        return self.database.read(work, snapshot=True)

    def estimate_upgrade(self, runner: Runner, target: SpaceSpec) -> Estimate:
        """Estimate an upgrade from the active space: run the models on two chunks, and write them
        to a temporary table that is dropped.

        The gallery stays unchanged. The target need not exist. If nothing is missing, seconds and
        bytes are 0, and no model runs.

        It blocks while the models run, and errors of the runner pass through.

        Returns:
            The number of missing items, seconds and bytes scaled to all of them, and the number of
            items that cannot be migrated.

        Raises:
            InvalidInputError: the runner's output is invalid.
            VerificationError: the runner makes no usable vectors.
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            IncompatibleSpaceError: the active space was deleted meanwhile.
            CannotWriteError: the database is read-only or full.
        """
        active = next(info for info in self.spaces() if info.state == "active")
        windows = self.windows_of_missing_vectors(active.spec.space, target, runner.reads_side)
        missing = windows.all_labels()
        spaces = {info.spec.space for info in self.spaces()}
        done = self.count(target.space) if target.space in spaces else 0
        left_behind = self.count() - done - len(missing)
        if not len(missing):
            return Estimate(0, 0.0, 0, left_behind)
        limit = _CHUNKS * CHUNK_ROWS
        probe = missing[:: max(1, len(missing) // limit)][:limit]
        runner.run(*windows.read(probe[:_FIRST_ROWS], runner.reads_side)[1:])
        began = time.perf_counter()
        written = 0
        for start in range(0, len(probe), CHUNK_ROWS):
            labels, embedding, side = windows.read(
                probe[start : start + CHUNK_ROWS], runner.reads_side
            )
            upgraded = runner.run(embedding, side)
            write = partial(_bytes_written, target=target, labels=labels, carried=upgraded)
            written += self.database.read(write)
        seconds = time.perf_counter() - began
        share = len(missing) / len(probe)
        return Estimate(len(missing), seconds * share, int(written * share), left_behind)


def _bytes_written(
    connection: Connection, target: SpaceSpec, labels: Labels, carried: RunnerResult
) -> int:
    """Return the bytes of some vectors in a table that is deleted with the transaction."""
    with connection.transaction():
        execute(
            connection,
            "CREATE TEMPORARY TABLE probe (label bigint PRIMARY KEY, origin text NOT NULL,"
            f" uncertainty double precision, embedding vector({target.dim:d}) NOT NULL, side bytea)"
            " ON COMMIT DROP",
        )
        copy_in(
            connection, "probe", labels, "upgraded", carried.uncertainty, carried.embedding,
            carried.side_information,
        )  # fmt: skip
        cursor = execute(connection, "SELECT pg_total_relation_size('probe')")
        return int(cursor.fetchone()[0])


def _matches_condition(matches: Matches | None) -> SqlCondition:
    if matches is None:
        return ALWAYS_TRUE
    if isinstance(matches, PostgresqlMatches):
        return matches.condition
    return SqlCondition("i.label = ANY(%s)", (matches.labels().tolist(),))
