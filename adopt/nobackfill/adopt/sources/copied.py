"""Migrate collections whose items hold one vector: new vectors go into a copy of the collection.

The copy has the same keys and values. Each of its items records a digest of its original. A window
is migrated in four steps: read, map, put, and remove the items that were deleted meanwhile. A
changed item has another digest and is computed again. An item of the copy without a digest comes
from a writer that writes to both collections, and stays as it is.
"""

import hashlib
import json
from collections.abc import Collection as Some
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.sources.source import ColumnValues, Facts, Rows, Target, Window, stack_vectors
from nobackfill.errors import AlreadyExistsError
from nobackfill.vectors import Vectors

# The value of a copy's item that holds the digest of the original, and that of its own vector.
OF = "nobackfill_of"
# Characters of a digest.
DIGEST = 32
# Projections in a sketch, and their largest difference as a share of the vector's norm.
_AXES, _NEAR = 4, 2e-5


@dataclass(frozen=True)
class Record:
    """An item of a collection.

    Attributes:
        key: Its key in the store's own type.
        vector: Its vector, float32 [dim].
        other_values: Its other values by name.
        partition: Its part of the collection; "" where the collection has no parts.
    """

    key: Any
    vector: Vectors
    other_values: Mapping[str, Any]
    partition: str = ""

    @cached_property
    def digest(self) -> str:
        """Return a digest of vector, values and partition, as 32 hexadecimal digits.

        The key is not part of it. It is computed once, so that later changes of the values do not
        count. Numbers that JSON writes alike are equal; a value that JSON does not know counts by
        its repr, an array by its values.

        Raises:
            TypeError: Keys of `other_values` cannot be sorted.
            RecursionError: A value is nested too deeply.
        """
        values = json.dumps(self.other_values, sort_keys=True, default=_plain).encode()
        whole = self.vector.tobytes() + values + self.partition.encode()
        return hashlib.sha256(whole).hexdigest()[:DIGEST]

    def copy_origin(self, vector: Vectors) -> str:
        """Return what a copy of the item with another vector records in `OF`.

        Args:
            vector: The vector of the copy, float32 [dim].

        Returns:
            The digest of the item, then the sketch of the vector.

        Raises:
            TypeError, RecursionError: The item has no digest; see `digest`.
        """
        return self.digest + sketch_vector(vector)


def sketch_vector(vector: Vectors) -> str:
    """Return a few fixed projections of a vector as text, by which `matches_sketch` knows it again.

    A digest would change with the last bit of a number, which some stores do not preserve.

    Args:
        vector: Float32 [dim].
    """
    return " ".join(f"{one:.7e}" for one in (_axes(len(vector)) @ vector.astype(np.float64)))


def matches_sketch(vector: Vectors, sketched: str) -> bool:
    """Tell whether a vector is the one of a sketch, but for the last bits of its numbers.

    Args:
        vector: Float32 [dim].
        sketched: The result of `sketch_vector`; every vector is like an empty text.

    Raises:
        ValueError: `sketched` holds other text than numbers.
    """
    if not sketched:
        return True
    both = [np.array(one.split(), np.float64) for one in (sketched, sketch_vector(vector))]
    bound = _NEAR * max(1e-6, float(np.linalg.norm(vector)))
    return len(both[0]) == _AXES and bool((np.abs(both[0] - both[1]) <= bound).all())


@cache
def _axes(dim: int) -> NDArray[np.float64]:
    """Return the axes of projections [4, dim]; quadratic phases, so that no two are alike."""
    phases = np.arange(1, _AXES + 1)[:, None] * np.arange(1, dim + 1) ** 2
    return np.asarray(np.cos(0.37 * phases))


