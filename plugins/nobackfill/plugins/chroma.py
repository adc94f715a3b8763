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
    """The HTTP API of a Chroma server, in one tenant and database.

    The constructor takes https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE unless
    they are the defaults. It raises ConfigurationError or InvalidInputError for another form.
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
                "chroma: expected https://HOST:PORT or https://HOST:PORT/TENANT/DATABASE"
            )
        tenant, database = map(_part, names or _DEFAULT)
        self._root = (
            f"{parts.scheme}://{parts.netloc}/api/v2/tenants/{tenant}/databases/{database}"
            "/collections"
        )
        self._http = _pool()
        processes.watch_forks(self)

    def before_fork(self) -> None:
        """Do nothing: requests of other threads continue in the parent."""

    def after_fork(self, child: bool) -> None:
        if child:
            self._http = _pool()

    def collection(self, name: str) -> dict[str, Any]:
        """Return the server's description of a collection. Raises NotFoundError."""
        try:
            found: dict[str, Any] = self.send("GET", f"/{_part(name)}", name)
        except NotFoundError as error:
            there = [one["name"] for one in self.send("GET", "?limit=4", name)]
            raise NotFoundError(
                f"{name}: no such collection; there are {', '.join(there) or 'none'}"
            ) from error
        return found

    def make(self, body: Mapping[str, Any], name: str) -> None:
        self.send("POST", "", name, body)

    def drop(self, name: str) -> None:
        self.send("DELETE", f"/{_part(name)}", name)

    def send(self, method: str, path: str, name: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the decoded JSON answer; None for an empty one.

        Args:
            method: the HTTP method.
            path: the path below the database's collections.
            name: the collection's name in error messages.
            body: the JSON body; None: none.

        Raises:
            UnavailableError: the server does not answer.
            NotFoundError, NotPermittedError, BusyError, AlreadyExistsError: by the HTTP status.
            InvalidInputError: any other refusal, or an answer that is not JSON.
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
            raise UnavailableError(f"{name}: Chroma does not answer ({error})") from error
        if response.status >= 300:
            ours = _STATUSES.get(response.status, InvalidInputError)
            raise ours(f"{name}: Chroma says: {response.status} {response.data[:200]!r}")
        try:
            return json.loads(response.data) if response.data else None
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{name}: the answer is not JSON; is it Chroma?") from error

    def close(self) -> None:
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
    """Open a collection as a source.

    Args:
        place: the server, as ChromaServer takes it.
        collection: the collection's name.
        vector: must be None, because a collection has one vector per item.

    Raises:
        InvalidInputError: `vector` is given, or the place is a folder.
        NotFoundError: there is no such collection.
        ConfigurationError: the address has another form.
        UnavailableError: the server does not answer.
    """
    if vector is not None:
        raise InvalidInputError(
            "chroma: omit --vector, because a collection has one vector per item"
        )
    return CopiedSource(ChromaStore(place), collection)


class ChromaStore:
    """The collections of a Chroma server; implements Store."""

    def __init__(self, place: str) -> None:
        self._server = ChromaServer(place)

    def open_collection(self, name: str) -> "ChromaCollection":
        return ChromaCollection(self._server, self._server.collection(name))

    def exists(self, name: str) -> bool:
        try:
            self._server.collection(name)
        except NotFoundError:
            return False
        return True

    def make(self, target: Target, like: Collection, facts: Mapping[str, str]) -> None:
        if not isinstance(like, ChromaCollection):
            raise TypeError(like)
        body = {
            "name": target.name,
            "metadata": like.noted | {_MARK + name: value for name, value in facts.items()},
            "configuration": like.index,
        }
        self._server.make(body, target.name)

    def drop(self, name: str) -> None:
        self._server.drop(name)

    def steps(self, old: Collection, new: Collection) -> list[str]:
        return [
            "stop all writers, or let every writer put to both collections, to the new one by the "
            "new model; then carry once more, because items of the last sweep are missing",
            "switch the queries to the new model; at the same moment give get_collection the new "
            f"model's embedding function and the name {new.name!r}, or swap the names:",
            f"client.get_collection({old.name!r}).modify(name={old.name + '_before'!r})",
            f"client.get_collection({new.name!r}).modify(name={old.name!r})",
        ]

    def close(self) -> None:
        self._server.close()


class ChromaCollection:
    """A collection of Chroma; implements Collection. The API has no ranges of ids, so ids are
    listed at the start of a sweep."""

    def __init__(self, server: ChromaServer, found: Mapping[str, Any]) -> None:
        self._server = server
        self.name = str(found["name"])
        self._path = f"/{found['id']}"
        self._dim: int | None = found.get("dimension")
        noted = found.get("metadata") or {}
        # The owner's metadata, without index settings of clients before 1.0, which "hnsw:" marks.
        self.noted = {
            name: value for name, value in noted.items() if not name.startswith((_MARK, "hnsw:"))
        }
        self.copy_facts = {
            name.removeprefix(_MARK): str(value)
            for name, value in noted.items()
            if name.startswith(_MARK)
        }
        configuration = found.get("configuration_json") or {}
        # Only the index settings: the embedding function belongs to the old model.
        self.index = {
            kind: {name: value for name, value in settings.items() if value is not None}
            for kind in ("hnsw", "spann")
            if (settings := configuration.get(kind))
        }
        self._ids: list[str] | None = None

    def facts(self) -> Facts:
        space = next((str(one.get("space") or "") for one in self.index.values()), "")
        some = self._get({"limit": 1, "include": ["documents", "metadatas", "uris"]})
        columns = tuple(some[0].values) if some else ()
        metric = metric_of(space, _METRICS, self.name)
        return Facts(self.name, self._dim, metric, self.copy_facts.get("model"), columns)

    def count(self) -> int:
        return int(self._request("GET", "/count"))

    def windows(self, rows: int) -> Iterator[Window]:
        ids = self._listed()
        after = None
        for last in ids[rows - 1 : -1 : rows]:
            yield Window(after, last)
            after = last
        # Open at the end, so that it includes items added after the listing.
        yield Window(after)

    def records(self, window: Window) -> list[Record]:
        return self._found(self._within(window), ["embeddings", "documents", "metadatas", "uris"])

    def digests(self, window: Window) -> dict[Any, str]:
        ids = self._within(window)
        found: dict[Any, str] = {}
        for first in range(0, len(ids), _PAGE):
            page = {"ids": ids[first : first + _PAGE], "include": ["metadatas"]}
            response = self._request("POST", "/get", page)
            for one, metadata in zip(response["ids"], response["metadatas"], strict=True):
                found[one] = str((metadata or {}).get(OF, ""))
        return found

    def existing_keys(self, keys: Sequence[Any]) -> Some[Any]:
        return {one.key for one in self._found(list(keys), [])}

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
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
        for first in range(0, len(keys), _PAGE):
            self._request("POST", "/delete", {"ids": list(keys[first : first + _PAGE])})

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        return self._found(ids, ["embeddings", "documents", "metadatas", "uris"])

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        if self._dim is None:
            return []
        body = {
            "query_embeddings": [np.asarray(vector, np.float32).tolist()],
            "n_results": count,
            "include": [],
        }
        return [str(one) for one in self._request("POST", "/query", body)["ids"][0]]

    def _within(self, window: Window) -> list[str]:
        """Return the ids of a window; the first window lists all ids again."""
        ids = self._listed() if window.lower is None or self._ids is None else self._ids
        first = 0 if window.lower is None else bisect_right(ids, str(window.lower))
        last = len(ids) if window.upper is None else bisect_right(ids, str(window.upper))
        return ids[first:last]

    def _note(self, written: Iterable[str]) -> None:
        """Insert written ids into the listing, which later windows use. Ids come in order, so they
        go near its end."""
        if self._ids is None:
            return
        for one in written:
            at = bisect_left(self._ids, one)
            if self._ids[at : at + 1] != [one]:
                self._ids.insert(at, one)

    def _listed(self) -> list[str]:
        """List all ids in order, in one request: pages would shift when others delete items."""
        self._ids = sorted(self._request("POST", "/get", {"include": []})["ids"])
        return self._ids

    def _found(self, ids: Sequence[str], include: list[str]) -> list[Record]:
        found = []
        for first in range(0, len(ids), _PAGE):
            found += self._get({"ids": list(ids[first : first + _PAGE]), "include": include})
        return sorted(found, key=lambda one: str(one.key))

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
        found = []
        for key, vector, document, metadata, uri in parts:
            kept = {n: v for n, v in (metadata or {}).items() if n != OF}
            if {"document", "uri"} & set(kept):
                raise InvalidInputError(
                    f"{self.name}: item {key!r} has a metadata key called 'document' or 'uri', "
                    "which hides the item's own; rename that key"
                )
            rest = {"document": document, "uri": uri} | kept
            values = np.asarray(() if vector is None else vector, np.float32)
            found.append(Record(key, values, {n: v for n, v in rest.items() if v is not None}))
        return found

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._server.send(method, self._path + path, self.name, body)
