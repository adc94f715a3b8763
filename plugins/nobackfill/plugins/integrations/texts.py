"""Read and write texts of a gateway's gallery, and search them there or with `Dual`.

A gateway keeps the vector of a text, not the text. The integrations keep the text in the item's
metadata under one key.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.gallery.filters import (
    LARGEST_INTEGER,
    LEAST_INTEGER,
    AnyOf,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    TimeRange,
    date_to_microseconds,
)
from nobackfill.gallery.spec import Metadata, MetadataValue
from nobackfill.v1 import gallery_pb2
from nobackfill.wire import Gateway
from nobackfill.wire.answers import Hit
from nobackfill.wire.galleries import Where
from nobackfill.wire.values import fill_metadata

if TYPE_CHECKING:
    # They need the extra `adopt`, which a gateway's client does without.
    from nobackfill.adopt.sources.source import Searchable
    from nobackfill.serve import Dual

# Embeds a query: `embed_query` in LangChain, `get_query_embedding` in LlamaIndex.
EmbedQuery = Callable[[str], Sequence[float]]

# Ids in one call of the gateway.
_IDS = 10_000
_BOUNDS = {">": "greater_than", ">=": "at_least", "<": "less_than", "<=": "at_most"}


@dataclass(frozen=True)
class StoredText:
    """A text of a gallery.

    Attributes:
        id: Id of the item.
        text: The text; empty for an item without one, such as an image.
        metadata: The item's other metadata.
        score: Similarity to the query, 0 to 1, larger is nearer: the calibrated probability of a
            match, or 1 / (1 + distance) where the release has no calibration. 0 without a query.
        distance: Distance to the query, smaller is nearer; 0 without a query, and from `Dual`.
    """

    id: str
    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    score: float = 0.0
    distance: float = 0.0


@runtime_checkable
class TextSearch(Protocol):
    """A search by text that a retriever can use."""

    def search(self, query: str, k: int) -> list[StoredText]:
        """Return the k nearest texts, nearest first.

        Args:
            query: The text to search for.
            k: The most hits, at least 1.

        Returns:
            Fewer than `k` if there are no more.

        Raises:
            NobackfillError: The search fails; the implementation says how.
        """


class DualTexts:
    """Search texts of a store with `Dual`, by the old and the new model together.

    Args:
        dual: The search.
        source: The store of `dual`.
        column: The store's column or field with the texts.
        embed_old: Embeds a query with the old model.
        embed_new: Embeds a query with the new model.
    """

    def __init__(
        self,
        dual: "Dual",
        source: "Searchable",
        column: str,
        embed_old: EmbedQuery,
        embed_new: EmbedQuery,
    ) -> None:
        self._dual, self._source, self._column = dual, source, column
        self._old, self._new = embed_old, embed_new

    def search(self, query: str, k: int) -> list[StoredText]:
        """Return the k nearest texts, nearest first; an item without a text is left out, so there
        may be fewer.

        `score` is the probability of a match. Metadata is empty, and `distance` is 0. As
        `Dual.search` it may re-embed candidates and store their vectors.

        Args:
            query: The text to search for.
            k: The most hits, 1 to 100.

        Raises:
            InvalidInputError: `k` is out of range, an embedder gives vectors of another dimension,
                or there is no such column.
            UnavailableError, BusyError, NotPermittedError: The store does not answer, is busy, or
                refuses the user.
            NotFoundError: The new vectors do not exist.
            Exception: Any error of the embedders.
            CannotWriteError, VerificationError: The file of native vectors cannot be used.
            ConfigurationError: The process was forked after the re-embedder, LanceDB or Milvus was
                opened.
            ValueError, TypeError: An embedder gives values that are no numbers.
        """
        old, new = (np.asarray(embed(query), np.float32) for embed in (self._old, self._new))
        hits = self._dual.search(old, new, k).hits
        texts = self._source.texts([hit.id for hit in hits], self._column)
        return [
            StoredText(hit.id, texts[hit.id], score=hit.probability)
            for hit in hits
            if hit.id in texts
        ]


class GalleryTexts:
    """Texts in a gallery of a gateway; threads may share it.

    The gateway embeds texts and queries itself, so that it can change its model. For a release
    without a text encoder, name the `release`: the caller then sends the vectors of its embedder.

    Args:
        gateway: The connection.
        gallery: Name of a gallery that exists.
        release: The release whose embedder the caller runs; None: the gateway embeds.
        embed: Embeds queries with that embedder.
        text_key: Key of the metadata that holds the text.

    Raises:
        InvalidInputError: `embed` without `release`.
        NotFoundError: No such gallery, or it has no vectors of this release.
        VerificationError: The gallery is damaged and set aside.
        NotPermittedError: The gateway refuses the token.
        BusyError: The gateway has too much work.
        UnavailableError: The gateway does not answer within the connection's seconds.
    """

    def __init__(
        self,
        gateway: Gateway,
        gallery: str,
        *,
        release: int | None = None,
        embed: EmbedQuery | None = None,
        text_key: str = "text",
    ) -> None:
        if embed is not None and release is None:
            raise InvalidInputError(
                "release: expected the number of the release that the embedder belongs to, got "
                "none; pass release=, or leave embed= out and let the gateway embed the texts"
            )
        self.gateway, self.gallery, self.text_key = gateway, gallery, text_key
        self._embed = embed
        spaces = {one.release: one.space for one in gateway.get_gallery(gallery).spaces}
        if release is not None and release not in spaces:
            raise NotFoundError(
                f"gallery {gallery!r} has no vectors of release {release}; pass one of the "
                f"releases that the gallery has: {join_few(spaces)}"
            )
        self._space = None if release is None else spaces[release]

    def put(
        self, texts: Sequence[StoredText], vectors: Sequence[Sequence[float]] | None = None
    ) -> None:
        """Store texts, which replace those of the same ids; they are durable when this returns.

        Many texts go in several calls; after an error, those of earlier calls stay. The last of
        several texts with one id wins.

        Args:
            texts: The texts; an empty list stores nothing.
            vectors: A vector for each text; None where the gateway embeds.

        Raises:
            InvalidInputError: A value of the metadata is not one that a gateway stores, or the
                vectors do not belong to the texts: nothing is stored. Or the gateway refused texts,
                and stored the others.
            TooLargeError: One text is larger than the gateway accepts.
            ItemQuotaError: The token's galleries would hold too many items.
            CannotWriteError: The gallery cannot be written.
            ValueError: A vector has values that are no numbers, or the connection of `gateway` was
                closed.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        if (vectors is None) != (self._space is None) or len(vectors or texts) != len(texts):
            choice = (
                "none, because the gateway embeds the texts"
                if self._space is None
                else "one for each text"
            )
            raise InvalidInputError(
                f"vectors: expected {choice}, got {0 if vectors is None else len(vectors)} "
                f"vectors for {len(texts)} texts; pass "
                f"{'no vectors' if self._space is None else 'as many vectors as texts'}"
            )
        items = []
        for row, one in enumerate(texts):
            item = gallery_pb2.PutItem(id=one.id)
            if vectors is None:
                item.text = one.text
            else:
                embedding = item.vectors.embedding
                embedding.space = self._space or ""
                embedding.values = np.ascontiguousarray(vectors[row], "<f4").tobytes()
            fill_metadata(self._metadata(one), item.metadata)
            items.append(item)
        refusals = self.gateway.put_items(self.gallery, items)
        if refusals:
            name, reason = next(iter(refusals.items()))
            raise InvalidInputError(
                f"the gateway refused {len(refusals)} of {len(items)} texts and stored the others; "
                f"correct the refused texts and add them again. The first is {name!r}: {reason}"
            )

    def _metadata(self, one: StoredText) -> Metadata:
        """Return the metadata with the text, after a check of each value."""
        for key, value in one.metadata.items():
            if not isinstance(key, str) or key == self.text_key:
                raise InvalidInputError(
                    f"metadata of {one.id!r}: expected a key that is a text other than "
                    f"{self.text_key!r}, got {key!r}; text_key= names another key for the text"
                )
            if not _is_storable(value):
                raise InvalidInputError(
                    f"metadata {key!r} of {one.id!r}: expected a text, a finite number of at most "
                    f"64 bits, a flag or a list of texts, got {type(value).__name__} "
                    f"{value!r:.80}; convert this value, or leave it out"
                )
        return {**one.metadata, self.text_key: one.text}

    def get(self, ids: Sequence[str]) -> list[StoredText]:
        """Return the items with these ids, in this order; unknown ids are left out.

        Each id costs a call. An id that is given twice counts once. An item without a text has an
        empty one; `score` and `distance` are 0.

        Args:
            ids: Ids; none: no call is made.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            InvalidInputError: The gateway sends metadata that this version cannot read.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection of `gateway` was closed.
        """
        found = []
        gallery_exists = False
        for name in dict.fromkeys(ids):
            try:
                item = self.gateway.get(self.gallery, name)
            except NotFoundError:
                if not gallery_exists:
                    # A missing gallery raises here.
                    self.gateway.status(self.gallery)
                    gallery_exists = True
                continue
            found.append(self._to_text(item.id, item.metadata))
        return found

    def items(self, where: Filter | None = None) -> Iterator[StoredText]:
        """Yield the items that pass a filter, in the order in which they were stored.

        Items are read page by page, and errors are raised then. An item without a text has an empty
        one.

        Args:
            where: The filter; None: all items.

        Raises:
            InvalidInputError: The filter is not valid, or the gateway sends metadata that this
                version cannot read.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection of `gateway` was closed.
        """
        for item in self.gateway.list(self.gallery, where=where):
            yield self._to_text(item.id, item.metadata)

    def delete(self, ids: Sequence[str] | None = None, *, where: Filter | None = None) -> int:
        """Delete items by id or by filter, and return how many there were.

        Ids go in calls of 10,000; after an error, earlier calls stay.

        Args:
            ids: Unknown ids are ignored; an empty list deletes nothing.
            where: A filter, where `ids` is None, and ignored otherwise; None deletes every item
                with a text.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            InvalidInputError: The filter is not valid.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection of `gateway` was closed.
        """
        if ids is None:
            return self.gateway.delete(self.gallery, where=where or Exists(self.text_key))
        return sum(
            self.gateway.delete(self.gallery, ids[first : first + _IDS])
            for first in range(0, len(ids), _IDS)
        )

    def search(
        self,
        query: str | None,
        k: int,
        *,
        vector: Sequence[float] | None = None,
        where: Where | None = None,
    ) -> list[StoredText]:
        """Return the k nearest items, nearest first.

        An item without a text has an empty one. Equal distances are ordered as the items were
        stored. `score` is the calibrated probability, or 1 / (1 + distance) without a calibration.

        Args:
            query: The text to search for; None with a `vector`.
            k: The most hits, 1 to 1000; fewer if no more items pass.
            vector: The query's vector by the embedder of `release`; None where `query` is given. If
                both are given, only the vector counts.
            where: Values that metadata must equal, or a filter; None: all items.

        Raises:
            InvalidInputError: A vector without `release`, a text with `release` and without
                `embed`, neither of both, or an invalid filter or `k`.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            PreconditionError: The gallery cannot answer now: its release embeds no texts
                (NoEncoderError), or its vectors are in several spaces (NeedsImageError).
            Exception: Any error of `embed`.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: `k` is negative, `vector` has values that are no numbers, or the connection
                of `gateway` was closed.
            TypeError: `where` is neither a mapping nor a filter.
        """
        if vector is None and query is not None and self._embed is not None:
            vector = self._embed(query)
        if (vector is None) != (self._space is None):
            raise InvalidInputError(
                "query: expected a text, because the gateway embeds queries of this store, got a "
                "vector; to search by vectors, open the store with release="
                if self._space is None
                else (
                    "query: expected a vector by the release's embedder, got a text; pass a "
                    "vector, or open the store with embed="
                )
            )
        answer = self.gateway.search(
            self.gallery,
            text=query if vector is None else None,
            embeddings=None if vector is None else {self._space or "": vector},
            k=k,
            where=where,
        )
        return [self._hit(hit) for hit in answer.hits]

    def _hit(self, hit: Hit) -> StoredText:
        score = 1 / (1 + max(0.0, hit.distance)) if hit.score is None else hit.score
        return self._to_text(hit.id, hit.metadata, score, hit.distance)

    def _to_text(
        self, name: str, metadata: Metadata, score: float = 0.0, distance: float = 0.0
    ) -> StoredText:
        others = {key: value for key, value in metadata.items() if key != self.text_key}
        return StoredText(name, str(metadata.get(self.text_key, "")), others, score, distance)


