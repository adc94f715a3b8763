"""A gallery in one SQLite file, as a GalleryStore."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nobackfill.gallery import edits, groups, listing, reading, staging
from nobackfill.gallery.edits import Chosen
from nobackfill.gallery.estimate import Estimate, estimate
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.groups import Group
from nobackfill.gallery.listing import Place
from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, SpaceSpec
from nobackfill.gallery.store import Store
from nobackfill.gallery.stored_vectors import Item, StoredVectors, Window
from nobackfill.gallery.tables import find_space
from nobackfill.gallery.upgrade import Runner
from nobackfill.gallery.writing import labels_of
from nobackfill.vectors import Vectors


class SqliteGallery(Store):
    """What is said of each method: GalleryStore. Its file lies in a folder of its own."""

    def labels_of(self, ids: Sequence[str]) -> Labels:
        with self.reading() as connection:
            return labels_of(connection, ids)

    def delete_some(self, labels: Labels, filtered: Filter | None) -> int:
        return edits.delete_in_file(self, Chosen(labels, filtered))

    def describe_some(
        self, labels: Labels, filtered: Filter | None, values: Metadata, remove: Collection[str]
    ) -> int:
        return edits.describe_in_file(self, Chosen(labels, filtered), values, remove)

    def page(
        self, space: str, limit: int, *, after: Place | None = None, allowed: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[Item, Place]], Place | None]:  # fmt: skip
        labels = None if allowed is None else allowed.labels()
        return listing.page(
            self, space, limit, after=after, allowed=labels, least_certain=least_certain
        )

    def stored(self, labels: Labels, space: str) -> StoredVectors:
        with self.reading() as connection:
            return reading.stored(connection, labels, find_space(connection, space))

    def frozen(self, spaces: Sequence[str], size: int) -> Iterator[Window]:
        with self.reading() as connection:
            infos = [find_space(connection, space) for space in spaces]
            after = 0
            while items := reading.page(connection, after, size):
                after = items[-1].label
                labels = np.array([item.label for item in items], np.int64)
                yield Window(items, [reading.stored(connection, labels, info) for info in infos])

    def groups(self, key: str, space: str) -> list[Group]:
        return groups.by_value(self, key, space)

    def left_behind_items(self, space: str, after: int = 0, limit: int = 1000) -> list[Item]:
        return staging.left_behind_items(self, space, after, limit)

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        staging.flip(self, space, leave_behind=leave_behind, state=state)

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        return staging.rollback(self, leave_behind=leave_behind, state=state)

    def drop(self, space: str) -> None:
        staging.drop(self, space)

    def upgraded(self, space: str, ids: Sequence[str]) -> list[Item]:
        return staging.upgraded(self, space, ids)

    def sample(self, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
        return staging.sample(self, space, other, count)

    def estimate(self, runner: Runner, target: SpaceSpec) -> Estimate:
        # Beside the gallery's folder: what a kill leaves is swept from there at the next start.
        return estimate(self, runner, target, self.path.parent.parent)
