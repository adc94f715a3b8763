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
        NobackfillError: As `GalleryTexts` does.
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
        """The embedder; None where the gateway embeds."""
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
        """Open a store with the arguments of the class in `settings`, and add texts to it."""
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

        Raises:
            ValueError: The numbers of texts, metadatas and ids differ.
            NobackfillError: As `GalleryTexts.put` does.
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
        """Delete documents; unknown ids are ignored, and None deletes all that has a text."""
        self.texts.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents in the order of their ids; unknown ids are left out."""
        return [_document(one) for one in self.texts.get(ids)]

    def similarity_search(
        self, query: str, k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[Document]:
        """Return the k nearest documents, nearest first."""
        return [_document(one) for one in self.texts.search(query, k, where=filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[Document]:
        """Return the k documents nearest to a vector of `release`, nearest first."""
        return [
            _document(one) for one in self.texts.search(None, k, vector=embedding, where=filter)
        ]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Where | None = None, **_: Any
    ) -> list[tuple[Document, float]]:
        """Return the k nearest documents with their distances; smaller is nearer."""
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
