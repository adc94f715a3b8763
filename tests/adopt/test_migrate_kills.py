"""A migration that is killed at random moments loses nothing, and goes on from there."""

import hashlib
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import sqlite_vec
from qdrant_client import QdrantClient, models

from nobackfill.adopt.maps import load_map
from nobackfill.plugins.chroma import ChromaServer
from tests.adopt.table_beside import Connection
from tests.support.postgres import Server
from tests.support.waiting import wait_until

COUNT = 300
MODELS = """
import hashlib, os, time
import numpy as np

FINGERPRINT = "{name}"

def embed(texts):
    time.sleep({seconds} * len(texts))
    while os.path.exists("hold"):
        open("reached", "w").close()
        time.sleep(0.02)
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


class Migrated(ABC):
    """A table `t` of texts, its writers, and the command that migrates it."""

    address: str
    name, column = "t", "body"
    busy = "another `nobackfill migrate` writes to this table"

    def __init__(self, folder: Path, count: int = COUNT) -> None:
        self.folder = folder
        self.bodies = {number: f"text {number}" for number in range(count)}
        pace = min(0.002, 6 / count)
        for name, scale, seconds in (("oldmodel", OLD_SCALE, 0), ("newmodel", NEW_SCALE, pace)):
            text = MODELS.format(name=name, scale=scale, seconds=seconds)
            (folder / f"{name}.py").write_text(text)

    @abstractmethod
    def put(self, number: int, body: str) -> None: ...

    @abstractmethod
    def delete(self, number: int) -> None: ...

    @property
    @abstractmethod
    def flipped(self) -> bool: ...

    @abstractmethod
    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        """Read key, text and vector of each row; `column` is v or v_before."""

    @abstractmethod
    def check_objects(self, finished: bool) -> None:
        """Check that nothing else is left."""

    def write(self, rng: np.random.Generator) -> None:
        """As an application that knows the old model alone: change, add and delete a row."""
        known = sorted(self.bodies)
        changed, gone = (known[one] for one in rng.choice(len(known), 2, replace=False))
        self.put(int(changed), f"changed {rng.integers(1 << 30)}")
        self.put(max(known) + 1, f"added {rng.integers(1 << 30)}")
        self.delete(int(gone))
        del self.bodies[int(gone)]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nobackfill.adopt.cli", "migrate", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    @property
    def words(self) -> list[str]:
        """The command's words, but for --yes."""
        source = f"{self.address}#{self.name}"
        return [source, "--new", "newmodel:embed", "--column", self.column, "-n", "60"]

    def run(self, *words: str) -> None:
        """To its end, which may have to wait for a session of one that was killed."""
        for _ in range(5):
            process = self.start(*words)
            error = process.communicate(timeout=600)[1].decode()
            if process.returncode != 75:
                break
        assert process.returncode == 0, error

    def check(self, column: str, scale: list[float]) -> None:
        """Each row has the vector that a model makes of its text; none is lost."""
        rows = self.found(column)
        found = {key: (body, vector) for key, body, vector in rows}
        assert len(rows) == len(found)
        assert {key: body for key, (body, _) in found.items()} == self.bodies
        for body, vector in found.values():
            assert vector is not None
            np.testing.assert_allclose(vector, made(body, scale), atol=1e-5)

    def check_mapped(self) -> None:
        """Each row has the map of its present old vector; none is lost."""
        mapping = load_map(self.folder / "nobackfill-migration" / "map.npz")
        old = {key: vector for key, _, vector in self.found("v_before")}
        found = {key: vector for key, _, vector in self.found("v")}
        assert found.keys() == old.keys() == self.bodies.keys()
        wanted = mapping(np.array([old[key] for key in found], np.float32))
        np.testing.assert_allclose(np.array(list(found.values())), wanted, atol=1e-5)


