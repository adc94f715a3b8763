"""A collection of a Chroma server as a source, over its HTTP API (v2).

Chroma's own client is not used, because it installs 80 packages. New vectors go into a second
collection with the same ids, documents, metadata and URIs.

A flip exchanges the names of both, in two requests. Programs open a collection by its name and then
hold its id, so they go on with the old collection until they open the name again. Therefore its
items are compared once more after the exchange, and `drop_old` refuses if they changed since then.
"""

import copy
import hashlib
import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Collection as Some
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import quote

import numpy as np
import urllib3

from nobackfill import processes
from nobackfill.adopt.sources.copied import OF, Collection, Record
from nobackfill.adopt.sources.flipping import FlippingCopy, FlippingSource
from nobackfill.adopt.sources.source import (
    HTTP_STATUS_ERRORS,
    Facts,
    SearchMetric,
    Target,
    Window,
    lock_by_address,
    old_name_after_flip,
    parse_server_address,
    parse_store_metric,
)
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    join_few,
)
from nobackfill.vectors import Vectors

# The environment variable with a server's token.
KEY = "NOBACKFILL_CHROMA_TOKEN"
_DEFAULT = ("default_tenant", "default_database")
_SECONDS = 60.0
_STATUSES = HTTP_STATUS_ERRORS | {409: AlreadyExistsError}


class ChromaServer:
    """A client of the HTTP API of a Chroma server, in one tenant and database.

    It sends the token of NOBACKFILL_CHROMA_TOKEN, if that is set. Nothing is sent before the first
    request. Every request may raise the errors of `request_json`.

    Args:
        address: https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE unless they are
            the defaults.

    Raises:
        ConfigurationError, InvalidInputError: `address` has another form.
    """

    def __init__(self, address: str) -> None:
        if "://" not in address:
            raise InvalidInputError(
                "chroma: expected https://HOST:PORT, got a folder; start its server with `chroma "
                f"run --path {address}`, then name chroma:http://localhost:8000#COLLECTION"
            )
        parts = parse_server_address(address, "chroma", KEY)
        names = [name for name in parts.path.split("/") if name]
        if len(names) not in (0, 2):
            raise InvalidInputError(
                "chroma: expected https://HOST:PORT or https://HOST:PORT/TENANT/DATABASE as the "
                "address of the server, got another form; correct SOURCE"
            )
        tenant, database = map(_quoted_path_part, names or _DEFAULT)
        self._root = (
            f"{parts.scheme}://{parts.netloc}/api/v2/tenants/{tenant}/databases/{database}"
            "/collections"
        )
        self._http = _connection_pool()
        processes.register_for_forks(self)

    def before_fork(self) -> None:
        """Do nothing: requests of other threads continue in the parent."""

    def after_fork(self, child: bool) -> None:
        """Open new connections in a child process, because connections must not be shared.

        The parent's connections stay open there. In the parent, nothing happens.
        """
        if child:
            self._http = _connection_pool()

    def describe_collection(self, name: str) -> dict[str, Any]:
        """Return the server's description of a collection: name, id, dimension, metadata and more.

        A missing collection costs a second request.

        Args:
            name: the collection's name.

        Raises:
            NotFoundError: there is no such collection; the error lists up to four others.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        description = self.find_collection(name)
        if description is None:
            names = [one["name"] for one in self.request_json("GET", "?limit=4", name)]
            raise NotFoundError(
                f"{name}: no such collection in this Chroma database; its collections are "
                f"{join_few(names) or 'none'}"
            )
        return description

    def find_collection(self, name: str) -> dict[str, Any] | None:
        """Return the server's description of a collection; None if there is none of this name.

        Args:
            name: the collection's name.

        Raises:
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        try:
            description: dict[str, Any] = self.request_json(
                "GET", f"/{_quoted_path_part(name)}", name
            )
        except NotFoundError:
            return None
        return description

    def rename_collection(
        self, description: Mapping[str, Any], facts: Mapping[str, str], name: str
    ) -> None:
        """Rename a collection and change facts in its metadata, in one request.

        The server replaces all metadata: the other ones stay as they are in `description`.

        Args:
            description: the server's description of the collection.
            facts: facts to record, with the prefix nobackfill_; an empty one is removed.
            name: the new name; it may be the present one.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError: another collection has the name, the server does not answer within a
                minute, or answers with the status 500, 502, 503 or 504.
            NotPermittedError, BusyError, InvalidInputError: the server refuses the token, has too
                many requests, or refuses the request otherwise.
        """
        marks = {_MARK + fact: value for fact, value in facts.items()}
        metadata = {
            n: value
            for n, value in ((description.get("metadata") or {}) | marks).items()
            if value or n not in marks
        }
        # The server ignores an empty object.
        body = {"new_name": name} | ({"new_metadata": some} if (some := metadata or marks) else {})
        self.request_json("PUT", f"/{description['id']}", str(description["name"]), body)

    def create_collection(self, body: Mapping[str, Any], name: str) -> None:
        """Create a collection.

        Args:
            body: the JSON body of the request.
            name: the collection's name in error messages.

        Raises:
            AlreadyExistsError: the name is in use.
            NotFoundError: there is no such tenant or database.
            ValueError, TypeError: `body` cannot be written as JSON.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        self.request_json("POST", "", name, body)

    def delete_collection(self, name: str) -> None:
        """Delete a collection with its items.

        Args:
            name: the collection's name.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        self.request_json("DELETE", f"/{_quoted_path_part(name)}", name)

    def request_json(
        self, method: str, path: str, name: str, body: Mapping[str, Any] | None = None
    ) -> Any:
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
                f"{response.status}: {response.data[:200].decode(errors='replace')}. Correct the "
                "request, or look at the server's log"
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


