"""A collection of Milvus, on a server or in a file of milvus-lite.

New vectors go into a collection of their own beside, with the same keys, fields and indexes. An
alias flips from one to the other. No version that can be run here lets a collection have one more
vector field once it is there.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as Some
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nobackfill.adopt.sources.copied import OF, Collection, CopiedSource, Record
from nobackfill.adopt.sources.source import (
    Facts,
    SearchMetric,
    Target,
    Window,
    metric_of,
    server_address,
)
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    few,
)
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("milvus"):
    import grpc
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import MilvusException


Result = TypeVar("Result")
# The variable that holds a server's token, or USER:PASSWORD.
KEY = "NOBACKFILL_MILVUS_TOKEN"
_SECONDS = 60.0
_PORT = 19530
_CODES: Mapping[int, type[NobackfillError]] = {
    1: UnavailableError, 2: UnavailableError, 7: NotPermittedError, 100: NotFoundError,
    1400: NotPermittedError,
}  # fmt: skip


# Processes in which clients were opened: the first, and none that it forks.
_OPENERS: list[int] = []


def open_client(place: str) -> Any:
    """The client of https://HOST:PORT (http:// on this machine), with /DATABASE where it is not the
    default one, or of a file. Raises NotFoundError, ConfigurationError, UnavailableError."""
    # It logs each failed call with the address in it.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    _OPENERS.append(os.getpid())
    if "://" not in place:
        path = Path(place)
        if not path.exists():
            raise NotFoundError(f"{place}: no file of milvus-lite is there")
        return call_milvus(path.name, lambda: MilvusClient(uri=str(path.resolve())))
    parts = server_address(place, "milvus", KEY)
    database = parts.path.strip("/")
    if "/" in database:
        raise ConfigurationError("milvus: expected https://HOST:PORT or https://HOST:PORT/DATABASE")
    address = f"{parts.scheme}://{parts.hostname}:{parts.port or _PORT}"
    token = os.environ.get(KEY, "")
    return call_milvus(
        str(parts.hostname),
        lambda: MilvusClient(uri=address, token=token, db_name=database, timeout=_SECONDS),
    )


def call_milvus(name: str, work: Callable[[], Result]) -> Result:
    """Run `work` and return its result; errors of Milvus become ours, and so does a fork since it
    was opened."""
    if os.getpid() != _OPENERS[0]:
        raise ConfigurationError(
            f"{name}: Milvus was opened before this process was forked, which its client does not "
            "survive; open it after the fork alone, in each process"
        )
    try:
        return work()
    except MilvusException as error:
        kind = _CODES.get(error.code, InvalidInputError)
        said = str(error.message).strip().splitlines() or [type(error).__name__]
        raise kind(f"{name}: Milvus says: {said[0][:200]}") from error
    except grpc.RpcError as error:
        raise UnavailableError(f"{name}: Milvus does not answer") from error


_KEPT = (
    "is_primary", "is_partition_key", "nullable", "default_value", "element_type", "max_capacity",
)  # fmt: skip
# Of an index, what Milvus tells beside its kind.
_PARAMS = ("M", "efConstruction", "nlist", "nbits", "m")


def schema_of(client: Any, fields: Mapping[str, Mapping[str, Any]], dims: Mapping[str, int]) -> Any:
    """Fields as they are, with other `dims` of some. Who puts an item gives its key; fields that no
    schema names are allowed: what carrying notes in an item need not be known."""
    made = client.create_schema(auto_id=False, enable_dynamic_field=True)
    for name, one in fields.items():
        params = dict(one.get("params") or {})
        if name in dims:
            params["dim"] = dims[name]
        kept = {what: one[what] for what in _KEPT if one.get(what)}
        made.add_field(name, one["type"], **(kept | params))
    return made


def make_partition(client: Any, collection: str, name: str) -> None:
    """It may be there."""
    if not call_milvus(collection, lambda: client.has_partition(collection, name)):
        call_milvus(collection, lambda: client.create_partition(collection, name))


def indexes_of(client: Any, collection: str) -> Any:
    """Those of all fields, to be made again."""
    made = client.prepare_index_params()
    for one in _indexes(client, collection):
        params = dict(one.get("params") or {})
        params |= {what: one[what] for what in _PARAMS if what in one}
        made.add_index(
            one["field_name"], index_type=one.get("index_type") or "AUTOINDEX",
            metric_type=one.get("metric_type") or "", params=params,
        )  # fmt: skip
    return made


def index_of(client: Any, collection: str, field: str) -> Mapping[str, Any]:
    """What is said of a field's index; nothing where there is none."""
    found = _indexes(client, collection)
    return next((one for one in found if one.get("field_name") == field), {})


