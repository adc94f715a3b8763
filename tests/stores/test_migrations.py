"""Databases that earlier versions wrote (format-N.sql, the pg_dump of a gateway of theirs): opened,
searched, and taken back. What format 3 adds is in test_journal.py."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.filters import Exists, Not, OneOf, Range, TimeRange
from nobackfill.server.storage import Storage, migrate_database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.schema import FORMAT
from tests.gallery.test_filters import holds, moment
from tests.server.test_cli import run_json
from tests.support.postgres import Server
from tests.support.postgresql_searcher import PostgresqlSearcher

OLDER = range(1, FORMAT)
# Of what was told to a Milvus each step keeps nothing: it is told again.
JOURNAL = """
DROP TABLE IF EXISTS nobackfill_2.pending;
DROP FUNCTION IF EXISTS nobackfill_2.note_pending() CASCADE
"""
ITEMS = (
    "SELECT i.id, i.metadata, v.embedding::text FROM nobackfill_1.items i"
    " JOIN nobackfill_1.vectors_2 v USING (label) ORDER BY i.label"
)
# One of each kind that metadata may be of.
FILTERS = (
    OneOf("tag", ("sea",)), OneOf("place", ("Köln", "nowhere")), OneOf("kept", (True,)),
    OneOf("year", (2026.0,)), Range("share", greater_than=0.25, at_most=0.5),
    Range("big", at_least=2**53 + 1), TimeRange("at", less_than=moment("2026-01-02")),
    Not(Exists("tag")),
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A database of an earlier format, and its dump without a Milvus' journal."""

    format: int
    url: str
    dump: str


@pytest.fixture(params=OLDER)
def written(postgres: Server, request: pytest.FixtureRequest) -> Iterator[Written]:
    script = Path(__file__).with_name(f"format-{request.param}.sql").read_text()
    with postgres.database() as url, postgres.database() as other:
        for address, statements in ((url, script), (other, script), (other, JOURNAL)):
            with psycopg.connect(address) as connection:
                connection.execute(statements.encode())
        yield Written(request.param, url, dump(postgres, other))


def dump(server: Server, url: str) -> str:
    """Tables, indexes, triggers and rows, as PostgreSQL's own program tells them, but for what each
    start forgets."""
    command = [
        str(server.programs / "pg_dump"), "--inserts", "--exclude-table-data=nobackfill.commits",
        "--dbname", url,
    ]  # fmt: skip
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A line of its own at both ends names a secret of this dump.
    return "\n".join(line for line in said.splitlines() if not line.startswith("\\"))


def check_searches(store: PostgresqlGallery, url: str) -> None:
    """Items are what the rows say; what passes a filter is found, nearest first."""
    with psycopg.connect(url) as connection:
        found = connection.execute(ITEMS).fetchall()
    ids = [row[0] for row in found]
    metadata = [json.loads(row[1]) for row in found]
    content = np.array([json.loads(row[2]) for row in found], np.float32)
    items = [item for item in store.items(store.labels_of(ids)) if item is not None]
    assert [item.id for item in items] == ids and [item.metadata for item in items] == metadata
    labels = dict(zip(ids, store.labels_of(ids).tolist(), strict=True))
    searcher = PostgresqlSearcher(store.database, store.schema, store.active())
    apart = ((content[:, None].astype(np.float64) - content[None]) ** 2).sum(axis=2)
    for filtered in (None, *FILTERS):
        passing = [filtered is None or holds(filtered, one) for one in metadata]
        nearest = searcher.search(content, len(ids), filtered).labels.tolist()
        for row, answered in enumerate(nearest):
            order = [at for at in np.argsort(apart[row], kind="stable") if passing[at]]
            expected = [labels[ids[at]] for at in order]
            assert answered == expected + [-1] * (len(ids) - len(order)), filtered


def test_what_an_earlier_version_wrote_is_served_and_taken_back(
    written: Written, postgres: Server, tmp_path: Path
) -> None:
    storage = Storage(written.url, tmp_path)
    try:
        assert (storage.state.current.active, storage.state.current.previous) == (2, (1,))
        assert storage.state.current.paused == ("g",)
        store = storage.galleries.open("g").store
        assert isinstance(store, PostgresqlGallery)
        assert [(info.spec.release, info.state) for info in store.spaces()] == [
            (1, "previous"), (2, "active"),
        ]  # fmt: skip
        check_searches(store, written.url)
        if written.format >= 2:
            check_second(storage)
        # Beside whoever serves it, its format stays.
        with pytest.raises(BusyError, match="a gateway serves from it"):
            migrate_database(written.url, written.format)
    finally:
        storage.close()
    forward = dump(postgres, written.url)
    to = str(written.format)
    found = run_json("data", "migrate", "--store", written.url, "--to", to)
    assert found == {"before": FORMAT, "after": written.format}
    assert dump(postgres, written.url) == written.dump
    assert migrate_database(written.url, None) == (written.format, FORMAT)
    assert dump(postgres, written.url) == forward


def check_second(storage: Storage) -> None:
    """What came with several gateways, and a gallery that was beside a Milvus."""
    deeds = [(deed.what, deed.of_what) for deed in storage.state.audit_entries()]
    assert deeds == [("delete", "gallery gone"), ("activate", "release 2")]
    job = storage.state.last_upgrade_record("g")
    assert job is not None and json.loads(job)["state"] == "done"
    assert storage.galleries.names() == ["g", "m"]
    beside = storage.galleries.open("m").store
    assert [item.id for item, _ in beside.list_page(beside.active().spec.space, 9)[0]] == [
        "i1",
        "i2",
    ]


def test_formats_to_which_no_step_leads_are_refused(postgres: Server, tmp_path: Path) -> None:
    with postgres.database() as url:
        with pytest.raises(
            NotFoundError, match="expected a database that a gateway has served from"
        ):
            migrate_database(url, None)
        assert "CREATE SCHEMA" not in dump(postgres, url)
        Storage(url, tmp_path).close()
        assert migrate_database(url, None) == (FORMAT, FORMAT)
        with pytest.raises(ConfigurationError, match="knows formats 1 to"):
            migrate_database(url, 9)
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE nobackfill.format SET version = 7")
        with pytest.raises(ConfigurationError, match=r"of format 7.*use the newer nobackfill that"):
            migrate_database(url, None)
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE nobackfill.format SET written_by = '7.5'")
        with pytest.raises(ConfigurationError, match=r"use nobackfill 7\.5, which wrote it"):
            migrate_database(url, None)


def test_a_newer_state_names_the_version_that_wrote_it(postgres: Server, tmp_path: Path) -> None:
    with postgres.database() as url:
        with closing(Storage(url, tmp_path)) as storage:
            storage.state.change(paused=("g",))
            with psycopg.connect(url) as connection:
                query = "SELECT written_by FROM nobackfill.format"
                assert connection.execute(query).fetchone() == (version("nobackfill"),)
                connection.execute("UPDATE nobackfill.format SET written_by = '7.5'")
                connection.execute("""UPDATE nobackfill.gateway SET value = '{"leases": 1}'""")
            with pytest.raises(VerificationError, match=r"leases.* start nobackfill 7\.5, which"):
                storage.state.refresh()
        with pytest.raises(VerificationError, match=r"leases.* start nobackfill 7\.5, which"):
            Storage(url, tmp_path)
