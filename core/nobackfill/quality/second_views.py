"""Where there are classes: what needs no labels, told beside them.

A second view of a picture (another part of it, lighter or darker), or the first sentence of a text,
asks for the very item; what else it finds is compared with what new/new finds. The same rule judges
both as where no class is known (gains.py), against staying; it does not keep a release from going
out, it says for which kind of search the verdict holds.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from nobackfill.class_folders import Listing
from nobackfill.images import Pixels, decode_within, read_file
from nobackfill.metrics.ranking import Ints
from nobackfill.metrics.retrieval import mean
from nobackfill.quality.cells import CellName, alone
from nobackfill.quality.embedded import Published
from nobackfill.quality.gains import NEIGHBOURS, agrees, gain
from nobackfill.quality.halves import ITEMS, Rows
from nobackfill.quality.relevance import of_class
from nobackfill.quality.retrieval import Measured, measure_cell
from nobackfill.quality.text_listing import TextListing
from nobackfill.release.evidence import Unlabelled

# Queries: what they cost, once a model, does not grow with --eval.
MOST = 500
# Of a view: larger pictures are made smaller first; its share of either side; its light.
_SIDE = 640
_PART = (0.75, 0.875)
_LIGHT = (0.8, 1.2)


def measure_unlabelled(items: Published, served: Sequence[CellName]) -> tuple[Unlabelled, ...]:
    """Of each served cell, by MOST of the items at most; nothing where they are too few to tell.
    Searches are exact. Raises InvalidInputError for what is no image."""
    rows = _drawn(items.listing)
    if len(rows) < ITEMS or not served:
        return ()
    drawn = items.listing.select(rows)
    if isinstance(drawn, TextListing):
        known, label = drawn.by_parts(), dict(zip(drawn.paths, drawn.labels, strict=True))
        held = Published(known, items.files, items.manifests)
        classes = np.array([label[path] for path in known.paths])
        return _measured(known.asking(), held, served, classes)
    with tempfile.TemporaryDirectory() as folder:
        views = second_views(drawn, Path(folder))
        return _measured(views, items, served, drawn.labels)


def second_views(listing: Listing, folder: Path) -> Listing:
    """A second view of each picture, written below `folder`; each is a class of its own, named by
    the picture's path. A picture has the same view whatever is beside it.

    Raises InvalidInputError for what is no image.
    """
    views = tuple(f"{path}.png" for path in listing.paths)
    for path, view in zip(listing.paths, views, strict=True):
        place = folder / view
        place.parent.mkdir(parents=True, exist_ok=True)
        _view(decode_within(read_file(listing.root / path), _SIDE), path).save(place)
    return Listing(folder, listing.paths, views, np.arange(len(listing)))


def _view(pixels: Pixels, path: str) -> Image.Image:
    image = Image.fromarray(pixels)
    rng = np.random.default_rng(int.from_bytes(_digest(path)[:8]))
    share = rng.uniform(*_PART)
    width, height = (max(1, round(side * share)) for side in image.size)
    left = int(rng.integers(0, image.width - width + 1))
    top = int(rng.integers(0, image.height - height + 1))
    part = image.crop((left, top, left + width, top + height))
    return ImageEnhance.Brightness(part).enhance(float(rng.uniform(*_LIGHT)))


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()


def _drawn(listing: Listing) -> Rows:
    order = sorted(range(len(listing)), key=lambda row: _digest(listing.paths[row]))
    return np.sort(np.array(order[:MOST], np.int64))


def _measured(
    asking: Listing, held: Published, served: Sequence[CellName], classes: Ints
) -> tuple[Unlabelled, ...]:
    own = held.listing
    relevance = of_class(asking, Listing(own.root, own.paths, own.paths, np.arange(len(own))))
    asked = Published(asking, held.files, held.manifests, role="query")
    done: dict[CellName, Measured] = {}

    def cell(name: CellName) -> Measured:
        if name not in done:
            done[name] = measure_cell(
                name, asked, held, relevance, neighbours=NEIGHBOURS, int8=True
            )
        return done[name]

    told = []
    for name in served:
        old = alone(name.gallery[0])
        found, before, new = cell(name), cell(old), cell(alone(name.query))
        row = gain(name, old, found, before, new, classes=classes, exact=False, by_text=False)
        told.append(
            Unlabelled(
                query=str(name.query), gallery=name.carried, queries=len(asking), items=len(own),
                agreement=mean(agrees(found, new)), stayed_agreement=mean(agrees(before, new)),
                recall1=mean(found.cmc1), stayed_recall1=mean(before.cmc1),
                mrr=mean(found.map), stayed_mrr=mean(before.map),
                similar=row.finds_similar, very_item=row.keeps_items,
            )
        )  # fmt: skip
    return tuple(told)
