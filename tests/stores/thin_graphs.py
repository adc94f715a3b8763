"""Graphs of pgvector that are bad on purpose, and vectors that they fail on."""

import numpy as np

from nobackfill.gallery.spec import Metric, SpaceInfo
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import graphs
from nobackfill.server.stores.postgresql.database import Connection, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.vectors import Vectors
from tests.gallery.making import ids, spec, vectors

SPACE = spec(2).space


def filled(store: PostgresqlGallery, content: Vectors, metric: Metric = "squared_l2") -> SpaceInfo:
    """A space of these vectors, without a graph."""
    # A graph of the first one is of no use here, and takes longest to grow.
    drop = f"DROP INDEX IF EXISTS {store.schema}.vectors_1_graph"
    store.database.write(lambda connection: execute(connection, drop))
    store.add_staging_space(spec(2, dim=content.shape[1], metric=metric))
    first = NewVectors(spec(1).space, vectors(len(content), 3))
    store.put(ids(len(content)), [first, NewVectors(SPACE, content)])
    return store.space(SPACE)


def thin(store: PostgresqlGallery, info: SpaceInfo, m: int = 2, construction: int = 4) -> None:
    """Give a space a graph, of so few links."""

    def work(connection: Connection) -> None:
        name = graphs.graph_name(info)
        execute(connection, f"DROP INDEX IF EXISTS {store.schema}.{name}")
        execute(
            connection,
            f"CREATE INDEX {name} ON {store.schema}.vectors_{info.table_number} USING hnsw"
            f" (embedding vector_l2_ops) WITH (m = {m}, ef_construction = {construction})",
        )

    store.database.write(work)


def islands(count: int, dim: int = 24) -> Vectors:
    """Tight clusters, far from each other: a thin graph does not lead from one to another."""
    rng = np.random.default_rng(2)
    centres = 100 * rng.standard_normal((count // 30, dim))
    content = np.repeat(centres, 30, axis=0) + 0.01 * rng.standard_normal((count // 30 * 30, dim))
    return rng.permutation(content).astype(np.float32)
