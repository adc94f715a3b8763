"""The application whose table it is: wares with vectors in PostgreSQL, and its search by SQL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pyarrow.parquet as pq

from demo.adoption.wares import Row

TABLE = "documents"


class Shop:
    """The table `documents (id, body, embedding)`."""

    def __init__(self, address: str) -> None:
        self.source = f"{address}#{TABLE}"
        self._connection = psycopg.connect(address, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def refill(self, wares: Sequence[Row], vectors: Path) -> None:
        """Anew, with vectors that `nobackfill embed` made."""
        made = read_vectors_by_id(vectors)
        dim = len(next(iter(made.values())))
        self._run("CREATE EXTENSION IF NOT EXISTS vector")
        self._run("DROP TABLE IF EXISTS documents CASCADE")
        self._run("CREATE TABLE documents (id text PRIMARY KEY, body text, embedding vector)")
        if isinstance(wares[0][0], int):
            self._run("ALTER TABLE documents ALTER id TYPE int USING id::int")
        self._connection.execute(f"ALTER TABLE documents ALTER embedding TYPE vector({int(dim)})")
        with (
            self._connection.cursor() as cursor,
            cursor.copy("COPY documents (id, body, embedding) FROM STDIN") as rows,
        ):
            for key, body in wares:
                rows.write_row((key, body, str(made[str(key)])))

    def nearest_ids(self, vector: list[float], k: int) -> list[str]:
        """Ids by the column that searches use."""
        found = self._run(
            "SELECT id::text FROM documents ORDER BY embedding <=> %s::vector LIMIT %s",
            json.dumps(vector), k,
        )  # fmt: skip
        return [str(one) for (one,) in found]

    def run_flip_statements(self, steps: list[str]) -> None:
        """The statements that `nobackfill carry` told."""
        for step in steps:
            if step.startswith(("CREATE INDEX", "BEGIN")):
                self._connection.execute(step)

    def _run(self, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query, values)
        return cursor.fetchall() if cursor.description else []


def read_vectors_by_id(folder: Path) -> dict[str, list[float]]:
    """By id, from a folder that `nobackfill embed` wrote."""
    table = pq.read_table(folder)
    return dict(zip(table["id"].to_pylist(), table["vector"].to_pylist(), strict=True))
