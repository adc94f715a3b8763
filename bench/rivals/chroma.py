"""Chroma's server, from a virtual environment of its own (`make bench` makes it), over HTTP."""

import http.client
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.loaded import Target
from bench.record import ROOT, library_versions
from bench.rivals.rival import Rival
from demo.calls import HTTP
from demo.load import write_requests
from demo.serve import free_addresses
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.index import Labels
from nobackfill.vectors import Vectors

PROGRAM = ROOT / "build" / "chroma" / "bin" / "chroma"
COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"
ADD_ROWS = 1000
START_SECONDS = 60


class Chroma(Rival):
    """A collection for each ef: it has one for good."""

    name = "Chroma"

    def __init__(
        self, address: str, vectors: Vectors, queries: Vectors, k: int, efs: Sequence[int]
    ) -> None:
        """`efs`: likely ones, whose collections are filled at the same time, each on one core."""
        self.version = library_versions()["chromadb"]
        self._address = address
        self._added, self._bodies = addition_bodies(vectors), query_bodies(queries, k)
        self._paths: dict[int, str] = {}
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._path, efs))

    def load_target(self, ef: int, requests: Path) -> Target:
        return f"{HTTP}{self._address}", self._path(ef), write_requests(requests, self._bodies)

    def search_all(self, ef: int) -> Labels:
        return search_chroma(self._address, self._path(ef), self._bodies)

    def _path(self, ef: int) -> str:
        if ef not in self._paths:
            self._paths[ef] = make_collection(self._address, self._added, ef)
        return self._paths[ef]


@contextmanager
def serve_chroma(
    folder: Path, vectors: Vectors, queries: Vectors, k: int, efs: Sequence[int]
) -> Iterator[Chroma]:
    """A server with its data below `folder`, to the end of the block."""
    with run_chroma(folder) as address:
        yield Chroma(address, vectors, queries, k, efs)


@contextmanager
def run_chroma(folder: Path) -> Iterator[str]:
    """The server with its data below `folder`; its address."""
    address = free_addresses(1)[0]
    host, port = address.split(":")
    command = [PROGRAM, "run", "--path", folder / "chroma", "--host", host, "--port", port]
    with (folder / "chroma.log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        _until_up(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def _until_up(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            _call(address, "GET", "/api/v2/heartbeat")
            return
        except ConnectionError:
            time.sleep(0.1)
    raise RuntimeError(f"Chroma does not answer at {address}")


def addition_bodies(vectors: Vectors) -> list[bytes]:
    """The bodies of the requests that add vector n as item n, ADD_ROWS of them each."""
    bodies = []
    for start in range(0, len(vectors), ADD_ROWS):
        some = vectors[start : start + ADD_ROWS]
        ids = [str(start + row) for row in range(len(some))]
        bodies.append(json.dumps({"ids": ids, "embeddings": some.tolist()}).encode())
    return bodies


def make_collection(address: str, added: list[bytes], ef: int) -> str:
    """A collection of what `added` adds, its graph made like ours; the path of its queries.

    `ef` is fixed here: a change by its API afterwards changed no answer when this was written.
    """
    settings = {
        "space": "l2",
        "ef_construction": hnsw.EF_CONSTRUCTION,
        "max_neighbors": hnsw.LINKS_PER_ROW,
        "ef_search": ef,
    }
    body = {"name": f"bench-{ef}", "configuration": {"hnsw": settings}}
    path = f"{COLLECTIONS}/{_call(address, 'POST', COLLECTIONS, body)['id']}"
    for addition in added:
        _send(address, "POST", f"{path}/add", addition)
    return f"{path}/query"


def query_bodies(queries: Vectors, k: int) -> list[bytes]:
    """One query each, asking for ids and distances, as our Search answers."""
    return [
        json.dumps(
            {"query_embeddings": [query.tolist()], "n_results": k, "include": ["distances"]}
        ).encode()
        for query in queries
    ]


def search_chroma(address: str, path: str, requests: list[bytes]) -> Labels:
    """The numbers of the items found for each query, [q, k]."""
    found = [_send(address, "POST", path, body)["ids"][0] for body in requests]
    return np.array([[int(item) for item in row] for row in found])


def _call(address: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    return _send(address, method, path, None if body is None else json.dumps(body).encode())


def _send(address: str, method: str, path: str, body: bytes | None) -> Any:
    host, port = address.split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"Chroma: {method} {path}: {answer.status} {text[:300]!r}")
    return json.loads(text) if text else None
