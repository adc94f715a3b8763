"""Small pictures of items: thumbnails for pages, and the contact sheet of a search.

Thumbnails lie beside the gallery file and are made when a page first shows them. They are a cache:
anybody may delete it. An item's thumbnail is named by its label, which is never used again for
another content; it goes with the item. No file is read that is not what the item was made from."""

import io
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, beside
from nobackfill.client.photos import local_image, threads
from nobackfill.client.search import DeviceAnswer
from nobackfill.durable import remove_tree
from nobackfill.errors import InvalidInputError
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.store import Store
from nobackfill.images import decode_file, decode_within

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

    def of(self, item: StoredItem) -> bytes | None:
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

    def large(self, item: StoredItem) -> bytes | None:
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

    def _jpeg(self, item: StoredItem, side: int) -> bytes | None:
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


_THUMB = 128
_MARGIN = 8
_TEXT = 14
_COLUMNS = 6
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def write_sheet(device: GalleryFile, answers: Sequence[DeviceAnswer], target: Path) -> None:
    """One row of pictures an answer, the query first; a grey tile where an image is gone.

    The format follows the suffix. Raises InvalidInputError for another suffix than those of
    `_FORMATS`, CannotWriteError.
    """
    kind = _FORMATS.get(target.suffix.lower())
    if kind is None:
        raise InvalidInputError(f"{target}: expected a name that ends in {', '.join(_FORMATS)}")
    rows = [(answer, answer.hits[: _COLUMNS - 1]) for answer in answers]
    height = _THUMB + _TEXT + _MARGIN
    sheet = Image.new("RGB", (_COLUMNS * (_THUMB + _MARGIN), len(rows) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (answer, hits) in enumerate(rows):
        tiles = [(_path(device, answer.query), "query")]
        tiles += [(hit.path, f"{hit.distance:.3f}{_percent(hit.score)}") for hit in hits]
        for column, (path, caption) in enumerate(tiles):
            x, y = column * (_THUMB + _MARGIN) + _MARGIN // 2, row * height + _MARGIN // 2
            sheet.paste(_thumbnail(Path(path)), (x, y))
            draw.text((x, y + _THUMB), caption, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, kind)
    durable.write_file(target, buffer.getvalue(), 0o600)


def _path(device: GalleryFile, query: str) -> str:
    """A query's picture: its own path, or that of the item it names."""
    item = device.store.get(query)
    return query if item is None else str(item.metadata.get("path", ""))


def _percent(score: float | None) -> str:
    return "" if score is None else f"  {score:.0%}"


def _thumbnail(path: Path) -> Image.Image:
    try:
        return Image.fromarray(decode_file(path, _THUMB, _THUMB))
    except InvalidInputError:
        return Image.new("RGB", (_THUMB, _THUMB), "lightgrey")
