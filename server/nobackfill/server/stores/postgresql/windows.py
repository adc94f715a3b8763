"""What an upgrade has still to do: the items its target lacks, and what it reads of them."""

from collections.abc import Iterator

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec, side_passes
from nobackfill.gallery.upgrade import Order
from nobackfill.server.stores.postgresql.bulk import among, copy_out
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.frontier import frontier
from nobackfill.server.stores.postgresql.rows import find_space, label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import table_of
from nobackfill.vectors import Vectors

# Labels that are looked up at once: little enough that workers have some left meanwhile.
_LABELS = 16_384


class PostgresqlWindows:
    """What is said of it: Windows. Labels become visible out of order, for transactions do: whoever
    goes by rising label alone misses some. So what is lacking is looked for again, from the first
    label on, until a whole pass finds nothing; a flip does it once more with the gate held."""

    def __init__(
        self, database: Database, schema: str, source: str, target: SpaceSpec, needs_side: bool
    ) -> None:
        """Raises IncompatibleSpaceError for an unknown source."""
        self._database = database
        self._source = database.read(lambda connection: find_space(connection, schema, source))
        spaces = database.read(lambda connection: read_spaces(connection, schema))
        there = [info.number for info in spaces if info.spec.space == target.space]
        self._table = table_of(schema, self._source.number)
        self._target, self._whole = "", 0
        if there:
            self._target = table_of(schema, there[0])
            self._whole = database.read(lambda c: frontier(c, schema, there[0]))
        self._passes = side_passes(self._source.spec, target, needs_side=needs_side)

    def chunks(self, order: Order, size: int) -> Iterator[tuple[Labels, Vectors, Vectors | None]]:
        """`size` items each."""
        found = True
        while found:
            found = False
            for labels, with_side in self.pieces(order, size):
                chunk = self.read(labels, with_side)
                if len(chunk[0]):
                    found = True
                    yield chunk

    def pieces(self, order: Order, size: int) -> Iterator[tuple[Labels, bool]]:
        """One pass over what is lacking: labels, `size` at a time, and whether to `read` them with
        side-information."""
        for with_side in self._passes:
            for labels in self._labels(order, with_side):
                for start in range(0, len(labels), size):
                    yield labels[start : start + size], bool(with_side)

    def all_labels(self) -> Labels:
        """Every label that `chunks` would come to, if nothing changed."""
        found = [piece for side in self._passes for piece in self._labels("label", side)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _labels(self, order: Order, with_side: bool | None) -> Iterator[Labels]:
        """Those that the target lacks, with or without side-information (None: no matter)."""
        query = f"SELECT s.label FROM {self._table} s WHERE " + {
            None: "TRUE", True: "s.side IS NOT NULL", False: "s.side IS NULL"
        }[with_side]  # fmt: skip
        if order == "uncertainty":
            # All of them: what a page would begin after is no label.
            query += self._lacking(self._whole) + " ORDER BY s.uncertainty DESC NULLS LAST, s.label"
            yield self._database.read(lambda c: label_column(run(c, query)))
            return
        last = self._whole
        while True:

            def page(connection: Connection, after: int = last) -> Labels:
                rest = f"{self._lacking(after)} ORDER BY s.label LIMIT {_LABELS}"
                return label_column(run(connection, query + rest))

            labels = self._database.read(page)
            if not len(labels):
                return
            last = int(labels[-1])
            yield labels

    def _lacking(self, after: int) -> str:
        """Of a row `s` of the source: behind `after`, and not in the target. Said of both tables:
        what lies before a page is not read for it, however much is carried."""
        behind = f" AND s.label > {after:d}"
        if not self._target:
            return behind
        return (
            f"{behind} AND NOT EXISTS (SELECT 1 FROM {self._target} t WHERE t.label = s.label"
            f" AND t.label > {after:d})"
        )

    def read(self, labels: Labels, with_side: bool) -> tuple[Labels, Vectors, Vectors | None]:
        """Those of `labels` that are still there, by label."""
        spec, where = self._source.spec, among(labels)
        if with_side:
            # Put again without any, since it was looked at.
            where += " AND side IS NOT NULL"
        side_dim = spec.side_dim if with_side else 0
        return self._database.read(
            lambda connection: copy_out(connection, self._table, where, spec.dim, side_dim)
        )
