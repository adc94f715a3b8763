"""What a gallery's store does, whatever engine keeps it: SQLite in one file, or PostgreSQL.

Each method that changes something is one transaction, and what it returns from is durable. A label
is never used twice. Once a space is staged, puts write both; an upgrade goes by windows, which may
be repeated anywhere. Besides what each says, all raise BusyError for what may be tried again,
UnavailableError for an engine that does not answer, CannotWriteError, NotFoundError once closed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nobackfill.gallery.edits import Editing
from nobackfill.gallery.filters import Filter, Matches
from nobackfill.gallery.listing import ListingPlace, MetadataGroup
from nobackfill.gallery.reading import StoredItem, StoredVectors, StoredWindow
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import Estimate
from nobackfill.gallery.store import Change, NewVectors, PutResult
from nobackfill.gallery.upgrade import Carrying, Runner
from nobackfill.vectors import Vectors


class Searcher(Protocol):
    """The nearest items of one space."""

    def search(
        self, queries: Vectors, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        """The `k` nearest to each of `queries` (float32 [q, dim]) among the items that pass.

        `ef`: candidates that are looked at, at least; index.EVERY: an exact search. Raises
        InvalidInputError for queries that are not finite, or a filter that filters.check refuses.
        """
        ...


class GalleryStore(Carrying, Editing, Protocol):
    """One gallery."""

    def close(self) -> None: ...

    def rest(self) -> bool:
        """Let go of what is open until it is needed; False if it is in use just now."""
        ...

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each commit of this process."""
        ...

    def unsubscribe(self, listener: Callable[[Change], None]) -> None: ...

    def spaces(self) -> list[SpaceInfo]:
        """All spaces, oldest first; exactly one is active."""
        ...

    def space(self, space: str) -> SpaceInfo:
        """One space by its id. Raises IncompatibleSpaceError if the gallery does not have it."""
        ...

    def put(
        self, ids: Sequence[str], vectors: Sequence[NewVectors], *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:  # fmt: skip
        """Store items, all or none; see Store.put."""
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items from every space. Returns how many."""
        ...

    def get(self, item_id: str) -> StoredItem | None:
        """One item by its id."""
        ...

    def page(
        self,
        space: str,
        limit: int,
        *,
        after: ListingPlace | None = None,
        allowed: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[StoredItem, ListingPlace]], ListingPlace | None]:
        """Items by page; see listing.page."""
        ...

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """All vectors of a space in one snapshot: labels int64 [n] increasing, float32 [n, dim]."""
        ...

    def vector(self, label: int, space: str) -> Vectors | None:
        """One item's vector in a space, [1, dim]; None if it has none there."""
        ...

    def stored(self, labels: Labels, space: str) -> StoredVectors:
        """The vectors of those of `labels` that have one in a space, with all beside them."""
        ...

    def frozen(self, spaces: Sequence[str], size: int) -> Iterator[StoredWindow]:
        """Every item by increasing label with its vectors in `spaces`, `size` at a time, all of one
        snapshot; it is held until the iterator ends or is closed. Raises IncompatibleSpaceError."""
        ...

    def groups(self, key: str, space: str) -> list[MetadataGroup]:
        """The groups that metadata `key` makes; see groups.by_value."""
        ...

    def state(self) -> dict[str, Any]:
        """All the small JSON values kept with the gallery."""
        ...

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Keep small JSON values, all in one transaction; None removes."""
        ...

    def left_behind_items(self, space: str, after: int = 0, limit: int = 1000) -> list[StoredItem]:
        """Those items by increasing label, after label `after`: a page."""
        ...

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make `space` the active one; see staging.flip. Raises PreconditionError."""
        ...

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        """Return to the space before; see staging.rollback. Raises NotFoundError,
        PreconditionError."""
        ...

    def drop(self, space: str) -> None:
        """Remove a space that is not active. Raises PreconditionError for the active one."""
        ...

    def upgraded(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Those of `ids` that an upgrade carried into the space, by falling uncertainty; those of
        unknown uncertainty last."""
        ...

    def sample(self, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
        """About `count` items at random that have a vector in both spaces: labels [n], increasing,
        and their vectors [n, dim] in each."""
        ...

    def estimate(self, runner: Runner, target: SpaceSpec) -> Estimate:
        """Cost of an upgrade from the active space, measured on a few items; nothing is changed."""
        ...