def _indexes(client: Any, collection: str) -> list[dict[str, Any]]:
    names = call_milvus(collection, lambda: client.list_indexes(collection))
    found = [
        call_milvus(collection, lambda name=name: client.describe_index(collection, name))  # type: ignore[misc]
        for name in names
    ]
    return [dict(one) for one in found if one]


# Items of a request.
_PAGE = 1000
# Bytes of vectors in one answer: a message may have 64 MiB, and an item has more than its vector.
_MOST_BYTES = 16 << 20
_STRONG = "Strong"
_METRICS: Mapping[str, SearchMetric] = {
    "COSINE": "cosine", "L2": "squared_l2", "IP": "inner_product",
}  # fmt: skip
_LEAST = -(1 << 63)
_MARK = "nobackfill."
# The partition of items that are put without one.
_DEFAULT = "_default"


def open_collection(place: str, collection: str, vector: str | None) -> CopiedSource:
    """Open a collection as a source. `place`, `vector`: as in MilvusStore. Raises NotFoundError,
    ConfigurationError, UnavailableError, InvalidInputError."""
    return CopiedSource(MilvusStore(place, vector), collection)


class MilvusStore:
    """The collections of a place. See Store. `vector`: None for the only field of float32."""

    def __init__(self, place: str, vector: str | None = None) -> None:
        self._client = open_client(place)
        self._vector = vector

    def opened(self, name: str) -> "MilvusCollection":
        if not self.exists(name):
            there = few(call_milvus(name, self._client.list_collections))
            raise NotFoundError(f"{name}: no such collection; there are {there or 'none'}")
        return MilvusCollection(self._client, name, self._vector)

    def exists(self, name: str) -> bool:
        """An alias is, too."""
        return bool(call_milvus(name, lambda: self._client.has_collection(name)))

    def make(self, target: Target, like: Collection, said: Mapping[str, str]) -> None:
        if not isinstance(like, MilvusCollection):
            raise TypeError(like)
        schema = like.schema(target.dim)
        properties = {_MARK + name: value for name, value in said.items()}
        indexes = like.indexes()
        call_milvus(
            target.name,
            lambda: self._client.create_collection(
                target.name, schema=schema, index_params=indexes, properties=properties,
                consistency_level=_STRONG, **like.own_partitions,
            ),
        )  # fmt: skip
        for name in like.partitions():
            make_partition(self._client, target.name, name)

    def drop(self, name: str) -> None:
        if aliases := call_milvus(name, lambda: self._client.list_aliases(name))["aliases"]:
            raise InvalidInputError(
                f"{name}: expected a collection that nobody searches, found the alias "
                f"{few(aliases)}; let it lead elsewhere first"
            )
        call_milvus(name, lambda: self._client.drop_collection(name))

    def steps(self, old: Collection, new: Collection) -> list[str]:
        steps = [
            "let nobody write, or let every writer put to both collections, to the new one by the "
            "new model, and carry once more: what was put since the last sweep is missing",
            "switch the queries to the new model, and in the same moment:",
        ]
        aliases = call_milvus(old.name, lambda: self._client.list_aliases(old.name))["aliases"]
        steps += [f"client.alter_alias({new.name!r}, {alias!r})" for alias in aliases]
        if not aliases:
            steps.append(
                f"search {new.name!r} in place of {old.name!r}; with an alias, "
                f"client.create_alias({new.name!r}, ALIAS), the next change is one call"
            )
        if isinstance(old, MilvusCollection) and old.numbers_itself:
            steps.append("puts bring their keys from then on: the new collection gives none")
        return steps

    def close(self) -> None:
        self._client.close()


