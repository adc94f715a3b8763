"""PostgreSQL with pgvector, from PyPI, by its own protocol on its socket."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
from pgvector.psycopg import register_vector

from bench.loaded import Target
from bench.rivals.rival import Rival
from demo.calls import POSTGRESQL, STATEMENT
from demo.load import write_requests
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.index import Labels
from nobackfill.vectors import Vectors
from tests.support.postgres import Server, running

_NEAREST = "SELECT id, embedding <-> $1 FROM items ORDER BY embedding <-> $1 LIMIT {k}"
# Everything fits into its memory, as it does into the gateway's.
_MEMORY = {"shared_buffers": "1GB", "maintenance_work_mem": "1GB"}


class Pgvector(Rival):
    """One table, one prepared statement a connection."""

    name = "pgvector"

    def __init__(self, server: Server, vectors: Vectors, queries: Vectors, k: int) -> None:
        self._server, self._queries, self._k = server, queries, k
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
            register_vector(connection)
            dim = vectors.shape[1]
            connection.execute(f"CREATE TABLE items (id int8, embedding vector({dim}))".encode())
            with connection.cursor().copy(
                "COPY items (id, embedding) FROM STDIN (FORMAT binary)"
            ) as copy:
                copy.set_types(["int8", "vector"])
                for number, vector in enumerate(vectors):
                    copy.write_row((number, vector))
            made = f"m = {hnsw.LINKS_PER_ROW}, ef_construction = {hnsw.EF_CONSTRUCTION}"
            connection.execute(
                f"CREATE INDEX ON items USING hnsw (embedding vector_l2_ops) WITH ({made})".encode()
            )
            connection.execute("VACUUM ANALYZE items")
            found = connection.execute(
                "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
            ).fetchone()
        assert found is not None
        self.version = str(found[0])

    def load_target(self, ef: int, requests: Path) -> Target:
        write_requests(requests, [_asked(query) for query in self._queries])
        return f"{POSTGRESQL}{self._server.socket}?{ef}", _NEAREST.format(k=self._k), requests

    def search_all(self, ef: int) -> Labels:
        with psycopg.connect(self._server.url("postgres"), autocommit=True) as connection:
            register_vector(connection)
            connection.execute(f"SET hnsw.ef_search = {ef}".encode())
            sql = _NEAREST.format(k=self._k).replace("$1", "%(query)s").encode()
            rows = [connection.execute(sql, {"query": query}) for query in self._queries]
            return np.array([[number for number, _ in row] for row in rows])


def _asked(query: Vectors) -> bytes:
    """Bind, Execute and Sync of the prepared statement, binary both ways."""
    vector = struct.pack(">hh", len(query), 0) + query.astype(">f4").tobytes()
    bind = b"\0" + STATEMENT + struct.pack(">hhhi", 1, 1, 1, len(vector)) + vector
    bind += struct.pack(">hh", 1, 1)
    parts = (b"B", bind), (b"E", b"\0" + struct.pack(">i", 0)), (b"S", b"")
    return b"".join(kind + struct.pack(">i", 4 + len(body)) + body for kind, body in parts)


@contextmanager
def serve_pgvector(vectors: Vectors, queries: Vectors, k: int) -> Iterator[Pgvector]:
    """A server that holds `vectors`, to the end of the block."""
    with running(_MEMORY) as server:
        yield Pgvector(server, vectors, queries, k)
