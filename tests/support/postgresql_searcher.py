"""Search one space of a gallery in PostgreSQL, without a gateway."""

from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.stores.postgresql.conditions import sql_condition
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.search import CandidateSource, SpaceTable, search
from nobackfill.vectors import Vectors


class PostgresqlSearcher:
    """Search one space; implements Searcher."""

    def __init__(
        self,
        database: Database,
        schema: str,
        info: SpaceInfo,
        candidates: CandidateSource | None = None,
    ) -> None:
        self._database = database
        self._candidates = candidates
        self._table = SpaceTable(schema, info)

    def search(
        self, queries: Vectors, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        """Find the nearest items to each query; None as filter means all items."""
        requests = [(self._table, queries)]
        return search(
            self._database, requests, k, sql_condition(filtered), ef, candidates=self._candidates
        )[0]