class Collection(Protocol):
    """One collection of a store, as the client of the store reads and writes it.

    Every method may also raise UnavailableError (the server does not answer), NotPermittedError (it
    refuses the key), BusyError (it has too many requests), NotFoundError (the collection was
    deleted) and InvalidInputError (it refuses the request).
    """

    @property
    def name(self) -> str:
        """Return the collection's own name, not an alias."""

    @property
    def copy_facts(self) -> Mapping[str, str]:
        """Return the facts that were recorded when the collection was created as a copy.

        "map" and "model" as in Target, and "of", the name of the original. Empty for a collection
        that is no copy.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def facts(self) -> Facts:
        """Return the facts that the store declares about the vectors.

        Raises:
            InvalidInputError: The metric is not supported, the field of vectors cannot be chosen,
                or the server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """

    def count(self) -> int:
        """Count the items.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all keys into windows of about `rows_per_window` items; the last one has no upper
        end.

        An empty collection gives one window.

        The errors come when a window is requested.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def records(self, window: Window) -> list[Record]:
        """Read the items of a window in the order of their keys.

        Items without a vector are left out.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def digests(self, window: Window) -> dict[Any, str]:
        """Read the recorded digests of a copy's items by key; "" for an item of a writer.

        Returns:
            Notes as `Record.copy_origin` makes them; earlier versions noted the item's digest
            alone. Items without a vector may be among them. Empty for a window without items.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def existing_keys(self, keys: Sequence[Any]) -> Some[Any]:
        """Return those of the keys that the collection has.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def put(self, records: Sequence[Record], vectors: Vectors) -> None:
        """Upsert copies of items, with their digests and other vectors. It returns once the store
        has them.

        Without records nothing is sent. After an error, some of the items may have been sent.

        Args:
            records: n items of the original.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            CannotWriteError: The store's disk is full, or it cannot be written.
            InvalidInputError: The server refuses the items, as vectors of another dimension.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """

    def remove(self, keys: Sequence[Any]) -> None:
        """Delete items by key; unknown keys are ignored.

        No keys delete nothing.

        Raises:
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def lookup(self, ids: Sequence[str]) -> list[Record]:
        """Read items by their keys as text, in any order; unknown ids are left out.

        A repeated id may come twice.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def nearest(self, vector: Vectors, count: int) -> list[str]:
        """Search for the ids of at most `count` items nearest to a vector [dim], nearest first.

        Raises:
            InvalidInputError: The query has another dimension, or the server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """


class CollectionStore(Protocol):
    """A store of collections, as its client reads and writes it.

    Every method may also raise UnavailableError (the server does not answer), NotPermittedError (it
    refuses the key), BusyError (it has too many requests) and InvalidInputError (it refuses the
    request).
    """

    def open_collection(self, name: str) -> Collection:
        """Open a collection by its name or alias.

        Raises:
            NotFoundError: There is no such collection.
            InvalidInputError: The collection cannot be used, as without a single field of vectors.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """

    def exists(self, name: str) -> bool:
        """Tell whether a collection or an alias of this name exists.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """

    def create_copy(self, target: Target, original: Collection, facts: Mapping[str, str]) -> None:
        """Create an empty collection for other vectors of the items of `original`.

        Args:
            target: Name and dimension of the collection.
            original: The original.
            facts: Facts to record in the same step (see `Collection`).

        Raises:
            InvalidInputError: The store refuses the name or the dimension.
            CannotWriteError: The store cannot be written.
            AlreadyExistsError: Another program made a collection of this name meanwhile.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """

    def drop(self, name: str) -> None:
        """Delete a collection with all its items.

        The name is that of a collection, not an alias.

        Raises:
            CannotWriteError: The store cannot be written.
            NotFoundError: There is no such collection.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request, as where another name leads to it.
        """

    def flip_steps(self, old: Collection, new: Collection) -> list[str]:
        """Return the steps by which the owner flips from one collection to the other.

        Nothing is changed.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: A collection was deleted.
            InvalidInputError: The server refuses the request.
        """

    def close(self) -> None:
        """Close the connection to the store.

        The store cannot be used afterwards.
        """


class CopiedSource:
    """The Source of a collection whose new vectors go into a second collection of its store.

    Args:
        store: The store.
        name: Name of the collection.

    Raises:
        NotFoundError: There is no such collection.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the key.
        BusyError: The server has too many requests.
    """

    def __init__(self, store: CollectionStore, name: str) -> None:
        self._store = store
        self._here = store.open_collection(name)

    def facts(self) -> Facts:
        """Return the facts of the collection.

        Raises:
            InvalidInputError: The metric is not supported, the field of vectors cannot be chosen,
                or the server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        return self._here.facts()

    def count(self) -> int:
        """Count the items of the collection.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        return self._here.count()

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all keys into windows of about `rows_per_window` items; the last one has no upper
        end.

        An empty collection gives one window.

        The errors come when a window is requested.

        Args:
            rows_per_window: At least 1.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        return self._here.windows(rows_per_window)

    def read(self, window: Window) -> Rows:
        """Read the vectors of a window; a row's key is its Record, and its version its digest.

        Raises:
            InvalidInputError: The vectors have several dimensions. The server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        return rows_from_records(self._here.records(window), self._here.name)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read a value of a window's items as text; items where it is empty are left out.

        An unknown name gives no values. A value counts as empty if it is None or "". Values come in
        the order in which the store reads the window.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        found = [(str(one.key), one.other_values.get(name)) for one in self._here.records(window)]
        pairs = [(key, str(value)) for key, value in found if value not in (None, "")]
        return ColumnValues([key for key, _ in pairs], [value for _, value in pairs])

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search the collection, or the copy named `new_name`, as the store searches.

        Args:
            vector: The query, float32 [dim].
            count: Largest number of hits.
            new_name: Name of the copy or an alias; None for the collection.

        Returns:
            Ids, nearest first; the store may search approximately.

        Raises:
            NotFoundError: There is no such copy. The collection was deleted.
            InvalidInputError: The query has another dimension, or the server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """
        where = self._here if new_name is None else self._store.open_collection(new_name)
        return where.nearest(vector, count)

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Read old vectors by id, in any order; unknown ids are left out.

        A repeated id comes once.

        Raises:
            InvalidInputError: The vectors have several dimensions. The server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        return rows_from_records(self._here.lookup(list(dict.fromkeys(ids))), self._here.name)

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read a value of items as text, by id; items without it are left out.

        Unknown ids are left out, and so are empty values.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        found = {str(one.key): one.other_values.get(column) for one in self._here.lookup(ids)}
        return {name: str(value) for name, value in found.items() if value not in (None, "")}

    def close(self) -> None:
        """Close the connection to the store; the source cannot be used afterwards."""
        self._store.close()

    def open_target(self, target: Target) -> "CollectionCopy":
        """Create an empty copy of the collection, or open that of an earlier run of this map.

        The dimension of an existing copy is not checked.

        Raises:
            AlreadyExistsError: The name belongs to another collection, or to a copy by another map.
                Another program made a collection of the name meanwhile.
            InvalidInputError: The store refuses the name or the dimension.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        return CollectionCopy(self._store, self._here, self._open_copy(target))

    def _open_copy(self, target: Target) -> Collection:
        """Create an empty copy of the collection, or open that of an earlier run of this map."""
        facts = {"map": target.computer_digest, "of": self._here.name}
        if self._store.exists(target.name):
            made = self._store.open_collection(target.name).copy_facts
            if any(made.get(name) != value for name, value in facts.items()):
                way = (
                    "remove it with `nobackfill carry --rollback`"
                    if made.get("of") == self._here.name
                    else f"it is no copy of {self._here.name!r}, so rename or delete it"
                )
                raise AlreadyExistsError(
                    f"{self._here.name}: the collection {target.name!r} exists already, and was "
                    f"not made by this map; {way}, or (`nobackfill carry`) choose another --to"
                )
        else:
            model = {"model": target.model} if target.model else {}
            self._store.create_copy(target, self._here, facts | model)
        return self._store.open_collection(target.name)

    def drop_new_vectors(self, name: str) -> bool:
        """Delete the copy of the collection.

        Returns:
            False, and nothing changes, if the name is no copy of it, or queries search the copy.

        Raises:
            CannotWriteError: The store cannot be written.
            NotFoundError: The copy was deleted meanwhile.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """
        if not self._store.exists(name):
            return False
        found = self._store.open_collection(name)
        # After a flip, the name leads to the copy: queries search it.
        if found.name == self._here.name or found.copy_facts.get("of") != self._here.name:
            return False
        self._store.drop(name)
        return True


