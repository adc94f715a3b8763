"""A collection of Qdrant as a source, on a server or in a folder (the client's local mode).

New vectors become a named vector of the same points, so a deleted point takes its new vector along.

A point that is put again with only the old vector loses its new one and becomes pending. A writer
that updates only the old named vector (`update_vectors`) leaves a stale new one. Verification finds
such vectors, until the flip.
"""

import os
import re
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.adopt.sources.source import (
    STATUSES,
    ColumnValues,
    Facts,
    Rows,
    SearchMetric,
    Target,
    Window,
    even,
    metric_of,
    server_address,
)
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NotFoundError,
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
# Ids have 64 bits; Python refuses to parse thousands of digits.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_FOLDERS: "weakref.WeakValueDictionary[Path, QdrantClient]" = weakref.WeakValueDictionary()


class Clients:
    """One Qdrant client per process, because a forked process must not share a connection.

    A folder belongs to the process that opened it; another process gets BusyError.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._by_process: dict[int, QdrantClient] = {}

    @property
    def own(self) -> QdrantClient:
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
            self._by_process[process] = open_client(self._place)
        return self._by_process[process]


def _forget_clients() -> None:
    """Forget the parent's clients: closing them in a child would release the parent's lock."""
    for client in _FOLDERS.values():
        # A client that tests replace has no lock.
        if (lock := getattr(client._client, "_flock_file", None)) is not None:
            lock.close()
    _FOLDERS.clear()


os.register_at_fork(after_in_child=_forget_clients)


def open_client(place: str) -> QdrantClient:
    """Open a client of a Qdrant server or of a folder of its local mode.

    Vectors are private, so a server on another machine must be addressed by https://. A server is
    not called yet, and gets the key of NOBACKFILL_QDRANT_KEY if that is set. A folder is locked
    while its client, the only one of this process, is in use.

    Args:
        place: https://HOST:PORT (http:// on this machine), or a folder.

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
    if "://" not in place:
        if not (Path(place) / "meta.json").is_file():
            raise NotFoundError(
                f"{place}: expected a folder of Qdrant's local mode, which has a meta.json, or the "
                "address https://HOST:PORT of a server"
            )
        return _folder(Path(place).resolve())
    server_address(place, "qdrant", KEY)
    key = os.environ.get(KEY)
    # The client's own version check would call the server at once, and print warnings.
    return QdrantClient(url=place, api_key=key, timeout=_SECONDS, check_compatibility=False)


