"""Re-embed items of a database into a file of native vectors."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.source import Rows, Searchable
from nobackfill.errors import BusyError, InvalidInputError, NotPermittedError, UnavailableError
from nobackfill.serving.natives import ItemVersion, Natives, digest
from nobackfill.serving.reembedding import Limits, Reembedding
from nobackfill.serving.sources import Items, check_size
from nobackfill.vectors import Kind, Vectors


class ColumnItems:
    """Texts of a column in the database that holds the vectors; implements Items."""

    kind: Kind = "text"

    def __init__(self, source: Searchable, column: str) -> None:
        self._source, self._column = source, column

    def read(self, name: str, most_bytes: int) -> str | None:
        contents = self._source.texts([name], self._column).get(name)
        if contents is not None:
            check_size(contents.encode("utf-8", "surrogatepass"), name, most_bytes)
        return contents


class SourceReembedding(Reembedding[ItemVersion]):
    """Reads items of `source` from `items`, embeds them, and stores native vectors.

    The constructor raises InvalidInputError if the model cannot read this kind of items.
    """

    def __init__(
        self,
        source: Searchable,
        items: Items,
        embedder: Embedder,
        natives: Natives,
        limits: Limits,
    ) -> None:
        if embedder.kind not in (None, items.kind):
            raise InvalidInputError(
                f"expected items that the model reads ({embedder.kind}s), got {items.kind}s"
            )
        super().__init__(items, limits, natives)
        self._source, self._embedder, self._natives = source, embedder, natives

    def keep(
        self, contents: Mapping[ItemVersion, str | bytes], gone: Sequence[ItemVersion]
    ) -> Collection[ItemVersion]:
        """Embed and store; then delete the vectors of items that changed meanwhile."""
        vectors = self._embed(contents)
        if vectors:
            ids, seen = zip(*vectors, strict=True)
            self._natives.keep(ids, seen, np.stack(list(vectors.values())))
            now = versions(self._source.lookup(ids))
            self._natives.delete_outdated(dict(one for one in vectors if one not in now))
        self._natives.forget([name for name, _ in gone])
        return vectors

    def _embed(self, contents: Mapping[ItemVersion, str | bytes]) -> dict[ItemVersion, Vectors]:
        """Embed items; one that fails does not affect the others."""
        if not contents:
            return {}
        try:
            embeddings = self._embedder.embed(list(contents.values()))  # type: ignore[arg-type]
            return dict(zip(contents, embeddings, strict=True))
        except (UnavailableError, BusyError, NotPermittedError):
            # The embedder's host fails, not an item: retrying each item alone cannot help.
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            self.failed(error)
            if len(contents) == 1:
                return {}
        return {
            key: vector
            for one in contents
            for key, vector in self._embed({one: contents[one]}).items()
        }


def versions(rows: Rows) -> dict[ItemVersion, str]:
    """Return the items' names in the source by version: their id and the digest of their vector."""
    return {(name, digest(rows.vectors[row])): name for row, name in enumerate(rows.ids)}
