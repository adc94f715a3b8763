"""What tests of several files carry."""

from collections.abc import Iterator

import pytest

from tests.adopt.table_beside import MADE, Connection, put
from tests.support.postgres import Server


@pytest.fixture
def table(postgres: Server) -> Iterator[tuple[str, Connection]]:
    """A table `t` with an index of its vectors."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24), body text)")
        put(connection, range(300), MADE.old)
        connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops)")
        yield address, connection
