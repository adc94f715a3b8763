"""Implement GalleryStore for a gallery in one SQLite file, and Searcher for one of its spaces."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from nobackfill.gallery.filters import Filter, Filtering
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, Origin, SpaceSpec
from nobackfill.gallery.sqlite_file import (
    StoredItem,
    StoredVectors,
    StoredWindow,
    find_space,
    items_page,
    stored_vectors,
)
from nobackfill.gallery.store import Store, labels_of
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.gallery.filters import Matches
    from nobackfill.gallery.listing import ListingPlace, MetadataGroup
    from nobackfill.gallery.search.view import LiveView
    from nobackfill.gallery.staging import Estimate, Remaining, Runner


class SqliteGallery(Store):
    """Store a gallery in one SQLite file.

    Methods without a docstring are those of GalleryStore. All methods raise NotFoundError after
    `close`, VerificationError if the file is damaged, and BusyError or CannotWriteError as Store
    does. `estimate` writes a temporary file next to the gallery's folder.
    """

    def labels_of(self, ids: Sequence[str]) -> Labels:
        with self.reading() as connection:
            return labels_of(connection, ids)

    def delete_some(self, labels: Labels, condition: Filter | None) -> int:
        from nobackfill.gallery import edits

        return edits.delete_in_file(self, edits.Selection(labels, condition))

    def describe_some(
        self, labels: Labels, condition: Filter | None, values: Metadata, remove: Collection[str]
    ) -> int:
        from nobackfill.gallery import edits

        return edits.describe_in_file(self, edits.Selection(labels, condition), values, remove)

    def page(
        self, space: str, limit: int, *, start_after: "ListingPlace | None" = None,
        matches: "Matches | None" = None, least_certain: bool = False,
    ) -> "tuple[list[tuple[StoredItem, ListingPlace]], ListingPlace | None]":  # fmt: skip
        from nobackfill.gallery import listing

        labels = None if matches is None else matches.labels()
        return listing.page(
            self, space, limit, start_after=start_after, matches=labels, least_certain=least_certain
        )

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        with self.reading() as connection:
            return stored_vectors(connection, labels, find_space(connection, space))

    def frozen(self, spaces: Sequence[str], size: int) -> Iterator[StoredWindow]:
        with self.reading() as connection:
            infos = [find_space(connection, space) for space in spaces]
            last = 0
            while items := items_page(connection, last, size):
                last = items[-1].label
                labels = np.array([item.label for item in items], np.int64)
                yield StoredWindow(
                    items, [stored_vectors(connection, labels, info) for info in infos]
                )

    def groups(self, key: str, space: str) -> "list[MetadataGroup]":
        from nobackfill.gallery.listing import groups_by_value

        return groups_by_value(self, key, space)

    def begin(self, spec: SpaceSpec) -> None:
        from nobackfill.gallery import staging

        staging.begin(self, spec)

    def windows(self, source: str, target: SpaceSpec, needs_side: bool) -> "Remaining":
        from nobackfill.gallery.staging import Remaining

        return Remaining(self, source, target, needs_side)

    def write(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        from nobackfill.gallery import staging

        return staging.write(
            self, space, labels, embedding, side=side, uncertainty=uncertainty, origin=origin,
            replace=replace,
        )  # fmt: skip

    def left_behind(self, space: str) -> int:
        from nobackfill.gallery import staging

        return staging.left_behind(self, space)

    def left_behind_items(self, space: str, limit: int = 1000) -> list[StoredItem]:
        from nobackfill.gallery import staging

        return staging.left_behind_items(self, space, limit)

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        from nobackfill.gallery import staging

        staging.flip(self, space, leave_behind=leave_behind, state=state)

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        from nobackfill.gallery import staging

        return staging.rollback(self, leave_behind=leave_behind, state=state)

    def drop(self, space: str) -> None:
        from nobackfill.gallery import staging

        staging.drop(self, space)

    def upgraded(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        from nobackfill.gallery import staging

        return staging.upgraded(self, space, ids)

    def sample(self, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
        from nobackfill.gallery import staging

        return staging.sample(self, space, other, count)

    def estimate(self, runner: "Runner", target: SpaceSpec) -> "Estimate":
        from nobackfill.gallery.staging import estimate

        # Beside the gallery's folder: the next start removes what a kill leaves there.
        return estimate(self, runner, target, self.path.parent.parent)


class SqliteSearcher:
    """A search in one space of a gallery file, with filters; it implements Searcher."""

    def __init__(self, view: "LiveView", filtering: Filtering) -> None:
        self._view = view
        self._filtering = filtering

    def search(
        self, queries: Vectors, k: int, condition: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        """Find the nearest items to each query in the current snapshot.

        Args:
            queries: float32 [q, dim].
            k: Number of items for each query, at least 1.
            condition: Only items that pass this filter; None for all.
            ef: Minimum number of candidates of a graph, 0 for its default; index.EVERY for an exact
                search.

        Returns:
            At most k items for each query, nearest first.

        Raises:
            InvalidInputError: Queries of another shape or not finite, or a filter with too many
                tests, values or levels.
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed.
        """
        label_filter = None if condition is None else self._filtering.passing(condition).mask
        return self._view.snapshot().search(queries, k, label_filter, ef)
