"""A migration that is killed at random moments loses nothing, and goes on from there."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.adopt.table_beside import Connection
from tests.support.postgres import Server

COUNT = 300
MODELS = """
import hashlib, time
import numpy as np

FINGERPRINT = "{name}"

def embed(texts):
    time.sleep({seconds} * len(texts))
    made = []
    for text in texts:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        vector = np.random.default_rng(seed).normal(size=16)
        made.append((vector * np.array({scale})) / np.linalg.norm(vector * np.array({scale})))
    return made
"""
OLD_SCALE = [1.0] * 4 + [0.05] * 12
NEW_SCALE = [1.0] * 16


def made(text: str, scale: list[float]) -> np.ndarray:
    """The vector that the models of MODELS make of a text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    vector = np.random.default_rng(seed).normal(size=16) * np.array(scale)
    return np.asarray(vector / np.linalg.norm(vector))


class Table:
    """A table `t` of texts, its writers, and the command that migrates it."""

    def __init__(self, address: str, connection: Connection, folder: Path) -> None:
        self.address, self.connection, self.folder = address, connection, folder
        self.bodies = {number: f"text {number}" for number in range(COUNT)}
        for name, scale, seconds in (("oldmodel", OLD_SCALE, 0), ("newmodel", NEW_SCALE, 0.002)):
            text = MODELS.format(name=name, scale=scale, seconds=seconds)
            (folder / f"{name}.py").write_text(text)
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, body text, v vector(16))")
        for number in range(COUNT):
            self.put(number, self.bodies[number])
        connection.execute("CREATE INDEX t_v ON t USING hnsw (v vector_cosine_ops)")

    def put(self, number: int, body: str) -> None:
        self.bodies[number] = body
        vector = str(made(body, OLD_SCALE).tolist())
        self.connection.execute(
            "INSERT INTO t VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE "
            "SET body = EXCLUDED.body, v = EXCLUDED.v",
            (number, body, vector),
        )

    def write(self, rng: np.random.Generator) -> None:
        """As an application that knows the old model alone: change, add and delete a row."""
        known = sorted(self.bodies)
        changed, gone = (known[one] for one in rng.choice(len(known), 2, replace=False))
        self.put(int(changed), f"changed {rng.integers(1 << 30)}")
        self.put(max(known) + 1, f"added {rng.integers(1 << 30)}")
        self.connection.execute("DELETE FROM t WHERE id = %s", [int(gone)])
        del self.bodies[int(gone)]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nobackfill.adopt.cli", "migrate", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str) -> None:
        """To its end, which may have to wait for a session of one that was killed."""
        for _ in range(5):
            process = self.start(*words)
            error = process.communicate(timeout=120)[1].decode()
            if process.returncode != 75:
                break
        assert process.returncode == 0, error

    @property
    def flipped(self) -> bool:
        found = self.connection.execute(
            "SELECT 1 FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'v_before' "
            "AND NOT attisdropped"
        ).fetchall()
        return bool(found)

    def check(self, column: str, scale: list[float]) -> None:
        """Each row has the vector that a model makes of its text; none is lost."""
        rows = self.connection.execute(f"SELECT id, body, {column}::real[] FROM t".encode())
        found = {key: (body, vector) for key, body, vector in rows.fetchall()}
        assert {key: body for key, (body, _) in found.items()} == self.bodies
        for body, vector in found.values():
            np.testing.assert_allclose(vector, made(body, scale), atol=1e-5)

    def check_objects(self, columns: set[str], indexed: int) -> None:
        rows = self.connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 "
            "AND NOT attisdropped"
        ).fetchall()
        assert {name for (name,) in rows} == columns
        valid = self.connection.execute(
            "SELECT indisvalid FROM pg_index JOIN pg_class c ON c.oid = indexrelid "
            "JOIN pg_am m ON m.oid = relam WHERE indrelid = 't'::regclass AND amname = 'hnsw'"
        ).fetchall()
        assert valid == [(True,)] * indexed


@pytest.fixture
def table(postgres: Server, tmp_path: Path) -> Iterator[Table]:
    with postgres.connected() as (address, connection):
        yield Table(address, connection, tmp_path)


def life(table: Table, way: str, kills: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [f"{table.address}#t", "--new", "newmodel:embed", "--column", "body", "-n", "60"]
    table.run(*words)
    file = table.folder / "nobackfill-migration" / "migration.json"
    plan = json.loads(file.read_text())
    plan["way"] = way
    file.write_text(json.dumps(plan))
    words.append("--yes")
    done = 0
    while done < kills:
        if table.flipped:
            # Taken back, it may be killed as well.
            process, limit = table.start("back", "--yes"), 2.5
        else:
            table.write(rng)
            process, limit = table.start(*words), 6.0
        try:
            process.wait(timeout=float(rng.uniform(0.2, limit)))
        except subprocess.TimeoutExpired:
            process.kill()
            done += 1
        process.communicate()
    if table.flipped:
        table.run("back", "--yes")
        table.check("v", OLD_SCALE)
    # A sample that is older than the rows is no reason to keep an old vector.
    plan = json.loads(file.read_text())
    file.write_text(json.dumps(plan | {"way": way, "state": "writing"}))
    table.run(*words)
    if way == "map":
        found = table.connection.execute("SELECT count(*) FROM t WHERE v IS NULL").fetchall()
        assert found == [(0,)]
    else:
        table.check("v", NEW_SCALE)
    table.check("v_before", OLD_SCALE)
    table.check_objects({"id", "body", "v", "v_before"}, 2)
    table.run("finish")
    table.check_objects({"id", "body", "v"}, 1)


def test_two_kills_lose_nothing(table: Table) -> None:
    life(table, "re-embed", 2, seed=1)


@pytest.mark.faults
@pytest.mark.parametrize("way", ["map", "lazily", "re-embed"])
def test_thirty_kills_lose_nothing(table: Table, way: str) -> None:
    life(table, way, 30, seed=2)