def _folder(path: Path) -> QdrantClient:
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
    """
    try:
        yield
    except UnexpectedResponse as error:
        ours = STATUSES.get(error.status_code or 0, InvalidInputError)
        raise ours(
            f"collection {name}: the Qdrant server answers with the HTTP status "
            f"{error.status_code}: {error.content[:200]!r}"
        ) from error
    except ResponseHandlingException as error:
        raise UnavailableError(
            f"collection {name}: the Qdrant server does not answer ({error}); check its address "
            "and that it runs"
        ) from error
    except KeyError as error:
        # The local mode's error for a missing point.
        raise NotFoundError(f"collection {name}: no point has the id {error}") from error
    except (ValueError, RuntimeError) as error:
        kind = BusyError if "already accessed" in str(error) else InvalidInputError
        raise kind(f"collection {name}: Qdrant refuses this: {error}") from error


_PAGE = 500
# Vectors that differ by less are equal: a collection may store half precision.
_TOLERANCE = 2e-3
_METRICS: Mapping[str, SearchMetric] = {
    "Cosine": "cosine", "Euclid": "squared_l2", "Dot": "inner_product", "Manhattan": "l1",
}  # fmt: skip


class QdrantSource:
    """A collection of Qdrant, one dense vector of which can be migrated.

    Every method may raise UnavailableError, NotPermittedError, BusyError, NotFoundError (the
    collection was dropped) and InvalidInputError, by the server's answer.

    Args:
        place: https://HOST:PORT (http:// on this machine), or a folder of the local mode.
        collection: the collection's name.
        vector: the name of the vector; None: the only dense vector that no map computed.

    Attributes:
        vector: the name of the vector; empty for an unnamed one.

    Raises:
        NotFoundError: there is no such folder or collection.
        InvalidInputError: the vector is missing or ambiguous, or a point may have several.
        ConfigurationError: the address has another form.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the key.
        BusyError: the server has too many requests, or another process has opened the folder.
    """

    def __init__(self, place: str, collection: str, vector: str | None = None) -> None:
        self._name = collection
        self._clients = Clients(place)
        with translated_errors(collection):
            if not self._client.collection_exists(collection):
                others = join_few(one.name for one in self._client.get_collections().collections)
                raise NotFoundError(
                    f"{collection}: no such collection in this Qdrant; its collections are "
                    f"{others or 'none'}"
                )
        vectors, marks = self._config()
        self._model = marks.get(vector or "", {}).get("model")
        names = [name for name in vectors if vector is not None or name not in marks]
        if (vector is None and len(names) != 1) or (vector is not None and vector not in names):
            raise InvalidInputError(
                f"{collection}: expected {'one vector' if vector is None else repr(vector)}, found "
                f"{join_few(map(repr, names)) or 'none'}; name one with --vector"
            )
        self.vector = vector or names[0]
        self._params = vectors[self.vector]
        if self._params.multivector_config is not None:
            raise InvalidInputError(
                f"{collection}: expected one vector per item, but {self.vector!r} has several (a "
                "multivector, as ColBERT models make them); multivectors cannot be migrated"
            )

    @property
    def _client(self) -> QdrantClient:
        return self._clients.own

    def _config(self) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """Return the parameters of dense vectors by name ("" for an unnamed one), and the marks of
        migrated ones: digest of the map, fingerprint of the model, and whether they are flipped."""
        with translated_errors(self._name):
            config = self._client.get_collection(self._name).config
        vectors = config.params.vectors or {}
        if not isinstance(vectors, dict):
            vectors = {"": vectors}
        marks = (config.metadata or {}).get("nobackfill") or {}
        return dict(vectors), {n: m for n, m in marks.items() if n in vectors}

    def facts(self) -> Facts:
        """Return the name, dimension, metric and model of the vectors.

        Nothing is read from the server: the facts are as they were when the source was opened. The
        model is None unless `vector` was given and a map made it with a known model.

        Raises:
            InvalidInputError: searches use a metric that nobackfill does not support.
        """
        metric = metric_of(self._params.distance.value, _METRICS, self._name)
        name, size = f"{self._name}#{self.vector}", self._params.size
        return Facts(name, size, metric, self._model, directions=metric == "cosine")

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

    def windows(self, rows: int) -> Iterator[Window]:
        """Divide all ids into windows of `rows` points.

        The last window has no upper end, so that it includes new points. An empty collection gives
        one window. Each window is asked for when it is taken. Numbers come before UUIDs. The first
        one has the `lower` None.

        Args:
            rows: the size of a window, at least 1.

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
                    self._name, limit=rows, offset=lower, with_payload=False, with_vectors=False
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
        return self.rows(self.vector, window)

    def column(self, window: Window, name: str) -> ColumnValues:
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
        points = self._points(window, payload=[name])
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
        return self._rows(points, name)

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
        """
        vectors, marks = self._config()
        if self.vector == "":
            raise InvalidInputError(
                f"{self._name}: its vector has no name, and Qdrant refuses unnamed vectors once a "
                "collection has named ones; copy it into a collection with a named vector first"
            )
        mark = marks.get(target.name, {})
        if not target.name or (target.name in vectors and mark.get("map") != target.mark):
            raise AlreadyExistsError(
                f"{self._name}: vector {target.name!r} exists already and was not made by this map;"
                " choose another --to, or remove it with --rollback"
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
                self._set_mark(target.name, {"map": target.mark} | model)
                self._client.create_vector_name(
                    self._name, target.name, models.DenseVectorNameConfig(dense=dense)
                )
                if any(value is not None for _, value in diff):
                    self._client.update_collection(self._name, vectors_config={target.name: diff})
        flipped = mark.get("flipped") == "true"
        return NewNamedVectors(self, self._clients, self._name, target, flipped)

    def rollback(self, name: str) -> bool:
        """Remove the new vectors of a name.

        The vectors go first, then the mark. After an error in between, a mark without vectors
        stays; it does no harm.

        Returns:
            False if no map created them, or if the collection has flipped to them.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        marks = self._config()[1]
        # A flipped collection searches these vectors, so they must stay.
        if name not in marks or "flipped" in marks[name]:
            return False
        with translated_errors(self._name):
            self._client.delete_vector_name(self._name, name)
            self._set_mark(name, None)
        return True

    def note_flip(self, name: str) -> None:
        """Record the flip to new vectors: from now on, writers put vectors of this name.

        Args:
            name: the name of the new vectors, which `open_target` has created.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection was deleted, or no map made vectors of this name.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        with translated_errors(self._name):
            self._set_mark(name, {**self._config()[1][name], "flipped": "true"})

    def _set_mark(self, name: str, mark: dict[str, str] | None) -> None:
        config = self._client.get_collection(self._name).config
        marks = {**((config.metadata or {}).get("nobackfill") or {}), name: mark}
        present = {one: value for one, value in marks.items() if value is not None}
        self._client.update_collection(self._name, metadata={"nobackfill": present})

    def count_vectors(self, vector: str) -> int:
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
        has = models.Filter(must=[models.HasVectorCondition(has_vector=vector)])
        with translated_errors(self._name):
            return int(self._client.count(self._name, count_filter=has, exact=True).count)

    def rows(self, vector: str, window: Window, missing: str | None = None) -> Rows:
        """Read the vectors of one name in a window.

        Points without the vector are left out. With the metric cosine, vectors are scaled to the
        norm 1. They are read in pages of 500.

        Args:
            vector: the name of the vectors.
            window: the range of ids, `lower` included and `upper` not.
            missing: leave out points that have a vector of this name; None: read all.

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
        if missing is not None:
            none = models.Filter(must_not=[models.HasVectorCondition(has_vector=missing)])
        return self._rows(list(self._points(window, vector=vector, where=none)), vector)

    def _points(
        self, window: Window, *, vector: str | None = None, payload: list[str] | None = None,
        where: Any = None,
    ) -> Iterator[Any]:  # fmt: skip
        offset: Any = window.lower
        while True:
            with translated_errors(self._name):
                points, offset = self._client.scroll(
                    self._name, scroll_filter=where, limit=_PAGE, offset=offset,
                    with_payload=payload or False,
                    with_vectors=False if vector is None else [vector] if vector else True,
                )  # fmt: skip
            for point in points:
                if window.upper is not None and key_order(point.id) >= key_order(window.upper):
                    return
                yield point
            if offset is None:
                return

    def _rows(self, points: Sequence[Any], vector: str) -> Rows:
        values = (
            (p.id, p.vector.get(vector) if isinstance(p.vector, dict) else p.vector) for p in points
        )
        pairs = [(key, value) for key, value in values if value is not None]
        ids = [str(key) for key, _ in pairs]
        vectors = even([value for _, value in pairs], ids, self._name)
        if self._params.distance == models.Distance.COSINE:
            # A server stores normalised vectors; a folder may not, after it is opened again.
            vectors = normalise(vectors)
        return Rows(ids, vectors, [key for key, _ in pairs])