class Table(Migrated):
    """A table of PostgreSQL."""

    def __init__(
        self, address: str, connection: Connection, folder: Path, count: int = COUNT
    ) -> None:
        super().__init__(folder, count)
        self.address, self.connection = address, connection
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, body text, v vector(16))")
        with connection.transaction():
            for number in range(count):
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

    def delete(self, number: int) -> None:
        self.connection.execute("DELETE FROM t WHERE id = %s", [number])

    @property
    def flipped(self) -> bool:
        found = self.connection.execute(
            "SELECT 1 FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'v_before' "
            "AND NOT attisdropped"
        ).fetchall()
        return bool(found)

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        query = f"SELECT id, body, {column}::real[] FROM t".encode()
        return self.connection.execute(query).fetchall()

    def check_objects(self, finished: bool) -> None:
        rows = self.connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 "
            "AND NOT attisdropped"
        ).fetchall()
        assert {name for (name,) in rows} == {"id", "body", "v"} | (
            set() if finished else {"v_before"}
        )
        valid = self.connection.execute(
            "SELECT indisvalid FROM pg_index JOIN pg_class c ON c.oid = indexrelid "
            "JOIN pg_am m ON m.oid = relam WHERE indrelid = 't'::regclass AND amname = 'hnsw'"
        ).fetchall()
        assert valid == [(True,)] * (1 if finished else 2)


class LanceTable(Migrated):
    """A table of LanceDB."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"lancedb:{folder / 'lance'}"
        database = lancedb.connect(folder / "lance", read_consistency_interval=timedelta(0))
        self.table = database.create_table("t", self._rows(self.bodies))

    def _rows(self, bodies: dict[int, str]) -> pa.Table:
        vectors = np.array([made(body, OLD_SCALE) for body in bodies.values()], np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 16)
        return pa.table({"id": list(bodies), "body": list(bodies.values()), "v": column})

    def put(self, number: int, body: str) -> None:
        self.bodies[number] = body
        upsert = self.table.merge_insert("id").when_matched_update_all()
        upsert.when_not_matched_insert_all().execute(self._rows({number: body}))

    def delete(self, number: int) -> None:
        self.table.delete(f"id = {number}")

    @property
    def flipped(self) -> bool:
        return "v_before" in self.table.schema.names

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        rows = self.table.search().select(["id", "body", column]).to_arrow().to_pylist()
        return [(row["id"], row["body"], row[column]) for row in rows]

    def check_objects(self, finished: bool) -> None:
        old = set() if finished else {"v_before", "nobackfill_of_v_new"}
        assert set(self.table.schema.names) == {"id", "body", "v"} | old


class SqliteTable(Migrated):
    """A virtual table of sqlite-vec."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"sqlite:{folder / 't.db'}"
        self.connection = apsw.Connection(str(folder / "t.db"))
        self.connection.set_busy_timeout(20_000)
        self.connection.enable_load_extension(True)
        sqlite_vec.load(self.connection)
        self.connection.execute(
            "CREATE VIRTUAL TABLE t USING vec0(id integer primary key, "
            "v float[16] distance_metric=cosine, +body text)"
        )
        for number, body in self.bodies.copy().items():
            self.put(number, body)

    def put(self, number: int, body: str) -> None:
        self.bodies[number] = body
        vector = made(body, OLD_SCALE).astype("<f4").tobytes()
        with self.connection:
            self.delete(number)
            self.connection.execute(
                "INSERT INTO t (id, v, body) VALUES (?, ?, ?)", (number, vector, body)
            )

    def delete(self, number: int) -> None:
        self.connection.execute("DELETE FROM t WHERE id = ?", (number,))

    def _names(self) -> set[str]:
        query = "SELECT name FROM sqlite_master WHERE sql LIKE '%USING vec0%'"
        return {str(name) for (name,) in self.connection.execute(query)}

    @property
    def flipped(self) -> bool:
        return "t_before" in self._names()

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        rows = self.connection.execute(f"SELECT id, body, v FROM {column.replace('v', 't', 1)}")
        return [(key, body, np.frombuffer(v, "<f4").tolist()) for key, body, v in rows]

    def check_objects(self, finished: bool) -> None:
        assert self._names() == {"t"} | (set() if finished else {"t_before"})
        assert self.connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = self.connection.execute("SELECT count(*) FROM nobackfill_items").fetchall()
        assert rows == [(0 if finished else len(self.bodies),)]


