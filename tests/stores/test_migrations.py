"""A database that an earlier version wrote (format-1.sql, its pg_dump): opened, and taken back.
What format 3 adds is in test_journal.py."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.server.storage import Storage, migrate_database
from nobackfill.server.stores.postgresql.migrations import FORMAT
from tests.server.test_cli import run_json
from tests.support.postgres import Server

WRITTEN = Path(__file__).with_name("format-1.sql")
# What a table is, and all that it holds.
COLUMNS = (
    "SELECT table_name, column_name, data_type, is_nullable, column_default"
    " FROM information_schema.columns WHERE table_schema LIKE 'nobackfill%' ORDER BY 1, 2"
)
CONTENT = "SELECT to_jsonb(t) FROM nobackfill.{} t"


@pytest.fixture
def written(postgres: Server) -> Iterator[str]:
    """The address of a database of format 1."""
    with postgres.database() as url:
        with psycopg.connect(url) as connection:
            connection.execute(WRITTEN.read_bytes())
        yield url


def everything(url: str) -> list[object]:
    with psycopg.connect(url) as connection:
        found: list[object] = list(connection.execute(COLUMNS))
        for table in ("format", "gateway", "galleries"):
            found += connection.execute(CONTENT.format(table).encode()).fetchall()
        return found


def test_what_the_version_before_wrote_is_served_and_taken_back(
    written: str, tmp_path: Path
) -> None:
    before = everything(written)
    storage = Storage(written, tmp_path)
    try:
        assert (storage.state.now.active, storage.state.now.previous) == (2, (1,))
        assert storage.state.now.paused == ("g",)
        store = storage.home.open("g").store
        (item,) = store.items(store.labels_of(["i0"]))
        assert item is not None and item.metadata == {"tag": ["sea"], "year": 2026}
        assert [(info.spec.release, info.state) for info in store.spaces()] == [
            (1, "previous"), (2, "active"),
        ]  # fmt: skip
        assert store.count(store.active().spec.space) == 3
        # Beside whoever serves it, its format stays.
        with pytest.raises(BusyError, match="a gateway serves from this database"):
            migrate_database(written, 1)
    finally:
        storage.close()
    found = run_json("migrate", "--store", written, "--to", "1")
    assert found == {"before": FORMAT, "after": 1}
    assert everything(written) == before
    assert migrate_database(written, None) == (1, FORMAT)
    with pytest.raises(ConfigurationError, match="knows formats 1 to"):
        migrate_database(written, 9)
    with psycopg.connect(written) as connection:
        connection.execute("UPDATE nobackfill.format SET version = 7")
    with pytest.raises(ConfigurationError, match="of format 7"):
        migrate_database(written, None)
