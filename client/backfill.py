"""Backfill, as a choice: items whose upgrade is least certain, embedded anew from their images."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from client.device import Device
from client.encode import Encoder
from client.output import Output
from gallery import staging
from gallery.store import Item
from release.images import LARGEST_BYTES
from release.manifest import Manifest

_BATCH = 32


def re_embed(device: Device, manifest: Manifest, budget: int, output: Output) -> int:
    """Embed up to `budget` items in a release's space from their images; how many it did.

    Items without a vector there come first, then the least certain ones. An image is taken from its
    file, if that still holds what was added, else from the vault. Items without an image are passed
    over. Raises VerificationError, CannotWriteError, BusyError; UnavailableError if the vault is
    needed and away.
    """
    if budget <= 0:
        return 0
    space = manifest.space
    chosen = staging.left_behind_items(device.store, space, limit=budget)
    chosen += staging.least_certain(device.store, space, limit=budget - len(chosen))
    if not chosen:
        return 0
    encoder = Encoder(device.models, manifest)
    done = 0
    with output.progress("re-embedding") as advance:
        for start in range(0, len(chosen), _BATCH):
            batch = dict(_images(device, chosen[start : start + _BATCH]))
            done += _write(device, encoder, batch)
            advance(start + _BATCH, len(chosen))
    return done


def _write(device: Device, encoder: Encoder, batch: dict[int, bytes]) -> int:
    pixels = {}
    for label, image in batch.items():
        pixels[label] = encoder.pixels(image)
    if not pixels:
        return 0
    vectors = encoder.vectors(list(pixels.values()))
    written = staging.write(
        device.store,
        vectors.space,
        np.fromiter(pixels, np.int64),
        vectors.embedding,
        side=vectors.side,
        origin="re-embedded",
        replace=True,
    )
    return len(written)


def _images(device: Device, items: Sequence[Item]) -> Iterator[tuple[int, bytes]]:
    """(label, image) of the items whose image can be had."""
    from client.restore import Vaulted

    with Vaulted(device) as vaulted:
        for item in items:
            image = local_image(item) or vaulted.image(item.id)
            if image is not None:
                yield item.label, image


def local_image(item: Item) -> bytes | None:
    """The image an item was made from, if its file is still there and unchanged."""
    path = Path(str(item.metadata.get("path", "")))
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == item.digest else None
