"""A contact sheet: the query and what was found, as one picture."""

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.photos.search import Answer
from nobackfill.errors import InvalidInputError
from nobackfill.images import decode_file

_THUMB = 128
_MARGIN = 8
_TEXT = 14
_COLUMNS = 6
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def write_sheet(device: GalleryFile, answers: Sequence[Answer], target: Path) -> None:
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
