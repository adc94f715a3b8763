"""Which items are as an upgrade left them, followed through every change."""

from pathlib import Path

import numpy as np

from nobackfill.gallery.listing import MigratedItems
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import Linear, filled, ids, put, rows, spec, vectors

TWO = spec(2).space


def truth(store: SqliteGallery) -> set[int]:
    return {label for label, (_, _, origin) in rows(store, TWO).items() if origin == "upgraded"}


def seen(carried: MigratedItems, store: SqliteGallery) -> set[int]:
    labels = store.load_vectors(TWO)[0]
    mask = carried.native_mask(labels)
    # Asked again it is the same mask, until something changes.
    assert carried.native_mask(labels) is mask
    assert carried.native_mask(labels[:2]).tolist() == mask[:2].tolist()
    return set(labels[~mask].tolist())


def test_every_change_is_followed(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 12) as store:
        run_upgrade(store, Linear(), spec(2))
        carried = MigratedItems(store, TWO)
        assert not carried.is_loaded
        # What changes before it is read is followed, too.
        store.delete(ids(1))
        labels = store.load_vectors(TWO)[0]
        assert carried.native_mask(labels).all()
        carried.load()
        # A mask from before is not given again.
        assert not carried.native_mask(labels).any()
        for change in (
            lambda: store.delete(ids(2, 1)),
            lambda: store.write_vectors(
                TWO, np.array(sorted(truth(store))[:3]), vectors(3, 7, spec(2).dim),
                origin="re-embedded", replace=True,
            ),
            lambda: put(store, ids(4, 8), release=2, seed=3),
            # One that a put has carried, and one that a put made, beside each other.
            lambda: store.put(
                ids(2, 30), [NewVectors(TWO, vectors(2, 5, spec(2).dim), origin="upgraded")]
            ),
            lambda: put(store, ids(1, 40), release=2, seed=4),
        ):  # fmt: skip
            assert seen(carried, store) == truth(store)
            assert len(carried) == len(truth(store)) > 0
            change()
        assert seen(carried, store) == truth(store)
        carried.close()
