"""Small pictures of items: thumbnails for pages, and the contact sheet of a search.

A thumbnail is made when a page first shows it. The folder of thumbnails is a cache that anybody may
delete. A thumbnail's name is its item's label; labels are never reused. A thumbnail is deleted with
its item. A file is shown only if its content is still what the item was made from.
"""

import io
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, sidecar_path
from nobackfill.client.photos import local_image
from nobackfill.client.search import DeviceAnswer
from nobackfill.durable import remove_tree
from nobackfill.errors import InvalidInputError
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.gallery.store import Store
from nobackfill.images import decode_file, decode_for_display
from nobackfill.release.models import count_cores

# Longest side of a thumbnail, and of a picture on its own page, in pixels.
SIDE = 240
LARGE_SIDE = 1280
_QUALITY = 82
_ENDS = (b"\xff\xd8", b"\xff\xd9")


class Thumbnails:
    """The cached thumbnails of one gallery file; threads may share it."""

    def __init__(self, gallery_file: Path) -> None:
        self._folder = sidecar_path(gallery_file, "thumbs")
        # Decoding a large picture takes 100 MB.
        self._decoding = threading.BoundedSemaphore(count_cores())

    def thumbnail(self, item: StoredItem) -> bytes | None:
        """Return an item's thumbnail; make and cache it if there is none yet.

        A cached thumbnail is returned without a look at the original. If the cache cannot be
        written, the picture is returned all the same. Blocks while as many threads as there are
        cores decode.

        Returns:
            A JPEG whose longer side has at most SIDE pixels. None if no thumbnail is cached, and
            the original file is gone, changed or cannot be decoded.
        """
        path = self._folder / f"{item.label}.jpg"
        try:
            cached = path.read_bytes()
            # Thumbnails are not synced to disk: a power failure may leave half of one.
            if (cached[:2], cached[-2:]) == _ENDS:
                return cached
        except OSError:
            pass
        jpeg = self._jpeg(item, SIDE)
        if jpeg is not None:
            self._store(path, jpeg)
        return jpeg

    def large_picture(self, item: StoredItem) -> bytes | None:
        """Return a large picture of an item, made from its original; it is not cached.

        Blocks while as many threads as there are cores decode. A smaller original keeps its size.

        Returns:
            A JPEG whose longer side has at most LARGE_SIDE pixels. None if the original file is
            gone, changed or cannot be decoded.
        """
        return self._jpeg(item, LARGE_SIDE)

    def delete_thumbnails(self, labels: Iterable[int]) -> None:
        """Delete the thumbnails of items by label; labels without a thumbnail are ignored.

        Raises:
            CannotWriteError: a file cannot be deleted; earlier ones are gone.
        """
        for label in labels:
            remove_tree(self._folder / f"{label}.jpg")

    def delete_orphans(self, store: Store) -> None:
        """Delete all files in the folder of thumbnails that belong to no item of the gallery.

        Without such a folder, nothing happens. Temporary files of pages that are being shown are
        deleted too.

        Args:
            store: the items of the same gallery.

        Raises:
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: a file cannot be deleted, and earlier ones are gone; or the gallery
                cannot be opened.
            NotFoundError: the gallery was closed.
            OSError: the folder cannot be read.
        """
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
                pixels = decode_for_display(original, side)
            except InvalidInputError:
                return None
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
            return buffer.getvalue()

    def _store(self, path: Path, content: bytes) -> None:
        """Write a thumbnail, not durably: a page makes hundreds, and each can be made again."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder)
            with open(handle, "wb") as file:  # noqa: PTH123 - of a handle
                file.write(content)
            os.replace(name, path)  # noqa: PTH105
        except OSError:
            # The disk is full or read-only: the page shows the picture without the cache.
            return


_THUMB = 128
_MARGIN = 8
_TEXT = 14
_COLUMNS = 6
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def write_contact_sheet(device: GalleryFile, answers: Sequence[DeviceAnswer], target: Path) -> None:
    """Draw searches into one picture: a row per answer, with the query and its first five hits.

    An image that is missing or cannot be decoded is a grey tile. An existing file is replaced. The
    file gets mode 0600, and appears as the last step.

    Args:
        device: the gallery.
        answers: one or more answers; the first five hits of each are drawn.
        target: the picture file to write; its suffix is .png, .jpg, .jpeg or .webp.

    Raises:
        InvalidInputError: `target` has another suffix.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the picture or the gallery's files cannot be written.
        OSError: the picture has more pixels than its format allows, such as many answers in a WebP.
        NotFoundError: the gallery was closed.
        ValueError, MemoryError: `answers` is empty.
    """
    kind = _FORMATS.get(target.suffix.lower())
    if kind is None:
        raise InvalidInputError(
            f"{target}: expected a file name that ends in {', '.join(_FORMATS)}; name another file"
        )
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
    """Return the path of a query's picture: its own, or that of the item with this id."""
    item = device.store.get(query)
    return query if item is None else str(item.metadata.get("path", ""))


def _percent(score: float | None) -> str:
    return "" if score is None else f"  {score:.0%}"


def _thumbnail(path: Path) -> Image.Image:
    try:
        return Image.fromarray(decode_file(path, _THUMB, _THUMB))
    except InvalidInputError:
        return Image.new("RGB", (_THUMB, _THUMB), "lightgrey")
