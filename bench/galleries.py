"""Galleries filled with the vectors of bench.data, as an app would fill them."""

from pathlib import Path

from bench.data import ItemVectors
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest

PUT_ROWS = 2000


def fill_gallery(path: Path, manifest: Manifest, items: ItemVectors) -> SqliteGallery:
    """A gallery in a release's space with every item's old vector and side-information."""
    store = SqliteGallery.create(path, SpaceSpec.of(manifest))
    put_items(store, manifest.space, items)
    return store


def put_items(store: SqliteGallery, space: str, items: ItemVectors) -> None:
    """Add items, named by their number from the gallery's present count on."""
    first = store.count()
    for start in range(0, len(items.old), PUT_ROWS):
        rows = slice(start, start + PUT_ROWS)
        ids = [f"item-{first + start + i}" for i in range(len(items.old[rows]))]
        store.put(ids, [NewVectors(space, items.old[rows], items.side[rows])])
