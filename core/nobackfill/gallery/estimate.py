"""What an upgrade will cost, from a short measured probe that changes nothing."""

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nobackfill import durable
from nobackfill.gallery.access import connect
from nobackfill.gallery.creation import PAGE_BYTES
from nobackfill.gallery.remaining import Remaining
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.store import Store
from nobackfill.gallery.tables import VECTOR_TABLE, vector_table
from nobackfill.gallery.upgrade import Runner
from nobackfill.gallery.writing import Checked, NewVectors, check, insert_vectors
from nobackfill.release.models import CHUNK

# Chunks that are carried to measure the next ones, after a few rows that make the runner ready.
_CHUNKS = 2
_FIRST_ROWS = 8


@dataclass(frozen=True)
class Estimate:
    """`seconds`: reading, carrying and writing without pauses. `bytes`: what the space adds to the
    file on disk. `left_behind`: items that cannot go."""

    items: int
    seconds: float
    bytes: int
    left_behind: int


def estimate(
    store: Store, runner: Runner, target: SpaceSpec, scratch: Path, *, source: str | None = None
) -> Estimate:
    """Cost of `run_upgrade`, before anything starts.

    Two chunks of items are read, carried and written durably to a temporary file in the folder
    `scratch`, on the gallery's disk; `durable.sweep` removes what a kill leaves of it.
    Raises InvalidInputError for a bad output of the runner, CannotWriteError.
    """
    remaining = Remaining(store, source or store.active().spec.space, target, runner.reads_side)
    todo = remaining.all_labels()
    done = 0 if remaining.target is None else store.count(target.space)
    left_behind = store.count() - done - len(todo)
    if not len(todo):
        return Estimate(0, 0.0, 0, left_behind)
    # Spread over the gallery.
    most = _CHUNKS * CHUNK
    probe = todo[:: max(1, len(todo) // most)][:most]
    runner.run(*remaining.read(probe[:_FIRST_ROWS], runner.reads_side)[1:])
    aside = _Aside(target)
    began = time.perf_counter()
    temporary = tempfile.TemporaryDirectory(prefix=f"{durable.TEMPORARY}estimate-", dir=scratch)
    with temporary as folder, aside.open(Path(folder) / "probe.sqlite") as connection:
        for start in range(0, len(probe), CHUNK):
            rows = probe[start : start + CHUNK]
            labels, embedding, side = remaining.read(rows, runner.reads_side)
            upgraded = runner.run(embedding, side)
            new = NewVectors(target.space, upgraded.embedding, upgraded.side)
            aside.write(connection, check(aside.info, new, len(labels)), labels)
        seconds = time.perf_counter() - began
        written = aside.bytes(connection)
    share = len(todo) / len(probe)
    return Estimate(len(todo), seconds * share, int(written * share), left_behind)


class _Aside:
    """A file set up as a gallery's, with one table of vectors."""

    def __init__(self, target: SpaceSpec) -> None:
        self.info = SpaceInfo(target, "staging", 1, 0)

    @contextmanager
    def open(self, path: Path) -> Iterator[sqlite3.Connection]:
        with closing(connect(path)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            # Its vectors belong to items of another file.
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute(VECTOR_TABLE.format(name=vector_table(self.info.number)))
            yield connection

    def write(self, connection: sqlite3.Connection, checked: Checked, labels: Labels) -> None:
        with durable.transaction(connection):
            insert_vectors(connection, checked, labels)

    def bytes(self, connection: sqlite3.Connection) -> int:
        """Size of the table: every page but that of the schema."""
        pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
        return (pages - 1) * PAGE_BYTES
