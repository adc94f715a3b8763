"""A table `t` in a PostgreSQL, and a map that carries it into a table beside."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.vectors import Vectors, normalise
from tests.adopt.made import world

MADE = world(300)
MAPS = fit_maps(MADE.old, MADE.new)
MAP = MAPS["procrustes"]
TARGET = Target("table:beside", MAP.dims[1], MAP.digest)
Connection = psycopg.Connection[tuple[Any, ...]]


def put(connection: Connection, keys: Sequence[int], vectors: Vectors) -> None:
    rows = [(n, str(v.tolist())) for n, v in zip(keys, vectors, strict=True)]
    connection.cursor().executemany(
        "INSERT INTO t (id, v) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v", rows
    )


def drawn(seed: int, count: int) -> Vectors:
    return normalise(np.random.default_rng(seed).normal(size=(count, 24)).astype(np.float32))


def stale(connection: Connection) -> int:
    """New vectors that are not of what their row holds in the same moment."""
    rows = connection.execute(
        "SELECT t.v::real[], b.v::real[] FROM beside b LEFT JOIN t USING (id) WHERE b.v IS NOT NULL"
    ).fetchall()
    # One without a row is of none.
    kept = [(old, new) for old, new in rows if old is not None]
    if not kept:
        return len(rows)
    old, new = (np.array(part, np.float32) for part in zip(*kept, strict=True))
    return len(rows) - len(kept) + int((np.abs(MAP(old) - new).max(1) > 1e-4).sum())


def carried(address: str, window: int = 50) -> int:
    return carry(open_source(f"{address}#t"), TARGET, MAP, rows_per_window=window).new_vector_count
