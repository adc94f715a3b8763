"""A collection of Qdrant as a source, on a server or in a folder (the client's local mode).

New vectors become a named vector of the same points, so a deleted point takes its new vector along.

A point that is put again with only the old vector loses its new one and becomes pending. For a
writer that changes only the old named vector or the text, a second collection has a note for each
point: what its new vector was computed from, and that vector, each as a few projections. Until the
flip, a point that differs from its note is computed again. The points get no payload of ours,
because some programs refuse fields that they do not know.

Vectors of Qdrant cannot be renamed. A flip is a record in the collection's metadata; programs then
search with the new name (`using`). The old vectors stay until `drop_old`.
"""

import hashlib
import os
import re
import sqlite3
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.sources.source import (
    HTTP_STATUS_ERRORS,
    ColumnValues,
    Facts,
    Rows,
    SearchMetric,
    Target,
    Window,
    lock_by_address,
    parse_server_address,
    parse_store_metric,
    refuse_lost_vectors,
    stack_vectors,
)
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    join_few,
)
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors, normalise

with require_extra("qdrant"):
    from qdrant_client import QdrantClient, models
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse


# The environment variable with a server's key.
KEY = "NOBACKFILL_QDRANT_KEY"
_SECONDS = 60
# Port of an address without one, as the client takes it.
_PORT = 6333
# Ids have 64 bits; Python refuses to parse thousands of digits.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_FOLDERS: "weakref.WeakValueDictionary[Path, QdrantClient]" = weakref.WeakValueDictionary()


class Clients:
    """One Qdrant client per process, because a forked process must not share a connection.

    A folder belongs to the process that opened it; another process gets BusyError.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._by_process: dict[int, QdrantClient] = {}

    @property
    def process_client(self) -> QdrantClient:
        """Return the client of this process; open it at the first use.

        Threads of one process share it. After a fork, the child opens its own.

        Raises:
            NotFoundError: the folder does not exist.
            ConfigurationError: the address has another form.
            BusyError: another process has opened the folder.
            InvalidInputError: the folder cannot be read.
            OSError: the lock file of the folder cannot be opened.
        """
        process = os.getpid()
        if process not in self._by_process:
            self._by_process[process] = open_client(self._address)
        return self._by_process[process]


def _forget_clients() -> None:
    """Forget the parent's clients: closing them in a child would release the parent's lock."""
    for client in _FOLDERS.values():
        # A client that tests replace has no lock.
        if (lock := getattr(client._client, "_flock_file", None)) is not None:
            lock.close()
    _FOLDERS.clear()


os.register_at_fork(after_in_child=_forget_clients)


def open_client(address: str) -> QdrantClient:
    """Open a client of a Qdrant server or of a folder of its local mode.

    Vectors are private, so a server on another machine must be addressed by https://. A server is
    not called yet, and gets the key of NOBACKFILL_QDRANT_KEY if that is set. A folder is locked
    while its client, the only one of this process, is in use.

    Args:
        address: https://HOST:PORT (http:// on this machine), or a folder.

    Returns:
        The client. All calls of this process get the same client of a folder; it is closed when no
        object uses it.

    Raises:
        NotFoundError: the folder does not exist.
        ConfigurationError: the address has another form.
        BusyError: another process has opened the folder.
        InvalidInputError: the folder cannot be read.
        OSError: the lock file of the folder cannot be opened.
    """
    if "://" not in address:
        if not (Path(address) / "meta.json").is_file():
            raise NotFoundError(
                f"{address}: expected a folder of Qdrant's local mode, which has a meta.json, or "
                "the address https://HOST:PORT of a server; correct SOURCE"
            )
        return _folder_client(Path(address).resolve())
    parse_server_address(address, "qdrant", KEY)
    key = os.environ.get(KEY)
    # The client's own version check would call the server at once, and print warnings.
    return QdrantClient(url=address, api_key=key, timeout=_SECONDS, check_compatibility=False)


def _folder_client(path: Path) -> QdrantClient:
    """Return the one client of a folder in this process; the folder is locked while it is used."""
    client = _FOLDERS.get(path)
    if client is None:
        with translated_errors(str(path)):
            client = QdrantClient(path=str(path), force_disable_check_same_thread=True)
        _FOLDERS[path] = client
        weakref.finalize(client, client._client.close)
    return client


def point_id(name: str) -> int | str | None:
    """Convert a text to a point's id.

    Args:
        name: the text of an id.

    Returns:
        An integer of 64 bits for decimal digits without leading zeros, or a UUID in its usual
        lower-case form; None if no point can have this id.
    """
    if _NUMBER.fullmatch(name) and int(name) < 2**64:
        return int(name)
    try:
        return name if str(uuid.UUID(name)) == name else None
    except ValueError:
        return None


def key_order(key: Any) -> tuple[bool, Any]:
    """Return a key that sorts points' ids as Qdrant does: numbers come before UUIDs.

    Args:
        key: an id, an integer or a UUID.

    Raises:
        ValueError: `key` is neither an integer nor a UUID.
    """
    return (False, key) if isinstance(key, int) else (True, uuid.UUID(str(key)).int)


@contextmanager
def translated_errors(name: str) -> Iterator[None]:
    """Convert errors of Qdrant's client in the block to errors of nobackfill.

    Args:
        name: the collection or folder, for the messages.

    Raises:
        UnavailableError: the server does not answer, or its status is one of 500, 502, 503, 504.
        NotPermittedError: status 401 or 403.
        NotFoundError: status 404, or any KeyError of the block: the folder lacks a point.
        BusyError: status 429, or another process has opened the folder.
        InvalidInputError: any other status, and any other ValueError or RuntimeError of the block.
            OSError passes unchanged.
        CannotWriteError: the disk of a folder is full, or one of its files is read-only.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        # The local mode keeps its points in a file of SQLite.
        raise CannotWriteError(
            f"collection {name}: the folder cannot be written ({error}); free some space or fix "
            "the permissions, and run the command again"
        ) from error
    except UnexpectedResponse as error:
        ours = HTTP_STATUS_ERRORS.get(error.status_code or 0, InvalidInputError)
        raise ours(
            f"collection {name}: the Qdrant server answers with the HTTP status "
            f"{error.status_code}: {error.content[:200].decode(errors='replace')}. Correct the "
            "request, or look at the server's log"
        ) from error
    except ResponseHandlingException as error:
        raise UnavailableError(
            f"collection {name}: the Qdrant server does not answer ({error}); check its address "
            "and that it runs"
        ) from error
    except KeyError as error:
        # The local mode's error for a missing point.
        raise NotFoundError(
            f"collection {name}: no point has the id {error}; a program may have deleted the point "
            "meanwhile: run the command again"
        ) from error
    except (ValueError, RuntimeError) as error:
        kind = BusyError if "already accessed" in str(error) else InvalidInputError
        raise kind(f"collection {name}: Qdrant refuses the request: {error}") from error


