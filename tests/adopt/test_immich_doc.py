"""docs/immich.md, its commands as they are: a database with Immich's types and constraints, and a
machine learning service that answers as Immich's does."""

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.maps import load_map
from tests.adopt.made import world
from tests.support import hosts
from tests.support.documents import blocks, page, run_script
from tests.support.postgres import Server

PAGE = page("docs/immich.md")
MADE = world(260)
IDS = [str(uuid.UUID(int=n + 1, version=4)) for n in range(260)]
OLD, NEW = "ViT-B-32__openai", "ViT-B-16-SigLIP2__webli"
TABLES = (
    "CREATE EXTENSION vector",
    "CREATE TABLE asset (id uuid PRIMARY KEY DEFAULT gen_random_uuid())",
    'CREATE TABLE asset_file (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), "assetId" uuid NOT '
    "NULL REFERENCES asset ON DELETE CASCADE, type varchar NOT NULL, path varchar NOT NULL, "
    '"isEdited" boolean NOT NULL DEFAULT false, UNIQUE ("assetId", type, "isEdited"))',
    'CREATE TABLE smart_search ("assetId" uuid PRIMARY KEY REFERENCES asset ON DELETE CASCADE '
    "ON UPDATE CASCADE, embedding vector(24) NOT NULL)",
    "ALTER TABLE smart_search ALTER COLUMN embedding SET STORAGE EXTERNAL",
    "CREATE INDEX clip_index ON smart_search USING hnsw (embedding vector_cosine_ops) "
    "WITH (ef_construction = 300, m = 16)",
    "CREATE TABLE system_metadata (key varchar PRIMARY KEY, value jsonb NOT NULL)",
)
PUT = (
    'INSERT INTO smart_search ("assetId", embedding) VALUES (%s, %s) '
    'ON CONFLICT ("assetId") DO UPDATE SET embedding = EXCLUDED.embedding'
)


class Predict(BaseHTTPRequestHandler):
    """POST /predict of Immich's machine learning: forms in, a vector as text in JSON out."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        new = NEW in body
        row = int(re.findall(r"(?:picture|query) (\d+)", body)[0])
        if '"visual"' in body:
            vector = (MADE.new if new else MADE.old)[row]
        else:
            vector = (MADE.queries_new if new else MADE.queries_old)[row]
        answer = json.dumps({"clip": json.dumps(vector.tolist())}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said."""


@contextmanager
def machine_learning() -> Iterator[str]:
    server = hosts.Host(("127.0.0.1", 0), Predict)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/predict"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def immich(postgres: Server, tmp_path: Path) -> Iterator[tuple[str, psycopg.Connection]]:
    with postgres.connected() as (address, connection):
        for statement in TABLES:
            connection.execute(statement.encode())
        rows = []
        for number, name in enumerate(IDS):
            path = tmp_path / f"{name}-preview.jpeg"
            path.write_text(f"picture {number} ")
            rows.append((name, str(path)))
        cursor = connection.cursor()
        with connection.transaction():
            cursor.executemany("INSERT INTO asset VALUES (%s)", [(name,) for name in IDS])
            cursor.executemany(
                "INSERT INTO asset_file (\"assetId\", type, path) VALUES (%s, 'preview', %s)", rows
            )
            # Edited pictures have a second preview, which shows something else.
            edited = tmp_path / "edited-preview.jpeg"
            edited.write_text("picture 7 ")
            cursor.executemany(
                'INSERT INTO asset_file ("assetId", type, path, "isEdited") VALUES '
                "(%s, 'preview', %s, true)",
                [(name, str(edited)) for name in IDS[:40]],
            )
            stored = [(n, str(v.tolist())) for n, v in zip(IDS, MADE.old, strict=True)]
            cursor.executemany(PUT.encode(), stored)
        yield address, connection


def column(connection: psycopg.Connection) -> tuple[object, ...] | None:
    """Type of the searched column, whether it must be there, what the index called clip_index is
    of, the model in the settings."""
    return connection.execute(
        "SELECT format_type(atttypid, atttypmod), attnotnull, "
        "(SELECT pg_get_indexdef('clip_index'::regclass, 1, true)), "
        "(SELECT value #>> '{machineLearning,clip,modelName}' FROM system_metadata) "
        "FROM pg_attribute WHERE attrelid = 'smart_search'::regclass AND attname = 'embedding'"
    ).fetchone()


def searched(connection: psycopg.Connection) -> dict[str, str]:
    """What searches look at, by asset."""
    rows = connection.execute('SELECT "assetId"::text, embedding::text FROM smart_search')
    return {str(name): str(vector) for name, vector in rows}


def test_immichs_search_changes_its_model_and_goes_back(
    immich: tuple[str, psycopg.Connection], tmp_path: Path
) -> None:
    address, connection = immich
    asked = [
        {"id": IDS[answer], "text": f"query {number} "}
        for number, answer in enumerate(MADE.answers[:60])
    ]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))
    ((_, module),) = blocks(PAGE, "python")
    (tmp_path / "immich_clip.py").write_text(module)
    flip, back = (text for _, text in blocks(PAGE, "sql"))
    (tmp_path / "immich.sql").write_text(flip)
    (tmp_path / "back.sql").write_text(back)
    fit, carry, flipping = (text for _, text in blocks(PAGE, "sh"))
    with machine_learning() as predict:
        fit = fit.replace("postgresql:///immich", address).replace("-n 2000", "-n 150")
        fit = fit.replace("http://localhost:3003/predict", predict)
        # psql knows the database by its environment, as the page's reader has it.
        fit = fit.replace("psql ", f"psql '{address}' ")
        said = run_script(fit, tmp_path, {}, 120)
    assert "verdict: " in said and "finding that very item" in said
    given = {"SOURCE": f"{address}#smart_search"}
    assert "260 vectors written now" in run_script(carry, tmp_path, given, 60)
    stored = searched(connection)
    flipping = flipping.replace("psql ", f"psql '{address}' ")
    run_script(flipping, tmp_path, given, 60)
    assert column(connection) == ("vector(32)", True, "embedding", NEW)
    found = searched(connection)
    mapped = load_map(tmp_path / "map.npz")(MADE.old)
    for name, vector in zip(IDS, mapped, strict=True):
        np.testing.assert_allclose(json.loads(found[name]), vector, atol=1e-5)
    # As Immich writes, and deletes.
    late = str(uuid.uuid4())
    connection.execute("INSERT INTO asset VALUES (%s)", [late])
    connection.execute(PUT.encode(), (late, str(MADE.new[0].tolist())))
    connection.execute("DELETE FROM asset WHERE id = %s", [IDS[0]])
    run_script(f"psql '{address}' -v ON_ERROR_STOP=1 -v old={OLD} -f back.sql", tmp_path, given, 60)
    assert column(connection) == ("vector(24)", True, "embedding", OLD)
    after = searched(connection)
    del stored[IDS[0]]
    assert after == stored
