"""Where the items of a store are: what `nobackfill.items` has, and the store itself."""

from nobackfill.adopt.sources.source import Searchable
from nobackfill.items.kind import Kind
from nobackfill.items.sources import FolderItems, FunctionItems, Items, UrlItems, bounded

__all__ = ["ColumnItems", "FolderItems", "FunctionItems", "Items", "UrlItems"]


class ColumnItems:
    """Texts of a column of the store that holds the vectors; see Items."""

    kind: Kind = "text"

    def __init__(self, source: Searchable, column: str) -> None:
        self._source, self._column = source, column

    def read(self, name: str, most_bytes: int) -> str | None:
        found = self._source.texts([name], self._column).get(name)
        if found is not None:
            bounded(found.encode("utf-8", "surrogatepass"), name, most_bytes)
        return found
