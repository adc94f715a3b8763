"""What the shop sells: texts or pictures, by two pretrained models, and what is asked for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from demo.adoption import lite, models, pictures
from demo.adoption.documents import draw_documents
from nobackfill.adopt.sources import Searchable
from nobackfill.serve import ColumnItems, FolderItems, ItemSource

# Of a row: its key and its body.
Row = tuple[int | str, str]


class Wares(Protocol):
    """`name`: of one. `models`: the old and the new one. `rows`: of the table. `items`, `queries`:
    words of `nobackfill embed` for all, and for what is asked, whose ids are those of what is to be
    found."""

    name: str
    models: tuple[Path, Path]
    rows: Sequence[Row]
    items: Sequence[str | Path]
    queries: Sequence[str | Path]

    def items_of_ids(self, source: str, only: Path) -> Sequence[str | Path]:
        """The same for some ids of the table."""

    def open_item_source(self, source: Searchable) -> ItemSource:
        """Where they are while searches heal."""


class Texts:
    """Descriptions in a column; their titles are asked."""

    name = "document"

    def __init__(self, packages: Path, folder: Path, count: int, asked: int) -> None:
        docs = draw_documents(packages, count)
        self.models = models.write_model_files(packages, folder / "models")
        self.rows: Sequence[Row] = [(number, one.body) for number, one in enumerate(docs, 1)]
        self.items: Sequence[str | Path] = [_lines(folder / "items.jsonl", self.rows)]
        titles = [(number, one.title) for number, one in enumerate(docs[:asked], 1)]
        self.queries: Sequence[str | Path] = [_lines(folder / "queries.jsonl", titles), "--queries"]

    def items_of_ids(self, source: str, only: Path) -> Sequence[str | Path]:
        return [source, "--column", "body", "--only", only]

    def open_item_source(self, source: Searchable) -> ItemSource:
        return ColumnItems(source, "body")


class Pictures:
    """Files of a folder, whose paths the table has; second views of them are asked."""

    name = "picture"

    def __init__(self, packages: Path, folder: Path, images: Path, count: int, asked: int) -> None:
        names = pictures.draw_pictures(images, count)
        self._images = images
        self.models = lite.write_model_files(packages, folder / "models")
        self.rows: Sequence[Row] = [(name.as_posix(), name.stem) for name in names]
        only = folder / "items.txt"
        only.write_text("".join(f"{name}\n" for name, _ in self.rows))
        self.items: Sequence[str | Path] = [images, "--only", only]
        # From everywhere: neighbours in a folder may be parts of one photograph.
        spread = names[:: max(1, len(names) // asked)][:asked]
        pictures.write_second_views(images, spread, folder / "views")
        some = folder / "queries.txt"
        some.write_text("".join(f"{name.as_posix()}\n" for name in spread))
        self.queries: Sequence[str | Path] = [folder / "views", "--only", some]

    def items_of_ids(self, source: str, only: Path) -> Sequence[str | Path]:
        return [self._images, "--only", only]

    def open_item_source(self, source: Searchable) -> ItemSource:
        return FolderItems(self._images)


def _lines(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in rows))
    return path