_PAGE = 500
# Vectors that differ by less are equal: a collection may store half precision.
_TOLERANCE = 2e-3
# Projections of a vector in a note.
_AXES = 4
# Largest difference between a projection and its note, as a share of the vector's norm. A new
# vector may be stored in half precision; an old one is always read alike, but for the last bits.
_NEAR: Mapping[str, float] = {"old": 2e-5, "new": _TOLERANCE}
_METRICS: Mapping[str, SearchMetric] = {
    "Cosine": "cosine", "Euclid": "squared_l2", "Dot": "inner_product", "Manhattan": "l1",
}  # fmt: skip


class QdrantSource:
    """A collection of Qdrant, one dense vector of which can be migrated.

    Every method may raise UnavailableError, NotPermittedError, BusyError, NotFoundError (the
    collection was dropped) and InvalidInputError, by the server's answer.
    Methods that write may raise CannotWriteError for a folder.

    Args:
        address: https://HOST:PORT (http:// on this machine), or a folder of the local mode.
        collection: the collection's name, or an alias of it.
        vector: the name of the vector; None: the only dense vector, apart from new ones of a map
            or model whose old ones still exist. The name of vectors that were dropped after a flip
            leads to the new ones.

    Attributes:
        vector: the name of the vector; empty for an unnamed one.

    Raises:
        NotFoundError: there is no such folder or collection.
        InvalidInputError: the vector is missing or ambiguous, or a point may have several.
        ConfigurationError: the address has another form.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the key.
        BusyError: the server has too many requests, or another process has opened the folder.
        OSError: the lock file of the folder cannot be opened.
    """

    flip_renames = False

    def __init__(self, address: str, collection: str, vector: str | None = None) -> None:
        self._name = collection
        self._address = address
        self._clients = Clients(address)
        with translated_errors(collection):
            if not self._client.collection_exists(collection):
                others = join_few(one.name for one in self._client.get_collections().collections)
                raise NotFoundError(
                    f"{collection}: no such collection in this Qdrant; its collections are "
                    f"{others or 'none'}"
                )
        # The lock and the notes go by the name; an alias would have its own. A key of one
        # collection may not list aliases.
        with suppress(NotPermittedError), translated_errors(collection):
            for one in self._client.get_aliases().aliases:
                if one.alias_name == collection:
                    self._name = one.collection_name
        vectors, marks = self._config()
        if vector is not None and vector not in vectors:
            vector = next((n for n, m in marks.items() if m.get("of") == vector), vector)
        names = list(vectors)
        if vector is None:
            names = [name for name in vectors if _is_own(marks.get(name, {}), vectors)]
        if (vector is None and len(names) != 1) or (vector is not None and vector not in names):
            raise InvalidInputError(
                f"{collection}: expected {'one vector' if vector is None else repr(vector)}, found "
                f"{join_few(map(repr, names)) or 'none'}; name one with --vector"
            )
        self.vector = vector or names[0]
        self._params = vectors[self.vector]
        self._model = marks.get(self.vector, {}).get("model")
        if self._params.multivector_config is not None:
            raise InvalidInputError(
                f"{collection}: expected one vector per item, but {self.vector!r} has several (a "
                "multivector, as ColBERT models make them); multivectors cannot be migrated"
            )

    @property
    def _client(self) -> QdrantClient:
        return self._clients.process_client

    def _read_config(self) -> models.CollectionConfig:
        with translated_errors(self._name):
            return self._client.get_collection(self._name).config

    def _config(self) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """Return the parameters of dense vectors by name ("" for an unnamed one), and their marks.

        A mark has the fingerprint of the model, as "model". That of new vectors also has the digest
        of the map, as "map". A flip adds "flipped", and "of": the name of the old vectors.
        "finished" says that these were dropped.
        """
        config = self._read_config()
        vectors = config.params.vectors or {}
        if not isinstance(vectors, dict):
            vectors = {"": vectors}
        marks = (config.metadata or {}).get("nobackfill") or {}
        return dict(vectors), {n: m for n, m in marks.items() if n in vectors}

    def _sparse_names(self) -> Collection[str]:
        return self._read_config().params.sparse_vectors or {}

    def facts(self) -> Facts:
        """Return the name, dimension, metric and model of the vectors.

        Nothing is read from the server: the facts are as they were when the source was opened. The
        model is None unless the collection's metadata names it.

        Raises:
            InvalidInputError: searches use a metric that nobackfill does not support.
        """
        metric = parse_store_metric(self._params.distance.value, _METRICS, self._name)
        name, size = f"{self._name}#{self.vector}", self._params.size
        return Facts(name, size, metric, self._model, normalises=metric == "cosine")

    def count(self) -> int:
        """Count the points that have the vector.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        return self.count_vectors(self.vector)

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all ids into windows of `rows_per_window` points.

        The last window has no upper end, so that it includes new points. An empty collection gives
        one window. Each window is asked for when it is taken. Numbers come before UUIDs. The first
        one has the `lower` None.

        Args:
            rows_per_window: the size of a window, at least 1.

        Yields:
            Windows whose `lower` is included and whose `upper` is not; both are ids.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        lower = None
        while True:
            with translated_errors(self._name):
                _, upper = self._client.scroll(
                    self._name,
                    limit=rows_per_window,
                    offset=lower,
                    with_payload=False,
                    with_vectors=False,
                )
            # `upper` begins the next window. The last window is open, to include new points.
            yield Window(lower, upper)
            if upper is None:
                return
            lower = upper

    def read(self, window: Window) -> Rows:
        """Read the vectors of a window, by increasing id.

        Points without the vector are left out. With the metric cosine, vectors have the norm 1.
        They are read in pages of 500.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request, or vectors differ in dimension.
        """
        return self.read_rows(self.vector, window)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read a payload field of a window as text, without the points where it is empty.

        An unknown field gives no values. Points come by increasing id. Other values are converted
        by `str`, also lists and False.

        Args:
            name: the field, in Qdrant's syntax of paths for the request; only a top-level key gives
                values.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        points = self.read_points(window, payload=[name])
        values = [(point.id, (point.payload or {}).get(name)) for point in points]
        pairs = [(str(key), str(value)) for key, value in values if value not in (None, "")]
        return ColumnValues([key for key, _ in pairs], [value for _, value in pairs])

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        The collection's own metric is used, and a server may search approximately. Points without
        the vector are never hits.

        Args:
            vector: float32 [dim].
            count: the most ids to return, at least 1.
            new_name: the name of new vectors to search; None: the old ones.

        Raises:
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: there are no vectors of this name, `vector` has another dimension, or
                Qdrant refuses the request otherwise.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
        """
        with translated_errors(self._name):
            response = self._client.query_points(
                self._name, np.asarray(vector, np.float32).tolist(), limit=count,
                using=(new_name or self.vector) or None, with_payload=False,
            )  # fmt: skip
        return [str(point.id) for point in response.points]

    def lookup(self, ids: Sequence[str], vector: str | None = None) -> Rows:
        """Read vectors by id.

        Args:
            ids: ids as text; texts that are no ids, unknown ones, and points without the vector,
                are left out. An empty list gives no points.
            vector: the name of the vector; None: the old one.

        Returns:
            Points in any order, each once, with float32 [n, dim]. With the metric cosine, vectors
            have the norm 1.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        name = self.vector if vector is None else vector
        with translated_errors(self._name):
            points = self._client.retrieve(
                self._name, [key for n in dict.fromkeys(ids) if (key := point_id(n)) is not None],
                with_payload=False, with_vectors=[name] if name else True,
            )  # fmt: skip
        return self.rows_of(points, name)

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read a payload field by id as text, without the points where it is empty.

        Texts that are no ids, unknown ids and unknown fields are left out. The result is in any
        order, each id once. Other values are converted by `str`.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        with translated_errors(self._name):
            points = self._client.retrieve(
                self._name,
                [k for n in ids if (k := point_id(n)) is not None],
                with_payload=[column],
            )
        values = {str(point.id): (point.payload or {}).get(column) for point in points}
        return {name: str(value) for name, value in values.items() if value not in (None, "")}

    def close(self) -> None:
        """Do nothing: the client is closed when no object uses it."""

    def open_target(self, target: Target) -> "NewNamedVectors":
        """Create the new named vector, or open it if this map created it before.

        It gets the metric, storage and index settings of the old one. Its numbers are float16 if
        those of the old one are, else float32. The mark is written before the vector, so that a
        killed call can be repeated. An existing vector of this map is not
        changed, and its dimension is not checked. If writing the index settings fails, the vector
        stays with the server's own; a later call does not set them.

        Args:
            target: its name and dimension, and the digest of the map.

        Raises:
            AlreadyExistsError: another vector has the name, or the name is empty.
            InvalidInputError: the old vector has no name; Qdrant then refuses named ones; or Qdrant
                refuses the request otherwise.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        vectors, marks = self._config()
        # It refuses a vector without a name.
        _ = self.flip_name
        mark = marks.get(target.name, {})
        if "flipped" in mark and mark.get("map") != target.computer_digest:
            raise AlreadyExistsError(
                f"{self._name}: searches use the vector {target.name!r} since a flip by another "
                "map; end that migration with `nobackfill migrate finish` or `nobackfill migrate "
                "back`, or choose another --to"
            )
        foreign = target.name in vectors and mark.get("map") != target.computer_digest
        if not target.name or foreign or target.name in self._sparse_names():
            raise AlreadyExistsError(
                f"{self._name}: vector {target.name!r} exists already and was not made by this "
                "map; choose another --to, or remove the vector with `nobackfill carry --rollback`"
            )
        if target.name not in vectors:
            like = self._params
            # Others lose too much: uint8 cuts each number of a vector of norm 1 to 0 or 1.
            half = like.datatype == models.Datatype.FLOAT16
            datatype = models.VectorStorageDatatype.FLOAT16 if half else None
            dense = models.DenseVectorConfig(
                size=target.dim, distance=like.distance, datatype=datatype
            )
            # Storage and index settings, which the creation call does not take.
            diff = models.VectorParamsDiff(
                hnsw_config=like.hnsw_config, quantization_config=like.quantization_config,
                on_disk=like.on_disk, memory=like.memory,
            )  # fmt: skip
            with translated_errors(self._name):
                # Write the mark first: after a kill in between, the name is still free.
                model = {"model": target.model} if target.model else {}
                self._set_mark(target.name, {"map": target.computer_digest} | model)
                self._client.create_vector_name(
                    self._name, target.name, models.DenseVectorNameConfig(dense=dense)
                )
                if any(value is not None for _, value in diff):
                    self._client.update_collection(self._name, vectors_config={target.name: diff})
        flipped = mark.get("flipped") == "true"
        if not flipped:
            self._make_notes(target.name)
        return NewNamedVectors(self, self._clients, self._name, target, flipped)

    def drop_new_vectors(self, name: str) -> bool:
        """Remove the new vectors of a name, and the collection of their notes.

        A killed call can be repeated.

        Returns:
            False if no map created them, or if the collection has flipped to them.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        vectors, mark = self._config()[0], self._marks().get(name, {})
        # A flipped collection searches these vectors, so they must stay.
        if "map" not in mark or "flipped" in mark:
            return False
        self._remove(name, vectors)
        return name in vectors

    def _remove(self, name: str, vectors: Collection[str]) -> None:
        """Remove new vectors, their notes and their mark; `vectors` are the dense ones there are.

        The mark goes last, so that a killed call can be repeated.
        """
        with translated_errors(self._name):
            # A sparse vector may have this name by now; it is not ours.
            if name in vectors:
                self._client.delete_vector_name(self._name, name)
            self._drop_notes(name)
            self._set_mark(name, None)

    def _make_notes(self, name: str) -> None:
        """Create the collection of notes on new vectors, if it is missing."""
        notes = sketches_collection(self._name, name)
        with translated_errors(notes):
            if self._client.collection_exists(notes):
                if self._is_ours(notes):
                    return
                raise AlreadyExistsError(
                    f"{self._name}: the collection {notes!r} exists already and was not made by "
                    "nobackfill, which needs this name; delete it, or choose another --to"
                )
            # Notes are never searched: no index.
            params = models.VectorParams(
                size=2 * _AXES, distance=models.Distance.EUCLID, on_disk=True,
                hnsw_config=models.HnswConfigDiff(m=0),
            )  # fmt: skip
            self._client.create_collection(
                notes, vectors_config=params, metadata={"nobackfill": {"notes": self._name}}
            )

    def _is_ours(self, notes: str) -> bool:
        metadata = self._client.get_collection(notes).config.metadata or {}
        return "notes" in (metadata.get("nobackfill") or {})

    def _drop_notes(self, *names: str) -> None:
        for notes in [sketches_collection(self._name, name) for name in names]:
            if self._client.collection_exists(notes) and self._is_ours(notes):
                self._client.delete_collection(notes)

    def read_sketches(self, name: str, keys: Sequence[Any]) -> dict[str, "VectorSketch"]:
        """Read the notes on new vectors by id; points without one are left out.

        Args:
            name: the name of the new vectors; without a collection of notes there are none.
            keys: ids of points, as Qdrant has them.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        notes, found = sketches_collection(self._name, name), list[Any]()
        with translated_errors(notes):
            if not self._client.collection_exists(notes):
                return {}
            for first in range(0, len(keys), _PAGE):
                found += self._client.retrieve(
                    notes, list(keys[first : first + _PAGE]), with_vectors=True
                )
        return {
            str(one.id): VectorSketch(tuple(one.vector), (one.payload or {}).get("text", ""))
            for one in found
        }

    def record_flip(self, name: str) -> None:
        """Record the flip to new vectors: from now on, writers put vectors of this name.

        Args:
            name: the name of the new vectors, which `open_target` has created.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection was deleted, or no map made vectors of this name.
            InvalidInputError: Qdrant refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        with translated_errors(self._name):
            mark = {**self._config()[1][name], "flipped": "true", "of": self.vector}
            self._set_mark(name, mark)

    @property
    def flip_name(self) -> str:
        """Return the name of the vectors, which a flip does not change.

        Raises:
            InvalidInputError: the vector has no name, so that no second one can stand next to it.
        """
        if self.vector == "":
            raise InvalidInputError(
                f"{self._name}: its vector has no name, and Qdrant refuses unnamed vectors once a "
                "collection has named ones; copy its points into a collection with a named vector, "
                "and migrate that one"
            )
        return self.vector

    def record_model(self, model: str) -> None:
        """Record the model of the vectors in the collection's metadata, by its fingerprint.

        An earlier model is replaced; the text is not checked.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        with translated_errors(self._name):
            self._set_mark(self.vector, {**self._marks().get(self.vector, {}), "model": model})
        self._model = model

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the collection out, by a lock file.

        It waits up to 3 s for the lock. The file lies in the folder of the local mode. For a server
        it lies in `~/.cache/nobackfill` (or below XDG_CACHE_HOME): it keeps out migrations of this
        user on this machine alone. Yields a function that does nothing: a lock file is not lost.

        Raises:
            BusyError: another migration holds the lock.
            CannotWriteError: the lock file cannot be created.
        """
        folder = None if "://" in self._address else Path(self._address).resolve()
        return lock_by_address(self._address, self._name, folder, port=_PORT)

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the map whose vectors have a name; None for any other name, and
        after the flip.

        Also for a name whose vectors a killed `drop_new_vectors` has removed.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        mark = self._marks().get(column, {})
        return None if "flipped" in mark else mark.get("map")

    def _flipped_to(self) -> tuple[str, dict[str, str]]:
        """Return name and mark of the vectors that searches use since the last flip from this name,
        or to it; ("", {}) without one."""
        vectors, marks = self._config()
        flipped = {name: mark for name, mark in marks.items() if "flipped" in mark}
        for name, mark in flipped.items():
            if mark.get("of") == self.vector and self.vector in vectors:
                return name, mark
        return (self.vector, flipped[self.vector]) if self.vector in flipped else ("", {})

    def flip_digest(self) -> str | None:
        """Return the digest of the map of the vectors that searches use since a flip; None without
        one.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        return self._flipped_to()[1].get("map")

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whether the collection has flipped to the vectors of a map: old, flipped, finished
        (the old ones are dropped) or unknown.

        It is unknown where the old vectors of a flip to other vectors exist.

        Args:
            computer_digest: digest of the map of the new vectors.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        found = self._flipped_to()[1]
        finished = "finished" in found
        if found.get("map") == computer_digest:
            return "finished" if finished else "flipped"
        return "old" if finished or not found else "unknown"

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Take the flip back: remove the new vectors.

        A point counts as written since the flip if it has no old vector. It also counts if its new
        vector alone differs from its note; its old vector is then stale, and is deleted. A point
        that a writer has put with both vectors keeps the old one.

        Args:
            new_name: the name of the new vectors.
            allow_loss: go on where points were written since the flip: they lose their only vector.

        Returns:
            The number of points that lost their only vector.

        Raises:
            NotFoundError: there are no old vectors, or the collection has not flipped to
                `new_name`.
            InvalidInputError: points were written since the flip, and `allow_loss` is False;
                nothing is changed; or Qdrant refuses the request.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        vectors, marks = self._config()
        mark = marks.get(new_name, {})
        old = mark.get("of")
        if old is None or old not in vectors:
            raise NotFoundError(
                f"collection {self._name}: the collection has no old vectors, so there is no flip "
                f"to {new_name!r} that can be undone"
            )
        without_old, stale = 0, list[Any]()
        for window in self.windows(_PAGE) if new_name in vectors else ():
            page = list(self.read_points(window, [old, new_name]))
            both = [one for one in page if {old, new_name} <= set(one.vector or {})]
            without_old += sum(new_name in (one.vector or {}) for one in page) - len(both)
            notes = self.read_sketches(new_name, [one.id for one in both])
            before, after = self.rows_of(both, old), self.rows_of(both, new_name)
            stale += [
                key
                for key, name, one, other in zip(
                    before.keys, before.ids, before.vectors, after.vectors, strict=True
                )
                if name in notes
                and notes[name].matches("old", one)
                and not notes[name].matches("new", other)
            ]
        losses = without_old + len(stale)
        refuse_lost_vectors(self._name, losses, "points", allow_loss=allow_loss)
        for first in range(0, len(stale), _PAGE):
            with suppress(NotFoundError), translated_errors(self._name):
                self._client.delete_vectors(self._name, [old], stale[first : first + _PAGE])
        self._remove(new_name, vectors)
        return losses

    def drop_old(self) -> None:
        """Drop the old vectors after a flip, and the notes; the flip cannot be undone then.

        A killed call can be repeated.

        Raises:
            NotFoundError: the collection has not flipped. The collection or the folder was deleted.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            InvalidInputError: a point has only the old vector, and nothing is changed; or Qdrant
                refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        name, mark = self._flipped_to()
        if not name:
            raise NotFoundError(
                f"collection {self._name}: searches have not flipped to new vectors, so there are "
                "no old vectors to drop"
            )
        old = mark["of"]
        present = old in self._config()[0]
        only_old = models.Filter(
            must=[models.HasVectorCondition(has_vector=old)],
            must_not=[models.HasVectorCondition(has_vector=name)],
        )
        with translated_errors(self._name):
            count = self._client.count(self._name, count_filter=only_old, exact=True).count
        if present and count:
            raise InvalidInputError(
                f"{self._name}: {count} points have a vector {old!r} and no {name!r}, as programs "
                "put them after the flip; nothing was dropped. Run `nobackfill carry` with the "
                f"same model or map, --vector {old} and --to {name}, or delete these vectors; then "
                "run `nobackfill migrate finish` again"
            )
        with translated_errors(self._name):
            # A killed call may have deleted them, and some clients refuse an unknown name.
            if present:
                self._client.delete_vector_name(self._name, old)
            # The old vectors may have notes of their own, of an earlier `carry`.
            self._drop_notes(name, old)
            self._set_mark(name, {**mark, "finished": "true"})

    def _marks(self) -> dict[str, dict[str, str]]:
        """Return the marks of all names, also of vectors that do not exist."""
        return dict((self._read_config().metadata or {}).get("nobackfill") or {})

    def _set_mark(self, name: str, mark: dict[str, str] | None) -> None:
        marks = {**self._marks(), name: mark}
        present = {one: value for one, value in marks.items() if value is not None}
        self._client.update_collection(self._name, metadata={"nobackfill": present})

    def count_vectors(self, vector_name: str) -> int:
        """Count the points that have a vector of this name, exactly.

        Returns:
            The number of points; 0 for an unknown name.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        has = models.Filter(must=[models.HasVectorCondition(has_vector=vector_name)])
        with translated_errors(self._name):
            return int(self._client.count(self._name, count_filter=has, exact=True).count)

    def read_rows(self, vector_name: str, window: Window, missing_name: str | None = None) -> Rows:
        """Read the vectors of one name in a window.

        Points without the vector are left out. With the metric cosine, vectors are scaled to the
        norm 1. They are read in pages of 500.

        Args:
            vector_name: the name of the vectors.
            window: the range of ids, `lower` included and `upper` not.
            missing_name: leave out points that have a vector of this name; None: read all.

        Returns:
            Points by increasing id, with float32 [n, dim]. `keys` are the ids as Qdrant has them,
            integers or texts.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request, or vectors differ in dimension.
        """
        none = None
        if missing_name is not None:
            none = models.Filter(must_not=[models.HasVectorCondition(has_vector=missing_name)])
        return self.rows_of(list(self.read_points(window, [vector_name], where=none)), vector_name)

    def read_points(
        self, window: Window, vectors: Sequence[str] = (), payload: Sequence[str] = (),
        where: Any = None,
    ) -> Iterator[Any]:  # fmt: skip
        """Read the points of a window by increasing id, with vectors and payload fields by name.

        They are read in pages of 500. An empty name reads all vectors.

        Args:
            window: the range of ids, `lower` included and `upper` not.
            vectors: names of vectors; a point may lack them.
            payload: paths of payload fields.
            where: a filter of Qdrant; None: all.

        Yields:
            Points as Qdrant's client has them.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        offset: Any = window.lower
        while True:
            with translated_errors(self._name):
                points, offset = self._client.scroll(
                    self._name, scroll_filter=where, limit=_PAGE, offset=offset,
                    with_payload=list(payload) or False,
                    with_vectors=True if "" in vectors else list(vectors) or False,
                )  # fmt: skip
            for point in points:
                if window.upper is not None and key_order(point.id) >= key_order(window.upper):
                    return
                yield point
            if offset is None:
                return

    def rows_of(self, points: Sequence[Any], vector_name: str) -> Rows:
        """Convert points of Qdrant to rows with the vectors of one name.

        Points without the vector are left out.

        Args:
            points: points that were read with the vector.
            vector_name: its name.

        Returns:
            Rows with float32 [n, dim], [0, 0] if no point has the vector. With the metric cosine,
            vectors have the norm 1.

        Raises:
            InvalidInputError: the vectors differ in dimension, or one is empty.
        """
        values = (
            (p.id, p.vector.get(vector_name) if isinstance(p.vector, dict) else p.vector)
            for p in points
        )
        pairs = [(key, value) for key, value in values if value is not None]
        ids = [str(key) for key, _ in pairs]
        vectors = stack_vectors([value for _, value in pairs], ids, self._name)
        if self._params.distance == models.Distance.COSINE:
            # A server stores normalised vectors; a folder may not, after it is opened again.
            vectors = normalise(vectors)
        return Rows(ids, vectors, [key for key, _ in pairs])


class NewNamedVectors:
    """The new named vector of a collection's points, which a migration fills.

    Before the flip, a new vector that differs from its note is its writer's. It stays, unless the
    flip must be reversible: then each new vector is computed here. After the flip, writers put it
    together with the old vector, and a migration only fills the points that have none. Every method
    may raise the errors of QdrantSource.

    Attributes:
        flipped: whether the flip was recorded.
        writers_put_new_vectors: whether new vectors of writers stay before the flip.
    """

    concurrent_windows = 1

    def __init__(
        self,
        source: QdrantSource,
        clients: Clients,
        collection: str,
        target: Target,
        flipped: bool,
    ) -> None:
        self._source, self._clients = source, clients
        self._collection, self._target, self.flipped = collection, target, flipped
        self._notes = sketches_collection(collection, target.name)
        self.writers_put_new_vectors = not target.must_be_reversible

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of the points in a window whose new one is missing or stale.

        They come by increasing id. Stale new vectors are deleted, but not after the flip: then only
        points without one are pending.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        old, new, content = self._source.vector, self._target.name, self._target.content_column
        if self.flipped:
            return self._source.read_rows(old, window, missing_name=new)
        points = self._source.read_points(window, [old, new], [content] if content else [])
        # The window of a flip is the whole collection: only pending rows fit into memory.
        pages = iter(lambda: list(islice(points, _PAGE)), [])
        parts = [part for page in pages if len(part := self._pending(page))]
        if not parts:
            return Rows([], np.empty((0, self._source.facts().dim or 0), np.float32))
        return Rows(
            [name for part in parts for name in part.ids],
            np.concatenate([part.vectors for part in parts]),
            [key for part in parts for key in part.keys],
            [version for part in parts for version in part.versions],
        )

    def _pending(self, points: Sequence[Any]) -> Rows:
        """Return the rows of a page of points that are pending; delete their stale new vectors."""
        old, new, content = self._source.vector, self._target.name, self._target.content_column
        rows, made = self._source.rows_of(points, old), self._source.rows_of(points, new)
        notes = self._source.read_sketches(new, [one.id for one in points])
        olds = dict(zip(rows.ids, rows.vectors, strict=True))
        news = dict(zip(made.ids, made.vectors, strict=True))
        versions, stale = dict[str, str](), list[Any]()
        for point in points:
            name = str(point.id)
            note = notes.get(name)
            version = _text_digest((point.payload or {}).get(content)) if content else ""
            ours = name in news and note is not None and note.matches("new", news[name])
            if name not in olds:
                # Nothing is left that this vector was computed from.
                stale += [point.id] if ours else []
            elif name not in news:
                versions[name] = version
            elif ours and note is not None and note.matches("old", olds[name]):
                if note.text_digest != version:
                    versions[name] = version
                    stale.append(point.id)
            elif ours or not self.writers_put_new_vectors:
                versions[name] = version
                stale.append(point.id)
        self._delete(stale)
        left = [row for row, name in enumerate(rows.ids) if name in versions]
        some = rows.select(left)
        return replace(some, versions=[versions[name] for name in some.ids])

    def _delete(self, keys: list[Any]) -> None:
        """Delete new vectors of points; those that were deleted meanwhile are ignored."""
        for first in range(0, len(keys), _PAGE):
            some, name = keys[first : first + _PAGE], self._target.name
            with suppress(NotFoundError), translated_errors(self._collection):
                self._clients.process_client.delete_vectors(self._collection, [name], some)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors of points, except of those whose old vector has changed.

        It goes in requests of 500, and earlier ones stay after an error. The notes are written
        first, so that after a kill no new vector lacks one. A vector that a writer put in the
        meantime stays. If the old vector changes during the write, the new one is deleted again. A
        point that was deleted is left out.

        Args:
            rows: n points, as `pending` returned them.
            vectors: float32 [n, dim].

        Raises:
            NotFoundError: the collection or the folder was deleted.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            InvalidInputError: Qdrant refuses the request otherwise.
            ValueError: `vectors` has another number of rows; earlier requests stay.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        for first in range(0, len(rows), _PAGE):
            part = slice(first, first + _PAGE)
            read = dict(zip(rows.ids[part], rows.vectors[part], strict=True))
            new = dict(zip(rows.ids[part], vectors[part], strict=True))
            keys = dict(zip(rows.ids[part], rows.keys[part], strict=True))
            versions = rows.versions[part] or [""] * len(read)
            texts = dict(zip(rows.ids[part], map(str, versions), strict=True))
            self._write_sketches(read, new, keys, texts)
            self._write_vectors(read, new, keys)

    def _write_sketches(
        self,
        read: dict[str, Vectors],
        new: dict[str, Vectors],
        keys: dict[str, Any],
        texts: dict[str, str],
    ) -> None:
        """Write notes of points; nothing after `drop_old`, which no note outlives."""
        unit = self._source.facts().normalises
        points = [
            models.PointStruct(
                id=keys[name],
                vector=[
                    *_vector_projections(old),
                    *_vector_projections(normalise(new[name][None])[0] if unit else new[name]),
                ],
                payload={"text": texts[name]} if texts[name] else None,
            )
            for name, old in read.items()
        ]
        with translated_errors(self._notes):
            if not self.flipped or self._clients.process_client.collection_exists(self._notes):
                self._clients.process_client.upsert(self._notes, points)

    def _write_vectors(
        self, read: dict[str, Vectors], new: dict[str, Vectors], keys: dict[str, Any]
    ) -> None:
        name, client = self._target.name, self._clients.process_client
        same = [one for one, is_same in self._unchanged_by_id(read).items() if is_same]
        points = [
            models.PointVectors(id=keys[one], vector={name: new[one].tolist()}) for one in same
        ]
        if not points:
            return
        # Vectors that a writer has put meanwhile stay.
        none = models.Filter(must_not=[models.HasVectorCondition(has_vector=name)])
        # Qdrant reports points that were deleted meanwhile, and writes the others.
        with suppress(NotFoundError), translated_errors(self._collection):
            client.update_vectors(self._collection, points, update_filter=none)
        stale = [one for one, is_same in self._unchanged_by_id(read).items() if not is_same]
        if not stale:
            return
        present = self._source.lookup(stale, name)
        ours = [
            keys[one]
            for one, vector in zip(present.ids, present.vectors, strict=True)
            if np.allclose(vector, new[one], atol=_TOLERANCE)
        ]
        self._delete(ours)

    def _unchanged_by_id(self, read: Mapping[str, Vectors]) -> dict[str, bool]:
        """Return, for each point that still exists, whether its old vector is unchanged."""
        rows = self._source.lookup(list(read))
        pairs = zip(rows.ids, rows.vectors, strict=True)
        return {name: np.array_equal(read[name], vector) for name, vector in pairs}

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Do nothing: Qdrant builds indexes by itself, and two flips do the same."""
        return nullcontext()

    @contextmanager
    def open_flip(self) -> Iterator[None]:
        """Record the flip after the block; Qdrant has no lock.

        From then on, each new vector counts as its writer's. Nothing is recorded if the block
        raises an error. A second flip changes nothing.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection was deleted, or the new vectors were removed.
            InvalidInputError: Qdrant refuses the request otherwise.
            CannotWriteError: the disk of a folder is full, or one of its files is read-only.
        """
        yield
        self._source.record_flip(self._target.name)
        self.flipped = True

    def owner_tasks(self) -> list[str]:
        """Return the owner's tasks after the flip, as sentences."""
        return [
            f"search with using={self._target.name!r} as soon as queries come from the new model",
            "run carry once more after the last writer that puts only the old vector has stopped",
        ]

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window, by increasing id.

        Also those that writers put. Points without one are left out.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        return self._source.read_rows(self._target.name, window)

    def count(self) -> int:
        """Count the points that have a new vector.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        return self._source.count_vectors(self._target.name)

    def finish(self) -> list[str]:
        """Return the owner's steps to the flip, as sentences; empty after the flip.

        Nothing is read or written. `flipped` is what this object knows: another process's flip
        counts after `open_target`.
        """
        if self.flipped:
            return []
        return [
            f"let every writer put points with both {self._source.vector!r} and "
            f"{self._target.name!r}, each by its model",
            "run `carry` with --flip: it fills the points that have only the old vector, and keeps "
            "the vectors that writers put",
            *self.owner_tasks(),
        ]


def _is_own(mark: Mapping[str, str], vectors: Mapping[str, Any]) -> bool:
    """Return whether vectors are no migration's, or those of one whose old vectors are dropped."""
    dropped = "flipped" in mark and ("finished" in mark or mark.get("of") not in vectors)
    return "map" not in mark or dropped


