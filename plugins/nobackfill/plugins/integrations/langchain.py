"""Use a gateway as a vector store of LangChain, and a gateway or `Dual` as a retriever.

Needs the extra `langchain`.
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from nobackfill.extras import require_extra
from nobackfill.plugins.integrations.texts import GalleryTexts, StoredText, TextSearch
from nobackfill.wire import Gateway
from nobackfill.wire.galleries import Where

with require_extra("langchain"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import VectorStore


class LangChainVectorStore(VectorStore):  # type: ignore[misc]
    """Documents in a gallery of a gateway. A document of the same id is replaced.

    `filter=` of each search is a filter of nobackfill.gallery.filters, or values that metadata must
    equal. Scores of `similarity_search_with_score` are distances, and relevance scores are
    `StoredText.score`. A gateway answers no vectors, so there is no search by marginal relevance.

    Args:
        gateway: The connection.
        gallery: Name of a gallery that exists.
        embedding: The embedder of `release`; None: the gateway embeds.
        release: The release that `embedding` belongs to.
        text_key: Key of the metadata that holds the text.

    Raises:
        InvalidInputError: `embedding` without `release`.
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
        embedding: Embeddings | None = None,
        *,
        release: int | None = None,
        text_key: str = "text",
    ) -> None:
        embed = None if embedding is None else embedding.embed_query
        self._embedding = embedding
        self.texts = GalleryTexts(gateway, gallery, release=release, embed=embed, text_key=text_key)

    @property
    def embeddings(self) -> Embeddings | None:
        """Return the embedder; None where the gateway embeds."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **settings: Any,
    ) -> "LangChainVectorStore":
        """Open a store with the arguments of the class in `settings`, and add texts to it.

        A second call without `ids` stores the texts again.

        Args:
            texts: The texts; an empty list stores nothing.
            embedding: The embedder of `release`; None: the gateway embeds.
            metadatas: Metadata of each text; None: none.
            ids: Ids of the texts; None: random ones.
            settings: The other arguments of the class, with `gateway` and `gallery`.

        Raises:
            TypeError: An argument of the class is missing or unknown.
            ValueError: The numbers of texts, metadatas and ids differ, a vector has values that are
                no numbers, or the connection was closed.
            InvalidInputError: As `add_texts`, or `embedding` without `release`.
            Exception: Any error of the embedder; nothing is stored.
            TooLargeError: One text is larger than the gateway accepts; earlier calls stay.
            ItemQuotaError: The token's galleries would hold too many items.
            CannotWriteError: The gallery cannot be written.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        store = cls(embedding=embedding, **settings)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **_: Any,
    ) -> list[str]:
        """Store texts, and return their ids; a missing id becomes a random one.

        Texts are durable when this returns. An existing id is replaced, and the last text of an id
        counts. Other keyword arguments are ignored.

        Args:
            texts: The texts; none: nothing is stored.
            metadatas: Metadata of each text; None or empty: none.
            ids: Ids of the texts; None or empty: random ones. A None or empty id becomes random.

        Raises:
            ValueError: The numbers of texts, metadatas and ids differ, a vector has values that are
                no numbers, or the connection was closed.
            InvalidInputError: A value of the metadata is not one that a gateway stores, or the
                embedder gives another number of vectors: nothing is stored. Or the gateway refused
                texts, and stored the others.
            Exception: Any error of the embedder; nothing is stored.
            TooLargeError: One text is larger than the gateway accepts; earlier calls stay.
            ItemQuotaError: The token's galleries would hold too many items.
            CannotWriteError: The gallery cannot be written.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        bodies = list(texts)
        names = [name or str(uuid.uuid4()) for name in ids or [None] * len(bodies)]
        others = metadatas or [{}] * len(bodies)
        rows = [
            StoredText(name, body, metadata)
            for name, body, metadata in zip(names, bodies, others, strict=True)
        ]
        embedding = self._embedding
        self.texts.put(rows, None if embedding is None else embedding.embed_documents(bodies))
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Delete documents; unknown ids are ignored, and None deletes all that has a text.

        Other keyword arguments are ignored.

        Returns:
            True, whatever was deleted. An empty list deletes nothing.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        self.texts.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents in the order of their ids; unknown ids are left out.

        Each id costs a call. An id that is given twice counts once.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            InvalidInputError: The gateway sends metadata that this version cannot read.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        return [_document(one) for one in self.texts.get(ids)]

    def similarity_search(
        self, query: str, k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[Document]:
        """Return the k nearest documents, nearest first.

        Other keyword arguments are ignored.

        Args:
            k: The most documents, 1 to 1000; fewer if no more pass.
            filter: A filter, or values that metadata must equal; None: all documents.

        Raises:
            InvalidInputError: The query, the filter or `k` is not valid, or the store has a
                `release` and no embedder.
            PreconditionError: The gallery cannot answer now, such as NoEncoderError.
            Exception: Any error of the embedder.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: `k` is negative, the vector has values that are no numbers, or the
                connection was closed.
            TypeError: `filter` is neither a mapping nor a filter.
        """
        return [_document(one) for one in self.texts.search(query, k, where=filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[Document]:
        """Return the k documents nearest to a vector of `release`, nearest first.

        The store's embedder is not called. Other keyword arguments are ignored.

        Args:
            k: The most documents, 1 to 1000; fewer if no more pass.
            filter: A filter, or values that metadata must equal; None: all documents.

        Raises:
            InvalidInputError: The vector, the filter or `k` is not valid, or the store has no
                `release`.
            PreconditionError: The gallery cannot answer now.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: `k` is negative, the vector has values that are no numbers, or the
                connection was closed.
            TypeError: `filter` is neither a mapping nor a filter.
        """
        return [
            _document(one) for one in self.texts.search(None, k, vector=embedding, where=filter)
        ]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[tuple[Document, float]]:
        """Return the k nearest documents with their distances; smaller is nearer.

        Other keyword arguments are ignored.

        Args:
            k: The most documents, 1 to 1000; fewer if no more pass.
            filter: A filter, or values that metadata must equal; None: all documents.

        Raises:
            InvalidInputError: The query, the filter or `k` is not valid, or the store has a
                `release` and no embedder.
            PreconditionError: The gallery cannot answer now, such as NoEncoderError.
            Exception: Any error of the embedder.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: `k` is negative, the vector has values that are no numbers, or the
                connection was closed.
            TypeError: `filter` is neither a mapping nor a filter.
        """
        hits = self.texts.search(query, k, where=filter)
        return [(_document(one), one.distance) for one in hits]

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[tuple[Document, float]]:
        return [(_document(one), one.score) for one in self.texts.search(query, k, where=filter)]


class LangChainRetriever(BaseRetriever):  # type: ignore[misc]
    """A retriever over `GalleryTexts` or `DualTexts`.

    Attributes:
        texts: Where to search.
        k: The most documents.
    """

    texts: TextSearch
    k: int = 4

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [_document(one) for one in self.texts.search(query, self.k)]


def _document(one: StoredText) -> Document:
    return Document(id=one.id, page_content=one.text, metadata=dict(one.metadata))