def _connection_pool() -> urllib3.PoolManager:
    return urllib3.PoolManager(retries=False, timeout=_SECONDS, maxsize=16)


def _quoted_path_part(name: str) -> str:
    return quote(name, safe="")


# Items per request: a server accepts a few thousand, and vectors travel as text.
_PAGE = 500
# Seconds before a read is repeated that met an item while a program deleted it.
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_METRICS: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "ip": "inner_product",
}  # fmt: skip
_MARK = "nobackfill_"
# The fact of an original whose deletion has begun: some of its items may be gone.
_DROPPING = "dropping"


def open_collection(address: str, collection: str, vector: str | None) -> "ChromaSource":
    """Open a collection of a Chroma server as a source of vectors.

    Asks the server for the collection. The caller closes the source.

    Args:
        address: https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE unless they are
            the defaults.
        collection: the collection's name.
        vector: must be None or empty, because a collection has one vector per item.

    Raises:
        InvalidInputError: `vector` is given, the address is a folder or names a tenant without a
            database, or the server refuses the request otherwise or does not answer with JSON.
        NotFoundError: there is no such collection.
        AlreadyExistsError: a flip was killed between its requests, and its name was taken since.
        ConfigurationError: the address has another form.
        UnavailableError: the server does not answer.
        NotPermittedError: the server refuses the token.
        BusyError: the server has too many requests.
    """
    if vector:
        raise InvalidInputError(
            "chroma: expected no --vector, because a collection of Chroma has one vector per item; "
            "leave --vector out"
        )
    return ChromaSource(ChromaStore(address, collection), collection)