@dataclass(frozen=True)
class VectorSketch:
    """Projections of a new vector, and of the old vector that it was computed from.

    A digest would change with the last bit of a number, which Qdrant does not preserve.

    Attributes:
        projections: four of the old vector, and four of the new one.
        text_digest: digest of the text; empty without one.
    """

    projections: tuple[float, ...]
    text_digest: str

    def matches(self, part: Literal["old", "new"], vector: Vectors) -> bool:
        """Return whether the old or the new vector is still the one of the note.

        Args:
            part: which of them.
            vector: float32 [dim].
        """
        noted = self.projections[:_AXES] if part == "old" else self.projections[_AXES:]
        bound = _NEAR[part] * max(1e-6, float(np.linalg.norm(vector)))
        return bool((np.abs(np.array(noted) - _vector_projections(vector)) <= bound).all())


def sketches_collection(collection: str, name: str) -> str:
    """Return the collection of the notes on new vectors of a name."""
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    # "a.b" and "a_b" may be vectors of one collection.
    digest = "" if plain == name else "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{collection}-nobackfill-{plain}{digest}"


def _vector_projections(vector: Vectors) -> list[float]:
    """Return four fixed projections of a vector."""
    projections: list[float] = (_projection_axes(len(vector)) @ vector.astype(np.float64)).tolist()
    return projections


@cache
def _projection_axes(dim: int) -> NDArray[np.float64]:
    """Return the axes of projections [4, dim]; quadratic phases, so that no two are alike."""
    phases = np.arange(1, _AXES + 1)[:, None] * np.arange(1, dim + 1) ** 2
    return np.asarray(np.cos(0.37 * phases))


def _text_digest(value: object) -> str:
    """Return a digest of a payload value; empty for an empty one."""
    return "" if value in (None, "") else hashlib.sha256(str(value).encode()).hexdigest()[:32]
