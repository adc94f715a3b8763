"""A gallery: one SQLite file with items, metadata, and one table of vectors a space.

The same on a server and on a phone. Items have an integer `label`, never used twice: putting an id
again with other content deletes the old label and makes a new one, so a label's content is fixed.

Threads: one writer connection under a lock, each reader with a connection of its own from a pool; all
methods may be called from any thread. Processes: several may have the file open; writers wait for one
another up to the busy timeout, then BusyError. Files are 0600.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gallery.index import Labels
from gallery.spec import Origin, SpaceInfo, SpaceSpec
from release.vectors import Vectors

Metadata = Mapping[str, str | float | bool]


@dataclass(frozen=True)
class NewVectors:
    """Vectors of one space for all items of a put: `embedding` [n, dim], `side` [n, side_dim] or None."""

    space: str
    embedding: ArrayLike
    side: ArrayLike | None = None
    origin: Origin = "native"


@dataclass(frozen=True)
class PutResult:
    """`labels` int64 [n] of the items; `changed` bool [n]: False where the same content was there."""

    labels: Labels
    changed: NDArray[np.bool_]


@dataclass(frozen=True)
class Item:
    """`origin` and `uncertainty` are those of its vector in the space asked for; None without one."""

    label: int
    id: str
    digest: str | None
    metadata: Metadata
    origin: Origin | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class Change:
    """What one committed transaction did: vectors that came or were replaced, by space id, and labels
    that are gone from every space."""

    added: Mapping[str, tuple[Labels, Vectors]]
    deleted: Labels


class Store:
    """Made by `create` or `open`; `close` it, or use it in a `with` statement."""

    path: Path

    @classmethod
    def create(cls, path: Path, spec: SpaceSpec) -> Self:
        """Make an empty gallery whose active space is `spec`.

        Raises AlreadyExistsError, CannotWriteError.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a gallery; after an unclean end its pages are checked first.

        Raises NotFoundError, VerificationError for a damaged file or none of ours, BusyError.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close every connection. Twice is harmless."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that sees one snapshot of the file, for reading only."""
        raise NotImplementedError

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction of the one writer: committed at the end, rolled back on an error.

        Raises BusyError, CannotWriteError.
        """
        raise NotImplementedError

    def subscribe(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call `listener` after each commit, in the order of commits, in the writer's thread.

        Returns a function that ends it.
        """
        raise NotImplementedError

    def spaces(self) -> list[SpaceInfo]:
        """All spaces, oldest table first; exactly one is active."""
        raise NotImplementedError

    def active(self) -> SpaceInfo:
        """The space that queries are answered in."""
        raise NotImplementedError

    def space(self, space: str) -> SpaceInfo:
        """One space. Raises IncompatibleSpaceError if the gallery does not have it."""
        raise NotImplementedError

    def put(
        self,
        ids: Sequence[str],
        vectors: Sequence[NewVectors],
        *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata] | None = None,
    ) -> PutResult:
        """Store items, all or none, durably. Each space's vectors are for all `ids`, in order.

        An item whose digest (of its content: of the image's bytes, say) is the one stored keeps its
        label and vectors; only metadata and vectors of spaces it lacks are added. Any other item that
        exists is replaced: its old label is gone from every space. Without a digest an item is always
        replaced.

        Raises InvalidInputError (vectors, ids not 1 to 256 characters, an id twice, metadata that is
        not text, a finite number or a flag), IncompatibleSpaceError, BusyError, CannotWriteError.
        """
        raise NotImplementedError

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items from every space, and their bytes from the file and its log; how many existed."""
        raise NotImplementedError

    def get(self, item_id: str) -> Item | None:
        """One item by its id."""
        raise NotImplementedError

    def items(self, labels: Sequence[int] | Labels, space: str | None = None) -> list[Item | None]:
        """Items in the order of `labels`; None where there is none (any more)."""
        raise NotImplementedError

    def listing(self, after: int = 0, limit: int = 1000) -> list[Item]:
        """Items by increasing label, those after label `after`: a page."""
        raise NotImplementedError

    def count(self, space: str | None = None) -> int:
        """Number of items, or of vectors in a space."""
        raise NotImplementedError

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """All vectors of a space: labels int64 [n] increasing, float32 [n, dim], of one snapshot."""
        raise NotImplementedError

    def vector(self, label: int, space: str) -> Vectors | None:
        """One item's vector in a space, [1, dim]."""
        raise NotImplementedError

    def state_get(self, key: str) -> Any:
        """A small JSON value kept with the gallery; None if there is none."""
        raise NotImplementedError

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Keep small JSON values, all in one transaction; None removes."""
        raise NotImplementedError
