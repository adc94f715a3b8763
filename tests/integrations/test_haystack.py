"""Haystack: its own tests of document stores against a gateway, and what they leave out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("haystack", reason="haystack-ai is not installed")

from haystack import Document, Pipeline
from haystack.dataclasses import ByteStream
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from haystack.testing.document_store import (
    CountDocumentsTest,
    DeleteAllTest,
    DeleteDocumentsTest,
    FilterDocumentsTest,
    WriteDocumentsTest,
)

from nobackfill.errors import InvalidInputError
from nobackfill.plugins.integrations.haystack import HaystackDocumentStore, HaystackRetriever
from nobackfill.plugins.integrations.texts import StoredText
from nobackfill.wire import Gateway
from tests.integrations.conftest import empty_gallery
from tests.support.graphs import DIM

pytestmark = pytest.mark.scale


@pytest.fixture
def document_store(reader: Gateway) -> Iterator[HaystackDocumentStore]:
    store = HaystackDocumentStore(reader.address, empty_gallery(reader))
    yield store
    store.close()


class TestStandard(
    CountDocumentsTest,  # type: ignore[misc]
    WriteDocumentsTest,  # type: ignore[misc]
    DeleteDocumentsTest,  # type: ignore[misc]
    DeleteAllTest,  # type: ignore[misc]
    FilterDocumentsTest,  # type: ignore[misc]
):
    """A gateway answers no vectors."""

    @staticmethod
    def assert_documents_are_equal(received: list[Document], expected: list[Document]) -> None:
        assert received == [replace(one, embedding=None) for one in expected]

    def test_write_documents(self, document_store: HaystackDocumentStore) -> None:
        """A document of the same id is replaced by default."""
        assert document_store.write_documents([Document(id="1", content="first")]) == 1
        assert document_store.write_documents([Document(id="1", content="second")]) == 1
        assert document_store.filter_documents() == [Document(id="1", content="second")]
        assert document_store.write_documents([]) == 0


def words(*names: str) -> list[Document]:
    return [Document(id=name, content=name, meta={"n": int(name[1:])}) for name in names]


def test_a_pipeline_retrieves(document_store: HaystackDocumentStore) -> None:
    document_store.write_documents(words("w1", "w2", "w3"))
    pipeline = Pipeline()
    pipeline.add_component("near", HaystackRetriever(document_store, top_k=2))
    module = "nobackfill.plugins.integrations.haystack"
    saved = Pipeline.loads(pipeline.dumps(), allowed_modules=[module])
    for one in (pipeline, saved):
        documents = one.run({"near": {"query": "w3"}})["near"]["documents"]
        assert documents[0].id == "w3" and len(documents) == 2
        assert 1 >= documents[0].score > documents[1].score >= 0
        filters = {"field": "meta.n", "operator": "<", "value": 3}
        asked = {"query": "w3", "filters": filters, "top_k": 9}
        documents = one.run({"near": asked})["near"]["documents"]
        assert {document.id for document in documents} == {"w1", "w2"}
    saved.get_component("near").document_store.close()


def test_vectors_of_the_pipelines_embedder(vectors_only: Gateway) -> None:
    store = HaystackDocumentStore(vectors_only.address, empty_gallery(vectors_only), release=1)
    rows = np.eye(2, DIM).tolist()
    documents = [
        replace(one, embedding=row) for one, row in zip(words("w0", "w1"), rows, strict=True)
    ]
    store.write_documents(documents)
    retriever = HaystackRetriever(store, top_k=1)
    assert [one.id for one in retriever.run(query_embedding=rows[1])["documents"]] == ["w1"]
    with pytest.raises(InvalidInputError, match="document 'w2': expected an embedding, got none"):
        store.write_documents(words("w2"))
    with pytest.raises(InvalidInputError, match="expected a vector"):
        retriever.run(query="w1")
    store.close()


def test_duplicates(document_store: HaystackDocumentStore) -> None:
    document_store.write_documents(words("w1", "w2"))
    with pytest.raises(
        DuplicateDocumentError, match="found 2 ids that the gallery has already, the first is 'w1'"
    ):
        document_store.write_documents(words("w1", "w2", "w3"), DuplicatePolicy.FAIL)
    assert document_store.count_documents() == 2
    assert document_store.write_documents(words("w1", "w3"), DuplicatePolicy.SKIP) == 1


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"field": "content", "operator": "==", "value": "x"}, "metadata only, got 'content'"),
        ({"field": "meta.a", "operator": "like", "value": "x"}, "got 'like'"),
        ({"operator": "XOR", "conditions": []}, "AND, OR or NOT .* got 'XOR'"),
    ],
)
def test_filters_that_a_gateway_does_not_have(
    document_store: HaystackDocumentStore, filters: dict[str, Any], message: str
) -> None:
    with pytest.raises(FilterError, match=message):
        document_store.filter_documents(filters)


def test_a_retriever_over_other_texts(document_store: HaystackDocumentStore) -> None:
    document_store.write_documents(words("w1", "w2"))
    retriever = HaystackRetriever(document_store.texts)
    assert retriever.run("w2", top_k=1)["documents"][0].id == "w2"

    class Anything:
        def search(self, query: str, k: int) -> list[StoredText]:
            return [StoredText(query, "text", score=0.5)] * k

    retriever = HaystackRetriever(Anything(), top_k=2)
    expected = Document(id="x", content="text", score=0.5)
    assert retriever.run("x")["documents"] == [expected, expected]
    with pytest.raises(InvalidInputError, match="no vector and no filters"):
        retriever.run("x", filters={"field": "meta.a", "operator": "==", "value": 1})


def test_a_blob_is_refused(document_store: HaystackDocumentStore) -> None:
    with pytest.raises(InvalidInputError, match="document 'b': expected a text, got a blob"):
        document_store.write_documents([Document(id="b", blob=ByteStream(b"x"))])
    with pytest.raises(InvalidInputError, match="metadata 'deep' of 'd'"):
        document_store.write_documents([Document(id="d", content="w1", meta={"deep": {}})])
    assert document_store.count_documents() == 0
