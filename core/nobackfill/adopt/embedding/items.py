"""Items that can be embedded: image files of a folder, lines of JSON, a column of a source."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Source, repeated
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.items.kind import Kind
from nobackfill.picture_files import is_clutter, is_picture
from nobackfill.text_lines import read_texts

_WINDOW = 1000


@dataclass(frozen=True)
class Items:
    """Ids, each once, and texts or paths in the same order; how many other files a folder of images
    has, hidden ones among them."""

    kind: Kind
    ids: list[str]
    values: list[str] | list[Path]
    others: int = 0


def read_items(
    address: str, *, column: str, key: str | None = None, only: Collection[str] | None = None
) -> Items:
    """What is to be embedded; `only`: ids that are wanted.

    A folder with images: ids are paths below it; what is_clutter names is left out. FILE.jsonl:
    objects with `id` (or `key`) and `column`. Else a source of vectors or of texts with that
    column. Raises NotFoundError, InvalidInputError.
    """
    path = Path(address)
    if path.suffix == ".jsonl":
        found = [(one.id, one.text) for one in read_texts(path, key=key or "id", column=column)]
    elif path.is_dir() and any(_is_picture(p, path) for p in path.rglob("*")):
        every = [p for p in path.rglob("*") if p.is_file()]
        files = sorted(p for p in every if _is_picture(p, path))
        names = [p.relative_to(path).as_posix() for p in files]
        images = _wanted("image", names, files, only, address)
        return replace(images, others=len(every) - len(files))
    else:
        source = _source(address, key)
        found = []
        for window in source.windows(_WINDOW):
            values = source.column(window, column)
            found += zip(values.ids, values.values, strict=True)
    return _wanted("text", [name for name, _ in found], [text for _, text in found], only, address)


def _is_picture(file: Path, folder: Path) -> bool:
    below = file.relative_to(folder).parts
    return is_picture(file.name) and not any(map(is_clutter, below)) and file.is_file()


def _source(address: str, key: str | None) -> Source:
    try:
        return open_source(address, key=key)
    except NotFoundError as error:
        if not Path(address).is_dir():
            raise
        raise NotFoundError(f"{error}, nor a file named as a JPEG, PNG or WebP") from error


def _wanted(
    kind: Kind,
    ids: list[str],
    values: list[str] | list[Path],
    only: Collection[str] | None,
    address: str,
) -> Items:
    if twice := repeated(ids):
        raise InvalidInputError(f"{address}: expected each id once, got {twice[0]!r} again")
    if only is not None:
        rows = [row for row, name in enumerate(ids) if name in only]
        ids, values = [ids[row] for row in rows], [values[row] for row in rows]  # type: ignore[assignment]
    for text in (*ids, *(map(str, values) if kind == "text" else ())):
        if not _is_unicode(text):
            raise InvalidInputError(f"{address}: expected valid Unicode, got {text[:64]!r}")
    if not ids:
        raise NotFoundError(f"{address}: nothing to embed is there")
    return Items(kind, ids, values)


def _is_unicode(text: str) -> bool:
    """Whether no half of a character stands alone: JSON's escapes and names of files allow it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
