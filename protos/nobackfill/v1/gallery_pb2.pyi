import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from nobackfill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpaceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPACE_STATE_UNSPECIFIED: _ClassVar[SpaceState]
    SPACE_STATE_ACTIVE: _ClassVar[SpaceState]
    SPACE_STATE_STAGING: _ClassVar[SpaceState]
    SPACE_STATE_PREVIOUS: _ClassVar[SpaceState]

class ItemOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_ORDER_UNSPECIFIED: _ClassVar[ItemOrder]
    ITEM_ORDER_LEAST_CERTAIN: _ClassVar[ItemOrder]
SPACE_STATE_UNSPECIFIED: SpaceState
SPACE_STATE_ACTIVE: SpaceState
SPACE_STATE_STAGING: SpaceState
SPACE_STATE_PREVIOUS: SpaceState
ITEM_ORDER_UNSPECIFIED: ItemOrder
ITEM_ORDER_LEAST_CERTAIN: ItemOrder

class SpaceInfo(_message.Message):
    __slots__ = ("space", "release", "items", "state", "ends_at", "index")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    space: str
    release: int
    items: int
    state: SpaceState
    ends_at: _timestamp_pb2.Timestamp
    index: IndexInfo
    def __init__(self, space: _Optional[str] = ..., release: _Optional[int] = ..., items: _Optional[int] = ..., state: _Optional[_Union[SpaceState, str]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., index: _Optional[_Union[IndexInfo, _Mapping]] = ...) -> None: ...

class IndexInfo(_message.Message):
    __slots__ = ("in_graph", "compared", "delta", "due")
    IN_GRAPH_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    in_graph: int
    compared: int
    delta: int
    due: bool
    def __init__(self, in_graph: _Optional[int] = ..., compared: _Optional[int] = ..., delta: _Optional[int] = ..., due: _Optional[bool] = ...) -> None: ...

class Gallery(_message.Message):
    __slots__ = ("name", "items", "release", "spaces", "note", "created", "exact_distances", "set_aside", "source", "both_models", "both_with")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    EXACT_DISTANCES_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BOTH_MODELS_FIELD_NUMBER: _ClassVar[int]
    BOTH_WITH_FIELD_NUMBER: _ClassVar[int]
    name: str
    items: int
    release: int
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceInfo]
    note: str
    created: _timestamp_pb2.Timestamp
    exact_distances: bool
    set_aside: str
    source: ItemSource
    both_models: bool
    both_with: int
    def __init__(self, name: _Optional[str] = ..., items: _Optional[int] = ..., release: _Optional[int] = ..., spaces: _Optional[_Iterable[_Union[SpaceInfo, _Mapping]]] = ..., note: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., exact_distances: _Optional[bool] = ..., set_aside: _Optional[str] = ..., source: _Optional[_Union[ItemSource, _Mapping]] = ..., both_models: _Optional[bool] = ..., both_with: _Optional[int] = ...) -> None: ...

class ItemSource(_message.Message):
    __slots__ = ("address", "hits", "patience", "bytes_a_query", "concurrency", "items_a_day")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_A_QUERY_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_A_DAY_FIELD_NUMBER: _ClassVar[int]
    address: str
    hits: int
    patience: _duration_pb2.Duration
    bytes_a_query: int
    concurrency: int
    items_a_day: int
    def __init__(self, address: _Optional[str] = ..., hits: _Optional[int] = ..., patience: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., bytes_a_query: _Optional[int] = ..., concurrency: _Optional[int] = ..., items_a_day: _Optional[int] = ...) -> None: ...

class CreateGalleryRequest(_message.Message):
    __slots__ = ("name", "exact_distances")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXACT_DISTANCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    exact_distances: bool
    def __init__(self, name: _Optional[str] = ..., exact_distances: _Optional[bool] = ...) -> None: ...

class CreateGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class UpdateGalleryRequest(_message.Message):
    __slots__ = ("name", "exact_distances", "source", "both_models")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXACT_DISTANCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BOTH_MODELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    exact_distances: bool
    source: ItemSource
    both_models: bool
    def __init__(self, name: _Optional[str] = ..., exact_distances: _Optional[bool] = ..., source: _Optional[_Union[ItemSource, _Mapping]] = ..., both_models: _Optional[bool] = ...) -> None: ...

class UpdateGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class GetGalleryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetGalleryResponse(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: Gallery
    def __init__(self, gallery: _Optional[_Union[Gallery, _Mapping]] = ...) -> None: ...

class ListGalleriesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGalleriesResponse(_message.Message):
    __slots__ = ("galleries", "next_page_token")
    GALLERIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    galleries: _containers.RepeatedCompositeFieldContainer[Gallery]
    next_page_token: str
    def __init__(self, galleries: _Optional[_Iterable[_Union[Gallery, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteGalleryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteGalleryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutItem(_message.Message):
    __slots__ = ("id", "image", "vectors", "text", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    id: str
    image: bytes
    vectors: Vectors
    text: str
    metadata: _containers.MessageMap[str, _types_pb2.Value]
    def __init__(self, id: _Optional[str] = ..., image: _Optional[bytes] = ..., vectors: _Optional[_Union[Vectors, _Mapping]] = ..., text: _Optional[str] = ..., metadata: _Optional[_Mapping[str, _types_pb2.Value]] = ...) -> None: ...

class Vectors(_message.Message):
    __slots__ = ("embedding", "side_info")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    SIDE_INFO_FIELD_NUMBER: _ClassVar[int]
    embedding: _types_pb2.Embedding
    side_info: _types_pb2.SideInfo
    def __init__(self, embedding: _Optional[_Union[_types_pb2.Embedding, _Mapping]] = ..., side_info: _Optional[_Union[_types_pb2.SideInfo, _Mapping]] = ...) -> None: ...

class PutItemsRequest(_message.Message):
    __slots__ = ("gallery", "items")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    items: _containers.RepeatedCompositeFieldContainer[PutItem]
    def __init__(self, gallery: _Optional[str] = ..., items: _Optional[_Iterable[_Union[PutItem, _Mapping]]] = ...) -> None: ...

class PutItemsResponse(_message.Message):
    __slots__ = ("stored", "errors", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    errors: _containers.RepeatedCompositeFieldContainer[ItemError]
    refused: int
    def __init__(self, stored: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[ItemError, _Mapping]]] = ..., refused: _Optional[int] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("id", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    message: str
    def __init__(self, id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class GetItemRequest(_message.Message):
    __slots__ = ("gallery", "id")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    id: str
    def __init__(self, gallery: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class GetItemResponse(_message.Message):
    __slots__ = ("id", "metadata", "spaces", "uncertainty", "origin")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    id: str
    metadata: _containers.MessageMap[str, _types_pb2.Value]
    spaces: _containers.RepeatedScalarFieldContainer[str]
    uncertainty: float
    origin: _types_pb2.Origin
    def __init__(self, id: _Optional[str] = ..., metadata: _Optional[_Mapping[str, _types_pb2.Value]] = ..., spaces: _Optional[_Iterable[str]] = ..., uncertainty: _Optional[float] = ..., origin: _Optional[_Union[_types_pb2.Origin, str]] = ...) -> None: ...

class ListItemsRequest(_message.Message):
    __slots__ = ("gallery", "filter", "page_size", "page_token", "order", "fields")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    filter: _types_pb2.Filter
    page_size: int
    page_token: str
    order: ItemOrder
    fields: _types_pb2.Fields
    def __init__(self, gallery: _Optional[str] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., order: _Optional[_Union[ItemOrder, str]] = ..., fields: _Optional[_Union[_types_pb2.Fields, _Mapping]] = ...) -> None: ...

class ListItemsResponse(_message.Message):
    __slots__ = ("items", "next_page_token")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ListedItem]
    next_page_token: str
    def __init__(self, items: _Optional[_Iterable[_Union[ListedItem, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListedItem(_message.Message):
    __slots__ = ("id", "metadata", "uncertainty", "origin")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    id: str
    metadata: _containers.MessageMap[str, _types_pb2.Value]
    uncertainty: float
    origin: _types_pb2.Origin
    def __init__(self, id: _Optional[str] = ..., metadata: _Optional[_Mapping[str, _types_pb2.Value]] = ..., uncertainty: _Optional[float] = ..., origin: _Optional[_Union[_types_pb2.Origin, str]] = ...) -> None: ...

class CountItemsRequest(_message.Message):
    __slots__ = ("gallery", "filter")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    filter: _types_pb2.Filter
    def __init__(self, gallery: _Optional[str] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ...) -> None: ...

class CountItemsResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: int
    def __init__(self, items: _Optional[int] = ...) -> None: ...

class SetMetadataRequest(_message.Message):
    __slots__ = ("gallery", "ids", "filter", "set", "remove")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    filter: _types_pb2.Filter
    set: _containers.MessageMap[str, _types_pb2.Value]
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gallery: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ..., set: _Optional[_Mapping[str, _types_pb2.Value]] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class SetMetadataResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: int
    def __init__(self, items: _Optional[int] = ...) -> None: ...

class DeleteItemsRequest(_message.Message):
    __slots__ = ("gallery", "ids", "filter")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    filter: _types_pb2.Filter
    def __init__(self, gallery: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ...) -> None: ...

class DeleteItemsResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...