def _is_storable(value: object) -> bool:
    if isinstance(value, bool | str):
        return True
    if isinstance(value, int):
        return LEAST_INTEGER <= value <= LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# Filters. Both LlamaIndex and Haystack compare a key with a value by one of these operators.


def compare(key: str, comparison: str, value: object) -> Filter:
    """Return a comparison of a framework as a filter.

    Args:
        key: Key of the metadata.
        comparison: ==, !=, >, >=, <, <=, in or `not in`. With !=, and `not in`, items without the
            key pass.
        value: A text, number or flag; a list of them for in and `not in`, where an empty list
            passes no item, and all; None is a missing key, and has no order, so that no item passes
            >, >=, < and <=. NaN is not refused here. The order of texts is that of dates and times
            in RFC 3339.

    Raises:
        InvalidInputError: Another operator, or a value that it cannot compare with.
    """
    if comparison in ("!=", "not in"):
        return Not(compare(key, {"!=": "==", "not in": "in"}[comparison], value))
    if comparison == "in" and isinstance(value, list):
        return AnyOf(tuple(compare(key, "==", one) for one in value))
    if comparison == "==" and value is None:
        return Not(Exists(key))
    if comparison == "==" and isinstance(value, bool | str | int | float):
        return OneOf(key, (value,))
    bound = _BOUNDS.get(comparison)
    if bound is None and comparison not in ("==", "in"):
        raise InvalidInputError(
            f"filter on {key!r}: expected one of the operators ==, !=, >, >=, <, <=, in and not "
            f"in, got {comparison!r}, which a gateway does not have; correct the filter"
        )
    if bound is not None and value is None:
        return AnyOf(())
    if bound is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return Range(key, **{bound: value})
    if (
        bound is not None
        and isinstance(value, str)
        and (time := date_to_microseconds(value)) is not None
    ):
        return TimeRange(key, **{bound: time})
    raise InvalidInputError(
        f"filter on {key!r}: the operator {comparison} cannot compare with {type(value).__name__} "
        f"{value!r:.80}; use another operator or value"
    )