class NewNamedVectors:
    """The new named vector of a collection's points, which a migration fills.

    After the flip, writers put it together with the old vector, and a migration only fills the
    points that have none. Every method may raise the errors of QdrantSource.

    Attributes:
        flipped: whether the flip was recorded.
    """

    at_once = 1
    put_by_writers = True

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

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of the points in a window that have no new one.

        They come by increasing id. A stale new vector is not noticed.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection or the folder was deleted.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        return self._source.rows(self._source.vector, window, missing=self._target.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors of points, except of those whose old vector has changed.

        It goes in requests of 500, and earlier ones stay after an error. A vector that a writer put
        in the meantime stays. If the old vector changes during the write, the new one is deleted
        again. A point that was deleted is left out.

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
        """
        for first in range(0, len(rows), _PAGE):
            part = slice(first, first + _PAGE)
            read = dict(zip(rows.ids[part], rows.vectors[part], strict=True))
            new = dict(zip(rows.ids[part], vectors[part], strict=True))
            keys = dict(zip(rows.ids[part], rows.keys[part], strict=True))
            self._write(read, new, keys)

    def _write(
        self, read: dict[str, Vectors], new: dict[str, Vectors], keys: dict[str, Any]
    ) -> None:
        name, client = self._target.name, self._clients.own
        same = self._same(read)
        points = [
            models.PointVectors(id=keys[one], vector={name: vector.tolist()})
            for one, vector in new.items()
            if same.get(one)
        ]
        if not points:
            return
        # Vectors that a writer has put meanwhile stay.
        none = models.Filter(must_not=[models.HasVectorCondition(has_vector=name)])
        # Qdrant reports points that were deleted meanwhile, and writes the others.
        with suppress(NotFoundError), translated_errors(self._collection):
            client.update_vectors(self._collection, points, update_filter=none)
        stale = [one for one, is_same in self._same(read).items() if not is_same]
        if not stale:
            return
        present = self._source.lookup(stale, name)
        ours = [
            keys[one]
            for one, vector in zip(present.ids, present.vectors, strict=True)
            if np.allclose(vector, new[one], atol=_TOLERANCE)
        ]
        if ours:
            with suppress(NotFoundError), translated_errors(self._collection):
                client.delete_vectors(self._collection, [name], ours)

    def _same(self, read: Mapping[str, Vectors]) -> dict[str, bool]:
        """Return, for each point that still exists, whether its old vector is unchanged."""
        rows = self._source.lookup(list(read))
        pairs = zip(rows.ids, rows.vectors, strict=True)
        return {name: np.array_equal(read[name], vector) for name, vector in pairs}

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Do nothing: Qdrant builds indexes by itself, and two flips do the same."""
        return nullcontext()

    @contextmanager
    def flip(self) -> Iterator[None]:
        """Record the flip at the start of the block; Qdrant has no lock.

        From now on, a new vector that the map does not compute counts as its writer's. It is
        recorded also if the block raises an error. After an error of the recording, the block does
        not run. A second flip changes nothing.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the key.
            BusyError: the server has too many requests, or another process has opened the folder.
            NotFoundError: the collection was deleted, or the new vectors were removed.
            InvalidInputError: Qdrant refuses the request otherwise.
        """
        self._source.note_flip(self._target.name)
        self.flipped = True
        yield

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
        return self._source.rows(self._target.name, window)

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
