"""Searches over two spaces of a file at once, and what each takes from the older space."""

from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted_file import HostedInFile
from tests.gallery.making import SIDE_DIM, ids, spec, vectors


class _Forgetful(HostedInFile):
    """Forgets the cached remainder as soon as it is set, as another thread may."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, None if name == "_remainder" else value)


def test_a_search_gets_its_own_remainder_while_others_replace_the_cached_one(
    tmp_path: Path,
) -> None:
    store = SqliteGallery.create(tmp_path / "g.sqlite", spec())
    space = spec().space
    store.put(ids(20), [NewVectors(space, vectors(20, 1), vectors(20, 2, SIDE_DIM))])
    hosted = _Forgetful("g", tmp_path, store)
    try:
        snapshot = hosted.view(space).snapshot()
        labels = np.sort(snapshot.labels())
        other = snapshot.without_labels(labels[:5])
        np.testing.assert_array_equal(
            np.sort(hosted.missing_vectors(snapshot, other).labels()), labels[:5]
        )
    finally:
        hosted.close()
