"""Items of a store that stays where it is, embedded again into a file of natives."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.source import Rows, Searchable
from nobackfill.errors import BusyError, InvalidInputError, NotPermittedError, UnavailableError
from nobackfill.serving.natives import ItemVersion, Natives, digest
from nobackfill.serving.reembedding import Limits, Reembedding
from nobackfill.serving.sources import Items, bounded
from nobackfill.vectors import Kind, Vectors


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


class SourceReembedding(Reembedding[ItemVersion]):
    """Embeds items of `source` by `embedder`, reading them from `items`, into `natives`."""

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
        self, found: Mapping[ItemVersion, str | bytes], gone: Sequence[ItemVersion]
    ) -> Collection[ItemVersion]:
        """Embed, keep, and look again: what went meanwhile is taken back."""
        vectors = self._embedded(found)
        if vectors:
            ids, seen = zip(*vectors, strict=True)
            self._natives.keep(ids, seen, np.stack(list(vectors.values())))
            now = versions(self._source.lookup(ids))
            self._natives.outdated(dict(one for one in vectors if one not in now))
        self._natives.forget([name for name, _ in gone])
        return vectors

    def _embedded(self, found: Mapping[ItemVersion, str | bytes]) -> dict[ItemVersion, Vectors]:
        """Vectors by item; one that cannot be embedded takes no other along."""
        if not found:
            return {}
        try:
            made = self._embedder.embed(list(found.values()))  # type: ignore[arg-type]
            return dict(zip(found, made, strict=True))
        except (UnavailableError, BusyError, NotPermittedError):
            # No item's fault: to ask for each of them would be more of the same.
            raise
        except Exception as error:  # noqa: BLE001 - and so may a model be
            self.failed(error)
            if len(found) == 1:
                return {}
        return {
            key: vector
            for one in found
            for key, vector in self._embedded({one: found[one]}).items()
        }


def versions(rows: Rows) -> dict[ItemVersion, str]:
    """Name the items of `rows`, each by its id as long as its old vector is this one."""
    return {(name, digest(rows.vectors[row])): name for row, name in enumerate(rows.ids)}
