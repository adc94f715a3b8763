"""Filters that PostgreSQL answers, from an index of `facets`."""

import numpy as np

from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search.index import Labels, Mask, mask_of
from nobackfill.server.stores.postgresql.conditions import Condition, condition_of
from nobackfill.server.stores.postgresql.database import Database, run
from nobackfill.server.stores.postgresql.rows import label_column


class PostgresqlMatches:
    """The items that pass, asked for when they are needed. `condition` is for other statements."""

    def __init__(self, database: Database, schema: str, condition: Condition) -> None:
        self._database = database
        self._items = f"{schema}.items i WHERE {condition.text}"
        self.condition = condition

    def labels(self) -> Labels:
        """All of them, increasing."""
        query = f"SELECT i.label FROM {self._items} ORDER BY i.label"
        return self._database.read(
            lambda connection: label_column(
                run(connection, query, self.condition.values, filters=True)
            )
        )

    def __len__(self) -> int:
        query = f"SELECT count(*) FROM {self._items}"
        return self._database.read(
            lambda connection: int(
                run(connection, query, self.condition.values, filters=True).fetchone()[0]
            )
        )

    def mask(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) pass."""
        return mask_of(np.asarray(labels), self.labels())


class PostgresqlFiltering:
    """What is said of it: Filtering."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database = database
        self._schema = schema

    def passing(self, filtered: Filter) -> PostgresqlMatches:
        return PostgresqlMatches(self._database, self._schema, condition_of(filtered))

    def close(self) -> None:
        """There is nothing to let go of."""
