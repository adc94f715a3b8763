"""Use a gateway as a vector store of LlamaIndex, and a gateway or `Dual` as a retriever.

Needs the extra `llama-index`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from nobackfill.errors import InvalidInputError
from nobackfill.extras import require_extra
from nobackfill.gallery.filters import All, AnyOf, Filter, Not, OneOf
from nobackfill.plugins.integrations.texts import GalleryTexts, StoredText, TextSearch, compare
from nobackfill.wire import Gateway

with require_extra("llama-index"):
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        FilterCondition,
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

_Answer = TypeVar("_Answer")
# Key of the metadata with the id of the node: a gateway filters by metadata only.
_NODE_ID = "_node_id"
# Operators with another name in `compare`. A list of a gateway passes if one of its elements does.
_COMPARISONS: Mapping[FilterOperator, str] = {
    FilterOperator.NIN: "not in",
    FilterOperator.ANY: "in",
    FilterOperator.CONTAINS: "==",
}


def _on_thread(method: Callable[..., _Answer]) -> Callable[..., Coroutine[Any, Any, _Answer]]:
    """Return a method that calls another one on a thread, which goes on if it is cancelled."""

    @wraps(method)
    async def call(*arguments: Any, **options: Any) -> _Answer:
        return await asyncio.to_thread(method, *arguments, **options)

    return call


class LlamaIndexVectorStore(BasePydanticVectorStore):  # type: ignore[misc]
    """Nodes in a gallery of a gateway. A node of the same id is replaced.

    A node is stored as LlamaIndex's other stores do: its text, its metadata, and the rest of it as
    JSON. A value None of the metadata is in the JSON alone, so that `is_empty` finds it.

    Args:
        gateway: The connection.
        gallery: Name of a gallery that exists.
        release: The release whose embedder the index runs; None: the gateway embeds, and the
            embeddings of nodes and queries are ignored.
        text_key: Key of the metadata that holds the text.

    Raises:
        NotFoundError: No such gallery, or it has no vectors of this release.
        VerificationError: The gallery is damaged and set aside.
        NotPermittedError: The gateway refuses the token.
        BusyError: The gateway has too much work.
        UnavailableError: The gateway does not answer within the connection's seconds.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    _texts: GalleryTexts = PrivateAttr()

    def __init__(
        self,
        gateway: Gateway,
        gallery: str,
        *,
        release: int | None = None,
        text_key: str = "text",
    ) -> None:
        super().__init__(is_embedding_query=release is not None)
        self._texts = GalleryTexts(gateway, gallery, release=release, text_key=text_key)

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex stores."""
        return "LlamaIndexVectorStore"

    @property
    def client(self) -> Gateway:
        """Return the connection, which the caller of the class closes."""
        return self._texts.gateway

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Store nodes, and return their ids.

        Nodes are durable when this returns. No nodes store nothing. A node of the same id is
        replaced, and the last node of an id counts. Values of None in its metadata are left out.
        Other keyword arguments are ignored, here and in the other methods.

        Raises:
            ValueError: The store has a `release`, and a node has no embedding or one with values
                that are no numbers; or the connection was closed.
            InvalidInputError: A value of the metadata is not one that a gateway stores: nothing is
                stored. Or the gateway refused nodes, and stored the others.
            TooLargeError: One text is larger than the gateway accepts; earlier calls stay.
            ItemQuotaError: The token's galleries would hold too many items.
            CannotWriteError: The gallery cannot be written.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
        """
        rows = []
        for node in nodes:
            metadata = node_to_metadata_dict(node, remove_text=True) | {_NODE_ID: node.node_id}
            values = {key: value for key, value in metadata.items() if value is not None}
            rows.append(StoredText(node.node_id, node.get_content(), values))
        vectors = [node.get_embedding() for node in nodes] if self.is_embedding_query else None
        self._texts.put(rows, vectors)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Delete all nodes of a document; an unknown one is ignored.

        Args:
            ref_doc_id: The document's id.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        self._texts.delete(where=OneOf("ref_doc_id", (ref_doc_id,)))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **_: Any,
    ) -> None:
        """Delete the nodes that have these ids and pass the filters; without both, none.

        Ids match only nodes that LlamaIndex stored.

        Args:
            node_ids: Ids; an empty list matches no node. None: any id.
            filters: Filters of LlamaIndex; None or empty: all nodes.

        Raises:
            InvalidInputError: More than 10,000 ids, or an operator or a value that a gateway does
                not have.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            CannotWriteError: The gallery cannot be written; some items may be deleted.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        where = _every([_ids(_NODE_ID, node_ids), to_filter(filters)])
        if where is not None:
            self._texts.delete(where=where)

    def clear(self) -> None:
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
        self._texts.delete()

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the nodes that have these ids and pass the filters; without both, every node.

        They come in the order in which they were stored. Items that LlamaIndex did not store become
        text nodes.

        Args:
            node_ids: Ids; an empty list matches no node. None: any id.
            filters: Filters of LlamaIndex; None or empty: all nodes.

        Raises:
            InvalidInputError: More than 10,000 ids, or an operator or a value that a gateway does
                not have.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The connection was closed.
        """
        where = _every([_ids(_NODE_ID, node_ids), to_filter(filters)])
        return [_node(one) for one in self._texts.items(where)]

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        """Return the nearest nodes, nearest first, with similarities of 0 to 1.

        Empty lists of ids or documents restrict nothing. Others match only nodes that LlamaIndex
        stored.

        Raises:
            InvalidInputError: Another mode than the default one, an operator that a gateway does
                not have, no query of the kind that the store needs, or a number of nodes outside 1
                to 1000.
            PreconditionError: The gallery cannot answer now, such as NoEncoderError.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            NotPermittedError: The gateway refuses the token.
            BusyError: The gateway has too much work.
            UnavailableError: The gateway does not answer within the connection's seconds.
            ValueError: The number of nodes is negative, the embedding has values that are no
                numbers, or the connection was closed.
        """
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise InvalidInputError(
                f"mode: expected 'default', the search by vectors, got {query.mode.value!r}, "
                "which a gateway does not have; leave the mode out"
            )
        # An index gives an empty list of ids where it restricts nothing.
        ids, documents = query.node_ids or None, query.doc_ids or None
        hits = self._texts.search(
            None if self.is_embedding_query else query.query_str,
            query.similarity_top_k,
            vector=query.query_embedding if self.is_embedding_query else None,
            where=_every(
                [_ids(_NODE_ID, ids), _ids("ref_doc_id", documents), to_filter(query.filters)]
            ),
        )
        return VectorStoreQueryResult(
            nodes=[_node(one) for one in hits],
            similarities=[one.score for one in hits],
            ids=[one.id for one in hits],
        )

    # LlamaIndex's own would call them on the event loop, which would wait for the gateway.
    async_add = _on_thread(add)
    adelete = _on_thread(delete)
    adelete_nodes = _on_thread(delete_nodes)
    aclear = _on_thread(clear)
    aget_nodes = _on_thread(get_nodes)
    aquery = _on_thread(query)


