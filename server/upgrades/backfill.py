"""Backfill: embed again, from images the caller supplies, what an upgrade was least sure of."""

from collections.abc import Mapping

import numpy as np

from gallery import staging
from gallery.store import Item
from release.errors import PreconditionError
from server.embedding.embedding import Embedding
from server.galleries.hosted import Hosted


def backfill(hosted: Hosted, embedding: Embedding, images: Mapping[str, bytes], budget: int) -> int:
    """Replace upgraded vectors of the active space by those of the items' images; how many.

    At most `budget` items (0: all), the least certain first; items that are gone or were embedded
    from their image already are passed over. Raises InvalidInputError for what is no image (those
    embedded before stay), PreconditionError while the gallery's active space is not searched by
    its own release, UnavailableError.
    """
    manifest = hosted.plan.parts[-1].query
    if manifest.space != hosted.spec().space:
        raise PreconditionError("the gallery is being upgraded; backfill it when that has ended")
    written = 0
    for item in _least_certain(hosted, images)[: budget or None]:
        pixels = [embedding.decode(manifest, images[item.id])]
        vectors, side = embedding.many(manifest, pixels), embedding.sides(manifest, pixels)
        labels = staging.write(
            hosted.store, manifest.space, np.array([item.label], np.int64), vectors,
            side=side, origin="re-embedded", replace=True,
        )  # fmt: skip
        written += len(labels)
    return written


def _least_certain(hosted: Hosted, images: Mapping[str, bytes]) -> list[Item]:
    space = hosted.spec().space
    found = [item for item in map(hosted.store.get, images) if item is not None]
    items = hosted.store.items([item.label for item in found], space)
    upgraded = [item for item in items if item is not None and item.origin == "upgraded"]
    # Without an uncertainty nobody knows better: those come last.
    return sorted(upgraded, key=lambda item: -(item.uncertainty or -np.inf))
