"""Define the interface of a user's store: a Protocol to read it, and one to write new vectors.

Below are the checks, records and addresses that several sources share. Any method of a store may
also raise UnavailableError (its server does not answer), NotPermittedError (it refuses the user)
and BusyError (others hold the store, or its server has too many requests).
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

import numpy as np

from nobackfill import durable
from nobackfill.digests import SPACE_PREFIX
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    IncompatibleSpaceError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    join_few,
)
from nobackfill.loopback import is_loopback
from nobackfill.vectors import Vectors

# Metrics of stores; a larger "inner_product" is nearer.
SearchMetric = Literal["cosine", "squared_l2", "inner_product", "l1"]
# Roles of texts, for a model that encodes queries and documents in two ways.
DOCUMENTS, QUERIES = "documents", "queries"


# Longest name of new vectors in bytes: PostgreSQL truncates longer names.
LONGEST_NAME_BYTES = 63


@dataclass(frozen=True)
class Facts:
    """Facts that a store states about its vectors.

    Attributes:
        name: The name of the vectors in messages, as `documents.embedding`.
        dim: Their dimension; None if the store does not declare one.
        metric: The metric of the store's searches; None if it does not declare one.
        model: The model in the store's metadata, by its fingerprint or a release's space; None
            without one.
        columns: Names of the other values of an item.
        normalises: Whether the store normalises each vector and so loses its norm.
    """

    name: str
    dim: int | None
    metric: SearchMetric | None = None
    model: str | None = None
    columns: tuple[str, ...] = ()
    normalises: bool = False


@dataclass(frozen=True)
class Window:
    """A range of a store's items, which only that store understands.

    In most stores it has the keys above `lower`, up to `upper` inclusive; None leaves an end open,
    so `Window()` has all items. The windows of one `Source.windows` cover each key once, also keys
    that are added meanwhile.
    """

    lower: object = None
    upper: object = None


@dataclass(frozen=True)
class Rows:
    """Items of a window that have a vector.

    Attributes:
        ids: Their keys as text.
        vectors: Their vectors, float32 [n, dim]; they may hold NaN (see `check_rows`).
        keys: Their keys in the store's own type; empty if the store needs none.
        versions: For each item, a value by which the store recognises a row that has changed since
            it was read; empty if the store needs none.
    """

    ids: list[str]
    vectors: Vectors
    keys: Sequence[object] = ()
    versions: Sequence[object] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, places: Sequence[int]) -> "Rows":
        """Return the items with these numbers, in their order.

        Negative numbers count from the end.

        Raises:
            IndexError: There is no such item.
        """
        return Rows(
            [self.ids[row] for row in places],
            self.vectors[np.asarray(places, np.int64)],
            [self.keys[row] for row in places] if len(self.keys) else (),
            [self.versions[row] for row in places] if len(self.versions) else (),
        )


@dataclass(frozen=True)
class Target:
    """The place for new vectors in the same store, and their origin.

    Attributes:
        name: Name of the new column, collection or file; `table:NAME` for a table in PostgreSQL.
        dim: Dimension of the new vectors.
        computer_digest: Digest of the map or model that computes them. Vectors with different
            digests are never mixed under one name.
        model: Fingerprint of the model in whose space they are; None if it is not known.
        content_column: The column that they are computed from; None if they are computed from the
            old vectors. A change of it makes a new vector stale.
        is_native: Whether a model computes them from the items. Stale ones among them cannot be
            found later by comparison with a map.
        must_be_reversible: Whether a flip must be reversible: until the old vectors are dropped,
            the store tells which of them may be stale because their new vector was written after
            the flip.
    """

    name: str
    dim: int
    computer_digest: str
    model: str | None = None
    content_column: str | None = None
    is_native: bool = False
    must_be_reversible: bool = False


@dataclass(frozen=True)
class ColumnValues:
    """Values of another column of a window, as text: `values[i]` belongs to `ids[i]`."""

    ids: list[str]
    values: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MigrationCosts:
    """Estimated seconds of a migration in one store.

    Attributes:
        item_seconds: Seconds to read, map, write and check an item; None: not measured.
        index_seconds: Seconds to build the index of all new vectors; 0: the store builds none;
            None: not measured.
    """

    item_seconds: float | None = None
    index_seconds: float | None = None


@dataclass(frozen=True)
class MigrationTrial:
    """The means by which a store estimates its MigrationCosts.

    Attributes:
        old: Old vectors of some items, float32 [n, a], at least two.
        new: Their new vectors, float32 [n, b].
        item_count: Number of items of the store.
        map_seconds: Seconds to map an item.
        carry_seconds: Migrates all items of a scratch source, and returns the seconds of an item.
    """

    old: Vectors
    new: Vectors
    item_count: int
    map_seconds: float
    carry_seconds: Callable[["Source"], float]


class TargetVectors(Protocol):
    """The new vectors in a store, which `Source.open_target` creates or opens.

    An item that is deleted from the source loses its new vector.

    Every method may also raise UnavailableError (the store's server does not answer),
    NotPermittedError (it refuses the user), BusyError (others hold the store) and InvalidInputError
    (a file is damaged).
    """

    @property
    def concurrent_windows(self) -> int:
        """Return the number of windows that threads may migrate at the same time; at least 1.

        It may ask the store at each call.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
        """

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of a window whose new vector is missing or stale.

        Returns:
            Rows in the order of the keys; none after all are written.

        Raises:
            InvalidInputError: Vectors of the window have several dimensions, a file is damaged, or
                the store refuses the request.
            NotPermittedError: The server refuses the user.
            UnavailableError: The server does not answer.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors durably, for rows that have not changed since they were read.

        Rows that have changed, and rows that are left out, stay pending, without an error.

        Args:
            rows: Some of the rows that `pending` returned for one window, at least one.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            CannotWriteError: The disk is full, or the store cannot be written.
            UnavailableError: The server does not answer.
            InvalidInputError: The vectors have another dimension than the target, or the store
                refuses them.
            NotPermittedError: The user's rights are missing.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window; items without one are left out.

        Raises:
            InvalidInputError: A file is damaged, or the store refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def count(self) -> int:
        """Count the items that have a new vector.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            InvalidInputError: A file is damaged, or the store refuses the request.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def finish(self) -> list[str]:
        """Complete the new vectors, and return sentences or statements by which the owner flips.

        The caller has written all rows. May be repeated.

        Returns:
            Empty if the store has flipped already.

        Raises:
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The user's rights are missing.
            InvalidInputError: A file is damaged, or the old vectors have indexes of several
                metrics.
            VerificationError: The store does not hold the vectors that were written.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """


@runtime_checkable
class Flippable(TargetVectors, Protocol):
    """New vectors to which the store can flip while others write."""

    @property
    def flipped(self) -> bool:
        """Tell whether the store has flipped to these vectors.

        Then only items without a new vector are pending, and writers may have put the others.
        """

    @property
    def writers_put_new_vectors(self) -> bool:
        """Tell whether writers put new vectors before the flip; then a flip checks no vector."""

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Build the indexes that the new vectors lack, and refuse other flips during the block.

        Searches and writers of the store continue.

        Raises:
            BusyError: Another flip is under way.
            InvalidInputError: The store cannot flip to these vectors, or refuses an index.
            UnavailableError: The server does not answer.
            CannotWriteError: The disk is full, or the store cannot be written.
            NotPermittedError: The user's rights are missing.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """

    def owner_tasks(self) -> list[str]:
        """Return sentences that name the owner's tasks after the flip; empty if there are none.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            InvalidInputError: The store refuses the request.
        """

    def open_flip(self) -> AbstractContextManager[None]:
        """Lock the store against other writers for the block, and flip at its end.

        The caller writes the last pending rows in the block. An exception in the block undoes the
        flip and releases the lock.

        Raises:
            BusyError: Others hold the store for too long; nothing has changed.
            InvalidInputError: An item would lose its vector; nothing has changed.
            UnavailableError: The server does not answer; it may have flipped.
            CannotWriteError: The disk is full, or the store cannot be written.
            NotPermittedError: The user's rights are missing.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """


@runtime_checkable
class ReadableById(TargetVectors, Protocol):
    """New vectors that can be read by id, so that some items are written before all others."""

    def pending_items(self, ids: Sequence[str]) -> Rows:
        """Read the old vectors of those items whose new vector is missing or stale.

        Unknown ids are left out; the order is arbitrary.

        Raises:
            InvalidInputError: An id is no value of the key's type, or the vectors have several
                dimensions.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
        """

    def read_items(self, ids: Sequence[str]) -> Rows:
        """Read the new vectors of items in any order; items without one, and unknown ids, are left
        out.

        Raises:
            InvalidInputError: An id is no value of the key's type.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
        """


@runtime_checkable
class ComputesProducts(TargetVectors, Protocol):
    """New vectors whose store computes inner products, so that a check need not read them."""

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        """Compute the inner product of each new vector of a window with `probe` [dim].

        Returns:
            The ids in the order of `pending`, and the products, float32 [n].

        Raises:
            InvalidInputError: `probe` has another dimension.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
        """


class Source(Protocol):
    """A store of vectors, opened by its address (see `open_source`).

    Reading changes nothing in the store; only `open_target` and `drop_new_vectors` write.
    """

    def facts(self) -> Facts:
        """Return the facts that the store declares about its vectors.

        Raises:
            InvalidInputError: The store searches by a metric that is not supported, its column of
                vectors cannot be chosen, or a file is damaged.
            UnavailableError: The server does not answer.
            NotFoundError: The table or the collection was deleted.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def count(self) -> int:
        """Count the items that have a vector.

        Files may be read whole for it.

        Raises:
            UnavailableError: The server does not answer.
            InvalidInputError: A file cannot be read, or the store refuses the request.
            NotFoundError: The table or the collection was deleted.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
            IncompatibleSpaceError: Files of one folder record different models.
        """

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all items into windows of about `rows_per_window` items.

        In a database the last window has no upper end, so that it includes later items. An empty
        database gives one window; files without rows may give none.

        The errors come when a window is requested.

        In Parquet files only these windows can be read.

        Args:
            rows_per_window: At least 1.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user, or may hide rows from this role.
            InvalidInputError: A file cannot be read, or the store refuses the request.
            IncompatibleSpaceError: Files of one folder record different models.
            NotFoundError: The table or the collection was deleted.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
            ValueError: `rows_per_window` is 0, in a folder of arrays.
        """

    def read(self, window: Window) -> Rows:
        """Read the vectors of a window; items without one are left out. NaN passes.

        Raises:
            InvalidInputError: The vectors have several dimensions, a file is damaged, or the store
                refuses the request.
            UnavailableError: The server does not answer.
            NotFoundError: The table or the collection was deleted.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of a window as text; items without a value are left out.

        Raises:
            InvalidInputError: There is no such column, or a file is damaged. A store without fixed
                columns returns no values instead.
            UnavailableError: The server does not answer.
            NotFoundError: The table or the collection was deleted.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def open_target(self, target: Target) -> TargetVectors:
        """Create the place for new vectors, or open it if an earlier run of the same map or model
        created it.

        Raises:
            AlreadyExistsError: The name belongs to other data, or to vectors of another map or
                model.
            InvalidInputError: The store cannot hold such vectors, or the name is not valid.
            CannotWriteError: The store cannot be written.
            BusyError: Others hold the store.
            UnavailableError: The server does not answer.
            NotPermittedError: The user may not change the store.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
            OSError: The name is too long for a folder, in a source of Parquet files.
        """

    def drop_new_vectors(self, name: str) -> bool:
        """Remove the new vectors of a name, and all that `open_target` created for them.

        Returns:
            False, and nothing changes, if `open_target` did not create vectors of this name, or a
            flip has given them the name of the old ones.

        Raises:
            BusyError: Others hold the store.
            InvalidInputError: Another object depends on the vectors, or the name is not valid.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The user may not change the store.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
            OSError: A folder of Parquet files cannot be listed, or the name is too long for one.
        """


@runtime_checkable
class WarningSource(Source, Protocol):
    """A source that predicts the side effects of writing new vectors."""

    def warnings(self, new_name: str) -> list[str]:
        """Return sentences about side effects of writing vectors under a name; empty if none.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
            InvalidInputError: The store refuses the request.
        """

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about obstacles to a flip to `target`; empty if the store can flip.

        The target need not exist; nothing is written.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
            InvalidInputError: The store refuses the request.
        """


@runtime_checkable
class Reversible(Source, Protocol):
    """A source whose store preserves the old vectors after a flip, and can restore their name.

    Every method may also raise UnavailableError (the store's server does not answer),
    NotPermittedError (the user's rights are missing) and BusyError (others hold the store).

    Attributes:
        vector: The column of its vectors.
        flip_renames: Whether a flip gives the new vectors the name of the old ones. If not, both
            sides stay under their names, and programs search with the other one.
    """

    vector: str
    flip_renames: bool

    @property
    def flip_name(self) -> str:
        """Return the name of the column or table that a flip renames.

        It begins the names of new vectors that `migrate` makes.

        Raises:
            InvalidInputError: The store cannot hold new vectors next to these.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
        """

    def count_vectors(self, column: str) -> int:
        """Count the rows with a vector under a name of new vectors; 0 if there is no such name.

        Rows of a source with a condition count only if they fulfil it.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted or renamed.
            ConfigurationError: The process was forked after the opening (LanceDB).
            InvalidInputError: The store refuses the request.
        """

    def record_model(self, model: str) -> None:
        """Write the fingerprint of the model in whose space the vectors are into the store.

        An earlier fingerprint is replaced. A source of some rows of a table does nothing.

        Raises:
            BusyError: Others hold the store.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The user's rights are missing.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
            InvalidInputError: The store refuses the request.
        """

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the same vectors out for the block, from any working folder.

        It waits up to 3 s for the lock. The death of the holder frees it. Yields a function that
        raises UnavailableError where the lock was lost meanwhile.

        Raises:
            BusyError: Another migration holds the lock.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            CannotWriteError: The lock file of a store without locks cannot be created.
            NotFoundError: The table or the collection was deleted.
        """

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the map or model of new vectors (see Target); None if the name has
        none, does not exist, or a flip has taken place.

        Raises:
            NotPermittedError: The server refuses the user.
            UnavailableError: The server does not answer.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted or renamed.
            InvalidInputError: The store refuses the request.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def flip_digest(self) -> str | None:
        """Return the digest of the map or model that computed the source's own vectors; None if no
        flip put them there.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            InvalidInputError: The store refuses the request.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whether the store has flipped to the vectors of a map or model.

        Args:
            computer_digest: Digest of the map or model that computes the new vectors.

        Returns:
            "old": no flip has taken place. "flipped": these vectors have the source's name, and the
            old ones still exist. "finished": the old ones were dropped. "unknown": a flip has taken
            place, but the vectors have another digest or none.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted or renamed.
            InvalidInputError: The store refuses the request.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Give the old vectors their name back, and drop the new ones.

        Args:
            new_name: The name that the new vectors had before the flip.
            allow_loss: Whether rows may lose their only vector, which is a new one.

        Returns:
            The number of rows that lost their only vector.

        Raises:
            InvalidInputError: Rows have only a new vector and `allow_loss` is False, another object
                depends on the new ones, or the flip was not reversible (see Target).
            NotFoundError: There are no old vectors.
            BusyError: Others hold the store.
            NotPermittedError: Rows may be hidden from this user. The user may not change the store.
            UnavailableError: The server does not answer.
            CannotWriteError: The store cannot be written.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """

    def drop_old(self) -> None:
        """Drop the old vectors after a flip; they cannot be restored.

        Raises:
            NotFoundError: There are no old vectors.
            InvalidInputError: Another object of the database still depends on them.
            BusyError: Others hold the store.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The user's rights are missing.
            ConfigurationError: The process was forked after the opening (LanceDB), or the file is
                read-only (sqlite-vec).
        """


@runtime_checkable
class EmbeddedSource(Source, Protocol):
    """A source that `nobackfill embed` may have written."""

    def seconds_per_item(self) -> float | None:
        """Return the measured time to embed an item in seconds; None if it was not measured.

        Raises:
            InvalidInputError: A file cannot be read.
        """

    def text_role(self) -> str:
        """Return the role in which the texts were embedded, as `Embedder.text_role`; empty if none.

        It is read at the opening.
        """


@runtime_checkable
class CostEstimator(Source, Protocol):
    """A source that estimates what a migration in its store takes."""

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration. Nothing is written to the store itself.

        Some stores migrate items in a temporary folder.

        Raises:
            InvalidInputError: A file is damaged, or vectors have several dimensions.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user, or may hide rows from this role.
            NotFoundError: The table or the collection was deleted.
            BusyError: Others hold the store, or its server has too many requests.
            IncompatibleSpaceError: Files of one folder record different models.
            OSError: The temporary folder cannot be written.
        """


@runtime_checkable
class Dimensioned(Source, Protocol):
    """A source whose items may have vectors of several dimensions."""

    def count_by_dim(self) -> dict[int, int]:
        """Count the items by the dimension of their vector; items without one do not count. Every
        vector may be read.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            InvalidInputError: The store refuses the request.
        """


@runtime_checkable
class Searchable(Source, Protocol):
    """A source that answers searches, as `nobackfill.serve` needs."""

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search for the items nearest to a vector, by the store's metric.

        Args:
            vector: The query, float32 [dim].
            count: Largest number of hits, at least 1.
            new_name: Name of the new vectors to search; None for the old ones.

        Returns:
            Ids, nearest first; the store may search approximately.

        Raises:
            NotFoundError: There are no new vectors of this name. The collection was deleted.
            InvalidInputError: The query has another dimension, or, in some stores, there are no new
                vectors of this name.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            ConfigurationError: The process was forked after the opening (LanceDB).
            ValueError: The query has another dimension, in files that are held in memory.
        """

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Read old vectors by id. Unknown ids, and items without a vector, are left out; the order
        is arbitrary.

        Raises:
            InvalidInputError: The vectors have several dimensions, or an id is no value of the
                key's type.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read another column of items as text, by id; items without a value are left out.

        Unknown ids are left out, too.

        Raises:
            InvalidInputError: There is no such column, in a store with fixed columns.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
            ConfigurationError: The process was forked after the opening (LanceDB).
        """

    def close(self) -> None:
        """Close the connections of searches; a later search opens them again.

        A store that a program opened whole cannot be used afterwards; see the class. It raises
        nothing.
        """


# Rows of a window, and number of windows, that are read to measure what reading takes.
_TIMED_ROWS, _TIMED_WINDOWS = 10_000, 3


def time_reading(source: Source) -> float:
    """Measure the seconds to read an item, on the first windows of a source.

    Returns:
        The mean over up to 30,000 items; for a source without items, the seconds to find none.

    Raises:
        InvalidInputError: A file is damaged, or vectors have several dimensions.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        NotFoundError: The table or the collection was deleted.
        BusyError: Others hold the store, or its server has too many requests.
        IncompatibleSpaceError: Files of one folder record different models.
        ConfigurationError: The process was forked after the opening (LanceDB).
    """
    started = time.perf_counter()
    rows = sum(len(source.read(one)) for one in islice(source.windows(_TIMED_ROWS), _TIMED_WINDOWS))
    return (time.perf_counter() - started) / max(1, rows)


def first_fingerprint(*fingerprints: str | None) -> str | None:
    """Return the first of some model names that is a fingerprint; None if there is none.

    An empty text counts as a fingerprint.

    Args:
        fingerprints: Fingerprints, ids of spaces of releases ("sp-…"), or None.
    """
    return next(
        (one for one in fingerprints if one is not None and not one.startswith(SPACE_PREFIX)), None
    )


def check_same_model(first_model: str | None, second_model: str | None, error_name: str) -> None:
    """Check that two sets of vectors are not known to be of different models.

    A release's space and a model's fingerprint cannot be compared, so such a pair passes; None is
    an unknown model and passes.

    An empty text counts as a fingerprint.

    Args:
        first_model: Fingerprint or space of the one model.
        second_model: Fingerprint or space of the other.
        error_name: The name of the vectors in the error.

    Raises:
        IncompatibleSpaceError: Both are fingerprints, or both are spaces, and they differ.
    """
    if (
        first_model is None
        or second_model is None
        or first_model.startswith(SPACE_PREFIX) != second_model.startswith(SPACE_PREFIX)
    ):
        return
    if first_model != second_model:
        raise IncompatibleSpaceError(
            f"{error_name}: expected vectors of one model, got vectors of the models "
            f"{first_model[:12]}… and {second_model[:12]}…, which cannot be compared even if their "
            "dimension is the same. If it is one model, embed both with the same options"
        )


def parse_store_metric(
    name: str, metrics: Mapping[str, SearchMetric], error_name: str
) -> SearchMetric | None:
    """Return the metric that a store names, or None if it names none (an empty text).

    Args:
        name: The store's own name of the metric; empty if it names none.
        metrics: Our metric for each name of the store's that can be migrated.
        error_name: The name of the vectors in the error.

    Raises:
        InvalidInputError: The metric is not in `metrics`.
    """
    if name and name not in metrics:
        raise InvalidInputError(
            f"{error_name}: expected a store that searches by {join_few(metrics)}, got {name}, "
            "which nobackfill does not support; build an index of one of these, or copy the "
            "vectors to a store that has one"
        )
    return metrics.get(name)


def check_rows(rows: Rows, dim: int | None, error_name: str) -> Rows:
    """Return `rows` after a check that each vector is finite and has the dimension `dim`.

    The same object is returned. Zero vectors pass.

    Args:
        rows: The rows to check; no rows pass.
        dim: The expected dimension; None accepts any.
        error_name: The name of the vectors in the error.

    Raises:
        InvalidInputError: The dimension differs, or a vector holds NaN or infinity.
    """
    if dim is not None and len(rows) and rows.vectors.shape[1] != dim:
        raise InvalidInputError(
            f"{error_name}: expected vectors of dimension {dim}, got {rows.vectors.shape[1]}; use "
            "vectors of one model, and a map that was fitted on that model's vectors"
        )
    bad = np.flatnonzero(~np.isfinite(rows.vectors).all(1))
    if len(bad):
        raise InvalidInputError(
            f"{error_name}: expected finite vectors, got NaN or infinity in "
            f"{join_few(repr(rows.ids[row]) for row in bad.tolist())}; correct or delete these "
            "items"
        )
    return rows


# The refusal of a flip of a source with a condition, in a store whose flip renames the vectors of
# all rows.
CONDITION_HINDERS_FLIP = (
    "expected no flip and no `nobackfill migrate` with --where, because a flip would take the "
    "vectors of the other rows out of their searches; run `nobackfill carry` without --flip, and "
    "search the new vectors by their own name with the same condition"
)
# The error of `Reversible.migration_lock`, after the name of the table.
OTHER_MIGRATION_MESSAGE = (
    "another `nobackfill migrate` writes to this table from another working folder; wait until it "
    "has ended, or stop it with `nobackfill migrate pause --work FOLDER`"
)
# Seconds to wait for a migration that was killed a moment ago.
LOCK_WAIT_SECONDS = 3.0


@contextmanager
def lock_by_file(path: Path, name: str) -> Iterator[Callable[[], None]]:
    """Hold `Reversible.migration_lock` by a lock file next to an embedded store. It waits up to 3
    s.

    A second call in this process waits and fails likewise.

    The folder of the file is made if it is missing.

    Args:
        path: The lock file; its holder removes it at the end.
        name: Name of the table in the error.

    Returns:
        A function that does nothing, because a file's lock cannot be lost.

    Raises:
        BusyError: Another migration holds the lock.
        CannotWriteError: The lock file cannot be created.
    """
    with ExitStack() as locks:
        try:
            locks.enter_context(durable.lock_file(path, LOCK_WAIT_SECONDS))
        except BusyError as error:
            raise BusyError(f"{name}: {OTHER_MIGRATION_MESSAGE}") from error
        locks.callback(path.unlink, missing_ok=True)
        yield lambda: None


def lock_by_address(
    address: str, collection_name: str, folder: Path | None = None, *, port: int | None = None
) -> AbstractContextManager[Callable[[], None]]:
    """Hold `Reversible.migration_lock` by a lock file for a collection of a store without locks.

    The file lies in `folder`. For a server it lies in `~/.cache/nobackfill` (or below
    XDG_CACHE_HOME): it keeps out migrations of this user on this machine alone. It waits up to 3 s.

    A server has one lock, however its address is spelled: localhost is each address of this
    machine, and letter case, a slash at the end and `http` or `https` do not count.

    The lock file and its folder are created when the block begins.

    Args:
        address: The address of the store.
        collection_name: Name of the collection, for the lock and for the error.
        folder: The store's own folder; None for a server.
        port: Port of an address without one; None if the store has no default.

    Raises:
        BusyError: Another migration holds the lock.
        CannotWriteError: The lock file cannot be created.
        ValueError: The address of a server is malformed; this comes at the call.
    """
    if folder is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "nobackfill"
        parts = urlsplit(address)
        host = (parts.hostname or "").rstrip(".")
        host = "localhost" if is_loopback(host) else host
        address = f"{host}:{parts.port or port}{parts.path.rstrip('/')}"
    digest = hashlib.sha256(f"{address}#{collection_name}".encode()).hexdigest()[:16]
    return lock_by_file(folder / f".{digest}-nobackfill.lock", collection_name)


def old_name_after_flip(column: str) -> str:
    """Return the name of the old vectors after a flip: COLUMN_before, in at most 63 bytes. Longer
    names lose their end, between characters.

    Two long names may become the same.
    """
    end = b"_before"
    start = column.encode("utf-8", "surrogateescape")[: LONGEST_NAME_BYTES - len(end)]
    return (start.decode("utf-8", "ignore").encode() + end).decode()


def refuse_lost_vectors(name: str, count: int, kind: str, *, allow_loss: bool) -> None:
    """Refuse to undo a flip if items would lose their only vector, unless that is allowed.

    Args:
        name: The store, for messages.
        count: The number of items without an old vector.
        kind: The word for them, such as rows.
        allow_loss: Whether they may lose it.

    Raises:
        InvalidInputError: There are such items, and `allow_loss` is False.
    """
    if count and not allow_loss:
        raise InvalidInputError(
            f"{name}: {count} {kind} were written since the flip and have no old vector; to lose "
            "them, run `nobackfill migrate back --yes`"
        )


def value_as_text(value: object) -> str:
    """Return a key or another value as text: bytes decoded from UTF-8, or as their repr; any other
    value by `str`, so None is "None".
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return repr(value)
    return str(value)


def check_file_name(name: str) -> str:
    """Return the name of new vectors after a check that it is a plain file name.

    It is returned unchanged, and need not exist. Other characters, such as line ends, pass.

    Raises:
        InvalidInputError: The name is empty, contains a slash, or begins with a dot.
    """
    if not name or "/" in name or name.startswith("."):
        raise InvalidInputError(
            f"--to: expected a name without '/' that does not begin with a dot, got {name!r}; it "
            "becomes a file in the folder of the old vectors"
        )
    return name


def file_permissions(path: Path) -> int:
    """Return the permissions of a file for reading and writing, for a file of new vectors.

    Links are followed.

    Raises:
        InvalidInputError: The file is gone or cannot be inspected.
    """
    try:
        return path.stat().st_mode & 0o666
    except OSError as error:
        raise InvalidInputError(
            f"{path}: the record of new vectors cannot be read ({error.strerror}); check its "
            "permissions"
        ) from error


def read_vector_record(path: Path) -> object:
    """Read the JSON file that records the map of new vectors.

    A folder in its place counts as no file.

    Returns:
        Its value, of any type; None if there is no file.

    Raises:
        InvalidInputError: The file cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidInputError(
            f"{path}: this record of new vectors cannot be read as JSON ({error}); delete it and "
            "the new vectors that it names, then run `nobackfill carry` again"
        ) from error


def repeated_ids(ids: Iterable[str]) -> list[str]:
    """Return each further occurrence of an id that occurred before, in order; an id that occurs
    three times comes twice. Empty if all differ.
    """
    earlier = set[str]()
    return [name for name in ids if name in earlier or earlier.add(name)]  # type: ignore[func-returns-value]


def stack_vectors(
    vectors: Sequence[Sequence[float] | Vectors], ids: Sequence[str], error_name: str
) -> Vectors:
    """Stack vectors of one dimension into an array.

    An id is needed for each vector: with fewer, an error becomes IndexError. More ids are ignored.

    Args:
        vectors: One vector for each id.
        ids: Ids, for the error.
        error_name: The name of the vectors in the error.

    Returns:
        float32 [n, dim]; [0, 0] without vectors. NaN passes.

    Raises:
        InvalidInputError: Their dimensions differ, or a vector is empty.
        ValueError, TypeError: A value is no number.
    """
    lengths = [len(vector) for vector in vectors]
    if 0 in lengths:
        raise InvalidInputError(
            f"{error_name}: expected vectors of at least 1 dimension, got an empty one for "
            f"{ids[lengths.index(0)]!r}; correct or delete this item"
        )
    other = next((row for row, n in enumerate(lengths) if n != lengths[0]), None)
    if other is not None:
        raise InvalidInputError(
            f"{error_name}: expected one dimension in all rows, got {lengths[0]} in {ids[0]!r} and "
            f"{lengths[other]} in {ids[other]!r}; use the vectors of one model alone"
        )
    return np.asarray(vectors, np.float32).reshape(len(vectors), lengths[0] if lengths else 0)


# The error for an HTTP status; any other status means that the request is invalid.
HTTP_STATUS_ERRORS: dict[int, type[NobackfillError]] = {
    401: NotPermittedError, 403: NotPermittedError, 404: NotFoundError, 429: BusyError,
    500: UnavailableError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def parse_server_address(address: str, server_kind: str, key_variable: str) -> SplitResult:
    """Parse a server's address: https://HOST:PORT, or http:// on this machine.

    No connection is made. A path behind the port passes.

    Args:
        address: The address.
        server_kind: The kind of server, as "qdrant", for the error.
        key_variable: The environment variable for the server's key, for the error.

    Returns:
        The parts of the address; its port may be None.

    Raises:
        ConfigurationError: The address has another form, holds a password, or would send vectors
            unencrypted to another machine.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(
            f"{server_kind}: expected https://HOST:PORT as the server's address, got a malformed "
            "one; correct SOURCE"
        ) from error
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"{server_kind}: expected no password in the address; put the server's key in the "
            f"environment variable {key_variable}"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(
            f"{server_kind}: expected https://HOST:PORT as the server's address, got another form; "
            "correct SOURCE"
        )
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigurationError(
            f"{server_kind}: expected https://{host}, got http://, which sends private vectors "
            "unencrypted; set up TLS at the server, or connect through an SSH tunnel to localhost"
        )
    return parts
