"""Small copies of images beside the gallery file, made when a page first shows them.

A cache: anybody may delete it. An item's copy is named by its label, which is never used again for
another content; it goes with the item. No file is read that is not what the item was made from.
"""

import io
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from nobackfill.client.gallery_file import beside
from nobackfill.client.photos.encoding import threads
from nobackfill.client.photos.files import local_image
from nobackfill.durable import remove_tree
from nobackfill.errors import InvalidInputError
from nobackfill.gallery.store import Item, Store
from nobackfill.images import decode_within

# The longest side in pixels.
SIDE = 240
# Of a picture that is looked at by itself.
LARGE_SIDE = 1280
_QUALITY = 82
_ENDS = (b"\xff\xd8", b"\xff\xd9")


class Thumbnails:
    """Of one gallery; safe to use from several threads."""

    def __init__(self, gallery: Path) -> None:
        self._folder = beside(gallery, "thumbs")
        # A large picture takes 100 MB while it is decoded.
        self._decoding = threading.BoundedSemaphore(threads())

    def of(self, item: Item) -> bytes | None:
        """A JPEG of at most SIDE pixels; None if there is none yet and the original is gone."""
        path = self._folder / f"{item.label}.jpg"
        try:
            kept = path.read_bytes()
            # Written without waiting for the disk: half of one may be left of a power failure.
            if (kept[:2], kept[-2:]) == _ENDS:
                return kept
        except OSError:
            pass
        made = self._jpeg(item, SIDE)
        if made is not None:
            self._keep(path, made)
        return made

    def large(self, item: Item) -> bytes | None:
        """A JPEG of at most LARGE_SIDE pixels; None if the original is gone. It is not kept."""
        return self._jpeg(item, LARGE_SIDE)

    def forget(self, labels: Iterable[int]) -> None:
        """Remove the copies of deleted items."""
        for label in labels:
            remove_tree(self._folder / f"{label}.jpg")

    def sweep(self, store: Store) -> None:
        """Remove what belongs to no item of the gallery."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        labels = [int(path.stem) if path.stem.isdecimal() else 0 for path in paths]
        for path, item in zip(paths, store.items(labels), strict=True):
            if item is None:
                remove_tree(path)

    def _jpeg(self, item: Item, side: int) -> bytes | None:
        with self._decoding:
            original = local_image(item)
            if original is None:
                return None
            try:
                pixels = decode_within(original, side)
            except InvalidInputError:
                return None
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
            return buffer.getvalue()

    def _keep(self, path: Path, content: bytes) -> None:
        """Not durably: a grid makes hundreds, and each can be made again."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder)
            with open(handle, "wb") as file:  # noqa: PTH123 - of a handle
                file.write(content)
            os.replace(name, path)  # noqa: PTH105
        except OSError:
            # A full disk, or one that is only read: the page shows the picture all the same.
            return
