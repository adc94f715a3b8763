"""One ranking while a gallery changes its model: old scores, carried ones, and native ones.

The store stays where it is and is only asked. With `again`, the first hits of a query are embedded
again from their items and ranked by the new model; what was made is kept, so that the gallery heals
where people look.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.joining import load_joining
from nobackfill.adopt.maps import NEW_MODEL, Map, load_map
from nobackfill.adopt.pairs import judged_by
from nobackfill.adopt.sources.source import QUERIES, Rows, Searchable, same_model
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.serve.reembedding import SourceReembedding, versions
from nobackfill.serving.fusion import HITS, Block, Joining, candidates
from nobackfill.serving.ledger import today
from nobackfill.serving.natives import Natives, digest
from nobackfill.serving.reembedding import EmbeddingCost, Limits
from nobackfill.serving.sources import Items
from nobackfill.vectors import Vectors, check_vectors

_WINDOW = 1000
_HEALED_AT_ONCE = 256


@dataclass(frozen=True)
class DualHit:
    """`probability` of a match, 0 to 1; `origin` of the vector that it was ranked by."""

    id: str
    probability: float
    origin: Literal["native", "carried"]


@dataclass(frozen=True)
class DualAnswer:
    """Hits, best first. `native`: the share of the candidates that the new model itself ranked."""

    hits: list[DualHit]
    native: float


@dataclass(frozen=True)
class Progress:
    """How far the gallery has healed, and what this process has spent on it."""

    items: int
    native: int
    today: int
    a_day: int | None
    cost: EmbeddingCost


class Dual:
    """Search of a gallery by its old and its new model together; threads may share it."""

    def __init__(
        self,
        source: Searchable,
        mapping: Map,
        joining: Joining,
        natives: Natives,
        *,
        again: SourceReembedding | None = None,
        carried: str | None = None,
    ) -> None:
        """`carried`: the name that `nobackfill carry --to` was given, whose vectors a query by the
        new model searches. Without it the candidates are the old model's and native items, which
        find less than `fit` predicted: the less, the larger the gallery.

        Raises IncompatibleSpaceError where `joining` was fitted for another map,
        InvalidInputError where the store searches by a metric that no joining ranks by.
        """
        judged_by(source.facts())
        if joining.mark != mapping.digest:
            raise IncompatibleSpaceError(
                "the joining was fitted for another map; take --out and --joining of one `fit`"
            )
        self._source, self._mapping, self._joining = source, mapping, joining
        self._natives, self._again = natives, again
        self._carried = carried

    @classmethod
    def open(
        cls,
        source: Searchable,
        mapping: Path,
        joining: Path,
        natives: Path,
        embedder: Embedder,
        *,
        items: Items | None = None,
        limits: Limits | None = None,
        carried: str | None = None,
    ) -> "Dual":
        """From the files of `nobackfill fit`; `embedder`: the new model. With `items`, hits are
        embedded again. Raises what the parts raise."""
        found = load_map(mapping)
        same_model(found.facts.get(NEW_MODEL), embedder.fingerprint, f"{mapping} and the embedder")
        if embedder.reads.startswith(QUERIES):
            raise InvalidInputError(
                "expected an embedder of items, got one of queries, which its model reads otherwise"
            )
        kept = Natives(natives, embedder.fingerprint, found.dims[1])
        again = None
        if items is not None:
            again = SourceReembedding(source, items, embedder, kept, limits or Limits())
        return cls(source, found, load_joining(joining), kept, again=again, carried=carried)

    def close(self) -> None:
        """End what embeds, after the batches that have begun."""
        if self._again is not None:
            self._again.close()
        self._natives.close()

    def search(self, old: Vectors, new: Vectors, k: int = 10) -> DualAnswer:
        """The k best items for a query by the old model [a] and by the new one [b].

        Raises InvalidInputError for vectors of other dimensions, or k beyond the candidates.
        """
        if not 1 <= k <= HITS:
            raise InvalidInputError(f"expected k from 1 to {HITS}, got {k}")
        dims = self._mapping.dims
        by_old = check_vectors(np.atleast_2d(old), dims[0], what="query by the old model")
        by_new = check_vectors(np.atleast_2d(new), dims[1], what="query by the new model")
        rows = self._candidates(by_old, by_new)
        rows, odds, native = self._ranked(rows, by_old, by_new)
        if self._again is not None and len(rows):
            self._again.ask(versions(without(rows, native)))
            # An item that was deleted while the query waited is not shown.
            rows, odds, native = self._ranked(self._source.lookup(rows.ids), by_old, by_new)
        probabilities = 1 / (1 + np.exp(-odds.astype(np.float64).clip(-500, 500)))
        hits = [
            DualHit(name, float(p), "native" if name in native else "carried")
            for name, p in zip(rows.ids[:k], probabilities[:k].tolist(), strict=True)
        ]
        return DualAnswer(hits, len(native) / len(rows) if len(rows) else 0.0)

    def _candidates(self, by_old: Vectors, by_new: Vectors) -> Rows:
        """Look up the candidates with their old vectors."""
        searches = [partial(self._source.nearest, by_old[0])]
        if self._carried is not None:
            searches.append(partial(self._source.nearest, by_new[0], beside=self._carried))
        near = self._natives.nearest(by_new, HITS, self._joining.metric)
        rows = self._source.lookup(candidates(*searches, lambda count: near[:count]))
        known = set(rows.ids)
        # An item that the store no longer has is no longer kept here either.
        self._natives.forget([name for name in near if name not in known])
        return rows

    def _ranked(self, rows: Rows, by_old: Vectors, by_new: Vectors) -> tuple[Rows, Block, set[str]]:
        """The best of `rows`, their log-odds, and which of them are native."""
        if not len(rows):
            return rows, np.empty(0, np.float32), set()
        found = self._natives.get(rows.ids)
        places = {name: row for row, name in enumerate(rows.ids)}
        stale = {
            name: one.seen
            for name, one in found.items()
            if one.seen != digest(rows.vectors[places[name]])
        }
        self._natives.outdated(stale)
        native = {places[name]: one.vector for name, one in found.items() if name not in stale}
        carried = self._mapping(rows.vectors)
        (odds,) = self._joining.odds(by_old, by_new, rows.vectors, carried, native)
        best = np.argsort(-odds, kind="stable")[:HITS]
        ids = {row: rows.ids[row] for row in best.tolist()}
        new_ids = {name for row, name in ids.items() if row in native}
        return Rows(list(ids.values()), rows.vectors[best]), odds[best], new_ids

    def heal(self, count: int) -> int:
        """Embed up to `count` items again, those first that people asked for; how many came.

        For a background job; the day's budget holds. 0 without items, or when all is done.
        """
        if self._again is None:
            return 0
        before, came = len(self._natives), 0
        for rows in self._waiting():
            # An item that cannot be embedded does not count: others would never have their turn.
            some = slice(count - came)
            self._again.finish(versions(Rows(rows.ids[some], rows.vectors[some])))
            came = len(self._natives) - before
            if came >= count or self._natives.spent(today()) >= self._again.limits.a_day:
                break
        return max(0, came)

    def _waiting(self) -> Iterator[Rows]:
        """Items without a native vector, in pieces: wanted ones, then the others by key."""
        wanted = self._natives.wanted(100_000)
        for first in range(0, len(wanted), _HEALED_AT_ONCE):
            ids = wanted[first : first + _HEALED_AT_ONCE]
            rows = self._source.lookup(ids)
            known = set(rows.ids)
            self._natives.forget([name for name in ids if name not in known])
            if len(rows):
                yield rows
        tried = set(wanted)
        for window in self._source.windows(_HEALED_AT_ONCE):
            rows = self._source.read(window)
            rest = without(rows, set(self._natives.get(rows.ids)) | tried)
            if len(rest):
                yield rest

    def forget(self, ids: list[str]) -> None:
        """Remove what is kept of items that were deleted, at once."""
        self._natives.forget(ids)

    def purge(self) -> int:
        """Remove what is kept of items that the store no longer has, or has changed; how many."""
        removed, after = 0, ""
        while page := self._natives.ids(after, _WINDOW):
            rows = self._source.lookup([name for name, _ in page])
            now = {name: digest(rows.vectors[row]) for row, name in enumerate(rows.ids)}
            gone = {name: seen for name, seen in page if now.get(name) != seen}
            self._natives.outdated(gone)
            removed, after = removed + len(gone), page[-1][0]
        return removed

    def progress(self) -> Progress:
        """For a person, or for metrics."""
        again = self._again
        return Progress(
            self._source.count(),
            len(self._natives),
            self._natives.spent(today()),
            None if again is None else again.limits.a_day,
            EmbeddingCost() if again is None else again.cost,
        )


def without(rows: Rows, ids: set[str]) -> Rows:
    """Rows of other items than these, in their order."""
    kept = [row for row, name in enumerate(rows.ids) if name not in ids]
    return Rows([rows.ids[row] for row in kept], rows.vectors[np.asarray(kept, np.int64)])