class ChromaStore:
    """The collections of a Chroma server, one name of which flips from a collection to its copy.

    While the copy has that name, the original is called NAME_before. The copy records its first
    name, by which `open_collection` finds it at any time.

    Every method that sends a request may also raise UnavailableError (the server does not answer
    within a minute), NotPermittedError (it refuses the token), BusyError (it has too many requests)
    and InvalidInputError (it refuses the request otherwise, or its answer is not JSON).

    Args:
        address: the server, as ChromaServer takes it.
        name: the name that flips.
    """

    def __init__(self, address: str, name: str) -> None:
        self._server = ChromaServer(address)
        self._name, self.before = name, old_name_after_flip(name)

    def open_collection(self, name: str) -> "ChromaCollection":
        """Open a collection by its name, or a copy by its first name.

        Where a flip was killed between its two requests, its name opens the original.

        Raises:
            NotFoundError: there is no such collection; the error names others.
            AlreadyExistsError: a flip was killed between its requests, and a program has created a
                collection of its name since.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        description = self._find(name)
        if description is None:
            # It raises, and names other collections.
            description = self._server.describe_collection(name)
        own = self._first_name(description) or str(description["name"])
        if name == self._name and own == self.before:
            own = name
        return ChromaCollection(self._server, description, own)

    def _first_name(self, description: Mapping[str, Any]) -> str | None:
        """Return the first name of the copy that has flipped; None for any other collection."""
        first = _facts(description).get("name")
        if description["name"] != self._name or first is None:
            return None
        # Without the original, it is a collection like any other.
        return first if self._server.find_collection(self.before) else None

    def _find(self, name: str) -> dict[str, Any] | None:
        """Return the description of the collection that `open_collection` opens; None if there is
        none.
        """
        description = self._server.find_collection(name)
        if name == self._name:
            if description is None or "name" not in _facts(description):
                half = self._half_renamed_collection()
                if half is not None and description is not None:
                    raise AlreadyExistsError(
                        f"{name}: a program created a collection of this name while nobackfill "
                        "exchanged the names of the old and the new one; the items are in "
                        f"{self.before!r}. Move those of {name!r} there, delete the collection "
                        f"{name!r}, and run the command again"
                    )
                description = description or half
        elif description is None:
            led = self._server.find_collection(self._name)
            if led is not None and self._first_name(led) == name:
                description = led
        return description

    def _half_renamed_collection(self) -> dict[str, Any] | None:
        """Return the original, if an exchange of names was killed between its two requests."""
        before = self._server.find_collection(self.before)
        return before if before and _facts(before).get("half") == self._name else None

    def exists(self, name: str) -> bool:
        """Return whether `open_collection` finds a collection of this name.

        A missing tenant or database gives False, too.

        Raises:
            AlreadyExistsError: a flip was killed between its requests, and a program has created a
                collection of its name since.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        return self._find(name) is not None

    def create_copy(self, target: Target, original: Collection, facts: Mapping[str, str]) -> None:
        """Create an empty collection for other vectors of the items of an existing one.

        Args:
            target: name of the new collection; its other fields are ignored. The dimension comes
                with the first items.
            original: the existing collection, whose metadata and settings are copied, but for its
                embedding function.
            facts: facts to record in the metadata in the same step, with the prefix nobackfill_.
                They replace metadata of that name.

        Raises:
            AlreadyExistsError: the name is in use.
            TypeError: `original` is no ChromaCollection.
            NotFoundError: there is no such tenant or database.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        if not isinstance(original, ChromaCollection):
            raise TypeError(original)
        metadata = original.metadata | {_MARK + name: value for name, value in facts.items()}
        self._server.create_collection(
            {"name": target.name, "metadata": metadata} | original.settings, target.name
        )

    def complete_copy(self, copy: Collection, original: Collection) -> None:
        """Do nothing: a copy is made by one request."""

    def wait_for_index(self, copy: Collection) -> None:
        """Do nothing: Chroma searches new items at once."""

    def flip_obstacles(self, name: str, collection: Collection) -> list[str]:
        """Return no sentences: every collection can be renamed."""
        return []

    def record_facts(self, collection: str, facts: Mapping[str, str]) -> None:
        """Record facts in a collection's metadata; the other metadata stay.

        Args:
            collection: the collection's name.
            facts: the facts; an empty one is removed. With an empty "of", the collection is no copy
                any more, and forgets its first name.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        description = self._find(collection)
        if description is None:
            # The first name of a copy whose original was dropped a moment ago.
            description = self._server.describe_collection(self._name)
        if facts.get("of") == "":
            facts = {**facts, "name": ""}
        self._server.rename_collection(description, facts, str(description["name"]))

    def redirect_name(self, name: str, collection: str) -> None:
        """Give the name to the copy, or back to the original, in two requests; may be repeated.

        The copy gets the present metadata of the original's owner.

        Args:
            name: the name that flips.
            collection: the copy; or the original, by the name that flips or by NAME_before.

        Raises:
            AlreadyExistsError: another collection is called NAME_before, or a program has created a
                collection of the name between both requests.
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        if collection in (name, self.before):
            self._lead_back()
            return
        copy = self._find(collection) or self._server.describe_collection(collection)
        if copy["name"] == name:
            return
        self.repair()
        original = self._server.describe_collection(name)
        if self._server.find_collection(self.before) is not None:
            raise AlreadyExistsError(
                f"{name}: the collection {self.before!r} exists already, and a flip gives this "
                f"name to the old collection; rename or delete {self.before!r} first"
            )
        owners = ChromaCollection(self._server, original).metadata
        marks = {n: value for n, value in copy["metadata"].items() if n.startswith(_MARK)}
        self._server.rename_collection(original, {"half": name}, self.before)
        try:
            facts = {"name": collection, "of": self.before}
            self._server.rename_collection({**copy, "metadata": owners | marks}, facts, name)
        except BaseException:
            self.repair()
            raise
        self._server.rename_collection(original, {"half": ""}, self.before)

    def redirect_command(self, name: str, collection: str) -> str:
        """Return the Python call by which the owner gives the name to a collection."""
        return f"client.get_collection({collection!r}).modify(name={name!r})"

    def _lead_back(self) -> None:
        led, original = (
            self._server.find_collection(self._name),
            self._server.find_collection(self.before),
        )
        if original is None:
            return
        if led is not None and (first := _facts(led).get("name")):
            self._server.rename_collection(original, {"half": self._name}, self.before)
            self._server.rename_collection(led, {"name": "", "of": self._name}, first)
        self._server.rename_collection(original, {"half": ""}, self._name)

    def repair(self) -> None:
        """Give the original its name back, if an exchange of names was killed between its requests.

        Raises:
            UnavailableError: the server does not answer within a minute, or the name is in use.
            NotPermittedError, BusyError, InvalidInputError: the server refuses the token, has too
                many requests, or refuses the request otherwise.
        """
        if (
            self._server.find_collection(self._name) is None
            and (half := self._half_renamed_collection()) is not None
        ):
            self._server.rename_collection(half, {"half": ""}, self._name)

    def owner_tasks(self, name: str, old: Collection, new: Collection) -> list[str]:
        """Return the owner's tasks after the flip, as sentences; sends nothing."""
        return [
            f"restart the programs that opened {name!r} before the flip: they hold the id of the "
            f"old collection, now {self.before!r}, and still read and write that",
            "let them give get_collection the new model's embedding function; the new collection "
            "stores none",
        ]

    def lock_name(self, name: str) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the name out, by a lock file in `~/.cache/nobackfill` (or below
        XDG_CACHE_HOME): it keeps out migrations of this user on this machine alone.

        It goes by the id of the original, which stays when names are exchanged. It waits up to 3 s.

        Args:
            name: ignored.

        Raises:
            NotFoundError: there is no such collection.
            AlreadyExistsError: a flip was killed between its requests, and a program has created a
                collection of its name since.
            BusyError: another migration holds the lock, or the server has too many requests.
            CannotWriteError: the lock file cannot be created.
            UnavailableError, NotPermittedError, InvalidInputError: the server does not answer
                within a minute, refuses the token, or refuses the request otherwise.
        """
        here = self._find(self._name) or self._server.describe_collection(self._name)
        original = self._server.find_collection(self.before) if "name" in _facts(here) else None
        return lock_by_address(str((original or here)["id"]), self._name)

    def drop(self, name: str) -> None:
        """Delete a collection with its items.

        A killed call may have deleted some items already.

        Raises:
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        ChromaCollection(
            self._server, self._server.describe_collection(name)
        ).remove_items_with_lists()
        self._server.delete_collection(name)

    def flip_steps(self, old: Collection, new: Collection) -> list[str]:
        """Return the steps by which the owner flips, as sentences and calls; sends nothing.

        Returns:
            Four sentences and calls, in order.
        """
        return [
            "stop all writers, or let every writer put to both collections, to the new one by the "
            "new model; then carry once more, because items of the last sweep are missing",
            "switch the queries to the new model; at the same moment give get_collection the new "
            f"model's embedding function and the name {new.name!r}, or `carry` with --flip, or "
            "swap the names:",
            self.redirect_command(f"{old.name}_before", old.name),
            self.redirect_command(old.name, new.name),
        ]

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._server.close()


