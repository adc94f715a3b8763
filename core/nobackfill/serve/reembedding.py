"""Items of a store that stays where it is, embedded again into a file of natives."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.source import Rows, Searchable
from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.items.reembedding import EmbeddingCost, today
from nobackfill.items.reembedding import Limits as Limits
from nobackfill.items.reembedding import Reembedding as ByKey
from nobackfill.items.sources import Items
from nobackfill.serve.natives import Natives, digest
from nobackfill.vectors import Vectors


class SourceReembedding:
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
        self._source, self._embedder, self._natives = source, embedder, natives
        self._again = ByKey[str](items, limits)

    @property
    def limits(self) -> Limits:
        """As they were given."""
        return self._again.limits

    @property
    def cost(self) -> EmbeddingCost:
        """So far."""
        return self._again.cost

    def close(self) -> None:
        """End after the batches that have begun; what waits is not begun."""
        self._again.close()

    def ask(self, rows: Rows) -> None:
        """Embed the items of `rows` again, and return when they are kept or time is up."""
        self._again.ask(*self._asked(rows))

    def finish(self, rows: Rows) -> None:
        """The same, however long it takes."""
        self._again.finish(*self._asked(rows))

    def _asked(self, rows: Rows) -> tuple[dict[str, str], "_Rows"]:
        names = {name: name for name in rows.ids}
        seen = {name: digest(rows.vectors[row]) for row, name in enumerate(rows.ids)}
        return names, _Rows(self._source, self._embedder, self._natives, self._again, seen)


class _Rows:
    """Items with the digests of their old vectors; see Work."""

    def __init__(
        self, source: Searchable, embedder: Embedder, natives: Natives, again: ByKey[str],
        seen: Mapping[str, bytes],
    ) -> None:  # fmt: skip
        self._source, self._embedder, self._natives = source, embedder, natives
        self._again, self._seen = again, seen

    def claim(self, keys: Sequence[str], budget: int) -> Sequence[str]:
        return self._natives.claim({name: self._seen[name] for name in keys}, today(), budget)

    def release(self, keys: Collection[str]) -> None:
        self._natives.release(list(keys))

    def keep(self, found: Mapping[str, str | bytes], gone: Sequence[str]) -> Collection[str]:
        """Embed, keep, and look again: what went meanwhile is taken back."""
        vectors = self._embedded(found)
        ids = list(vectors)
        if ids:
            new = np.stack([vectors[name] for name in ids])
            self._natives.keep(ids, [self._seen[name] for name in ids], new)
            rows = self._source.lookup(ids)
            now = {name: digest(rows.vectors[row]) for row, name in enumerate(rows.ids)}
            outdated = {n: self._seen[n] for n in ids if now.get(n) != self._seen[n]}
            self._natives.outdated(outdated)
        self._natives.forget(gone)
        return ids

    def _embedded(self, found: Mapping[str, str | bytes]) -> dict[str, Vectors]:
        """Vectors by id; one item that cannot be embedded takes no other along."""
        if not found:
            return {}
        try:
            made = self._embedder.embed(list(found.values()))  # type: ignore[arg-type]
            return dict(zip(found, made, strict=True))
        except (UnavailableError, BusyError, NotPermittedError):
            # No item's fault: to ask for each of them would be more of the same.
            raise
        except Exception as error:  # noqa: BLE001 - and so may a model be
            self._again.failed(error)
            if len(found) == 1:
                return {}
        return {
            name: vector
            for one in found
            for name, vector in self._embedded({one: found[one]}).items()
        }


def without(rows: Rows, ids: set[str]) -> Rows:
    """Rows of other items than these, in their order."""
    kept = [row for row, name in enumerate(rows.ids) if name not in ids]
    return Rows([rows.ids[row] for row in kept], rows.vectors[np.asarray(kept, np.int64)])
