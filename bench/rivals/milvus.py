"""Milvus standalone, from PyPI, over gRPC."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.loaded import Target
from bench.rivals.rival import Rival
from demo.load import write_requests
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.index import Labels
from nobackfill.vectors import Vectors
from tests.support.milvus import running

SEARCH = "/milvus.proto.milvus.MilvusService/Search"
_NAME = "items"
_ROWS = 5_000
# It indexes what was flushed when it finds the time.
_INDEXED_S = 600.0


class Milvus(Rival):
    """One collection. Answers need not hold what was written a moment ago: nothing was."""

    name = "Milvus"

    def __init__(self, address: str, vectors: Vectors, queries: Vectors, k: int) -> None:
        from pymilvus import DataType, MilvusClient

        self._address, self._queries, self._k = address, queries, k
        self._client: Any = MilvusClient(uri=f"http://{address}")
        self.version = str(self._client.get_server_version()).removeprefix("v")
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=vectors.shape[1])
        self._client.create_collection(_NAME, schema=schema)
        for start in range(0, len(vectors), _ROWS):
            some = vectors[start : start + _ROWS]
            rows = [{"id": start + n, "embedding": vector} for n, vector in enumerate(some)]
            self._client.insert(_NAME, rows)
        self._client.flush(_NAME)
        index = self._client.prepare_index_params()
        index.add_index(
            "embedding", index_type="HNSW", metric_type="L2",
            params={"M": hnsw.LINKS_PER_ROW, "efConstruction": hnsw.EF_CONSTRUCTION},
        )  # fmt: skip
        self._client.create_index(_NAME, index)
        self._until_indexed(len(vectors))
        self._client.load_collection(_NAME)

    def _until_indexed(self, rows: int) -> None:
        end = time.monotonic() + _INDEXED_S
        while time.monotonic() < end:
            state = self._client.describe_index(_NAME, "embedding")
            if int(state["indexed_rows"]) >= rows and not int(state["pending_index_rows"]):
                return
            time.sleep(1)
        raise RuntimeError(f"Milvus has not indexed {rows} rows within {_INDEXED_S:.0f} s")

    def load_target(self, ef: int, requests: Path) -> Target:
        from pymilvus.client.prepare import Prepare

        asked = [
            Prepare.search_requests_with_expr(
                _NAME,
                data=[query],
                anns_field="embedding",
                param={"metric_type": "L2", "params": {"ef": ef}},
                limit=self._k,
                consistency_level="Eventually",
            ).SerializeToString()
            for query in self._queries
        ]
        return self._address, SEARCH, write_requests(requests, asked)

    def search_all(self, ef: int) -> Labels:
        found = self._client.search(
            _NAME,
            data=list(self._queries),
            anns_field="embedding",
            limit=self._k,
            search_params={"metric_type": "L2", "params": {"ef": ef}},
            consistency_level="Eventually",
        )
        return np.array([[int(hit["id"]) for hit in row] for row in found])


@contextmanager
def serve_milvus(vectors: Vectors, queries: Vectors, k: int) -> Iterator[Milvus]:
    """A server that holds `vectors`, to the end of the block."""
    with running() as address:
        yield Milvus(address.rpartition("/")[2], vectors, queries, k)
