"""LlamaIndex: nodes in a gallery of a gateway, its index, its filters."""

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from nobackfill.errors import InvalidInputError
from nobackfill.plugins.integrations.llama_index import LlamaIndexRetriever, LlamaIndexVectorStore
from nobackfill.plugins.integrations.texts import GalleryTexts
from nobackfill.wire import Gateway
from tests.integrations.conftest import empty_gallery
from tests.support.graphs import DIM

pytestmark = pytest.mark.scale

METADATA: dict[str, dict[str, Any]] = {
    "w1": {"year": 2020, "tag": "sea", "tags": ["sea", "sun"]},
    "w2": {"year": 2021, "tag": "sun", "tags": ["sun"]},
    "w3": {"year": 2022.5, "tag": "", "tags": []},
    "w4": {"tag": None},
}


def node(text: str, document: str = "book") -> TextNode:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    metadata = dict(METADATA.get(text, {}))
    return TextNode(id_=f"n-{text}", text=text, metadata=metadata, relationships=source)


class UnitEmbedding(BaseEmbedding):  # type: ignore[misc]
    """A random vector of norm 1 for each text."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = np.random.default_rng(list(text.encode())).normal(size=DIM)
        return [float(one) for one in vector / np.linalg.norm(vector)]

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture
def store(reader: Gateway) -> LlamaIndexVectorStore:
    return LlamaIndexVectorStore(reader, empty_gallery(reader))


def found(store: LlamaIndexVectorStore, **query: Any) -> list[str]:
    return store.query(VectorStoreQuery(**query)).ids or []


def test_nodes_come_back_whole(store: LlamaIndexVectorStore) -> None:
    nodes = [node(text) for text in METADATA]
    assert store.add(nodes) == [one.node_id for one in nodes]
    assert store.get_nodes() == nodes
    assert store.get_nodes(["n-w3", "none"]) == [nodes[2]]
    result = store.query(VectorStoreQuery(query_str="w3", similarity_top_k=3))
    assert result.nodes[0] == nodes[2] and result.ids[0] == "n-w3"
    assert result.similarities == sorted(result.similarities, reverse=True)
    assert all(0 <= one <= 1 for one in result.similarities)
    changed = TextNode(id_="n-w3", text="w9")
    store.add([changed])
    assert store.get_nodes(["n-w3"]) == [changed]
    assert found(store, query_str="w9") == ["n-w3"]
    assert store.add([]) == []


def test_nodes_are_deleted(store: LlamaIndexVectorStore) -> None:
    store.add([node("w1"), node("w2"), node("w3", "letter"), node("w4", "letter")])
    store.delete("none")
    store.delete_nodes()
    store.delete("book")
    assert [one.node_id for one in store.get_nodes()] == ["n-w3", "n-w4"]
    store.delete_nodes(["n-w3", "none"])
    assert [one.node_id for one in store.get_nodes()] == ["n-w4"]
    store.clear()
    assert store.get_nodes() == [] == found(store, query_str="w1")


@pytest.mark.parametrize(
    ("key", "operator", "value"),
    [
        ("year", FilterOperator.EQ, 2020), ("year", FilterOperator.NE, 2020),
        ("year", FilterOperator.GT, 2020), ("year", FilterOperator.GTE, 2021),
        ("year", FilterOperator.LT, 2022.5), ("year", FilterOperator.LTE, 2022.5),
        ("tag", FilterOperator.IN, ["sea", "x"]), ("tag", FilterOperator.NIN, ["sea", "x"]),
        ("tags", FilterOperator.CONTAINS, "sun"), ("tags", FilterOperator.ANY, ["sea", "x"]),
        ("tags", FilterOperator.ALL, ["sea", "sun"]), ("tags", FilterOperator.IS_EMPTY, None),
        ("tag", FilterOperator.IS_EMPTY, None), ("none", FilterOperator.IS_EMPTY, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("condition", list(FilterCondition))
def test_filters_pass_what_llama_index_passes(
    store: LlamaIndexVectorStore,
    key: str,
    operator: FilterOperator,
    value: Any,
    condition: FilterCondition,
) -> None:
    tests = [
        MetadataFilter(key=key, operator=operator, value=value),
        MetadataFilter(key="tag", value="sun"),
    ]
    filters = MetadataFilters(filters=tests, condition=condition)
    passes = build_metadata_filter_fn(lambda name: METADATA[name], filters)
    expected = [f"n-{name}" for name in METADATA if passes(name)]
    store.add([node(text) for text in METADATA])
    assert [one.node_id for one in store.get_nodes(filters=filters)] == expected
    assert sorted(found(store, query_str="w1", similarity_top_k=9, filters=filters)) == expected


def test_filters_may_be_nested_and_combine_with_ids(store: LlamaIndexVectorStore) -> None:
    store.add([node("w1"), node("w2"), node("w3", "letter")])
    tag = MetadataFilter(key="tag", value="sun")
    year = MetadataFilter(key="year", operator=FilterOperator.LT, value=2021)
    either = MetadataFilters(filters=[tag, year], condition=FilterCondition.OR)
    nested = MetadataFilters(filters=[either, MetadataFilters(filters=[])])
    assert [one.node_id for one in store.get_nodes(filters=nested)] == ["n-w1", "n-w2"]
    assert [one.node_id for one in store.get_nodes(["n-w2", "n-w3"], nested)] == ["n-w2"]
    query = {"query_str": "w1", "similarity_top_k": 9}
    assert found(store, **query, doc_ids=["letter"]) == ["n-w3"]
    assert found(store, **query, node_ids=["n-w2"]) == ["n-w2"]
    store.delete_nodes(["n-w2", "n-w3"], nested)
    assert [one.node_id for one in store.get_nodes()] == ["n-w1", "n-w3"]


def test_what_a_gateway_does_not_have_is_refused_by_name(store: LlamaIndexVectorStore) -> None:
    match = MetadataFilter(key="tag", operator=FilterOperator.TEXT_MATCH, value="s")
    with pytest.raises(InvalidInputError, match="got 'text_match'"):
        store.get_nodes(filters=MetadataFilters(filters=[match]))
    with pytest.raises(InvalidInputError, match="got 'mmr'"):
        found(store, query_str="w1", mode=VectorStoreQueryMode.MMR)
    with pytest.raises(InvalidInputError, match="metadata 'deep' of 'a'"):
        store.add([TextNode(id_="a", text="w1", metadata={"deep": {"x": 1}})])


def test_an_index_with_an_embedder_of_its_own(vectors_only: Gateway) -> None:
    store = LlamaIndexVectorStore(vectors_only, empty_gallery(vectors_only), release=1)
    index = VectorStoreIndex.from_vector_store(store, embed_model=UnitEmbedding())
    index.insert(Document(text="the first", id_="1"))
    index.insert(Document(text="the second", id_="2"))
    (hit,) = index.as_retriever(similarity_top_k=1).retrieve("the second")
    assert hit.node.get_content() == "the second" and hit.score == pytest.approx(1, abs=1e-3)
    index.delete_ref_doc("2")
    (hit,) = asyncio.run(index.as_retriever(similarity_top_k=1).aretrieve("the second"))
    assert hit.node.get_content() == "the first"


def test_an_index_over_a_gateway_that_embeds(store: LlamaIndexVectorStore) -> None:
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(embed_dim=1))
    index.insert_nodes([node("w1"), node("w2"), node("w3")])
    (hit,) = index.as_retriever(similarity_top_k=1).retrieve("w2")
    assert hit.node.get_content() == "w2"
    retriever = LlamaIndexRetriever(GalleryTexts(store.client, store._texts.gallery), 2)
    assert retriever.retrieve("w3")[0].node.get_content() == "w3"
    assert len(asyncio.run(retriever.aretrieve("w3"))) == 2


def test_calls_of_asyncio_run_on_threads(store: LlamaIndexVectorStore) -> None:
    async def life() -> None:
        await store.async_add([node("w1"), node("w2", "letter"), node("w3", "letter")])
        answer = await store.aquery(VectorStoreQuery(query_str="w2"))
        assert answer.ids == ["n-w2"]
        await store.adelete("letter")
        assert await store.aget_nodes() == [node("w1")]
        await store.adelete_nodes(["n-w1"])
        assert await store.aget_nodes() == []
        await store.async_add([node("w1")])
        await store.aclear()
        assert await store.aget_nodes() == []

    asyncio.run(life())
