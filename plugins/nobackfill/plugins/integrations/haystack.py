"""Use a gateway as a document store of Haystack, and a gateway or `Dual` as a retriever.

Needs the extra `haystack`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nobackfill.errors import InvalidInputError, join_few
from nobackfill.extras import require_extra
from nobackfill.gallery.filters import All, AnyOf, Filter, Not
from nobackfill.plugins.integrations.texts import GalleryTexts, StoredText, TextSearch, compare
from nobackfill.wire import Gateway

with require_extra("haystack"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy
    from haystack.errors import FilterError


class HaystackDocumentStore:
    """Documents in a gallery of a gateway. By default, a document of the same id is replaced.

    A gateway answers no vectors: documents come back without their embeddings.

    Args:
        address: The gateway, as HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT.
        gallery: Name of a gallery that exists.
        release: The release whose embedder the pipeline runs: documents and queries need an
            embedding. None: the gateway embeds, and the embeddings of documents are ignored.
        text_key: Key of the metadata that holds the text.

    Raises:
        NotFoundError: No such gallery, or it has no vectors of this release.
        VerificationError: The gallery is damaged and set aside.
        NotPermittedError: The gateway refuses the token.
        BusyError: The gateway has too much work.
        UnavailableError: The gateway does not answer within the connection's seconds.
        ConfigurationError: The address has another form, or the token or certificate cannot be
            read.
    """

    def __init__(
        self, address: str, gallery: str, *, release: int | None = None, text_key: str = "text"
    ) -> None:
        self._settings = {
            "address": address, "gallery": gallery, "release": release, "text_key": text_key
        }  # fmt: skip
        self._gateway = Gateway(address)
        self._embeds = release is not None
        self.texts = GalleryTexts(self._gateway, gallery, release=release, text_key=text_key)

    def close(self) -> None:
        """Close the connection.

        Later calls raise ValueError.
        """
        self._gateway.close()

    def to_dict(self) -> dict[str, Any]:
        """Return what a saved pipeline holds of the store: its arguments.

        Returns:
            The class's name and its arguments; no token and no documents.
        """
        data: dict[str, Any] = default_to_dict(self, **self._settings)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HaystackDocumentStore":
        """Open a store that a pipeline saved.

        It connects to the gateway.

        Args:
            data: The result of `to_dict`.

        Raises:
            DeserializationError: The data are of another class.
            ConfigurationError: The address has another form, or the token or certificate cannot be
                read.
            NotFoundError: No such gallery, or it has no vectors of this release.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        store: HaystackDocumentStore = default_from_dict(cls, data)
        return store

    def count_documents(self) -> int:
        """Return the number of items in the gallery.

        Items without a text count too.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        return self.texts.gateway.status(self.texts.gallery).item_count

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """Return the documents that pass, in the order in which they were stored.

        Items without a text are among them.

        Args:
            filters: Filters of Haystack; None or empty: all documents.

        Raises:
            FilterError: A gateway does not have such a filter.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            InvalidInputError: The filter exceeds a gateway's limits, or the gateway sends metadata
                that this version cannot read.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        return [_document(one) for one in self.texts.items(to_filter(filters))]

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Store documents, and return how many.

        A text None becomes an empty one. With SKIP, only the documents that were stored count. An
        empty list stores nothing.

        Args:
            documents: The documents.
            policy: NONE and OVERWRITE replace a document of the same id. SKIP and FAIL read the ids
                first, by a call for each; they do not notice an id that occurs twice in the list,
                and a document that another client stores meanwhile is replaced.

        Raises:
            ValueError: Another type than a list of documents, an embedding with values that are no
                numbers, or the connection was closed.
            DuplicateDocumentError: An id exists already, with FAIL; no document is stored.
            InvalidInputError: A document has content other than a text, or no embedding although
                the store has a `release`, or metadata that a gateway does not store: none is
                stored. Or the gateway refused texts, and stored the others.
            TooLargeError: One text is larger than the gateway accepts; earlier calls stay.
            ItemQuotaError: The token's galleries would hold too many items.
            CannotWriteError: The gallery cannot be written.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        if not isinstance(documents, list) or any(
            not isinstance(one, Document) for one in documents
        ):
            raise ValueError(
                "documents: expected a list of haystack.Document, got another type; pass a list, "
                "and wrap each text in a Document"
            )
        if policy in (DuplicatePolicy.SKIP, DuplicatePolicy.FAIL):
            existing = {one.id for one in self.texts.get([one.id for one in documents])}
            if existing and policy == DuplicatePolicy.FAIL:
                raise DuplicateDocumentError(
                    f"expected documents whose ids are new to the gallery, found {len(existing)} "
                    f"ids that the gallery has already, the first is {min(existing)!r}; pass "
                    "policy=DuplicatePolicy.OVERWRITE or SKIP"
                )
            documents = [one for one in documents if one.id not in existing]
        for one in documents:
            if one.blob is not None or (self._embeds and one.embedding is None):
                raise InvalidInputError(
                    f"document {one.id!r}: expected "
                    + (
                        "a text, got a blob; convert it to text first"
                        if one.blob is not None
                        else "an embedding, got none; run an embedder on the documents first"
                    )
                )
        self.texts.put(
            [StoredText(one.id, one.content or "", one.meta) for one in documents],
            [one.embedding or [] for one in documents] if self._embeds else None,
        )
        return len(documents)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents; unknown ids are ignored.

        An empty list deletes nothing. Items without a text are deleted too.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        self.texts.delete(document_ids)

    def delete_all_documents(self) -> None:
        """Delete every item with a text.

        Other items stay.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        self.texts.delete()


@component
class HaystackRetriever:
    """A retriever over a `HaystackDocumentStore`, `GalleryTexts` or `DualTexts`.

    Args:
        document_store: Where to search.
        top_k: The most documents.
    """

    def __init__(self, document_store: HaystackDocumentStore | TextSearch, top_k: int = 10) -> None:
        self.document_store, self.top_k = document_store, top_k

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(
        self,
        query: str | None = None,
        query_embedding: list[float] | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
    ) -> dict[str, list[Document]]:
        """Return the nearest documents as `documents`, nearest first, with scores of 0 to 1.

        Args:
            query: The text to search for; None with a `query_embedding`. With a `release`, it is
                ignored in favour of the embedding.
            query_embedding: The vector to search for, by the embedder of the store's `release`.
            filters: Filters of Haystack; None or empty: all documents.
            top_k: The most documents, 1 to 1000, with `DualTexts` at most 100; None or 0 for the
                number of the retriever.

        Raises:
            FilterError: A gateway does not have such a filter.
            InvalidInputError: `Dual` got a vector or a filter, or no query; or the store got no
                query of the kind that it needs, or an invalid `top_k`.
            PreconditionError: The gallery cannot answer now, such as NoEncoderError.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            Exception: With `DualTexts`, any error of `DualTexts.search`, such as those of its
                embedders.
            ValueError: `top_k` is negative, the embedding has values that are no numbers, or the
                connection was closed.
        """
        store, k = self.document_store, top_k or self.top_k
        texts = store.texts if isinstance(store, HaystackDocumentStore) else store
        if isinstance(texts, GalleryTexts):
            where = to_filter(filters)
            hits = texts.search(query, k, vector=query_embedding, where=where)
        elif query is None or query_embedding is not None or filters:
            raise InvalidInputError(
                "query: expected a text alone, because Dual takes no vector and no filters; leave "
                "them out"
            )
        else:
            hits = texts.search(query, k)
        return {"documents": [_document(one, one.score) for one in hits]}


def _document(one: StoredText, score: float | None = None) -> Document:
    return Document(id=one.id, content=one.text, meta=dict(one.metadata), score=score)


def to_filter(filters: Mapping[str, Any] | None) -> Filter | None:
    """Return Haystack's filters as a filter of a gateway; None without any.

    A NOT of several conditions passes items that fail at least one.

    Raises:
        FilterError: A key is missing, a field is no metadata, or an operator or a value that a
            gateway does not have.
    """
    return _filter(filters) if filters else None


def _filter(condition: Mapping[str, Any]) -> Filter:
    keys: Sequence[str] = ("field", "operator", "value")
    if "field" not in condition:
        keys = ("operator", "conditions")
    for key in keys:
        if key not in condition:
            raise FilterError(
                f"filter: expected the keys {', '.join(keys)}, got "
                f"{join_few(condition) or 'none'}; correct the filter"
            )
    operator = condition["operator"]
    if "field" in condition:
        field = condition["field"].removeprefix("meta.")
        if field == condition["field"] and field in Document.__dataclass_fields__:
            raise FilterError(
                f"filter: a gateway filters by metadata only, got {field!r}; write the field as "
                "meta.KEY"
            )
        try:
            return compare(field, operator, condition["value"])
        except InvalidInputError as error:
            raise FilterError(str(error)) from error
    parts = tuple(map(_filter, condition["conditions"]))
    if operator == "OR":
        return AnyOf(parts)
    if operator not in ("AND", "NOT"):
        raise FilterError(
            f"filter: expected AND, OR or NOT as the operator of conditions, got {operator!r}; "
            "correct the filter"
        )
    return All(parts) if operator == "AND" else Not(All(parts))
