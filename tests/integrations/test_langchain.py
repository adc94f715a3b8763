"""LangChain: its own standard tests of vector stores against a gateway, and what they leave out."""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Range
from nobackfill.plugins.integrations.langchain import LangChainRetriever, LangChainVectorStore
from nobackfill.wire import Gateway
from tests.integrations.conftest import empty_gallery
from tests.support.graphs import DIM

DOCUMENTS = [Document(page_content=f"w{n}", metadata={"n": n}) for n in range(6)]


class UnitEmbedding(DeterministicFakeEmbedding):  # type: ignore[misc]
    """Vectors of norm 1, which the release stores."""

    def embed_query(self, text: str) -> list[float]:
        vector = np.asarray(super().embed_query(text))
        return [float(one) for one in vector / np.linalg.norm(vector)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return list(map(self.embed_query, texts))


# The suite has coroutines: anyio runs them.
@pytest.mark.anyio
class TestStandard(VectorStoreIntegrationTests):  # type: ignore[misc]
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @staticmethod
    def get_embeddings() -> Embeddings:
        return UnitEmbedding(size=DIM)

    @pytest.fixture
    def vectorstore(self, vectors_only: Gateway) -> Iterator[VectorStore]:
        gallery = empty_gallery(vectors_only)
        yield LangChainVectorStore(vectors_only, gallery, self.get_embeddings(), release=1)
        vectors_only.delete_gallery(gallery)


@pytest.fixture
def store(reader: Gateway) -> LangChainVectorStore:
    return LangChainVectorStore(reader, empty_gallery(reader))


def test_the_gateway_embeds(store: LangChainVectorStore) -> None:
    ids = store.add_documents(DOCUMENTS)
    assert len(set(ids)) == 6 and store.embeddings is None
    (document,) = store.similarity_search("w4", 1)
    assert document == Document(id=ids[4], page_content="w4", metadata={"n": 4})
    assert store.similarity_search("w4", 3, filter={"n": 2})[0].page_content == "w2"
    found = store.similarity_search("w4", 9, filter=Range("n", less_than=2))
    assert {one.metadata["n"] for one in found} == {0, 1}
    distances = [distance for _, distance in store.similarity_search_with_score("w4", 6)]
    assert distances == sorted(distances) and distances[0] < 1e-4 < distances[1]
    scores = [one for _, one in store.similarity_search_with_relevance_scores("w4", k=6)]
    assert scores == sorted(scores, reverse=True) and all(0 <= one <= 1 for one in scores)


def test_retrievers(store: LangChainVectorStore) -> None:
    store.add_documents(DOCUMENTS)
    near = store.as_retriever(
        search_type="similarity_score_threshold",
        search_kwargs={"score_threshold": 0.99, "filter": Range("n", at_least=0)},
    )
    assert [one.page_content for one in near.invoke("w5")] == ["w5"]
    retriever = LangChainRetriever(texts=store.texts, k=2)
    found = retriever.invoke("w5")
    assert found[0].page_content == "w5" and len(found) == 2


def test_a_store_from_texts_and_vectors(vectors_only: Gateway) -> None:
    embedding = UnitEmbedding(size=DIM)
    store = LangChainVectorStore.from_texts(
        ["one", "two"], embedding, [{"n": 1}, {"n": 2}], ids=["1", "2"],
        gateway=vectors_only, gallery=empty_gallery(vectors_only), release=1, text_key="body",
    )  # fmt: skip
    vector = embedding.embed_query("two")
    two = Document(id="2", page_content="two", metadata={"n": 2})
    assert store.similarity_search_by_vector(vector, 1) == [two]
    assert store.embeddings is embedding
    with pytest.raises(NotImplementedError):
        store.max_marginal_relevance_search("two")


def test_wrong_arguments(store: LangChainVectorStore) -> None:
    assert store.add_texts([]) == []
    with pytest.raises(ValueError):
        store.add_texts(["w1", "w2"], [{}])
    with pytest.raises(ValueError):
        store.add_texts(["w1"], ids=["a", "b"])
    with pytest.raises(InvalidInputError, match="metadata 'page' of 'a'"):
        store.add_texts(["w1"], [{"page": None}], ids=["a"])
    assert store.delete() and store.similarity_search("w1") == []
