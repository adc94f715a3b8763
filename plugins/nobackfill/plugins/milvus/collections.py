"""The collections of a Milvus server: one per space of a gallery, with labels, vectors, and columns
for filters."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import grpc

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.extras import require_extra
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.loopback import is_loopback
from nobackfill.plugins.milvus.columns import Columns, columns_of
from nobackfill.vectors import Vectors

with require_extra("milvus"):
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import MilvusException


Result = TypeVar("Result")
SCHEME = "milvus+"
M, EF_CONSTRUCTION = 16, 128
# The most rows that Milvus returns, and the rows per write.
MOST = 16_384
_AT_ONCE = 2_000
# Deadline of every call: without one, a hanging Milvus would block its caller for ever.
_TIMEOUT_S = 10.0
# Deadline of sealing, which writes to Milvus' object storage.
_SEAL_S = 60.0


class Collections:
    """A client of one Milvus server; threads may share it.

    Every call has a deadline. Every method may raise UnavailableError: Milvus does not answer, or
    refuses the call, for example because there is no such collection.
    """

    def __init__(self, address: str) -> None:
        """Connect to a Milvus server.

        Sets the log level of pymilvus in this process to CRITICAL. The port is 19530 if the address
        names none.

        Args:
            address: milvus+http://HOST:PORT or milvus+https://USER:PASSWORD@HOST:PORT.

        Raises:
            ConfigurationError: the address has another form, or names another machine without TLS.
                The error does not quote it.
            UnavailableError: Milvus does not answer within 10 s, or refuses the user.
        """
        # pymilvus would log every failed call with the address.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        try:
            parts = urlsplit(address.removeprefix(SCHEME))
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            where = f"{parts.scheme}://{host}:{parts.port or 19530}"
        except ValueError:
            # The error would quote a part of the address, which may contain a password.
            raise _address_error() from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _address_error()
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ConfigurationError(
                "setting `store`: Milvus on another machine requires TLS; write "
                "vectors=milvus+https://USER:PASSWORD@HOST:PORT"
            )
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        token = f"{user}:{password}" if user else ""
        self._client: Any = _call_milvus(
            lambda: MilvusClient(uri=where, token=token, timeout=_TIMEOUT_S)
        )

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._client.close()

    def names(self) -> list[str]:
        """Return the names of all collections of the server.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call.
        """
        return list(_call_milvus(lambda: self._client.list_collections(timeout=_TIMEOUT_S)))

    def exists(self, name: str) -> bool:
        """Return whether there is a collection of this name.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call.
        """
        return bool(_call_milvus(lambda: self._client.has_collection(name, timeout=_TIMEOUT_S)))

    def is_loaded(self, name: str) -> bool:
        """Return whether a collection can be searched.

        False if it does not exist, and for a while after Milvus restarts.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call.
        """
        if not self.exists(name):
            return False
        state = _call_milvus(lambda: self._client.get_load_state(name, timeout=_TIMEOUT_S)["state"])
        return bool(state.name == "Loaded")

    def make(self, name: str, spec: SpaceSpec) -> None:
        """Create, index and load a collection for the vectors of a space.

        An existing collection gets only the steps that it lacks, in case a process was killed while
        it created the collection. Its dimension and metric are not compared with the space's.

        Args:
            name: the collection.
            spec: the space: dimension and metric.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses a call; a part of the
                steps may be complete.
        """

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
                "embedding", index_type="HNSW", metric_type=_milvus_metric(spec),
                params={"M": M, "efConstruction": EF_CONSTRUCTION},
            )  # fmt: skip
            self._client.create_index(name, params, timeout=_TIMEOUT_S)

        if not self.exists(name):
            _call_milvus(create)
        if not _call_milvus(lambda: self._client.list_indexes(name, timeout=_TIMEOUT_S)):
            _call_milvus(index)
        _call_milvus(lambda: self._client.load_collection(name, timeout=_TIMEOUT_S))

    def drop(self, name: str) -> None:
        """Delete a collection with its rows; nothing happens if there is none.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call.
        """
        _call_milvus(lambda: self._client.drop_collection(name, timeout=_TIMEOUT_S))

    def upsert(
        self, name: str, labels: Labels, vectors: Vectors, columns: Sequence[Columns]
    ) -> int:
        """Insert or replace vectors with their columns.

        Many rows go in several calls, so a failure may leave the first rows written. Other numbers
        of vectors or columns raise ValueError, also after the first calls.

        Args:
            name: the collection.
            labels: int64 [n].
            vectors: float32 [n, dim].
            columns: n columns for filters, as `columns_of` returns them.

        Returns:
            The timestamp of the last write by Milvus' clock; 0 for no labels.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses a call, also where
                there is no such collection.
        """
        moment = 0
        for start in range(0, len(labels), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            rows = [
                {"id": label, "embedding": vector, **values}
                for label, vector, values in zip(
                    labels[part].tolist(), vectors[part], columns[part], strict=True
                )
            ]
            moment = max(moment, _call_milvus(lambda rows=rows: self._upsert_rows(name, rows)))  # type: ignore[misc]
        return moment

    def _upsert_rows(self, name: str, rows: list[dict[str, Any]]) -> int:
        # MilvusClient.upsert calls this, but does not return the timestamp.
        result = self._client._get_connection().upsert_rows(name, rows, timeout=_TIMEOUT_S)
        return int(result.timestamp)

    def delete(self, name: str, labels: Labels) -> None:
        """Delete rows by label, int64 [n]; labels without a row are ignored.

        No labels are no call. They go in calls of 2,000, and earlier ones stay after an error. A
        search with an earlier `since` may still return them.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses a call, also where
                there is no such collection.
        """
        for start in range(0, len(labels), _AT_ONCE):
            part = labels[start : start + _AT_ONCE].tolist()
            _call_milvus(
                lambda part=part: self._client.delete(name, ids=part, timeout=_TIMEOUT_S)  # type: ignore[misc]
            )

    def seal(self, name: str) -> None:
        """Seal the last segment of a collection, so that Milvus builds a graph of it.

        Returns before the graph is complete. Without this, Milvus waits up to ten minutes for more
        rows and compares them one by one.

        Raises:
            UnavailableError: Milvus does not answer within 60 s, or refuses the call, also where
                there is no such collection.
        """
        _call_milvus(lambda: self._client.flush(name, timeout=_SEAL_S))

    def has_graph(self, name: str) -> bool:
        """Return whether a collection has a graph of all its sealed rows.

        Rows that are not sealed yet do not count. False if the collection has no index.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call, also where
                there is no such collection.
        """
        state = _call_milvus(
            lambda: self._client.describe_index(name, "embedding", timeout=_TIMEOUT_S)
        )
        return state is not None and not int(state["pending_index_rows"])

    def count(self, name: str) -> int:
        """Count the rows of a collection, those of the last write included.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call, also where
                the collection is missing or not loaded.
        """
        rows = _call_milvus(
            lambda: self._client.query(
                name,
                filter="",
                output_fields=["count(*)"],
                consistency_level="Strong",
                timeout=_TIMEOUT_S,
            )
        )
        return int(rows[0]["count(*)"])

    def matching_labels(
        self, name: str, expression: str, max_count: int, since: int | None = None
    ) -> list[int] | None:
        """Return the labels of all rows that pass an expression.

        Args:
            name: the collection.
            expression: a Milvus expression; empty: all rows.
            max_count: the largest number of labels, 1 to 16,383.
            since: a timestamp that `upsert` returned: rows written until then are visible. None:
                all rows written before the call are visible.

        Returns:
            The labels in any order; None if there are more than `max_count`.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call, as for a
                collection that is missing or not loaded, or an invalid expression.
        """
        rows = _call_milvus(
            lambda: self._client.query(
                name, filter=expression, output_fields=["id"], limit=max_count + 1,
                timeout=_TIMEOUT_S, **_consistency_arguments(since),
            )
        )  # fmt: skip
        return None if len(rows) > max_count else [int(row["id"]) for row in rows]

    def search(
        self, name: str, spec: SpaceSpec, query: Vectors, limit: int, ef: int,
        expression: str = "", since: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the labels of about the nearest rows, nearest first.

        Fewer than `limit` if fewer rows pass, or if the graph search ends early. Without `since`,
        all earlier writes are visible. Distances are not returned.

        Args:
            name: the collection.
            spec: the space.
            query: float32 [dim].
            limit: the most labels; at most 16,384 are returned.
            ef: the least number of candidates that the graph search examines.
            expression: only rows that pass this Milvus expression; empty: all.
            since: a timestamp that `upsert` returned. Rows written until then are visible, and
                Milvus rarely has to wait. None: all rows written before the call are visible;
                Milvus waits for a tick of its clock.

        Raises:
            UnavailableError: Milvus does not answer within 10 s, or refuses the call, as for a
                collection that is missing or not loaded, or an invalid expression.
        """
        hits = _call_milvus(
            lambda: self._client.search(
                name,
                data=[query],
                anns_field="embedding",
                filter=expression,
                limit=min(limit, MOST),
                search_params={
                    "metric_type": _milvus_metric(spec),
                    "params": {"ef": max(ef, limit)},
                },
                timeout=_TIMEOUT_S,
                **_consistency_arguments(since),
            )
        )
        return [int(hit["id"]) for hit in hits[0]]


def _consistency_arguments(since: int | None) -> dict[str, Any]:
    """Return the consistency arguments of a read."""
    if since is None:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": since}


def _milvus_metric(spec: SpaceSpec) -> str:
    return "L2" if spec.metric == "squared_l2" else "COSINE"


def _address_error() -> ConfigurationError:
    return ConfigurationError(
        "setting `store`: expected vectors=milvus+http://HOST:PORT on this machine, or "
        "vectors=milvus+https://USER:PASSWORD@HOST:PORT, got another form of the address of "
        "Milvus; correct it"
    )


def _call_milvus(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except (MilvusException, grpc.RpcError) as error:
        # pymilvus does not convert all gRPC errors, such as an expired deadline or a refused
        # password. Messages may hold addresses, so only the code is shown.
        code: Any = getattr(error, "code", None)
        if isinstance(error, grpc.RpcError) and callable(code):
            code = code().name
        raise UnavailableError(
            f"the Milvus server of the galleries does not answer, or refuses a call (code {code}); "
            "check that it runs, then look at its log"
        ) from error