class QdrantCollection(Migrated):
    """A collection of Qdrant in a folder; only one process may have it open."""

    busy = "already accessed by another instance"

    def __init__(self, folder: Path, place: Path) -> None:
        super().__init__(folder)
        self.place, self.address = place, f"qdrant:{place}"
        with self.opened() as client:
            params = models.VectorParams(size=16, distance=models.Distance.COSINE)
            client.create_collection("t", vectors_config={"v": params})
            points = [self._point(number, body) for number, body in self.bodies.items()]
            client.upsert("t", points)

    @contextmanager
    def opened(self) -> Iterator[QdrantClient]:
        with closing(QdrantClient(path=str(self.place))) as client:
            yield client

    def _point(self, number: int, body: str) -> models.PointStruct:
        vector = made(body, OLD_SCALE).tolist()
        return models.PointStruct(id=number, vector={"v": vector}, payload={"body": body})

    def put(self, number: int, body: str) -> None:
        """As a whole point, or only its old vector and its text, which leaves the new vector."""
        with self.opened() as client:
            if number in self.bodies and number % 2:
                vector = {"v": made(body, OLD_SCALE).tolist()}
                client.update_vectors("t", [models.PointVectors(id=number, vector=vector)])
                client.set_payload("t", {"body": body}, points=[number])
            else:
                client.upsert("t", [self._point(number, body)])
        self.bodies[number] = body

    def delete(self, number: int) -> None:
        with self.opened() as client:
            client.delete("t", [number])

    @property
    def flipped(self) -> bool:
        with self.opened() as client:
            marks = (client.get_collection("t").config.metadata or {}).get("nobackfill") or {}
        return any("flipped" in mark for mark in marks.values())

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        name = "v_new" if column == "v" and self.flipped else "v"
        return [
            (int(point.id), point.payload["body"], point.vector.get(name))
            for point in self._points()
        ]

    def _points(self) -> list[Any]:
        with self.opened() as client:
            return client.scroll("t", limit=10_000, with_payload=True, with_vectors=True)[0]

    def check_objects(self, finished: bool) -> None:
        with self.opened() as client:
            vectors = client.get_collection("t").config.params.vectors
            collections = {one.name for one in client.get_collections().collections}
        assert isinstance(vectors, dict)
        assert vectors.keys() == {"v_new"} | (set() if finished else {"v"})
        assert collections == {"t"} | (set() if finished else {"t-nobackfill-v_new"})
        assert all(point.payload.keys() == {"body"} for point in self._points())


class ChromaTable(Migrated):
    """A collection of Chroma. Its writer holds its id, as Chroma's clients do."""

    name, column = "docs", "document"

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder)
        self.address = f"chroma:http://{address}"
        self.server = ChromaServer(f"http://{address}")
        for one in self._send("GET", ""):
            self._send("DELETE", f"/{one['name']}")
        index = {"hnsw": {"space": "cosine"}}
        made_here = self._send("POST", "", {"name": "docs", "configuration": index})
        self.id = made_here["id"]
        self._put(self.bodies)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.server.request_json(method, path, "docs", body)

    def _put(self, bodies: dict[int, str]) -> None:
        body = {
            "ids": [str(number) for number in bodies],
            "embeddings": [made(text, OLD_SCALE).tolist() for text in bodies.values()],
            "documents": list(bodies.values()),
            "metadatas": [{"length": len(text)} for text in bodies.values()],
        }
        self._send("POST", f"/{self.id}/upsert", body)

    def put(self, number: int, body: str) -> None:
        self.bodies[number] = body
        self._put({number: body})

    def delete(self, number: int) -> None:
        self._send("POST", f"/{self.id}/delete", {"ids": [str(number)]})

    def names(self) -> dict[str, dict[str, Any]]:
        """The collections by name."""
        return {one["name"]: one for one in self._send("GET", "")}

    @property
    def flipped(self) -> bool:
        led = self.names().get("docs")
        return led is not None and (led["metadata"] or {}).get("nobackfill_flip") == "done"

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        path = f"/{self.names()['docs' + column.removeprefix('v')]['id']}/get"
        include = ["embeddings", "documents", "metadatas"]
        answer = self._send("POST", path, {"include": include})
        for text, values in zip(answer["documents"], answer["metadatas"], strict=True):
            assert values["length"] == len(text)
        parts = (answer["ids"], answer["documents"], answer["embeddings"])
        return [(int(key), text, vector) for key, text, vector in zip(*parts, strict=True)]

    def check_objects(self, finished: bool) -> None:
        names = self.names()
        assert set(names) == {"docs"} | (set() if finished else {"docs_before"})
        assert names["docs"]["configuration_json"]["hnsw"]["space"] == "cosine"
        assert finished or names["docs_before"]["id"] == self.id