class ChromaSource(FlippingSource):
    """A collection of a Chroma server whose name can flip to a copy of it.

    A flip that was killed between its two requests is undone by the next call that writes. Every
    method that sends a request may also raise the errors of a ChromaStore.

    Args:
        store: the store.
        name: the collection's name.

    Raises:
        NotFoundError: there is no such collection.
        AlreadyExistsError: a flip was killed between its requests, and a program has created a
            collection of its name since.
        UnavailableError: the server does not answer within a minute.
        NotPermittedError: the server refuses the token.
        BusyError: the server has too many requests.
        InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
    """

    flip_renames = True
    _store: ChromaStore

    def __init__(self, store: ChromaStore, name: str) -> None:
        super().__init__(store, name, "")

    @property
    def flip_name(self) -> str:
        """Return the name that flips."""
        return self._name

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about a collection that is left of an earlier flip; empty if there is
        none.

        Args:
            target: ignored: every copy has the same obstacles.

        Raises:
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        before = self._store.before
        if self._led is not self._here or not self._store.exists(before):
            return []
        if self._here.copy_facts.get("of") == before:
            return super().flip_obstacles(target)
        if "half" in self._here.copy_facts:
            return []
        return [f"the collection {before!r} exists already: rename or delete it first"]

    def _is_copy(self, collection: Collection) -> bool:
        # Copies for searches were made while the original still had the name.
        return super()._is_copy(collection) or (
            collection.name != self._here.name and collection.copy_facts.get("of") == self._name
        )

    @contextmanager
    def migration_lock(self) -> Iterator[Callable[[], None]]:
        """Keep other migrations of the collection out, by a lock file of this user.

        It undoes an exchange of names that was killed between its two requests. See
        ChromaStore.lock.

        Raises:
            BusyError: another migration holds the lock, or the server has too many requests.
            CannotWriteError: the lock file cannot be created.
            NotFoundError: there is no such collection.
            UnavailableError, NotPermittedError, InvalidInputError: the server does not answer
                within a minute, refuses the token, or refuses the request otherwise.
            AlreadyExistsError: a flip was killed between its requests, and a program has created a
                collection of its name since.
        """
        with super().migration_lock() as check:
            self._store.repair()
            yield check

    def open_target(self, target: Target) -> "ChromaCopy":
        """Create an empty copy of the collection, or open that of an earlier run of this map.

        Raises:
            AlreadyExistsError: the name belongs to another collection, or to a copy by another map.
            InvalidInputError: the collection holds the vectors of this map already, or the server
                refuses the request.
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        self._store.repair()
        place = super().open_target(target)
        return ChromaCopy(self._store, self._here, place._copy, self._name)

    def drop_new_vectors(self, name: str) -> bool:
        """Delete a copy of the collection. A flip to it that was killed is taken back.

        Returns:
            False, and nothing changes, if the name is no copy of it, or it has flipped to the copy.

        Raises:
            InvalidInputError: a flip was killed, and programs wrote items into the copy since it
                began; or the server refuses the request.
            NotFoundError: the copy was dropped meanwhile.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        self._store.repair()
        return super().drop_new_vectors(name)

    def _refuse_late_items(self, way: str) -> None:
        """Raise InvalidInputError if programs wrote the original since the flip compared it."""
        compared, original = self._here.copy_facts.get("before"), self._original()
        if compared is None or not isinstance(original, ChromaCollection):
            return
        if _DROPPING in original.copy_facts:
            return
        for window in original.windows(_PAGE):
            original.records(window)
        if _sweep_digest(original) not in compared.split():
            raise InvalidInputError(
                f"{self._name}: programs have written {original.name!r} since the flip, because "
                f"they hold the id of the old collection; restart these programs. {way}"
            )

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Give the original its name back, and delete the copy.

        See FlippingSource.flip_back. Items that programs added to the original since the flip are
        not told from those that were deleted from the copy.

        Args:
            new_name: name of the copy.
            allow_loss: go on where items were written since the flip: they are lost.

        Returns:
            The number of items that were lost.

        Raises:
            NotFoundError: there is no original, or the name does not lead to `new_name`.
            InvalidInputError: items were written since the flip, and `allow_loss` is False;
                nothing is changed. Or `drop_old` was killed; or the server refuses the request.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        original = self._original()
        if original is not None and _DROPPING in original.copy_facts:
            raise InvalidInputError(
                f"{self._name}: `nobackfill migrate finish` was killed while it deleted the old "
                f"collection {original.name!r}, so some of its items may be gone; run `nobackfill "
                "migrate finish` again"
            )
        if not allow_loss:
            self._refuse_late_items(
                "Then run `nobackfill migrate back --yes`, which deletes the items that "
                f"{self._name!r} does not have"
            )
        return super().flip_back(new_name, allow_loss=allow_loss)

    def _remove_old(self, original: Collection, keys: Sequence[Any]) -> None:
        # Noted before each request, so that a killed call is not taken for a program's deletion.
        assert isinstance(original, ChromaCollection)
        for first in range(0, len(keys), _PAGE):
            some = keys[first : first + _PAGE]
            sums = [_sweep_digest(original)]
            original.forget_swept(some)
            self._store.record_facts(
                self._here.name, {"before": " ".join([*sums, _sweep_digest(original)])}
            )
            original.remove(some)

    def drop_old(self) -> None:
        """Delete the original after a flip; the flip cannot be undone then.

        Raises:
            NotFoundError: there is no original.
            InvalidInputError: programs wrote it since the flip; or the server refuses the request.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        self._refuse_late_items(
            f"Write the items that they wrote into {self._name!r} with vectors of the new model, "
            "then delete the old collection yourself"
        )
        if (original := self._original()) is not None:
            self._store.record_facts(original.name, {_DROPPING: "yes"})
        super().drop_old()


class ChromaCopy(FlippingCopy):
    """The copy of a ChromaSource; its flip records what the original held."""

    @contextmanager
    def open_flip(self) -> Iterator[None]:
        """Give the name to the copy; the block writes what changed in the original meanwhile.

        See FlippingCopy.flip.

        Raises:
            UnavailableError: the server does not answer within a minute.
            NotPermittedError: the server refuses the token.
            BusyError: the server has too many requests.
            NotFoundError: the collection or its copy was dropped.
            AlreadyExistsError: another collection has the name that the old one gets.
            InvalidInputError: the server refuses the request otherwise, or its answer is not JSON.
        """
        with super().open_flip():
            yield
            self._store.record_facts(self._copy.name, {"before": _sweep_digest(self._source)})


def _sweep_digest(collection: Collection) -> str:
    """Return the digest of the items that the last sweep of a collection read."""
    assert isinstance(collection, ChromaCollection)
    return f"{collection.swept_ids:016x}"


class ChromaCollection:
    """A collection of a Chroma server; its items have one vector each.

    The API has no ranges of ids, so all ids are listed at the start of a sweep. Every method that
    sends a request may also raise NotFoundError (the collection was dropped) and the errors of a
    ChromaStore.

    Attributes:
        name: the collection's name.
        metadata: the owner's metadata, without what nobackfill or old clients wrote.
        copy_facts: the facts that were recorded when it was created as a copy.
        index: its index settings by kind.
        settings: the part of a request that creates a collection with the same settings. A stored
            embedding function belongs to the old model, so it becomes "unknown": clients then
            refuse texts until they are given another function.
        swept_ids: a digest of all items that the last sweep of `records` read.

    Args:
        server: the server.
        description: the server's description of the collection.
        name: the name to show; None: its own.
    """

    def __init__(
        self, server: ChromaServer, description: Mapping[str, Any], name: str | None = None
    ) -> None:
        self._server = server
        self.name = name or str(description["name"])
        self._path = f"/{description['id']}"
        self._dim: int | None = description.get("dimension")
        metadata = description.get("metadata") or {}
        # Clients before 1.0 wrote index settings into the metadata, with the prefix "hnsw:".
        self.metadata = {
            name: value for name, value in metadata.items() if not name.startswith((_MARK, "hnsw:"))
        }
        self.copy_facts = _facts(description)
        configuration = description.get("configuration_json") or {}
        self.index = {
            kind: {name: value for name, value in settings.items() if value is not None}
            for kind in ("hnsw", "spann")
            if (settings := configuration.get(kind))
        }
        self.settings = _copied_settings(description, self.index)
        self.swept_ids = 0
        self._ids: list[str] | None = None

    def facts(self) -> Facts:
        """Return the collection's name, dimension, metric and model, and the names of other values.

        The names are those of the first item, without values that are None; none if the collection
        is empty. The dimension is as it was when the collection was opened, and None if it never
        had an item. The metric is None if the server names none.

        Raises:
            InvalidInputError: searches use a metric that nobackfill does not support, or the server
                refuses the request otherwise.
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        space = next((str(one.get("space") or "") for one in self.index.values()), "")
        some = self._request_records({"limit": 1, "include": ["documents", "metadatas", "uris"]})
        columns = tuple(some[0].other_values) if some else ()
        metric = parse_store_metric(space, _METRICS, self.name)
        return Facts(self.name, self._dim, metric, self.copy_facts.get("model"), columns)

    def count(self) -> int:
        """Count the items.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        return int(self._request("GET", "/count"))

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all ids into windows of `rows_per_window` items, and list the ids again at the
        first one, in one request.

        Ids are in the order of their text. The last window has no upper end, so that it includes
        later items. An empty collection gives one window. Items that are added before the last
        window's lower end are missed until the next sweep.

        Args:
            rows_per_window: the size of a window, at least 1; all but the last have exactly this
                many ids.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        ids = self._list_ids()
        lower = None
        for upper in ids[rows_per_window - 1 : -1 : rows_per_window]:
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
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError: the server does not answer within a
                minute, refuses the token, or has too many requests.
        """
        ids = self._ids_in(window)
        records = self._read_records(ids, ["embeddings", "documents", "metadatas", "uris"])
        if window.lower is None:
            self.swept_ids = 0
        self._add_to_sweep_digest(records)
        return records

    def digests(self, window: Window) -> dict[Any, str]:
        """Read the digests of a copy's items by id; "" for an item that a writer put.

        Deleted items are left out.

        Args:
            window: ids above `lower` and up to `upper`, as `records` reads it.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
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
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        return {one.key for one in self._read_records(list(keys), [])}

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
        """Insert or replace items with new vectors, in requests of 500.

        Earlier requests stay after an error. The ids join the listing of the present sweep.

        Args:
            records: n items; none: nothing is sent. Their documents, URIs, metadata and digests are
                stored.
            vectors: float32 [n, dim], in place of their own.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
            ValueError: there are fewer vectors than items; earlier requests stay.
        """
        for first in range(0, len(records), _PAGE):
            some = records[first : first + _PAGE]
            body = {
                "ids": [one.key for one in some],
                "embeddings": vectors[first : first + _PAGE].tolist(),
                "documents": [one.other_values.get("document") for one in some],
                "uris": [one.other_values.get("uri") for one in some],
                "metadatas": [
                    {n: v for n, v in one.other_values.items() if n not in ("document", "uri")}
                    | {OF: one.copy_origin(vector)}
                    for one, vector in zip(some, vectors[first : first + _PAGE], strict=True)
                ],
            }
            self._request("POST", "/upsert", body)
            self._add_to_listing(str(one.key) for one in some)

    def remove(self, keys: Sequence[Any]) -> None:
        """Delete items by id; unknown ids are ignored.

        They go in requests of 500, and earlier ones stay after an error.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        for first in range(0, len(keys), _PAGE):
            self._request("POST", "/delete", {"ids": list(keys[first : first + _PAGE])})

    def forget_swept(self, keys: Sequence[Any]) -> None:
        """Take items out of `swept_ids`, as if they were deleted.

        Args:
            keys: ids; unknown ones are ignored.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise. InvalidInputError also: an item has a metadata key called
                document or uri.
        """
        self._add_to_sweep_digest(self.lookup(keys))

    def remove_items_with_lists(self) -> None:
        """Delete the items whose metadata have a list.

        Chroma forgets to delete lists with their collection (chroma-core/chroma#7594): items that
        are written later, into any collection, would get them.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
        """
        ids = self._list_ids()
        for first in range(0, len(ids), _PAGE):
            page = {"ids": ids[first : first + _PAGE], "include": ["metadatas"]}
            response = self._request("POST", "/get", page)
            parts = zip(response["ids"], response["metadatas"], strict=True)
            self.remove(
                [one for one, m in parts if any(isinstance(v, list) for v in (m or {}).values())]
            )

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        """Read items by id, ordered by id; unknown ids are left out.

        Args:
            ids: ids; none: no request is sent.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise. InvalidInputError also: an item has a metadata key called
                document or uri.
        """
        return self._read_records(ids, ["embeddings", "documents", "metadatas", "uris"])

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        The server may search approximately, by the collection's metric.

        Args:
            vector: float32 [dim].
            count: the most ids to return, at least 1.

        Returns:
            Ids; empty if the collection had never had an item when it was opened.

        Raises:
            NotFoundError: the collection was dropped.
            UnavailableError, NotPermittedError, BusyError, InvalidInputError: the server does not
                answer within a minute, refuses the token, has too many requests, or refuses the
                request otherwise.
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

    def _add_to_listing(self, ids: Iterable[str]) -> None:
        """Insert ids that were put into the listing, which later windows use.

        Ids come in order, so they go near its end.
        """
        if self._ids is None:
            return
        for one in ids:
            at = bisect_left(self._ids, one)
            if self._ids[at : at + 1] != [one]:
                self._ids.insert(at, one)

    def _add_to_sweep_digest(self, records: Iterable[Record]) -> None:
        """Add items to the digest of the sweep, or take them out again; no order counts."""
        for one in records:
            item = hashlib.sha256(f"{one.key} {one.digest}".encode()).hexdigest()
            self.swept_ids ^= int(item[:16], 16)

    def _list_ids(self) -> list[str]:
        """List all ids in order, in one request: pages would shift when others delete items."""
        self._ids = sorted(self._request("POST", "/get", {"include": []})["ids"])
        return self._ids

    def _read_records(self, ids: Sequence[str], include: list[str]) -> list[Record]:
        records = []
        for first in range(0, len(ids), _PAGE):
            records += self._request_records(
                {"ids": list(ids[first : first + _PAGE]), "include": include}
            )
        return sorted(records, key=lambda one: str(one.key))

    def _request_records(self, body: Mapping[str, Any]) -> list[Record]:
        response = self._read_items(body)
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

    def _read_items(self, body: Mapping[str, Any]) -> Any:
        """Read items, again where the server fails because a program deletes one of them.

        The server lists the items first and reads their vectors then: it answers "Error finding id"
        with the status 500.
        """
        for pause in _PAUSES:
            try:
                return self._request("POST", "/get", body)
            except UnavailableError as error:
                if "Error finding id" not in str(error):
                    raise
            time.sleep(pause)
        return self._request("POST", "/get", body)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._server.request_json(method, self._path + path, self.name, body)


def _facts(description: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that we recorded in a collection's metadata."""
    return {
        name.removeprefix(_MARK): str(value)
        for name, value in (description.get("metadata") or {}).items()
        if name.startswith(_MARK) and value != ""
    }


def _copied_settings(
    description: Mapping[str, Any], index: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return settings of a collection for the request that creates another one."""
    schema = copy.deepcopy(description.get("schema"))
    if not schema:
        # Early servers have no schema.
        return {"configuration": index}
    keys = (schema.get("keys") or {}).values()
    # A server forgets an unknown function where it is the default, too.
    parts = [(schema.get("defaults") or {}, "legacy"), *((one, "unknown") for one in keys)]
    for part, kind in parts:
        config = ((part.get("float_list") or {}).get("vector_index") or {}).get("config") or {}
        if (config.get("embedding_function") or {}).get("type") == "known":
            config["embedding_function"] = {"type": kind}
    return {"schema": schema}
