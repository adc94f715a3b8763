import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from nobackfill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedbackKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEEDBACK_KIND_UNSPECIFIED: _ClassVar[FeedbackKind]
    FEEDBACK_KIND_CLICKED: _ClassVar[FeedbackKind]
    FEEDBACK_KIND_CONFIRMED: _ClassVar[FeedbackKind]
    FEEDBACK_KIND_REJECTED: _ClassVar[FeedbackKind]
FEEDBACK_KIND_UNSPECIFIED: FeedbackKind
FEEDBACK_KIND_CLICKED: FeedbackKind
FEEDBACK_KIND_CONFIRMED: FeedbackKind
FEEDBACK_KIND_REJECTED: FeedbackKind

class Query(_message.Message):
    __slots__ = ("image", "embeddings", "text")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    embeddings: Embeddings
    text: str
    def __init__(self, image: _Optional[bytes] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("embeddings",)
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[_types_pb2.Embedding]
    def __init__(self, embeddings: _Optional[_Iterable[_Union[_types_pb2.Embedding, _Mapping]]] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("gallery", "query", "k", "filter", "max_distance", "fields", "accuracy")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DISTANCE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    query: Query
    k: int
    filter: _types_pb2.Filter
    max_distance: float
    fields: _types_pb2.Fields
    accuracy: Accuracy
    def __init__(self, gallery: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., k: _Optional[int] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ..., max_distance: _Optional[float] = ..., fields: _Optional[_Union[_types_pb2.Fields, _Mapping]] = ..., accuracy: _Optional[_Union[Accuracy, _Mapping]] = ...) -> None: ...

class Accuracy(_message.Message):
    __slots__ = ("ef", "exact")
    EF_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    ef: int
    exact: bool
    def __init__(self, ef: _Optional[int] = ..., exact: _Optional[bool] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("hits", "release", "space", "error", "space_ends_at", "request_id")
    HITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SPACE_ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedCompositeFieldContainer[Hit]
    release: int
    space: str
    error: str
    space_ends_at: _timestamp_pb2.Timestamp
    request_id: str
    def __init__(self, hits: _Optional[_Iterable[_Union[Hit, _Mapping]]] = ..., release: _Optional[int] = ..., space: _Optional[str] = ..., error: _Optional[str] = ..., space_ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Hit(_message.Message):
    __slots__ = ("id", "distance", "score", "release", "origin", "metadata", "beyond_calibration")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BEYOND_CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    distance: float
    score: float
    release: int
    origin: _types_pb2.Origin
    metadata: _containers.MessageMap[str, _types_pb2.Value]
    beyond_calibration: bool
    def __init__(self, id: _Optional[str] = ..., distance: _Optional[float] = ..., score: _Optional[float] = ..., release: _Optional[int] = ..., origin: _Optional[_Union[_types_pb2.Origin, str]] = ..., metadata: _Optional[_Mapping[str, _types_pb2.Value]] = ..., beyond_calibration: _Optional[bool] = ...) -> None: ...

class SearchBatchRequest(_message.Message):
    __slots__ = ("gallery", "queries", "k", "filter", "max_distance", "fields", "accuracy")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DISTANCE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    k: int
    filter: _types_pb2.Filter
    max_distance: float
    fields: _types_pb2.Fields
    accuracy: Accuracy
    def __init__(self, gallery: _Optional[str] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., k: _Optional[int] = ..., filter: _Optional[_Union[_types_pb2.Filter, _Mapping]] = ..., max_distance: _Optional[float] = ..., fields: _Optional[_Union[_types_pb2.Fields, _Mapping]] = ..., accuracy: _Optional[_Union[Accuracy, _Mapping]] = ...) -> None: ...

class SearchBatchResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[SearchResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[SearchResponse, _Mapping]]] = ...) -> None: ...

class FeedbackRequest(_message.Message):
    __slots__ = ("gallery", "request_id", "item_id", "kind")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    request_id: str
    item_id: str
    kind: FeedbackKind
    def __init__(self, gallery: _Optional[str] = ..., request_id: _Optional[str] = ..., item_id: _Optional[str] = ..., kind: _Optional[_Union[FeedbackKind, str]] = ...) -> None: ...

class FeedbackResponse(_message.Message):
    __slots__ = ("counted",)
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    counted: bool
    def __init__(self, counted: _Optional[bool] = ...) -> None: ...