class MilvusTable(Migrated):
    """A collection of Milvus that its application opens by the alias `t`, on a server or in a file
    of milvus-lite, which only one process may have open."""

    def __init__(self, folder: Path, place: str) -> None:
        from pymilvus import DataType

        super().__init__(folder)
        self.place, self.address = place, f"milvus:{place}"
        if "://" not in place:
            self.busy = "another process has opened it"
        with self.opened() as client:
            schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", DataType.INT64, is_primary=True)
            schema.add_field("body", DataType.VARCHAR, max_length=200)
            schema.add_field("v", DataType.FLOAT_VECTOR, dim=16)
            index = client.prepare_index_params()
            index.add_index("v", index_type="FLAT", metric_type="COSINE", params={})
            client.create_collection("docs", schema=schema, index_params=index)
            client.create_alias("docs", "t")
            client.upsert("docs", [self._row(*one) for one in self.bodies.items()])

    def _row(self, number: int, body: str) -> dict[str, object]:
        return {"id": number, "body": body, "v": made(body, OLD_SCALE).astype(np.float32)}

    @contextmanager
    def opened(self) -> Iterator[Any]:
        from pymilvus import MilvusClient

        with closing(MilvusClient(uri=self.place)) as client:
            yield client
        if "://" not in self.place:
            manager = import_module("milvus_lite.server_manager").server_manager_instance
            manager.release_server(self.place)

    def put(self, number: int, body: str) -> None:
        self.bodies[number] = body
        with self.opened() as client:
            client.upsert("t", [self._row(number, body)])

    def delete(self, number: int) -> None:
        with self.opened() as client:
            client.delete("t", ids=[number])

    @property
    def flipped(self) -> bool:
        with self.opened() as client:
            return str(client.describe_collection("t")["collection_name"]) != "docs"

    def found(self, column: str) -> list[tuple[int, str, list[float] | None]]:
        name = "t" if column == "v" else "docs"
        with self.opened() as client:
            client.load_collection(name)
            rows = client.query(
                name, filter="id >= 0", output_fields=["*"], consistency_level="Strong"
            )
            return [(row["id"], row["body"], row["v"]) for row in rows]

    def check_objects(self, finished: bool) -> None:
        with self.opened() as client:
            names = set(client.list_collections())
            assert client.describe_collection("t")["collection_name"] == "docs_new"
            assert len(client.list_indexes("docs_new")) == 1
        assert names == {"docs_new"} | (set() if finished else {"docs"})

    def clear(self) -> None:
        with self.opened() as client:
            client.drop_alias("t")
            for name in client.list_collections():
                client.drop_collection(name)


_SCALE = [
    pytest.param(name, marks=pytest.mark.scale) for name in ("chroma", "milvus-lite", "milvus")
]


