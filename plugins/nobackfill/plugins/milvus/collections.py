"""The collections of a Milvus: one for each space of a gallery, of labels, vectors, and columns for
filters."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import grpc

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.extras import extra
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.loopback import is_loopback
from nobackfill.plugins.milvus.columns import Columns, columns_of
from nobackfill.vectors import Vectors

with extra("milvus"):
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import MilvusException


Result = TypeVar("Result")
SCHEME = "milvus+"
M, EF_CONSTRUCTION = 16, 128
# Rows that Milvus returns at most, and those that go there at once.
MOST = 16_384
_AT_ONCE = 2_000
# Of every call: without one, a Milvus that hangs would hold who asks for ever.
_TIMEOUT_S = 10.0
# It is written to where Milvus keeps things.
_SEAL_S = 60.0


class Collections:
    """One Milvus, from many threads. Every method raises UnavailableError."""

    def __init__(self, address: str) -> None:
        """`address`: milvus+http://HOST:PORT, milvus+https://USER:PASSWORD@HOST:PORT. Raises
        ConfigurationError for others, and for one over the network in the clear."""
        # It logs each failed call with the address in it.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        try:
            parts = urlsplit(address.removeprefix(SCHEME))
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            where = f"{parts.scheme}://{host}:{parts.port or 19530}"
        except ValueError:
            # It would quote what it takes for a port: a piece of a password, perhaps.
            raise _unfit() from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _unfit()
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ConfigurationError(
                "store: a Milvus on another machine demands TLS; write vectors=milvus+https://…"
            )
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        token = f"{user}:{password}" if user else ""
        self._client: Any = _asked(lambda: MilvusClient(uri=where, token=token, timeout=_TIMEOUT_S))

    def close(self) -> None:
        """Twice is harmless."""
        self._client.close()

    def names(self) -> list[str]:
        return list(_asked(lambda: self._client.list_collections(timeout=_TIMEOUT_S)))

    def exists(self, name: str) -> bool:
        return bool(_asked(lambda: self._client.has_collection(name, timeout=_TIMEOUT_S)))

    def loaded(self, name: str) -> bool:
        """Whether it is there and can be searched: not so for a while after Milvus was killed."""
        if not self.exists(name):
            return False
        state = _asked(lambda: self._client.get_load_state(name, timeout=_TIMEOUT_S)["state"])
        return bool(state.name == "Loaded")

    def make(self, name: str, spec: SpaceSpec) -> None:
        """With its index, loaded; one that is there is left as it is, but for what a process that
        was killed in between did not come to."""

        def create() -> None:
            schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", DataType.INT64, is_primary=True)
            schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=spec.dim)
            for column, value in columns_of({}).items():
                kind = DataType.DOUBLE if isinstance(value, float) else DataType.INT64
                schema.add_field(column, kind)
            self._client.create_collection(name, schema=schema, timeout=_TIMEOUT_S)

        def index() -> None:
            params = self._client.prepare_index_params()
            params.add_index(
                "embedding", index_type="HNSW", metric_type=_metric(spec),
                params={"M": M, "efConstruction": EF_CONSTRUCTION},
            )  # fmt: skip
            self._client.create_index(name, params, timeout=_TIMEOUT_S)

        if not self.exists(name):
            _asked(create)
        if not _asked(lambda: self._client.list_indexes(name, timeout=_TIMEOUT_S)):
            _asked(index)
        _asked(lambda: self._client.load_collection(name, timeout=_TIMEOUT_S))

    def drop(self, name: str) -> None:
        _asked(lambda: self._client.drop_collection(name, timeout=_TIMEOUT_S))

    def upsert(
        self, name: str, labels: Labels, vectors: Vectors, columns: Sequence[Columns]
    ) -> int:
        """Keep vectors [n, dim] with their columns, in place of those that have the labels; the
        moment of it by Milvus' clock, 0 for no labels."""
        moment = 0
        for start in range(0, len(labels), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            rows = [
                {"id": label, "embedding": vector, **rest}
                for label, vector, rest in zip(
                    labels[some].tolist(), vectors[some], columns[some], strict=True
                )
            ]
            moment = max(moment, _asked(lambda rows=rows: self._written(name, rows)))  # type: ignore[misc]
        return moment

    def _written(self, name: str, rows: list[dict[str, Any]]) -> int:
        # What MilvusClient.upsert calls, which does not tell when it was.
        result = self._client._get_connection().upsert_rows(name, rows, timeout=_TIMEOUT_S)
        return int(result.timestamp)

    def delete(self, name: str, labels: Labels) -> None:
        for start in range(0, len(labels), _AT_ONCE):
            some = labels[start : start + _AT_ONCE].tolist()
            _asked(
                lambda some=some: self._client.delete(name, ids=some, timeout=_TIMEOUT_S)  # type: ignore[misc]
            )

    def seal(self, name: str) -> None:
        """Have a graph made, too, of what was kept last: what Milvus still expects more of it
        compares one by one, for up to ten minutes."""
        _asked(lambda: self._client.flush(name, timeout=_SEAL_S))

    def has_graph(self, name: str) -> bool:
        """Whether Milvus says so, of all that is sealed."""
        state = _asked(lambda: self._client.describe_index(name, "embedding", timeout=_TIMEOUT_S))
        return state is not None and not int(state["pending_index_rows"])

    def count(self, name: str) -> int:
        """Rows, those of a moment ago too."""
        rows = _asked(
            lambda: self._client.query(
                name,
                filter="",
                output_fields=["count(*)"],
                consistency_level="Strong",
                timeout=_TIMEOUT_S,
            )
        )
        return int(rows[0]["count(*)"])

    def matching(
        self, name: str, expression: str, most: int, since: int | None = None
    ) -> list[int] | None:
        """Labels of all rows for which an expression holds; None for more than `most`, which MOST
        bounds. `since`: as of `search`."""
        rows = _asked(
            lambda: self._client.query(
                name, filter=expression, output_fields=["id"], limit=most + 1,
                timeout=_TIMEOUT_S, **_seen(since),
            )
        )  # fmt: skip
        return None if len(rows) > most else [int(row["id"]) for row in rows]

    def search(
        self, name: str, spec: SpaceSpec, query: Vectors, limit: int, ef: int,
        expression: str = "", since: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Labels of about the nearest `limit` to `query` [dim], of rows for which an expression
        holds. `since`: a moment that `upsert` told; what was kept by then is seen, and Milvus waits
        only where it was just now. None: what was kept before the call, for which it waits until
        its clock ticks."""
        found = _asked(
            lambda: self._client.search(
                name,
                data=[query],
                anns_field="embedding",
                filter=expression,
                limit=min(limit, MOST),
                search_params={"metric_type": _metric(spec), "params": {"ef": max(ef, limit)}},
                timeout=_TIMEOUT_S,
                **_seen(since),
            )
        )
        return [int(hit["id"]) for hit in found[0]]


def _seen(since: int | None) -> dict[str, Any]:
    """What a question has to see."""
    if since is None:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": since}


def _metric(spec: SpaceSpec) -> str:
    return "L2" if spec.metric == "squared_l2" else "COSINE"


def _unfit() -> ConfigurationError:
    return ConfigurationError(
        "store: expected vectors=milvus+http://HOST:PORT, or milvus+https://USER:PASSWORD@HOST:PORT"
    )


def _asked(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except (MilvusException, grpc.RpcError) as error:
        # pymilvus passes on as they are, among others, a deadline that passed and a password that
        # is refused. Sentences may hold addresses; a code says enough.
        code: Any = getattr(error, "code", None)
        if isinstance(error, grpc.RpcError) and callable(code):
            code = code().name
        raise UnavailableError(
            f"Milvus does not answer, or refuses (code {code}); look at its log"
        ) from error
