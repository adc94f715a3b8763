"""A collection of a Chroma server as a source, over its HTTP API (v2).

Chroma's own client is not used, because it installs 80 packages. New vectors go into a second
collection with the same ids, documents, metadata and URIs.
"""

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection as Some
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import urllib3

from nobackfill import processes
from nobackfill.adopt.sources.copied import OF, Collection, CopiedSource, Record
from nobackfill.adopt.sources.source import (
    STATUSES,
    Facts,
    SearchMetric,
    Target,
    Window,
    metric_of,
    server_address,
)
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from nobackfill.vectors import Vectors

# The environment variable with a server's token.
KEY = "NOBACKFILL_CHROMA_TOKEN"
_DEFAULT = ("default_tenant", "default_database")
_SECONDS = 60.0
_STATUSES = STATUSES | {409: AlreadyExistsError}


class ChromaServer:
    """A client of the HTTP API of a Chroma server, in one tenant and database.

    It sends the token of NOBACKFILL_CHROMA_TOKEN, if that is set. Nothing is sent before the first
    request.

    Args:
        place: https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE unless they are
            the defaults.

    Raises:
        ConfigurationError, InvalidInputError: `place` has another form.
    """

    def __init__(self, place: str) -> None:
        if "://" not in place:
            raise InvalidInputError(
                "chroma: expected https://HOST:PORT, got a folder; start its server with `chroma "
                f"run --path {place}`, then name chroma:http://localhost:8000#COLLECTION"
            )
        parts = server_address(place, "chroma", KEY)
        names = [name for name in parts.path.split("/") if name]
        if len(names) not in (0, 2):
            raise InvalidInputError(
                "chroma: expected https://HOST:PORT or https://HOST:PORT/TENANT/DATABASE as the "
                "address of the server, got another form"
            )
        tenant, database = map(_part, names or _DEFAULT)
        self._root = (
            f"{parts.scheme}://{parts.netloc}/api/v2/tenants/{tenant}/databases/{database}"
            "/collections"
        )
        self._http = _pool()
        processes.register_for_forks(self)

    def before_fork(self) -> None:
        """Do nothing: requests of other threads continue in the parent."""

    def after_fork(self, child: bool) -> None:
        """Open new connections in a child process, because connections must not be shared.

        The parent's connections stay open there. In the parent, nothing happens.
        """
        if child:
            self._http = _pool()

    def collection(self, name: str) -> dict[str, Any]:
        """Return the server's description of a collection: name, id, dimension, metadata and more.

        A missing collection costs a second request.

        Args:
            name: the collection's name.

        Raises:
            NotFoundError: there is no such collection; the error lists up to four others.
            UnavailableError: the server does not answer within a minute, or answers with the status
                500, 502, 503 or 504.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        try:
            description: dict[str, Any] = self.send("GET", f"/{_part(name)}", name)
        except NotFoundError as error:
            names = [one["name"] for one in self.send("GET", "?limit=4", name)]
            raise NotFoundError(
                f"{name}: no such collection in this Chroma database; its collections are "
                f"{', '.join(names) or 'none'}"
            ) from error
        return description

    def make(self, body: Mapping[str, Any], name: str) -> None:
        """Create a collection.

        Args:
            body: the JSON body of the request.
            name: the collection's name in error messages.

        Raises:
            AlreadyExistsError: the name is in use.
            NotFoundError: there is no such tenant or database.
            UnavailableError: the server does not answer within a minute, or answers with the status
                500, 502, 503 or 504.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
            ValueError, TypeError: `body` cannot be written as JSON.
        """
        self.send("POST", "", name, body)

    def drop(self, name: str) -> None:
        """Delete a collection with its items.

        Args:
            name: the collection's name.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError: the server does not answer within a minute, or answers with the status
                500, 502, 503 or 504.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        self.send("DELETE", f"/{_part(name)}", name)

    def send(self, method: str, path: str, name: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the decoded JSON answer; None for an empty one.

        Redirects are not followed and requests are not repeated. The token is read from the
        environment at each request. Threads may call it at once.

        Args:
            method: the HTTP method.
            path: the path below the database's collections; the caller has quoted it.
            name: the collection's name in error messages.
            body: the JSON body; None: none.

        Raises:
            UnavailableError: the server does not answer within a minute, or answers with the status
                500, 502, 503 or 504.
            InvalidInputError: any other status of 300 or more, or an answer that is not JSON.
            NotFoundError: the status is 404.
            NotPermittedError: the status is 401 or 403.
            BusyError: the status is 429.
            AlreadyExistsError: the status is 409.
            ValueError, TypeError: the body cannot be written as JSON.
        """
        token = os.environ.get(KEY)
        headers = {"x-chroma-token": token, "Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        try:
            response = self._http.request(
                method, self._root + path, body=data, headers=headers, redirect=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(
                f"collection {name}: the Chroma server does not answer ({error}); check its "
                "address and that it runs"
            ) from error
        if response.status >= 300:
            ours = _STATUSES.get(response.status, InvalidInputError)
            raise ours(
                f"collection {name}: the Chroma server answers with the HTTP status "
                f"{response.status}: {response.data[:200]!r}"
            )
        try:
            return json.loads(response.data) if response.data else None
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"collection {name}: expected JSON from the Chroma server, got something else; "
                "check that the address is a Chroma server's"
            ) from error

    def close(self) -> None:
        """Close idle connections; a later request opens new ones."""
        self._http.clear()


def _pool() -> urllib3.PoolManager:
    return urllib3.PoolManager(retries=False, timeout=_SECONDS, maxsize=16)


def _part(name: str) -> str:
    return quote(name, safe="")


# Items per request: a server accepts a few thousand, and vectors travel as text.
_PAGE = 500
_METRICS: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "ip": "inner_product",
}  # fmt: skip
_MARK = "nobackfill_"


def open_collection(place: str, collection: str, vector: str | None) -> CopiedSource:
    """Open a collection of a Chroma server as a source of vectors.

    Asks the server for the collection. The caller closes the source.

    Args:
        place: https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE unless they are
            the defaults.
        collection: the collection's name.
        vector: must be None, because a collection has one vector per item.

    Raises:
        InvalidInputError: `vector` is given, the place is a folder or names a tenant without a
            database, or the server refuses the request otherwise or does not answer with JSON.
        NotFoundError: there is no such collection.
        ConfigurationError: the address has another form.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the token.
        BusyError: the server has too many requests.
    """
    if vector is not None:
        raise InvalidInputError(
            "chroma: omit --vector, because a collection has one vector per item"
        )
    return CopiedSource(ChromaStore(place), collection)


class ChromaStore:
    """The collections of a Chroma server.

    Every method may raise UnavailableError, NotPermittedError, BusyError and InvalidInputError, by
    the server's answer.

    Args:
        place: the server, as ChromaServer takes it.
    """

    def __init__(self, place: str) -> None:
        self._server = ChromaServer(place)

    def open_collection(self, name: str) -> "ChromaCollection":
        """Open a collection.

        Raises:
            NotFoundError: there is no such collection; the error names others.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        return ChromaCollection(self._server, self._server.collection(name))

    def exists(self, name: str) -> bool:
        """Return whether there is a collection of this name.

        A missing tenant or database gives False, too.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        try:
            self._server.collection(name)
        except NotFoundError:
            return False
        return True

    def make(self, target: Target, like: Collection, facts: Mapping[str, str]) -> None:
        """Create an empty collection for other vectors of the items of an existing one.

        The embedding function of `like` is not copied.

        Args:
            target: name of the new collection; its other fields are ignored. The dimension comes
                with the first items.
            like: the existing collection, whose metadata and index settings are copied.
            facts: facts to record in the metadata in the same step, with the prefix nobackfill_.
                They replace metadata of that name.

        Raises:
            AlreadyExistsError: the name is in use.
            TypeError: `like` is no ChromaCollection.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: there is no such tenant or database.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        if not isinstance(like, ChromaCollection):
            raise TypeError(like)
        body = {
            "name": target.name,
            "metadata": like.metadata | {_MARK + name: value for name, value in facts.items()},
            "configuration": like.index,
        }
        self._server.make(body, target.name)

    def drop(self, name: str) -> None:
        """Delete a collection with its items.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        self._server.drop(name)

    def steps(self, old: Collection, new: Collection) -> list[str]:
        """Return the steps by which the owner flips, as sentences and calls; sends nothing.

        Returns:
            Four sentences and calls, in order.
        """
        return [
            "stop all writers, or let every writer put to both collections, to the new one by the "
            "new model; then carry once more, because items of the last sweep are missing",
            "switch the queries to the new model; at the same moment give get_collection the new "
            f"model's embedding function and the name {new.name!r}, or swap the names:",
            f"client.get_collection({old.name!r}).modify(name={old.name + '_before'!r})",
            f"client.get_collection({new.name!r}).modify(name={old.name!r})",
        ]

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._server.close()


class ChromaCollection:
    """A collection of a Chroma server; its items have one vector each.

    The API has no ranges of ids, so all ids are listed at the start of a sweep. Every method may
    raise UnavailableError, NotPermittedError, BusyError, NotFoundError (the collection was
    dropped) and InvalidInputError, by the server's answer.

    Attributes:
        name: the collection's name.
        metadata: the owner's metadata, without what nobackfill or old clients wrote.
        copy_facts: the facts that were recorded when it was created as a copy.
        index: its index settings by kind.
    """

    def __init__(self, server: ChromaServer, description: Mapping[str, Any]) -> None:
        self._server = server
        self.name = str(description["name"])
        self._path = f"/{description['id']}"
        self._dim: int | None = description.get("dimension")
        metadata = description.get("metadata") or {}
        # Clients before 1.0 wrote index settings into the metadata, with the prefix "hnsw:".
        self.metadata = {
            name: value for name, value in metadata.items() if not name.startswith((_MARK, "hnsw:"))
        }
        self.copy_facts = {
            name.removeprefix(_MARK): str(value)
            for name, value in metadata.items()
            if name.startswith(_MARK)
        }
        configuration = description.get("configuration_json") or {}
        # Only the index settings: the embedding function belongs to the old model.
        self.index = {
            kind: {name: value for name, value in settings.items() if value is not None}
            for kind in ("hnsw", "spann")
            if (settings := configuration.get(kind))
        }
        self._ids: list[str] | None = None

    def facts(self) -> Facts:
        """Return the collection's name, dimension, metric and model, and the names of other values.

        The names are those of the first item, without values that are None; none if the collection
        is empty. The dimension is as it was when the collection was opened, and None if it never
        had an item. The metric is None if the server names none.

        Raises:
            InvalidInputError: searches use a metric that nobackfill does not support, or the server
                refuses the request otherwise.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
        """
        space = next((str(one.get("space") or "") for one in self.index.values()), "")
        some = self._get({"limit": 1, "include": ["documents", "metadatas", "uris"]})
        columns = tuple(some[0].values) if some else ()
        metric = metric_of(space, _METRICS, self.name)
        return Facts(self.name, self._dim, metric, self.copy_facts.get("model"), columns)

    def count(self) -> int:
        """Count the items.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        return int(self._request("GET", "/count"))

    def windows(self, rows: int) -> Iterator[Window]:
        """Divide all ids into windows of `rows` items, and list the ids again at the first one, in
        one request.

        Ids are in the order of their text. The last window has no upper end, so that it includes
        later items. An empty collection gives one window. Items that are added before the last
        window's lower end are missed until the next sweep.

        Args:
            rows: the size of a window, at least 1; all but the last have exactly this many ids.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        ids = self._list_ids()
        lower = None
        for upper in ids[rows - 1 : -1 : rows]:
            yield Window(lower, upper)
            lower = upper
        # Open at the end, so that it includes items added after the listing.
        yield Window(lower)

    def records(self, window: Window) -> list[Record]:
        """Read the items of a window, ordered by id, in requests of 500.

        Args:
            window: ids above `lower` and up to `upper`. Without `lower`, all ids are listed again;
                other windows use the last listing.

        Returns:
            The items; their documents and URIs are among the values. Values that are None are left
            out. A deleted item is left out, and an item without a vector has an empty one.

        Raises:
            InvalidInputError: an item has a metadata key called document or uri, or the server
                refuses the request otherwise.
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
        """
        return self._read(self._ids_in(window), ["embeddings", "documents", "metadatas", "uris"])

    def digests(self, window: Window) -> dict[Any, str]:
        """Read the digests of a copy's items by id; "" for an item that a writer put.

        Deleted items are left out.

        Args:
            window: ids above `lower` and up to `upper`, as `records` reads it.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        ids = self._ids_in(window)
        digests: dict[Any, str] = {}
        for first in range(0, len(ids), _PAGE):
            page = {"ids": ids[first : first + _PAGE], "include": ["metadatas"]}
            response = self._request("POST", "/get", page)
            for one, metadata in zip(response["ids"], response["metadatas"], strict=True):
                digests[one] = str((metadata or {}).get(OF, ""))
        return digests

    def existing_keys(self, keys: Sequence[Any]) -> Some[Any]:
        """Return those of the given ids that exist.

        Args:
            keys: ids; none: no request is sent.

        Returns:
            A set of ids.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        return {one.key for one in self._read(list(keys), [])}

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
        """Insert or replace items with new vectors, in requests of 500.

        Earlier requests stay after an error. The ids join the listing of the present sweep.

        Args:
            records: n items; none: nothing is sent. Their documents, URIs, metadata and digests are
                stored.
            vectors: float32 [n, dim], in place of their own.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        for first in range(0, len(records), _PAGE):
            some = records[first : first + _PAGE]
            body = {
                "ids": [one.key for one in some],
                "embeddings": vectors[first : first + _PAGE].tolist(),
                "documents": [one.values.get("document") for one in some],
                "uris": [one.values.get("uri") for one in some],
                "metadatas": [
                    {n: v for n, v in one.values.items() if n not in ("document", "uri")}
                    | {OF: one.digest}
                    for one in some
                ],
            }
            self._request("POST", "/upsert", body)
            self._note(str(one.key) for one in some)

    def remove(self, keys: Sequence[Any]) -> None:
        """Delete items by id; unknown ids are ignored.

        They go in requests of 500, and earlier ones stay after an error.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        for first in range(0, len(keys), _PAGE):
            self._request("POST", "/delete", {"ids": list(keys[first : first + _PAGE])})

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        """Read items by id, ordered by id; unknown ids are left out.

        Args:
            ids: ids; none: no request is sent.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        return self._read(ids, ["embeddings", "documents", "metadatas", "uris"])

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        The server may search approximately, by the collection's metric.

        Args:
            vector: float32 [dim].
            count: the most ids to return, at least 1.

        Returns:
            Ids; empty if the collection had never had an item when it was opened.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection was dropped.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        if self._dim is None:
            return []
        body = {
            "query_embeddings": [np.asarray(vector, np.float32).tolist()],
            "n_results": count,
            "include": [],
        }
        return [str(one) for one in self._request("POST", "/query", body)["ids"][0]]

    def _ids_in(self, window: Window) -> list[str]:
        """Return the ids of a window; the first window lists all ids again."""
        ids = self._list_ids() if window.lower is None or self._ids is None else self._ids
        first = 0 if window.lower is None else bisect_right(ids, str(window.lower))
        last = len(ids) if window.upper is None else bisect_right(ids, str(window.upper))
        return ids[first:last]

    def _note(self, ids: Iterable[str]) -> None:
        """Insert ids that were put into the listing, which later windows use.

        Ids come in order, so they go near its end.
        """
        if self._ids is None:
            return
        for one in ids:
            at = bisect_left(self._ids, one)
            if self._ids[at : at + 1] != [one]:
                self._ids.insert(at, one)

    def _list_ids(self) -> list[str]:
        """List all ids in order, in one request: pages would shift when others delete items."""
        self._ids = sorted(self._request("POST", "/get", {"include": []})["ids"])
        return self._ids

    def _read(self, ids: Sequence[str], include: list[str]) -> list[Record]:
        records = []
        for first in range(0, len(ids), _PAGE):
            records += self._get({"ids": list(ids[first : first + _PAGE]), "include": include})
        return sorted(records, key=lambda one: str(one.key))

    def _get(self, body: Mapping[str, Any]) -> list[Record]:
        response = self._request("POST", "/get", body)
        ids = response["ids"]
        none: list[None] = [None] * len(ids)
        parts = zip(
            ids,
            response.get("embeddings") or none,
            response.get("documents") or none,
            response.get("metadatas") or none,
            response.get("uris") or none,
            strict=True,
        )
        records = []
        for key, vector, document, metadata, uri in parts:
            others = {n: v for n, v in (metadata or {}).items() if n != OF}
            if {"document", "uri"} & set(others):
                raise InvalidInputError(
                    f"collection {self.name}: item {key!r} has a metadata key called 'document' or "
                    "'uri', which hides the item's own; rename that key"
                )
            values = {"document": document, "uri": uri} | others
            array = np.asarray(() if vector is None else vector, np.float32)
            records.append(Record(key, array, {n: v for n, v in values.items() if v is not None}))
        return records

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._server.send(method, self._path + path, self.name, body)