@pytest.fixture(params=["pgvector", "lancedb", "sqlite-vec", "qdrant", *_SCALE])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Migrated]:
    if request.param == "chroma":
        yield ChromaTable(tmp_path, request.getfixturevalue("chroma_address"))
        return
    if request.param == "milvus-lite":
        pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
        yield MilvusTable(tmp_path, str(tmp_path / "t.db"))
        return
    if request.param == "milvus":
        address = request.getfixturevalue("milvus_address").removeprefix("milvus+")
        made_there = MilvusTable(tmp_path, address)
        yield made_there
        made_there.clear()
        return
    if request.param == "pgvector":
        server: Server = request.getfixturevalue("postgres")
        with server.connected() as (address, connection):
            yield Table(address, connection, tmp_path)
    elif request.param == "qdrant":
        # In memory, where there is such a folder: it commits each point to the disk on its own.
        memory = Path("/dev/shm")
        with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
            yield QdrantCollection(tmp_path, Path(place))
    else:
        yield (LanceTable if request.param == "lancedb" else SqliteTable)(tmp_path)


def life(table: Migrated, way: str, kills: int, seed: int, seconds: float = 6.0) -> None:
    rng = np.random.default_rng(seed)
    words = table.words
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
            process, limit = table.start("back", "--yes"), seconds / 2.4
        else:
            table.write(rng)
            process, limit = table.start(*words), seconds
        try:
            process.wait(timeout=float(rng.uniform(0.2, limit)))
        except subprocess.TimeoutExpired:
            process.kill()
            done += 1
        process.communicate()
    # Since the first `back`, the verdict of the run that was killed last may be another way.
    table.run("back", "--yes")
    table.check("v", OLD_SCALE)
    # A sample that is older than the rows is no reason to keep an old vector.
    plan = json.loads(file.read_text())
    file.write_text(json.dumps(plan | {"way": way, "state": "writing"}))
    table.run(*words)
    if way == "map":
        table.check_mapped()
    else:
        table.check("v", NEW_SCALE)
    table.check("v_before", OLD_SCALE)
    table.check_objects(finished=False)
    table.run("finish")
    table.check_objects(finished=True)


@pytest.mark.long
def test_two_folders_never_write_the_same_table(table: Migrated) -> None:
    words = table.words
    table.run(*words)
    table.run(*words, "--work", "second")
    hold, reached = table.folder / "hold", table.folder / "reached"
    hold.touch()
    first = table.start(*words, "--yes")
    wait_until(
        lambda: reached.exists() or first.poll() is not None,
        "the first migration embeds rows",
        seconds=300,
    )
    for second in ([*words, "--yes"], ["back"]):
        process = table.start(*second, "--work", "second")
        error = process.communicate(timeout=600)[1].decode()
        assert process.returncode == 75, error
        assert table.busy in error
    hold.unlink()
    error = first.communicate(timeout=600)[1].decode()
    assert first.returncode == 0, error
    table.check("v", NEW_SCALE)
    # The lock is free again, and the second one sees what the first has done.
    process = table.start(*words, "--yes", "--work", "second")
    error = process.communicate(timeout=600)[1].decode()
    assert process.returncode not in (0, 75), error
    assert "another migration has changed which vectors answer searches" in error
    assert not list(table.folder.rglob("*nobackfill.lock"))
    # The advice is for this store: only PostgreSQL has comments.
    file = table.folder / "second" / "migration.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "flipped", "mark": "m"}))
    process = table.start("status", "--work", "second")
    error = process.communicate(timeout=600)[1].decode()
    assert process.returncode == 65, error
    assert ("COMMENT ON" in error) == table.address.startswith("postgresql:"), error
    assert "--work" in error or "COMMENT ON" in error


@pytest.mark.long
def test_two_kills_lose_nothing(table: Migrated) -> None:
    life(table, "re-embed", 2, seed=1)


@pytest.mark.faults
@pytest.mark.parametrize("way", ["map", "lazily", "re-embed"])
def test_thirty_kills_lose_nothing(table: Migrated, way: str) -> None:
    life(table, way, 30, seed=2)


@pytest.mark.faults
@pytest.mark.parametrize("way", ["map", "lazily", "re-embed"])
def test_thirty_kills_of_a_large_table_lose_nothing(
    postgres: Server, tmp_path: Path, way: str
) -> None:
    with postgres.connected() as (address, connection):
        life(Table(address, connection, tmp_path, 20_000), way, 30, seed=3, seconds=16.0)
