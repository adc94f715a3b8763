"""A server opens sources before it forks its workers: each process has its own connections."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from qdrant_client import QdrantClient, models

from nobackfill.errors import ConfigurationError, NobackfillError
from nobackfill.serving import FunctionItems, LedgerFile, ReembeddingLimits
from tests.adopt.copies import Chroma
from tests.adopt.stores import MADE, Pgvector
from tests.serving.test_reembedding import Keeping
from tests.support.postgres import Server

_TOP = Path(__file__).parents[2]
WORKERS = [f"worker {number}" for number in range(3)]


def told(address: str, folder: Path) -> dict[str, list[str]]:
    """Errors of each process; all of the natives are there in the end."""
    path = folder / "natives.db"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.adopt.forking", address, path],
        capture_output=True, text=True, timeout=120, check=False, cwd=_TOP,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (count,) = connection.execute("SELECT count(*) FROM native").fetchone()
    connection.close()
    assert count > 60
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.long
def test_each_process_has_its_own_connection_to_postgresql(
    postgres: Server, tmp_path: Path
) -> None:
    with postgres.connected() as (address, connection):
        Pgvector(address, connection)
        assert not any(told(f"{address}#Documents", tmp_path).values())


@pytest.mark.long
def test_a_folder_of_qdrant_stays_with_its_opener(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    client = QdrantClient(path=str(folder))
    params = models.VectorParams(size=24, distance=models.Distance.COSINE)
    client.create_collection("docs", vectors_config={"vector": params})
    points = [
        models.PointStruct(id=name, vector={"vector": vector.tolist()})
        for name, vector in zip(MADE.ids, MADE.old, strict=True)
    ]
    client.upload_points("docs", points, wait=True)
    client.close()
    found = told(f"qdrant:{folder}#docs", tmp_path)
    assert not (found["before"] or found["meanwhile"] or found["after"])
    for worker in WORKERS:
        assert "already accessed" in found[worker][0] and found[worker][0].startswith("BusyError")


@pytest.mark.scale
def test_each_process_has_its_own_connection_to_chroma(chroma_address: str, tmp_path: Path) -> None:
    made = Chroma(chroma_address, MADE)
    assert not any(told(f"chroma:http://{chroma_address}#docs", tmp_path).values())
    made.close()


@pytest.mark.scale
def test_milvus_is_refused_in_a_forked_process(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    path = tmp_path / "m.db"
    # In a process of its own: the file is its server's until that ends.
    script = "from tests.adopt import copies, stores; import sys; "
    script += "copies.Milvus(sys.argv[1], stores.MADE)"
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=_TOP, timeout=60)
    found = told(f"milvus:{path}#docs", tmp_path)
    assert not (found["before"] or found["meanwhile"] or found["after"])
    for worker in WORKERS:
        assert "open it after the fork, in each process" in found[worker][0]


def test_what_embeds_again_is_refused_in_a_forked_process(tmp_path: Path) -> None:
    items = FunctionItems(lambda name: name, "text")
    again = Keeping(items, ReembeddingLimits(), LedgerFile(tmp_path / "ledger.sqlite"))
    if not (child := os.fork()):
        refused = False
        try:
            again.reembed({"a": "a"})
        except NobackfillError as error:
            refused = isinstance(error, ConfigurationError)
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    again.close()