class CollectionCopy:
    """The TargetVectors of a CopiedSource: the copy of a collection, with new vectors.

    Every method may also raise the errors of a Collection, for the original or the copy.

    Args:
        store: The store.
        source: The original.
        copy: The copy.
    """

    concurrent_windows = 1

    def __init__(self, store: CollectionStore, source: Collection, copy: Collection) -> None:
        self._store, self._source, self._copy = store, source, copy

    def pending(self, window: Window) -> Rows:
        """Delete copies of deleted and changed items; then read the items without a copy.

        An item that a writer put into the copy is never pending, and never deleted. Without any
        pending item, the rows are empty and of dimension 0.

        Raises:
            InvalidInputError: An item has no vector, or the vectors have several dimensions; stale
                copies are deleted already. The server refuses the request.
            CannotWriteError: A copy cannot be deleted.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
        """
        return rows_from_records(self._left(window), self._source.name)

    def _left(self, window: Window) -> list[Record]:
        """Delete copies of deleted and changed items; then read the items without a copy."""
        records = self._source.records(window)
        notes = self._copy.digests(window)
        now = {one.key: one.digest for one in records}
        stale = {key for key, one in notes.items() if one and now.get(key) != one[:DIGEST]}
        if stale:
            found = self._copy.lookup([str(key) for key in stale])
            # Some stores keep the note of an item that a writer replaces.
            theirs = {
                one.key for one in found if not matches_sketch(one.vector, notes[one.key][DIGEST:])
            }
            stale -= theirs
            self._copy.remove(list(stale))
        return [one for one in records if one.key in stale or one.key not in notes]

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Put copies of items with their new vectors; delete those whose original is gone now.

        A change between the read and the write is found by the next `pending`. If a writer put one
        of the items into the copy meanwhile, it is replaced. After an error some copies may be
        written; the next `pending` deletes stale ones.

        Args:
            rows: Rows of `pending`; their keys are Records.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the items, as vectors of another dimension.
        """
        records = [one for one in rows.keys if isinstance(one, Record)]
        self._copy.put(records, vectors)
        there = self._source.existing_keys([one.key for one in records])
        gone = [one.key for one in records if one.key not in there]
        if gone:
            self._copy.remove(gone)

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window that nobackfill wrote; those of writers are left out.

        Raises:
            InvalidInputError: An item has no vector, or the vectors have several dimensions. The
                server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The copy was deleted.
        """
        ours = {key for key, digest in self._copy.digests(window).items() if digest}
        records = [one for one in self._copy.records(window) if one.key in ours]
        return rows_from_records(records, self._copy.name)

    def count(self) -> int:
        """Count the items of the copy, also those of writers.

        Raises:
            NotFoundError: The copy was deleted.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """
        return self._copy.count()

    def finish(self) -> list[str]:
        """Return the steps by which queries search the copy in place of the original.

        Nothing is changed.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the request.
        """
        return self._store.flip_steps(self._source, self._copy)


def rows_from_records(records: Sequence[Record], error_name: str) -> Rows:
    """Convert items to rows, whose keys are the items and whose versions are their digests.

    Args:
        records: The items.
        error_name: The name of the collection in the error.

    Raises:
        InvalidInputError: The vectors have several dimensions, or an item has no vector.
    """
    ids = [str(one.key) for one in records]
    vectors = stack_vectors([one.vector for one in records], ids, error_name)
    return Rows(ids, vectors, list(records), [one.digest for one in records])


def _plain(value: object) -> object:
    """Convert a value that JSON does not know: an array to a list, any other to its repr."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)
