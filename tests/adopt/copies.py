"""Milvus and Chroma with MADE's items: stores whose new vectors are a collection of their own."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Searchable, Source
from nobackfill.plugins.chroma import ChromaServer
from nobackfill.vectors import Vectors
from tests.adopt.made import World


class Milvus:
    """A collection of texts that an application writes to. `place`: of a server, or a file."""

    def __init__(self, place: str, made: World) -> None:
        from pymilvus import DataType, MilvusClient

        self.place = place
        self.client: Any = MilvusClient(uri=place)
        self.clear()
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=64)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=made.old.shape[1])
        schema.add_field("text", DataType.VARCHAR, max_length=200)
        schema.add_field("number", DataType.INT64)
        index = self.client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="COSINE", params={})
        self.client.create_collection("docs", schema=schema, index_params=index)
        rows = zip(made.ids, made.old, strict=True)
        self.client.upsert("docs", [self._row(*one) for one in rows])

    def _row(self, name: str, vector: Vectors, text: str = "") -> dict[str, object]:
        return {"id": name, "vector": vector, "text": text or f"on {name}", "number": len(name)}

    def put(self, name: str, vector: Vectors, partition: str = "") -> None:
        self.client.upsert("docs", [self._row(name, vector)], partition_name=partition)

    def put_new(self, name: str, vector: Vectors, collection: str) -> None:
        """Of another model, into a collection of its own."""
        self.client.upsert(collection, [self._row(name, vector)])

    def delete(self, name: str) -> None:
        self.client.delete("docs", ids=[name])

    def names(self) -> list[str]:
        return sorted(one["id"] for one in self._found('id >= ""'))

    def _found(self, where: str) -> list[dict[str, Any]]:
        fields = ["id", "vector"]
        return list(
            self.client.query(
                "docs", filter=where, output_fields=fields, consistency_level="Strong"
            )
        )

    def touch(self, name: str) -> None:
        (one,) = self._found(f'id == "{name}"')
        self.client.upsert("docs", [self._row(name, one["vector"], "changed")])

    def text(self, name: str, collection: str) -> object:
        """What the copy says."""
        (one,) = self.client.query(
            collection, filter=f'id == "{name}"', output_fields=["text"],
            consistency_level="Strong",
        )  # fmt: skip
        return one["text"]

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"milvus:{self.place}#{vector or 'docs'}")

    def search(self) -> Searchable:
        return open_searchable(f"milvus:{self.place}#docs")

    def clear(self) -> None:
        for name in self.client.list_collections():
            for alias in self.client.list_aliases(name)["aliases"]:
                self.client.drop_alias(alias)
            self.client.drop_collection(name)

    def close(self) -> None:
        with suppress(Exception):
            self.clear()
        self.client.close()


class Chroma:
    """A collection of documents that an application writes to."""

    def __init__(self, address: str, made: World) -> None:
        self.address = address
        self._server = ChromaServer(f"http://{address}")
        self.clear()
        # A graph that is searched as if by a slow loop.
        index = {"hnsw": {"space": "cosine", "ef_search": 400, "ef_construction": 400}}
        made_of = {"name": "docs", "configuration": index}
        self.path = f"/{self.asked('POST', '', made_of)['id']}"
        self._put(made.ids, made.old.tolist())

    def asked(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        return self._server.request_json(method, path, "docs", body)

    def _put(self, names: list[str], vectors: list[list[float]]) -> None:
        body = {
            "ids": names, "embeddings": vectors, "documents": [f"about {n}" for n in names],
            "metadatas": [{"text": f"on {name}", "number": len(name)} for name in names],
        }  # fmt: skip
        self.asked("POST", f"{self.path}/upsert", body)

    def put(self, name: str, vector: Vectors) -> None:
        self._put([name], [vector.tolist()])

    def put_new(self, name: str, vector: Vectors, collection: str) -> None:
        """Of another model, into a collection of its own."""
        path = f"/{self.asked('GET', f'/{collection}')['id']}/upsert"
        self.asked("POST", path, {"ids": [name], "embeddings": [vector.tolist()]})

    def delete(self, name: str) -> None:
        self.asked("POST", f"{self.path}/delete", {"ids": [name]})

    def names(self) -> list[str]:
        return sorted(self.asked("POST", f"{self.path}/get", {"include": []})["ids"])

    def touch(self, name: str) -> None:
        body = {"ids": [name], "metadatas": [{"text": "changed"}]}
        self.asked("POST", f"{self.path}/update", body)

    def text(self, name: str, collection: str) -> object:
        """What the copy says."""
        path = f"/{self.asked('GET', f'/{collection}')['id']}/get"
        return self.asked("POST", path, {"ids": [name]})["metadatas"][0]["text"]

    def open(self, vector: str | None = None) -> Source:
        return open_source(f"chroma:http://{self.address}#{vector or 'docs'}")

    def search(self) -> Searchable:
        return open_searchable(f"chroma:http://{self.address}#docs")

    def clear(self) -> None:
        for one in self.asked("GET", ""):
            # The server gives lists of items that are left to later ones.
            if ids := self.asked("POST", f"/{one['id']}/get", {"include": []})["ids"]:
                self.asked("POST", f"/{one['id']}/delete", {"ids": ids})
            self.asked("DELETE", f"/{one['name']}")

    def close(self) -> None:
        self._server.close()
