"""Rank a gallery by old, migrated and native vectors at once, while its model changes.

The store is only read. With a source of items, the candidates of a query are re-embedded and ranked
by the new model. Their vectors are stored, so that frequent hits become native first (lazy
re-embedding).

`AdapterSearch` needs the new model alone: it maps each query to the space of the old vectors.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.joining import load_rank_fusion
from nobackfill.adopt.maps import NEW_MODEL, OLD_MODEL, Map, load_adapter, load_map
from nobackfill.adopt.pairs import judging_metric
from nobackfill.adopt.sources.source import QUERIES, Rows, Searchable, check_same_model
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.serve.reembedding import SourceReembedding, item_versions
from nobackfill.serving.fusion import (
    CANDIDATES_PER_SEARCH,
    Block,
    FittedRankFusion,
    collect_candidates,
)
from nobackfill.serving.ledger import today_utc
from nobackfill.serving.natives import NativeVectorFile, digest_old_vector
from nobackfill.serving.reembedding import EmbeddingCost, ReembeddingLimits
from nobackfill.serving.sources import ItemSource
from nobackfill.vectors import Vectors, check_vectors

_WINDOW = 1000
_BATCH = 256


@dataclass(frozen=True)
class DualHit:
    """A hit of a search by both models.

    Attributes:
        id: the item's id.
        probability: of a match, 0 to 1.
        origin: how the vector that ranked it was made: "native" by the new model, "carried" by the
            map.
    """

    id: str
    probability: float
    origin: Literal["native", "carried"]


@dataclass(frozen=True)
class DualAnswer:
    """The answer of a search by both models.

    Attributes:
        hits: best first.
        native_share: the share of the ranked candidates that have a native vector, 0 to 1; 0
            without any candidate.
    """

    hits: list[DualHit]
    native_share: float


@dataclass(frozen=True)
class ReembeddingProgress:
    """The progress of re-embedding over all processes, and the cost of this process.

    Attributes:
        gallery_item_count: items of the store.
        native_item_count: items with a native vector.
        claimed_today_count: items claimed today (UTC).
        daily_limit: the daily limit; None without re-embedding.
        cost: totals of this process.
    """

    gallery_item_count: int
    native_item_count: int
    claimed_today_count: int
    daily_limit: int | None
    cost: EmbeddingCost


class Dual:
    """Search of a gallery by its old and its new model together; threads may share it.

    Close it, and open it after a fork, in each process. Every method may raise the errors of the
    store (UnavailableError, NotPermittedError, InvalidInputError for a changed table) and of the
    file of native vectors (BusyError, CannotWriteError, DamagedError).
    """

    def __init__(
        self,
        source: Searchable,
        mapping: Map,
        joining: FittedRankFusion,
        natives: NativeVectorFile,
        *,
        reembedder: SourceReembedding | None = None,
        carried: str | None = None,
    ) -> None:
        """Combine the parts of a search; `Dual.open` makes them from files. Nothing is read.

        Args:
            source: the store with the old vectors.
            mapping: the map of `nobackfill fit`.
            joining: the rank fusion of the same `fit`.
            natives: the native vectors. `close` closes them.
            reembedder: re-embeds hits; None: hits are never re-embedded. `close` closes it.
            carried: the name after `nobackfill carry --to`. Its vectors give the new model's
                candidates that `fit` judged. Without it, these candidates are old vectors near to
                the query mapped back, except in a store searched by L2.

        Raises:
            IncompatibleSpaceError: `joining` was fitted for another map.
            InvalidInputError: no rank fusion exists for the store's metric, or the store refuses
                the call.
            UnavailableError, NotPermittedError, NotFoundError: the store's facts cannot be read.
                After an error, `natives` and `reembedder` stay open.
            BusyError: others hold the store, or its server has too many requests.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        judging_metric(source.facts())
        if joining.map_digest != mapping.digest:
            raise IncompatibleSpaceError(
                "the rank fusion (the file of --joining) was fitted for another map; use the files "
                "that one run of `nobackfill fit` wrote with --out and --joining"
            )
        self._source, self._mapping, self._joining = source, mapping, joining
        self._natives, self._reembedder = natives, reembedder
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
        items: ItemSource | None = None,
        limits: ReembeddingLimits | None = None,
        carried: str | None = None,
    ) -> "Dual":
        """Open a search from the files that `nobackfill fit` wrote.

        Args:
            source: the store with the old vectors.
            mapping: the map's file, `--out` of `fit`.
            joining: the joining's file, `--joining` of the same `fit`.
            natives: the file of native vectors; made, with its folder, if it is missing.
            embedder: the new model, for items.
            items: where to read items; None: hits are never re-embedded, and `limits` is ignored.
            limits: bounds of re-embedding; None: the defaults of ReembeddingLimits.
            carried: the name after `nobackfill carry --to`; its vectors add candidates. It is not
                checked here: with an unknown name, each search raises NotFoundError.

        Returns:
            The search; the caller closes it, but not `source` or `embedder`.

        Raises:
            InvalidInputError: the embedder embeds queries, it cannot read this kind of items, a
                file is damaged, or no rank fusion exists for the store's metric.
            IncompatibleSpaceError: the files belong to different models.
            UnavailableError, NotPermittedError: the store cannot be read.
            NotFoundError, BusyError, CannotWriteError, DamagedError: a file is missing, or the file
                of native vectors is locked, cannot be written or is damaged. After each error, no
                file stays open.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        new_map = load_map(mapping)
        check_same_model(
            new_map.facts.get(NEW_MODEL), embedder.fingerprint, f"{mapping} and the embedder"
        )
        if embedder.text_role.startswith(QUERIES):
            raise InvalidInputError(
                "embedder: expected one that embeds items (documents), got one that embeds "
                "queries, and this model embeds them differently; open the embedder for items"
            )
        fusion = load_rank_fusion(joining)
        with ExitStack() as undo:
            native_file = NativeVectorFile(natives, embedder.fingerprint, new_map.dims[1])
            undo.callback(native_file.close)
            reembedder = None
            if items is not None:
                reembedder = SourceReembedding(
                    source, items, embedder, native_file, limits or ReembeddingLimits()
                )
            search = cls(
                source, new_map, fusion, native_file, reembedder=reembedder, carried=carried
            )
            undo.pop_all()
        return search

    def close(self) -> None:
        """Finish the batches that have started, then close the file of native vectors.

        Waits up to 30 seconds; a batch whose source hangs ends later, and opens the file again.
        Call it once no thread searches; a second call does nothing. It closes neither the store nor
        the embedder.
        """
        if self._reembedder is not None:
            self._reembedder.close()
        self._natives.close()

    def search(self, old: Vectors, new: Vectors, k: int = 10) -> DualAnswer:
        """Return the k best items for one query, by rank fusion of both models.

        With a re-embedder, candidates without a native vector are re-embedded first, within its
        limit of seconds, and their vectors are stored. Native vectors of items that the store has
        deleted or changed are removed.

        Args:
            old: the query by the old model, float32 [a] or [1, a].
            new: the query by the new model, float32 [b] or [1, b].
            k: the most hits, 1 to 100; 10 by default.

        Returns:
            At most `k` hits, best first; fewer if the searches return fewer candidates, and none
            for an empty store.

        Raises:
            InvalidInputError: a vector has another dimension, is neither float32 nor float64, or is
                not finite, `k` is out of range, or the table was changed or refuses the search.
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError, CannotWriteError, VerificationError: the file of native vectors cannot be
                used. BusyError also: others hold the store, or its server has too many requests.
            ConfigurationError: the process was forked after the re-embedder, LanceDB or Milvus was
                opened.
            NotFoundError: the store has no new vectors of the name `carried`, or its table or
                collection was deleted.
            ValueError: a query has more than one row; an empty store gives no hits instead.
            IndexError: a query has no row.
            UnusableRowsError: as an InvalidInputError: a query is not finite, or has a norm above
                1e15.
        """
        if not 1 <= k <= CANDIDATES_PER_SEARCH:
            raise InvalidInputError(
                f"k, the number of hits: expected 1 to {CANDIDATES_PER_SEARCH}, got {k}; pass "
                "another k"
            )
        dims = self._mapping.dims
        by_old = check_vectors(np.atleast_2d(old), dims[0], error_name="query by the old model")
        by_new = check_vectors(np.atleast_2d(new), dims[1], error_name="query by the new model")
        rows = self._candidates(by_old, by_new)
        rows, odds, native = self._rank(rows, by_old, by_new)
        if self._reembedder is not None and len(rows):
            self._reembedder.reembed_within_limit(item_versions(exclude_rows(rows, native)))
            # The second lookup drops items that were deleted while the query waited.
            rows, odds, native = self._rank(self._source.lookup(rows.ids), by_old, by_new)
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
            searches.append(partial(self._source.nearest, by_new[0], new_name=self._carried))
        elif self._joining.metric != "l2":
            # The product of a query and a migrated vector is that of the query mapped back and the
            # old vector. The norm of the migrated vector is lost.
            searches.append(partial(self._source.nearest, by_new[0] @ self._mapping.weight))
        nearest_native = self._natives.nearest_ids(
            by_new, CANDIDATES_PER_SEARCH, self._joining.metric
        )
        rows = self._source.lookup(
            collect_candidates(*searches, lambda count: nearest_native[:count])
        )
        existing = set(rows.ids)
        # Native vectors of deleted items are removed.
        self._natives.delete_vectors([name for name in nearest_native if name not in existing])
        return rows

    def _rank(self, rows: Rows, by_old: Vectors, by_new: Vectors) -> tuple[Rows, Block, set[str]]:
        """Return the best of `rows`, their log-odds, and the ids of native ones."""
        if not len(rows):
            return rows, np.empty(0, np.float32), set()
        native_vectors = self._natives.read_vectors(rows.ids)
        row_of = {name: row for row, name in enumerate(rows.ids)}
        stale = {
            name: one.old_digest
            for name, one in native_vectors.items()
            if one.old_digest != digest_old_vector(rows.vectors[row_of[name]])
        }
        self._natives.delete_outdated(stale)
        native = {
            row_of[name]: one.vector for name, one in native_vectors.items() if name not in stale
        }
        carried = self._mapping(rows.vectors)
        (odds,) = self._joining.match_log_odds(by_old, by_new, rows.vectors, carried, native)
        best = np.argsort(-odds, kind="stable")[:CANDIDATES_PER_SEARCH]
        ids = {row: rows.ids[row] for row in best.tolist()}
        new_ids = {name for row, name in ids.items() if row in native}
        return Rows(list(ids.values()), rows.vectors[best]), odds[best], new_ids

    def heal(self, count: int) -> int:
        """Re-embed items in the background, those first that queries requested.

        Waits until each batch has ended, without a limit. Items that fail do not count and raise
        nothing. After an error, vectors that were stored stay.

        Args:
            count: the most items that get a native vector; 0 or less embeds none.

        Returns:
            How many items got a native vector, by all processes that share the file. 0 without a
            source of items, when all items are native, or when the day's budget is used up.

        Raises:
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError, CannotWriteError, VerificationError: the file of native vectors cannot be
                used. BusyError also: others hold the store.
            ConfigurationError: the process was forked after the re-embedder, LanceDB or Milvus was
                opened.
            NotFoundError, InvalidInputError: the table or the collection was deleted, or refuses
                the call.
        """
        if self._reembedder is None or count < 1:
            return 0
        count_before, count_new = len(self._natives), 0
        for rows in self._without_native():
            # Only stored vectors count: items that fail must not block the others.
            part = slice(count - count_new)
            self._reembedder.reembed(item_versions(Rows(rows.ids[part], rows.vectors[part])))
            count_new = len(self._natives) - count_before
            if (
                count_new >= count
                or self._natives.count_claimed(today_utc()) >= self._reembedder.limits.items_per_day
            ):
                break
        return max(0, count_new)

    def _without_native(self) -> Iterator[Rows]:
        """Yield items without a native vector, in batches: requested ones first, then by key."""
        queue = self._natives.requested_ids(100_000)
        for first in range(0, len(queue), _BATCH):
            ids = queue[first : first + _BATCH]
            rows = self._source.lookup(ids)
            existing = set(rows.ids)
            self._natives.delete_vectors([name for name in ids if name not in existing])
            if len(rows):
                yield rows
        earlier = set(queue)
        for window in self._source.windows(_BATCH):
            rows = self._source.read(window)
            others = exclude_rows(rows, set(self._natives.read_vectors(rows.ids)) | earlier)
            if len(others):
                yield others

    def forget(self, ids: list[str]) -> None:
        """Delete the native vectors of items that the store has deleted; unknown ids are ignored.

        Args:
            ids: the ids; may be empty.

        Raises:
            BusyError, CannotWriteError, DamagedError: nothing was deleted. BusyError comes after 30
                seconds in which another process writes the file.
        """
        self._natives.delete_vectors(ids)

    def purge(self) -> int:
        """Delete all native vectors whose items the store has deleted or changed.

        Reads the old vector of every item that has a native one. After an error, vectors that were
        deleted stay deleted.

        Returns:
            How many vectors were outdated and deleted.

        Raises:
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError, CannotWriteError, DamagedError: the file of native vectors cannot be used.
                BusyError also: others hold the store.
            NotFoundError, InvalidInputError: the table or the collection was deleted, or refuses
                the call.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        removed, last_id = 0, ""
        while page := self._natives.list_ids(last_id, _WINDOW):
            current = item_versions(self._source.lookup([name for name, _ in page]))
            outdated = dict(one for one in page if one not in current)
            self._natives.delete_outdated(outdated)
            removed, last_id = removed + len(outdated), page[-1][0]
        return removed

    def progress(self) -> ReembeddingProgress:
        """Count the items of the store and their native vectors.

        Returns:
            The counts; `daily_limit` is None and the cost 0 without re-embedding. `cost` goes on
            counting.

        Raises:
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError, CannotWriteError, DamagedError: the file of native vectors cannot be used.
                BusyError also: others hold the store.
            NotFoundError, InvalidInputError: the table or the collection was deleted, or refuses
                the call.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        reembedder = self._reembedder
        return ReembeddingProgress(
            self._source.count(),
            len(self._natives),
            self._natives.count_claimed(today_utc()),
            None if reembedder is None else reembedder.limits.items_per_day,
            EmbeddingCost() if reembedder is None else reembedder.cost,
        )


def exclude_rows(rows: Rows, ids: set[str]) -> Rows:
    """Leave out the rows of some items.

    Args:
        rows: n items with their vectors, float32 [n, dim].
        ids: the items to leave out; ids without a row are ignored.

    Returns:
        The other rows, in the same order, without `keys` and versions; empty if none is left.
    """
    others = [row for row, name in enumerate(rows.ids) if name not in ids]
    return Rows([rows.ids[row] for row in others], rows.vectors[np.asarray(others, np.int64)])


class AdapterSearch:
    """Search of old vectors by queries of the new model alone; threads may share it.

    A query adapter maps each query to the old space. The store is only read.
    """

    def __init__(self, source: Searchable, adapter: Map) -> None:
        """Combine a store and a query adapter; `AdapterSearch.open` reads it from its file.

        Args:
            source: the store with the old vectors.
            adapter: the query adapter of `nobackfill fit`.

        Raises:
            IncompatibleSpaceError: the adapter was fitted for other vectors than the store's, or it
                is a map of stored vectors.
            UnavailableError, NotPermittedError, NotFoundError: the store cannot be read.
            BusyError: others hold the store, or its server has too many requests.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
            InvalidInputError: the store refuses the call, or searches by an unsupported metric.
        """
        facts = source.facts()
        check_same_model(
            adapter.facts.get(OLD_MODEL), facts.model, f"the query adapter and {facts.name}"
        )
        returned = adapter.dims[1]
        if adapter.direction != "new to old" or facts.dim not in (None, returned):
            raise IncompatibleSpaceError(
                f"{facts.name}: expected a query adapter, a map from new vectors to old ones of "
                f"{facts.dim or 'the stored'} dimensions, found a map from {adapter.direction} "
                f"that returns {returned} dimensions; fit a query adapter with `nobackfill fit "
                "--adapter`"
            )
        self._source, self._adapter = source, adapter

    @classmethod
    def open(cls, source: Searchable, adapter: Path) -> "AdapterSearch":
        """Open a search from the file that `nobackfill fit --adapter` or `migrate` wrote.

        Args:
            source: the store with the old vectors.
            adapter: the file.

        Returns:
            The search; the caller closes the store.

        Raises:
            NotFoundError: there is no such file, or the table or the collection was deleted.
            InvalidInputError: the file is damaged, or holds a map of stored vectors; or the store
                refuses the call.
            IncompatibleSpaceError: the adapter was fitted for other vectors than the store's.
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError: others hold the store, or its server has too many requests.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        return cls(source, load_adapter(adapter))

    def search(self, new: Vectors, k: int = 10) -> list[str]:
        """Return the ids of the k nearest items for one query, nearest first.

        The store may search approximately.

        Args:
            new: the query by the new model, float32 or float64 [b] or [1, b]; of more rows only the
                first is searched, but all are checked.
            k: the most hits, 1 or more.

        Returns:
            At most k ids; fewer if the store has fewer items.

        Raises:
            InvalidInputError: the vector has another dimension or dtype or is not finite, `k` is
                below 1, or the store refuses the search.
            UnavailableError, NotPermittedError: the store cannot be read.
            UnusableRowsError: as an InvalidInputError: a row is not finite, or has a norm above
                1e15.
            BusyError: others hold the store, or its server has too many requests.
            NotFoundError: the table or the collection was deleted.
            IndexError: `new` has no row.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        if k < 1:
            raise InvalidInputError(
                f"k, the number of hits: expected 1 or more, got {k}; pass a larger k"
            )
        return self._source.nearest(self._adapter(np.atleast_2d(new))[0], k)
