"""Backfill, as a choice: items whose upgrade is least certain, embedded anew from their images."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output
from nobackfill.client.photos.encoding import Encoder
from nobackfill.client.photos.files import local_image
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.store import Item
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest

_BATCH = 32


def re_embed(device: GalleryFile, manifest: Manifest, budget: int, output: Output) -> int:
    """Embed up to `budget` items in a release's space from their images; how many it did.

    Items without a vector there come first, then the least certain ones. An image is taken from its
    file, if that still holds what was added, else from the vault; items whose image cannot be had,
    or makes no vector, keep what they have. Raises VerificationError, CannotWriteError, BusyError.
    """
    if budget <= 0:
        return 0
    space = manifest.space
    chosen = staging.left_behind_items(device.store, space, limit=budget)
    chosen += staging.least_certain(device.store, space, limit=budget - len(chosen))
    if not chosen:
        output.note(
            f"release {manifest.release}: no upgraded item has an uncertainty, so none is "
            "re-embedded"
        )
        return 0
    return embed_again(device, manifest, chosen, output)


def embed_again(
    device: GalleryFile, manifest: Manifest, chosen: Sequence[Item], output: Output
) -> int:
    """Embed these items in a release's space from their images; how many it did. Like `re_embed`
    otherwise."""
    encoder = Encoder(device.models, manifest)
    done = 0
    with output.progress("re-embedding") as advance, _Images(device, output) as images:
        for start in range(0, len(chosen), _BATCH):
            batch = {
                item.label: pixels
                for item in chosen[start : start + _BATCH]
                if (pixels := images.pixels_of(item, encoder)) is not None
            }
            done += _write(device, encoder, batch)
            advance(start + _BATCH, len(chosen))
    return done


def _write(device: GalleryFile, encoder: Encoder, batch: dict[int, Pixels]) -> int:
    if not batch:
        return 0
    try:
        vectors = encoder.vectors(list(batch.values()))
    except UnusableOutputError as error:
        good = [label for row, label in enumerate(batch) if row not in error.rows]
        return _write(device, encoder, {label: batch[label] for label in good})
    written = staging.write(
        device.store,
        vectors.space,
        np.fromiter(batch, np.int64),
        vectors.embedding,
        side=vectors.side,
        origin="re-embedded",
        replace=True,
    )
    return len(written)


class _Images:
    """Images of items, from their files or from the vault, for as long as that answers."""

    def __init__(self, device: GalleryFile, output: Output) -> None:
        # Only here, as most syncs need neither gRPC nor age.
        from nobackfill.client.vault.pull import Vaulted

        self._output = output
        self._vault: Vaulted | None = Vaulted(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._vault is not None:
            self._vault.close()

    def pixels_of(self, item: Item, encoder: Encoder) -> Pixels | None:
        """The image at the encoder's size; None if it cannot be had or be decoded."""
        image = self.of(item)
        try:
            return None if image is None else encoder.pixels(image)
        except InvalidInputError as error:
            self._output.note(f"{item.id}: {error}")
        return None

    def of(self, item: Item) -> bytes | None:
        """The image an item was made from; None if it cannot be had."""
        image = local_image(item)
        if image is not None or self._vault is None:
            return image
        try:
            return self._vault.image(item.id)
        except (UnavailableError, NotPermittedError, ConfigurationError) as error:
            self._output.note(f"no images from the vault: {error}")
            self._vault.close()
            self._vault = None
        except (VerificationError, NotFoundError) as error:
            self._output.note(f"{item.id}: {error}")
        return None
