"""A collection of Milvus as a source, on a server or in a file of milvus-lite.

New vectors go into a second collection with the same keys, fields and indexes. An alias flips from
one to the other. Milvus versions that run here cannot add a vector field to an existing collection.
A collection can be renamed, too, but only to a free name: for a moment the old name would lead to
none. An alias changes in one step.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as Some
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nobackfill.adopt.sources.copied import OF, Collection, Record
from nobackfill.adopt.sources.flipping import FlippingSource
from nobackfill.adopt.sources.source import (
    Facts,
    SearchMetric,
    Target,
    Window,
    lock_by_address,
    parse_server_address,
    parse_store_metric,
)
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    join_few,
)
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("milvus"):
    import grpc
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import MilvusException


Result = TypeVar("Result")
# The environment variable with a server's token, or USER:PASSWORD.
KEY = "NOBACKFILL_MILVUS_TOKEN"
_SECONDS = 60.0
_PORT = 19530
_CODES: Mapping[int, type[NobackfillError]] = {
    1: UnavailableError, 2: UnavailableError, 7: NotPermittedError, 100: NotFoundError,
    1400: NotPermittedError,
}  # fmt: skip


# Processes that opened a client; a process forked from the first must open its own.
_OPENERS: list[int] = []


def open_client(address: str) -> Any:
    """Open a client of a Milvus server or of a file of milvus-lite.

    A server gets the token of NOBACKFILL_MILVUS_TOKEN, if that is set. Open it after a fork, in
    each process. The log levels of pymilvus and milvus-lite in this process become CRITICAL.

    Args:
        address: https://HOST:PORT (http:// on this machine), with /DATABASE unless it is the
            default one; or a file.

    Returns:
        The client; the caller closes it.

    Raises:
        NotFoundError: the file does not exist.
        ConfigurationError: the address has another form, or the process was forked after another
            client was opened; a failed try counts as one.
        UnavailableError: the server does not answer within a minute.
        NotPermittedError: the server refuses the token.
        BusyError: another process has opened the file, or it is no database of milvus-lite.
        InvalidInputError: Milvus refuses the file or the address.
    """
    # pymilvus would log every failed call with the address.
    for name in ("pymilvus", "milvus_lite"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _OPENERS.append(os.getpid())
    if "://" not in address:
        path = Path(address)
        if not path.exists():
            raise NotFoundError(
                f"{address}: there is no such file; name a database file of milvus-lite, or the "
                "address https://HOST:PORT of a Milvus server"
            )
        try:
            return call_milvus(path.name, lambda: MilvusClient(uri=str(path.resolve())))
        except UnavailableError as error:
            # pymilvus does not say why.
            raise BusyError(
                f"{address}: milvus-lite cannot open this file: another process has opened it, "
                "or it is no database of milvus-lite. Only one process can open such a file at a "
                "time: stop the other process, or correct the path"
            ) from error
    parts = parse_server_address(address, "milvus", KEY)
    database = parts.path.strip("/")
    if "/" in database:
        raise ConfigurationError(
            "milvus: expected https://HOST:PORT or https://HOST:PORT/DATABASE as the address of "
            "the server, got another form; correct SOURCE"
        )
    uri = f"{parts.scheme}://{parts.hostname}:{parts.port or _PORT}"
    token = os.environ.get(KEY, "")
    return call_milvus(
        str(parts.hostname),
        lambda: MilvusClient(uri=uri, token=token, db_name=database, timeout=_SECONDS),
    )


def call_milvus(name: str, work: Callable[[], Result]) -> Result:
    """Call a function that uses a client of Milvus, and convert Milvus' errors to nobackfill's.

    Nothing is tried again. Errors of other kinds that `work` raises pass through.

    Args:
        name: the collection or host, for the messages.
        work: the function.

    Returns:
        The result of `work`.

    Raises:
        ConfigurationError: the process was forked after the first client was opened.
        UnavailableError: the server does not answer, or is not ready.
        InvalidInputError: any other refusal.
        IndexError: no client was opened before.
        NotFoundError: there is no such collection, by Milvus' code.
        NotPermittedError: Milvus refuses the token or the right, by its code.
    """
    if os.getpid() != _OPENERS[0]:
        raise ConfigurationError(
            f"{name}: Milvus was opened before this process was forked, and its client does not "
            "work after a fork; open it after the fork, in each process"
        )
    try:
        return work()
    except MilvusException as error:
        kind = _CODES.get(error.code, InvalidInputError)
        lines = str(error.message).strip().splitlines() or [type(error).__name__]
        raise kind(f"{name}: Milvus refuses the request: {lines[0][:200]}") from error
    except grpc.RpcError as error:
        raise UnavailableError(
            f"{name}: the Milvus server does not answer; check its address and that it runs"
        ) from error


_FIELD_OPTIONS = (
    "is_primary", "is_partition_key", "is_clustering_key", "nullable", "default_value",
    "element_type", "max_capacity", "description",
)  # fmt: skip
# Keys of an index' description that are no parameters.
_OF_INDEX = (
    "field_name", "index_name", "index_type", "metric_type", "params", "total_rows",
    "indexed_rows", "pending_index_rows", "state", "index_state_fail_reason",
)  # fmt: skip


def schema_of(
    client: Any,
    fields: Mapping[str, Mapping[str, Any]],
    dims: Mapping[str, int],
    description: str = "",
) -> Any:
    """Copy the schema of a collection for a second one with other dimensions.

    Keys must be given by writers. Undeclared fields are allowed, because a migration stores digests
    in items.

    Args:
        client: the client of Milvus; nothing is sent.
        fields: descriptions of the fields by name.
        dims: dimensions of vector fields by name; other fields stay as they are, and names without
            a field are ignored.
        description: the description of the collection.

    Returns:
        The schema, for the client's call that creates a collection.

    Raises:
        KeyError: a description lacks the name's type.
    """
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True, description=description)
    for name, one in fields.items():
        params = dict(one.get("params") or {})
        if name in dims:
            params["dim"] = dims[name]
        options = {what: one[what] for what in _FIELD_OPTIONS if one.get(what)}
        schema.add_field(name, one["type"], **(options | params))
    return schema


def make_partition(client: Any, collection: str, name: str) -> None:
    """Create a partition of a collection, unless it exists.

    Args:
        client: the client of Milvus.
        collection: the collection's name.
        name: the partition's name.

    Raises:
        NotFoundError: there is no such collection.
        UnavailableError: Milvus does not answer within a minute.
        NotPermittedError: Milvus refuses the token.
        InvalidInputError: Milvus refuses the request otherwise.
        ConfigurationError: the process was forked after the first client was opened.
    """
    if not call_milvus(collection, lambda: client.has_partition(collection, name)):
        call_milvus(collection, lambda: client.create_partition(collection, name))


def indexes_of(client: Any, collection: str) -> Any:
    """Copy the index definitions of all fields of a collection, for the creation of another one.

    Args:
        client: the client of Milvus.
        collection: the collection's name.

    Returns:
        Index parameters, for the client's call that creates a collection; without any index if no
        field has one.

    Raises:
        NotFoundError: there is no such collection.
        UnavailableError: Milvus does not answer within a minute.
        NotPermittedError: Milvus refuses the token.
        InvalidInputError: Milvus refuses the request otherwise.
        ConfigurationError: the process was forked after the first client was opened.
    """
    indexes = client.prepare_index_params()
    for one in _index_descriptions(client, collection):
        params = dict(one.get("params") or {})
        params |= {what: value for what, value in one.items() if what not in _OF_INDEX}
        indexes.add_index(
            one["field_name"], index_type=one.get("index_type") or "AUTOINDEX",
            index_name=one.get("index_name") or "", metric_type=one.get("metric_type") or "",
            params=params,
        )  # fmt: skip
    return indexes


def index_of(client: Any, collection: str, field: str) -> Mapping[str, Any]:
    """Return Milvus' description of a field's index; empty if the field has none.

    Args:
        client: the client of Milvus.
        collection: the collection's name.
        field: the field's name.

    Raises:
        NotFoundError: there is no such collection.
        UnavailableError: Milvus does not answer within a minute.
        NotPermittedError: Milvus refuses the token.
        InvalidInputError: Milvus refuses the request otherwise.
        ConfigurationError: the process was forked after the first client was opened.
    """
    results = _index_descriptions(client, collection)
    return next((one for one in results if one.get("field_name") == field), {})


def _index_descriptions(client: Any, collection: str) -> list[dict[str, Any]]:
    names = call_milvus(collection, lambda: client.list_indexes(collection))
    results = [
        call_milvus(collection, lambda name=name: client.describe_index(collection, name))  # type: ignore[misc]
        for name in names
    ]
    return [dict(one) for one in results if one]


# Items per request.
_PAGE = 1000
# Bytes of vectors per answer: a message may have 64 MiB, and an item holds more than its vector.
_MOST_BYTES = 16 << 20
_STRONG = "Strong"
_METRICS: Mapping[str, SearchMetric] = {
    "COSINE": "cosine", "L2": "squared_l2", "IP": "inner_product",
}  # fmt: skip
_MOST = (1 << 63) - 1
_MARK = "nobackfill."
# No server that runs here can hold them next to other vectors.
_ODD_VECTORS = (
    DataType.BINARY_VECTOR, DataType.FLOAT16_VECTOR, DataType.BFLOAT16_VECTOR, DataType.INT8_VECTOR,
)  # fmt: skip
# Properties of a collection that its copy needs, too; the first one deletes old items.
_PROPERTIES = ("collection.ttl.seconds", "mmap.enabled", "partitionkey.isolation")
# The partition of items that were put without a partition.
_DEFAULT = "_default"
# Seconds to wait for an index, and between two looks at it.
_INDEX_S, _LOOK_S = 600.0, 0.2


def open_collection(address: str, collection: str, vector: str | None) -> FlippingSource:
    """Open a collection of Milvus as a source of vectors; its first read loads it into Milvus'
    memory.

    Args:
        address: https://HOST:PORT (http:// on this machine), with /DATABASE unless it is the
            default one; or a file of milvus-lite.
        collection: the collection's name or alias.
        vector: the name of a float32 field; None: the only one.

    Returns:
        The source, which the caller closes.

    Raises:
        NotFoundError: there is no such file or collection.
        ConfigurationError: the address has another form, or the process was forked since the first
            client was opened.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the token.
        BusyError: another process has opened the file.
        InvalidInputError: the vector field is missing or ambiguous, functions compute fields, or
            Milvus refuses the call otherwise, as for an unknown database.
    """
    store = MilvusStore(address, vector)
    return FlippingSource(store, collection, store.open_collection(collection).vector)


class MilvusStore:
    """The collections of a Milvus server, or of a file of milvus-lite.

    Every method that asks Milvus may also raise UnavailableError (it does not answer within a
    minute), NotPermittedError (it refuses the token), InvalidInputError (it refuses the request
    otherwise) and ConfigurationError (the process was forked after the first client was opened).

    Args:
        address: the server or file, as `open_client` takes it.
        vector: the name of the vector field; None: the only float32 field.

    Raises:
        NotFoundError: the file does not exist.
        ConfigurationError: the address has another form, or the process was forked after another
            client was opened.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the token.
        BusyError: another process has opened the file.
        InvalidInputError: Milvus refuses the file or the address.
    """

    def __init__(self, address: str, vector: str | None = None) -> None:
        self._client = open_client(address)
        self._address, self._vector = address, vector

    def open_collection(self, name: str) -> "MilvusCollection":
        """Open a collection by its name or alias.

        Its first read loads it into Milvus' memory, where it stays.

        Raises:
            NotFoundError: there is no such collection; the error names others.
            InvalidInputError: the vector field is missing or ambiguous, functions compute fields,
                or Milvus refuses the call otherwise.
            UnavailableError, NotPermittedError: Milvus does not answer within a minute, or refuses
                the token.
            ConfigurationError: the process was forked after the first client was opened.
        """
        if not self.exists(name):
            names = join_few(call_milvus(name, self._client.list_collections))
            raise NotFoundError(
                f"{name}: no such collection in this Milvus; its collections are {names or 'none'}"
            )
        return MilvusCollection(self._client, name, self._vector)

    def exists(self, name: str) -> bool:
        """Return whether a collection or an alias has this name.

        Raises:
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        return bool(call_milvus(name, lambda: self._client.has_collection(name)))

    def create_copy(self, target: Target, original: Collection, facts: Mapping[str, str]) -> None:
        """Create an empty collection for other vectors of the items of an existing one.

        After an error, the collection may exist without some of its partitions.

        Args:
            target: name and dimension of the new collection; its other fields are ignored.
            original: the existing collection, whose fields, indexes, partitions, consistency level
                and time to live are copied.
            facts: facts to record in the same step.

        Raises:
            TypeError: `original` is no MilvusCollection.
            InvalidInputError: the name is in use, or is not valid; or Milvus refuses the request
                otherwise.
            NotFoundError: the existing collection was dropped.
            UnavailableError, NotPermittedError: Milvus does not answer within a minute, or refuses
                the token.
            ConfigurationError: the process was forked after the first client was opened.
        """
        if not isinstance(original, MilvusCollection):
            raise TypeError(original)
        schema = original.schema(target.dim)
        properties = original.properties | _mark_properties(facts)
        call_milvus(
            target.name,
            lambda: self._client.create_collection(
                target.name, schema=schema, properties=properties, **original.create_options
            ),
        )
        self.complete_copy(self.open_collection(target.name), original)

    def complete_copy(self, copy: Collection, original: Collection) -> None:
        """Create the indexes and partitions of a collection that its copy lacks.

        The index of the vectors comes last: without it, a copy is not complete.

        Args:
            copy: the copy.
            original: the original.

        Raises:
            TypeError: `original` is no MilvusCollection.
            NotFoundError: one of the collections was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        if not isinstance(original, MilvusCollection):
            raise TypeError(original)
        partitions = original.partitions()
        for name in partitions:
            make_partition(self._client, copy.name, name)
        present = {one["field_name"] for one in _index_descriptions(self._client, copy.name)}
        indexes = indexes_of(self._client, original.name)
        for one in sorted(indexes, key=lambda one: one.field_name == original.vector):
            if one.field_name not in present:
                missing = self._client.prepare_index_params()
                missing.append(one)
                call_milvus(
                    copy.name,
                    lambda missing=missing: self._client.create_index(copy.name, missing),  # type: ignore[misc]
                )

    def wait_for_index(self, copy: Collection) -> None:
        """Wait until Milvus has built the index of a copy's vectors, and loaded the copy.

        Rows of the last segment are sealed for it. It waits up to 10 minutes.

        Raises:
            BusyError: Milvus still builds the index.
            NotFoundError: the copy was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        name, field = copy.name, self.open_collection(copy.name).vector
        call_milvus(name, lambda: self._client.flush(name))
        call_milvus(name, lambda: self._client.load_collection(name))
        end = time.monotonic() + _INDEX_S
        while rows := int(index_of(self._client, name, field).get("pending_index_rows") or 0):
            if time.monotonic() > end:
                raise BusyError(
                    f"{name}: Milvus has not built the index of {rows} new vectors in "
                    f"{_INDEX_S / 60:.0f} minutes, so nothing flipped; run the same command later"
                )
            time.sleep(_LOOK_S)

    def flip_obstacles(self, name: str, collection: Collection) -> list[str]:
        """Return sentences about what prevents a flip: a name that is no alias, keys that Milvus
        generates, or further vectors that cannot be copied.

        Raises:
            TypeError: `collection` is no MilvusCollection.
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        sentences, own = [], collection.name
        if name == own:
            aliases = self._list_aliases(own)
            way = f"name its alias, as in #{aliases[0]}" if aliases else (
                f"run client.create_alias({own!r}, {own + '_live'!r}), let your programs open that "
                f"alias, and name it, as in #{own}_live"
            )  # fmt: skip
            sentences.append(
                f"{own!r} is the collection's own name, and Milvus flips aliases alone: {way}"
            )
        if not isinstance(collection, MilvusCollection):
            raise TypeError(collection)
        if collection.generates_keys:
            sentences.append(
                "Milvus generates the keys of this collection (auto_id), but the copy that a "
                "migration makes needs the same keys. Copy the items into a collection to which "
                "your programs give the keys"
            )
        if collection.unreadable_vector_fields:
            sentences.append(
                f"vectors of {join_few(collection.unreadable_vector_fields)} cannot be copied: "
                "only 32-bit "
                "floats and sparse vectors can. Copy the items into a collection without them"
            )
        return sentences

    def _list_aliases(self, name: str) -> list[str]:
        return sorted(call_milvus(name, lambda: self._client.list_aliases(name))["aliases"])

    def redirect_name(self, name: str, collection: str) -> None:
        """Let an alias lead to another collection, in one step.

        Raises:
            NotFoundError: there is no such collection.
            InvalidInputError: there is no such alias, or Milvus refuses the request otherwise.
            UnavailableError, NotPermittedError: Milvus does not answer within a minute, or refuses
                the token.
            ConfigurationError: the process was forked after the first client was opened.
        """
        call_milvus(name, lambda: self._client.alter_alias(collection, name))

    def redirect_command(self, name: str, collection: str) -> str:
        """Return the Python call by which the owner lets an alias lead to another collection."""
        return f"client.alter_alias({collection!r}, {name!r})"

    def record_facts(self, collection: str, facts: Mapping[str, str]) -> None:
        """Record facts in a collection's properties; the other properties stay.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        call_milvus(
            collection,
            lambda: self._client.alter_collection_properties(collection, _mark_properties(facts)),
        )

    def owner_tasks(self, name: str, old: Collection, new: Collection) -> list[str]:
        """Return the owner's tasks after an alias has flipped, as sentences and Python calls.

        Raises:
            NotFoundError: the old collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        others = [self.redirect_command(one, new.name) for one in self._list_aliases(old.name)]
        return [
            f"programs that open {old.name!r} by its own name still use the old vectors: let them "
            f"open {name!r}",
            f"roles need the rights on {new.name!r} that they have on {old.name!r}",
            *others,
        ]

    def lock_name(self, name: str) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of an alias out, by a lock file.

        It lies next to a file of milvus-lite; for a server it lies in `~/.cache/nobackfill` (or
        below XDG_CACHE_HOME): it keeps out migrations of this user on this machine alone.

        Raises:
            BusyError: another migration holds the lock.
            CannotWriteError: the lock file cannot be created.
        """
        folder = None if "://" in self._address else Path(self._address).resolve().parent
        return lock_by_address(self._address, name, folder)

    def drop(self, name: str) -> None:
        """Delete a collection with its items.

        Raises:
            InvalidInputError: an alias leads to it, or Milvus refuses the request otherwise.
            NotFoundError: there is no such collection (a server only; in a file nothing happens
                then).
            UnavailableError, NotPermittedError: Milvus does not answer within a minute, or refuses
                the token.
            ConfigurationError: the process was forked after the first client was opened.
        """
        if aliases := self._list_aliases(name):
            raise InvalidInputError(
                f"{name}: cannot be dropped while the alias {join_few(aliases)} leads to it; let "
                "the alias lead to another collection first"
            )
        call_milvus(name, lambda: self._client.drop_collection(name))

    def flip_steps(self, old: Collection, new: Collection) -> list[str]:
        """Return the steps by which the owner flips, as sentences and Python calls.

        The old collection's aliases are read, and nothing is changed.

        Raises:
            NotFoundError: the old collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        steps = [
            "stop all writers, or let every writer put to both collections, to the new one by the "
            "new model; then carry once more, because items of the last sweep are missing",
            "switch the queries to the new model, and at the same moment:",
        ]
        aliases = self._list_aliases(old.name)
        steps += [self.redirect_command(alias, new.name) for alias in aliases]
        if not aliases:
            steps.append(
                f"search {new.name!r} in place of {old.name!r}; with an alias, "
                f"client.create_alias({new.name!r}, ALIAS), the next change is one call"
            )
        if isinstance(old, MilvusCollection) and old.generates_keys:
            steps.append("writers must put keys from now on: the new collection generates none")
        return steps

    def close(self) -> None:
        """Close the client.

        Collections that it opened do not work afterwards.
        """
        self._client.close()


class MilvusCollection:
    """A collection of Milvus; reads see all earlier writes.

    Every method that asks Milvus may also raise NotFoundError (the collection was dropped) and the
    errors of a MilvusStore.

    Attributes:
        name: the collection's name, also if it was opened by an alias.
        vector: the field of the vectors.
        copy_facts: the facts that were recorded when it was created as a copy.
        properties: the owner's properties that a copy gets, too.
        generates_keys: whether Milvus generates the keys.
        create_options: options of the call that creates a copy.
        unreadable_vector_fields: fields of vectors that are neither 32-bit floats nor sparse.
    """

    def __init__(self, client: Any, name: str, vector: str | None) -> None:
        self._client = client
        results = call_milvus(name, lambda: client.describe_collection(name))
        self.name = str(results.get("collection_name") or name)
        self._fields = {str(one["name"]): one for one in results["fields"]}
        self._dynamic = bool(results.get("enable_dynamic_field"))
        # Marks are properties, because milvus-lite loses the description.
        properties = {key: str(one) for key, one in (results.get("properties") or {}).items()}
        self.copy_facts = {
            key.removeprefix(_MARK): one for key, one in properties.items() if key.startswith(_MARK)
        }
        self.properties = {key: properties[key] for key in _PROPERTIES if key in properties}
        self._key = next(n for n, one in self._fields.items() if one.get("is_primary"))
        self._texts = self._fields[self._key]["type"] == DataType.VARCHAR
        self.generates_keys = bool(results.get("auto_id") or self._fields[self._key].get("auto_id"))
        dense = [n for n, one in self._fields.items() if one["type"] == DataType.FLOAT_VECTOR]
        if (vector is None and len(dense) != 1) or (vector is not None and vector not in dense):
            raise InvalidInputError(
                f"{name}: expected {'one field' if vector is None else repr(vector)} of type "
                f"FLOAT_VECTOR, found {join_few(map(repr, dense)) or 'none'}; name one with "
                "--vector"
            )
        self.vector = vector or dense[0]
        self.unreadable_vector_fields = [
            n for n, one in self._fields.items() if one["type"] in _ODD_VECTORS
        ]
        for kind, found in (
            ("functions", "functions that compute fields"),
            ("struct_array_fields", "arrays of structs"),
            ("struct_fields", "arrays of structs"),
        ):
            if results.get(kind):
                raise InvalidInputError(
                    f"{name}: expected a collection without {found}, which cannot be migrated: "
                    f"{join_few(str(one.get('name')) for one in results[kind])}; copy its items "
                    "into a collection without them, and migrate that one"
                )
        self._dim = int(self._fields[self.vector]["params"]["dim"])
        self._description = str(results.get("description") or "")
        self._by_key = any(one.get("is_partition_key") for one in self._fields.values())
        self.create_options = {
            "consistency_level": results.get("consistency_level", 0),
            "num_shards": results.get("num_shards") or 1,
        }
        if self._by_key:
            self.create_options["num_partitions"] = results["num_partitions"]
        self._loaded = False

    def _load(self) -> None:
        """Load the collection into Milvus' memory before the first read."""
        if not self._loaded:
            call_milvus(self.name, lambda: self._client.load_collection(self.name))
            self._loaded = True

    def facts(self) -> Facts:
        """Return name, dimension, metric and model of the vectors, and names of other fields.

        The dimension is as it was when the collection was opened. The metric is None if the field
        has no index.

        Raises:
            InvalidInputError: searches use a metric that nobackfill does not support, or Milvus
                refuses the request otherwise.
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError: Milvus does not answer within a minute, or refuses
                the token.
            ConfigurationError: the process was forked after the first client was opened.
        """
        kind = str(index_of(self._client, self.name, self.vector).get("metric_type") or "")
        others = tuple(name for name in self._fields if name not in (self._key, self.vector))
        metric, model = parse_store_metric(kind, _METRICS, self.name), self.copy_facts.get("model")
        return Facts(f"{self.name}.{self.vector}", self._dim, metric, model, others)

    def count(self) -> int:
        """Count the items; 0 for a copy without an index of its vectors, which cannot be read.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        if self.copy_facts and not index_of(self._client, self.name, self.vector):
            return 0
        return int(self._query("", ["count(*)"])[0]["count(*)"])

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all keys into windows of at most `rows_per_window` items that fit into one answer.

        All keys are read into memory once, at the start. A key that is added later makes a window
        larger. The last window has no upper end, and an empty collection gives one window.

        Args:
            rows_per_window: the largest size of a window, at least 1; large vectors make it
                smaller.

        Yields:
            Windows of keys, without the lower end and with the upper one.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        each = min(rows_per_window, self._items_per_answer)
        keys = sorted(self._read_keys())
        lower = None
        for upper in keys[each - 1 : -1 : each]:
            yield Window(lower, upper)
            lower = upper
        yield Window(lower)

    def _read_keys(self) -> list[Any]:
        self._load()
        pages = call_milvus(
            self.name,
            lambda: self._client.query_iterator(
                self.name, batch_size=_PAGE * 10, filter=self._window_expression(Window()),
                output_fields=[self._key], consistency_level=_STRONG,
            ),
        )  # fmt: skip
        results = []
        while page := call_milvus(self.name, pages.next):
            results += [one[self._key] for one in page]
        pages.close()
        return results

    @property
    def _items_per_answer(self) -> int:
        """Return the number of items whose vectors fit into one answer."""
        return max(1, _MOST_BYTES // (4 * self._dim))

    def records(self, window: Window) -> list[Record]:
        """Read the items of a window by increasing key, with all fields and their partition. The
        digests that a copy stores are no fields.

        Earlier writes are visible.

        Args:
            window: keys above `lower` and up to `upper`. A large window is read in several
                requests.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        results = self._query(self._window_expression(window), [self._key])
        keys = sorted(one[self._key] for one in results)
        records: list[Record] = []
        lower = window.lower
        partitions = self.partitions()
        for upper in (
            *keys[self._items_per_answer - 1 : -1 : self._items_per_answer],
            window.upper,
        ):
            condition = self._window_expression(Window(lower, upper))
            some: list[Record] = []
            for partition in partitions or [""]:
                results = self._query(condition, ["*", self.vector], partition)
                some += self._records_of_results(
                    results, "" if partition == _DEFAULT else partition
                )
            records += sorted(some, key=lambda one: one.key)
            lower = upper
        return records

    def partitions(self) -> list[str]:
        """Return the partitions that items are put into.

        Empty if there is only the default one, or if Milvus chooses the partition of an item.
        Otherwise the default one is among them.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        # With a partition key, Milvus alone chooses the partition of an item.
        if self._by_key:
            return []
        results = call_milvus(self.name, lambda: self._client.list_partitions(self.name))
        return [] if list(results) == [_DEFAULT] else list(results)

    def digests(self, window: Window) -> dict[Any, str]:
        """Read the digests of a copy's items by key; "" for an item that a writer put.

        Args:
            window: keys above `lower` and up to `upper`.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        results = self._query(self._window_expression(window), [self._key, OF])
        return {one[self._key]: str(one.get(OF, "")) for one in results}

    def existing_keys(self, keys: Sequence[Any]) -> Some[Any]:
        """Return those of the given keys that exist, as a set.

        Args:
            keys: keys in the collection's own type; none: no request is sent.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        results: set[Any] = set()
        for first in range(0, len(keys), _PAGE):
            some = list(keys[first : first + _PAGE])
            results.update(
                one[self._key] for one in self._query(self._keys_expression(some), [self._key])
            )
        return results

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
        """Insert or replace items with new vectors, in requests of 1,000.

        Missing partitions are created.

        Earlier requests stay after an error.

        Args:
            records: n items; none: nothing is sent. Their fields, partitions and digests are
                stored.
            vectors: float32 [n, dim], in place of their own.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
            IndexError: there are fewer vectors than items; earlier requests stay.
        """
        parts = dict.fromkeys(one.partition for one in records)
        for partition in parts:
            if partition:
                make_partition(self._client, self.name, partition)
            some = [row for row, one in enumerate(records) if one.partition == partition]
            for first in range(0, len(some), _PAGE):
                rows = [
                    {
                        **one.other_values,
                        self._key: one.key,
                        self.vector: vectors[row],
                        OF: one.copy_origin(vectors[row]),
                    }
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
        """Delete items by key; unknown keys are ignored.

        They go in requests of 1,000, and earlier ones stay after an error.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        for first in range(0, len(keys), _PAGE):
            some = list(keys[first : first + _PAGE])
            call_milvus(self.name, lambda some=some: self._client.delete(self.name, ids=some))  # type: ignore[misc]

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        """Read items by id as text; unknown ids are left out.

        They come in any order; their partition is not read, and counts as "" in `digest`. A number
        in another spelling, such as 01, is unknown.

        Earlier writes are visible. An id that is given twice may come twice.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        keys = [key for one in ids if (key := self._parse_key(one)) is not None]
        results: list[Record] = []
        for first in range(0, len(keys), _PAGE):
            among = self._keys_expression(keys[first : first + _PAGE])
            results += self._records_of_results(self._query(among, ["*", self.vector]))
        return results

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        Milvus may search approximately, by the index' metric.

        Earlier writes are visible.

        Args:
            vector: float32 [dim].
            count: the most ids to return, 1 to 16,384.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, InvalidInputError: Milvus does not answer within a
                minute, refuses the token, or refuses the request otherwise.
            ConfigurationError: the process was forked after the first client was opened.
        """
        self._load()
        results = call_milvus(
            self.name,
            lambda: self._client.search(
                self.name, data=[np.asarray(vector, np.float32).tolist()],
                anns_field=self.vector, limit=count, consistency_level=_STRONG,
                search_params={"params": {"ef": max(64, count)}},
            ),
        )  # fmt: skip
        return [str(hit["id"] if "id" in hit else hit[self._key]) for hit in results[0]]

    def schema(self, dim: int) -> Any:
        """Return the schema of a copy with vectors of dimension `dim`; nothing is sent.

        The copy has the same fields. Its keys are always given by writers, and it always allows
        undeclared fields; see `schema_of`.
        """
        return schema_of(self._client, self._fields, {self.vector: dim}, self._description)

    def _query(self, where: str, fields: list[str], partition: str = "") -> list[dict[str, Any]]:
        self._load()
        results = call_milvus(
            self.name,
            lambda: self._client.query(
                self.name, filter=where, output_fields=fields, consistency_level=_STRONG,
                partition_names=[partition] if partition else None,
            ),
        )  # fmt: skip
        return list(results)

    def _records_of_results(
        self, results: Sequence[Mapping[str, Any]], partition: str = ""
    ) -> list[Record]:
        records = []
        for one in results:
            values = {n: v for n, v in one.items() if n not in (self._key, self.vector, OF)}
            # A nullable field may have none; no copy can be made of such an item.
            found = one[self.vector]
            vector = np.asarray(() if found is None else found, np.float32)
            records.append(Record(one[self._key], vector, values, partition))
        return records

    def _window_expression(self, window: Window) -> str:
        if window.upper is not None:
            upper = f"{self._key} <= {_key_literal(window.upper)}"
        else:
            # A server cannot parse the least number, but the largest.
            upper = f'{self._key} >= ""' if self._texts else f"{self._key} <= {_MOST}"
        if window.lower is None:
            return upper
        return f"{self._key} > {_key_literal(window.lower)} and {upper}"

    def _keys_expression(self, keys: Sequence[Any]) -> str:
        return f"{self._key} in [{', '.join(map(_key_literal, keys))}]"

    def _parse_key(self, name: str) -> Any:
        if self._texts:
            return name
        try:
            key = int(name)
        except ValueError:
            return None
        return key if str(key) == name and -(1 << 63) <= key < 1 << 63 else None


def _mark_properties(facts: Mapping[str, str]) -> dict[str, str]:
    """Write facts of a collection as properties."""
    return {_MARK + name: value for name, value in facts.items()}


def _key_literal(value: object) -> str:
    """Write a key as a literal of Milvus' expressions, whose strings are those of JSON."""
    return json.dumps(value, ensure_ascii=False)