class LlamaIndexRetriever(BaseRetriever):  # type: ignore[misc]
    """A retriever over `GalleryTexts` or `DualTexts`.

    Args:
        texts: Where to search.
        similarity_top_k: The most nodes.
    """

    def __init__(self, texts: TextSearch, similarity_top_k: int = 2) -> None:
        super().__init__()
        self._texts, self._similarity_top_k = texts, similarity_top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self._texts.search(query_bundle.query_str, self._similarity_top_k)
        return [NodeWithScore(node=_node(one), score=one.score) for one in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _node(one: StoredText) -> BaseNode:
    """Return a node; an item that LlamaIndex did not store becomes a TextNode."""
    if "_node_content" in one.metadata:
        return metadata_dict_to_node(dict(one.metadata), text=one.text)
    return TextNode(id_=one.id, text=one.text, metadata=dict(one.metadata))


def _ids(key: str, ids: list[str] | None) -> Filter | None:
    return None if ids is None else OneOf(key, tuple(ids))


def _every(filters: Sequence[Filter | None]) -> Filter | None:
    parts = tuple(one for one in filters if one is not None)
    return All(parts) if parts else None


def to_filter(filters: MetadataFilters | None) -> Filter | None:
    """Return LlamaIndex's filters as a filter of a gateway; None without any.

    An empty group inside passes all items, and so does `all` with an empty list. A NOT of several
    conditions passes items that fail all of them.

    Raises:
        InvalidInputError: An operator that a gateway does not have, such as text_match, or a value
            that it cannot compare with.
    """
    if filters is None or not filters.filters:
        return None
    parts = tuple(
        to_filter(one) or All(()) if isinstance(one, MetadataFilters) else _test(one)
        for one in filters.filters
    )
    if filters.condition == FilterCondition.OR:
        return AnyOf(parts)
    return Not(AnyOf(parts)) if filters.condition == FilterCondition.NOT else All(parts)


def _test(one: MetadataFilter) -> Filter:
    key, value = one.key, one.value
    if one.operator == FilterOperator.IS_EMPTY:
        return AnyOf((compare(key, "==", None), OneOf(key, ("",))))
    if one.operator == FilterOperator.ALL and isinstance(value, list):
        return All(tuple(compare(key, "==", part) for part in value))
    return compare(key, _COMPARISONS.get(one.operator, one.operator.value), value)