class MilvusCollection:
    """See Collection. Every read is Strong: it sees what was written before it."""

    def __init__(self, client: Any, name: str, vector: str | None) -> None:
        self._client = client
        found = call_milvus(name, lambda: client.describe_collection(name))
        self.name = str(found.get("collection_name") or name)
        self._fields = {str(one["name"]): one for one in found["fields"]}
        self._dynamic = bool(found.get("enable_dynamic_field"))
        # Not the description, which milvus-lite forgets.
        self.said = {
            key.removeprefix(_MARK): str(value)
            for key, value in (found.get("properties") or {}).items()
            if key.startswith(_MARK)
        }
        self._key = next(n for n, one in self._fields.items() if one.get("is_primary"))
        self._texts = self._fields[self._key]["type"] == DataType.VARCHAR
        self.numbers_itself = bool(found.get("auto_id") or self._fields[self._key].get("auto_id"))
        dense = [n for n, one in self._fields.items() if one["type"] == DataType.FLOAT_VECTOR]
        if (vector is None and len(dense) != 1) or (vector is not None and vector not in dense):
            raise InvalidInputError(
                f"{name}: expected {'one field' if vector is None else repr(vector)} of type "
                f"FLOAT_VECTOR, found {few(map(repr, dense)) or 'none'}; name one with --vector"
            )
        self._vector = vector or dense[0]
        if found.get("functions"):
            raise InvalidInputError(
                f"{name}: expected fields that are put, found functions that make some; these "
                "are not carried yet"
            )
        self._dim = int(self._fields[self._vector]["params"]["dim"])
        by_key = any(one.get("is_partition_key") for one in self._fields.values())
        # Where a field says where an item lies, Milvus alone puts it there.
        self.own_partitions = {"num_partitions": found["num_partitions"]} if by_key else {}
        self._load()

    def _load(self) -> None:
        call_milvus(self.name, lambda: self._client.load_collection(self.name))

    def facts(self) -> Facts:
        kind = str(index_of(self._client, self.name, self._vector).get("metric_type") or "")
        others = tuple(name for name in self._fields if name not in (self._key, self._vector))
        metric, model = metric_of(kind, _METRICS, self.name), self.said.get("model")
        return Facts(f"{self.name}.{self._vector}", self._dim, metric, model, others)

    def count(self) -> int:
        return int(self._query("", ["count(*)"])[0]["count(*)"])

    def windows(self, rows: int) -> Iterator[Window]:
        """Ranges without a limit are exact; where the listing misses keys, one is larger."""
        each = min(rows, self._at_once)
        keys = sorted(self._keys())
        after = None
        for last in keys[each - 1 : -1 : each]:
            yield Window(after, last)
            after = last
        yield Window(after)

    def _keys(self) -> list[Any]:
        pages = call_milvus(
            self.name,
            lambda: self._client.query_iterator(
                self.name, batch_size=_PAGE * 10, filter=self._within(Window()),
                output_fields=[self._key], consistency_level=_STRONG,
            ),
        )  # fmt: skip
        found = []
        while page := call_milvus(self.name, pages.next):
            found += [one[self._key] for one in page]
        pages.close()
        return found

    @property
    def _at_once(self) -> int:
        """Items whose vectors one answer may bring: a copy's may be longer than the original's."""
        return max(1, _MOST_BYTES // (4 * self._dim))

    def records(self, window: Window) -> list[Record]:
        found = self._query(self._within(window), [self._key])
        keys = sorted(one[self._key] for one in found)
        records: list[Record] = []
        after = window.after
        partitions = self.partitions()
        for last in (*keys[self._at_once - 1 : -1 : self._at_once], window.last):
            within = self._within(Window(after, last))
            some: list[Record] = []
            for partition in partitions or [""]:
                found = self._query(within, ["*", self._vector], partition)
                some += self._records(found, "" if partition == _DEFAULT else partition)
            records += sorted(some, key=lambda one: one.key)
            after = last
        return records

    def partitions(self) -> list[str]:
        """Names of partitions that items are put into, none where there is only the default."""
        if self.own_partitions:
            return []
        found = call_milvus(self.name, lambda: self._client.list_partitions(self.name))
        return [] if list(found) == [_DEFAULT] else list(found)

    def digests(self, window: Window) -> dict[Any, str]:
        found = self._query(self._within(window), [self._key, OF])
        return {one[self._key]: str(one.get(OF, "")) for one in found}

    def there(self, keys: Sequence[Any]) -> Some[Any]:
        found: set[Any] = set()
        for first in range(0, len(keys), _PAGE):
            some = list(keys[first : first + _PAGE])
            found.update(one[self._key] for one in self._query(self._among(some), [self._key]))
        return found

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
        parts = dict.fromkeys(one.partition for one in records)
        for partition in parts:
            if partition:
                make_partition(self._client, self.name, partition)
            some = [row for row, one in enumerate(records) if one.partition == partition]
            for first in range(0, len(some), _PAGE):
                rows = [
                    {**one.rest, self._key: one.key, self._vector: vectors[row], OF: one.digest}
                    for row in some[first : first + _PAGE]
                    for one in [records[row]]
                ]
                call_milvus(
                    self.name,
                    lambda rows=rows, partition=partition: self._client.upsert(  # type: ignore[misc]
                        self.name, rows, partition_name=partition
                    ),
                )

    def remove(self, keys: Sequence[Any]) -> None:
        for first in range(0, len(keys), _PAGE):
            some = list(keys[first : first + _PAGE])
            call_milvus(self.name, lambda some=some: self._client.delete(self.name, ids=some))  # type: ignore[misc]

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        keys = [key for one in ids if (key := self._key_of(one)) is not None]
        found: list[Record] = []
        for first in range(0, len(keys), _PAGE):
            among = self._among(keys[first : first + _PAGE])
            found += self._records(self._query(among, ["*", self._vector]))
        return found

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        found = call_milvus(
            self.name,
            lambda: self._client.search(
                self.name, data=[np.asarray(vector, np.float32).tolist()],
                anns_field=self._vector, limit=count, consistency_level=_STRONG,
                search_params={"params": {"ef": max(64, count)}},
            ),
        )  # fmt: skip
        return [str(hit["id"] if "id" in hit else hit[self._key]) for hit in found[0]]

    def schema(self, dim: int) -> Any:
        """Of a copy: fields as here, but for the vectors' dimension."""
        return schema_of(self._client, self._fields, {self._vector: dim})

    def indexes(self) -> Any:
        """Those of all fields, to be made again."""
        return indexes_of(self._client, self.name)

    def _query(self, where: str, fields: list[str], partition: str = "") -> list[dict[str, Any]]:
        found = call_milvus(
            self.name,
            lambda: self._client.query(
                self.name, filter=where, output_fields=fields, consistency_level=_STRONG,
                partition_names=[partition] if partition else None,
            ),
        )  # fmt: skip
        return list(found)

    def _records(self, found: Sequence[Mapping[str, Any]], partition: str = "") -> list[Record]:
        made = []
        for one in found:
            rest = {n: v for n, v in one.items() if n not in (self._key, self._vector, OF)}
            vector = np.asarray(one[self._vector], np.float32)
            made.append(Record(one[self._key], vector, rest, partition))
        return made

    def _within(self, window: Window) -> str:
        least = "" if self._texts else _LEAST
        if window.after is None:
            parts = [f"{self._key} >= {_literal(least)}"]
        else:
            parts = [f"{self._key} > {_literal(window.after)}"]
        if window.last is not None:
            parts.append(f"{self._key} <= {_literal(window.last)}")
        return " and ".join(parts)

    def _among(self, keys: Sequence[Any]) -> str:
        return f"{self._key} in [{', '.join(map(_literal, keys))}]"

    def _key_of(self, name: str) -> Any:
        if self._texts:
            return name
        try:
            key = int(name)
        except ValueError:
            return None
        return key if str(key) == name and -(1 << 63) <= key < 1 << 63 else None


def _literal(value: object) -> str:
    """A key in Milvus' expressions, whose strings are written as JSON's are."""
    return json.dumps(value, ensure_ascii=False)
