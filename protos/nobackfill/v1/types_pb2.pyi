import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_NATIVE: _ClassVar[Origin]
    ORIGIN_DIRECT: _ClassVar[Origin]
    ORIGIN_UPGRADED: _ClassVar[Origin]
    ORIGIN_RE_EMBEDDED: _ClassVar[Origin]
    ORIGIN_OLD_MODEL: _ClassVar[Origin]
ORIGIN_UNSPECIFIED: Origin
ORIGIN_NATIVE: Origin
ORIGIN_DIRECT: Origin
ORIGIN_UPGRADED: Origin
ORIGIN_RE_EMBEDDED: Origin
ORIGIN_OLD_MODEL: Origin

class Embedding(_message.Message):
    __slots__ = ("space", "values")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    space: str
    values: bytes
    def __init__(self, space: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class SideInfo(_message.Message):
    __slots__ = ("space", "values")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    space: str
    values: bytes
    def __init__(self, space: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("text", "number", "flag", "integer", "texts")
    class Texts(_message.Message):
        __slots__ = ("texts",)
        TEXTS_FIELD_NUMBER: _ClassVar[int]
        texts: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: float
    flag: bool
    integer: int
    texts: Value.Texts
    def __init__(self, text: _Optional[str] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ..., integer: _Optional[int] = ..., texts: _Optional[_Union[Value.Texts, _Mapping]] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("key", "equals", "one_of", "range", "integer_range", "time_range", "exists")
    class OneOf(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedCompositeFieldContainer[Value]
        def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    class Range(_message.Message):
        __slots__ = ("at_least", "less_than", "greater_than", "at_most")
        AT_LEAST_FIELD_NUMBER: _ClassVar[int]
        LESS_THAN_FIELD_NUMBER: _ClassVar[int]
        GREATER_THAN_FIELD_NUMBER: _ClassVar[int]
        AT_MOST_FIELD_NUMBER: _ClassVar[int]
        at_least: float
        less_than: float
        greater_than: float
        at_most: float
        def __init__(self, at_least: _Optional[float] = ..., less_than: _Optional[float] = ..., greater_than: _Optional[float] = ..., at_most: _Optional[float] = ...) -> None: ...
    class IntegerRange(_message.Message):
        __slots__ = ("at_least", "less_than", "greater_than", "at_most")
        AT_LEAST_FIELD_NUMBER: _ClassVar[int]
        LESS_THAN_FIELD_NUMBER: _ClassVar[int]
        GREATER_THAN_FIELD_NUMBER: _ClassVar[int]
        AT_MOST_FIELD_NUMBER: _ClassVar[int]
        at_least: int
        less_than: int
        greater_than: int
        at_most: int
        def __init__(self, at_least: _Optional[int] = ..., less_than: _Optional[int] = ..., greater_than: _Optional[int] = ..., at_most: _Optional[int] = ...) -> None: ...
    class TimeRange(_message.Message):
        __slots__ = ("at_least", "less_than", "greater_than", "at_most")
        AT_LEAST_FIELD_NUMBER: _ClassVar[int]
        LESS_THAN_FIELD_NUMBER: _ClassVar[int]
        GREATER_THAN_FIELD_NUMBER: _ClassVar[int]
        AT_MOST_FIELD_NUMBER: _ClassVar[int]
        at_least: _timestamp_pb2.Timestamp
        less_than: _timestamp_pb2.Timestamp
        greater_than: _timestamp_pb2.Timestamp
        at_most: _timestamp_pb2.Timestamp
        def __init__(self, at_least: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., less_than: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., greater_than: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., at_most: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    EQUALS_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    INTEGER_RANGE_FIELD_NUMBER: _ClassVar[int]
    TIME_RANGE_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    equals: Value
    one_of: Condition.OneOf
    range: Condition.Range
    integer_range: Condition.IntegerRange
    time_range: Condition.TimeRange
    exists: bool
    def __init__(self, key: _Optional[str] = ..., equals: _Optional[_Union[Value, _Mapping]] = ..., one_of: _Optional[_Union[Condition.OneOf, _Mapping]] = ..., range: _Optional[_Union[Condition.Range, _Mapping]] = ..., integer_range: _Optional[_Union[Condition.IntegerRange, _Mapping]] = ..., time_range: _Optional[_Union[Condition.TimeRange, _Mapping]] = ..., exists: _Optional[bool] = ...) -> None: ...

class Expression(_message.Message):
    __slots__ = ("condition", "all", "any")
    class Expressions(_message.Message):
        __slots__ = ("of",)
        OF_FIELD_NUMBER: _ClassVar[int]
        of: _containers.RepeatedCompositeFieldContainer[Expression]
        def __init__(self, of: _Optional[_Iterable[_Union[Expression, _Mapping]]] = ...) -> None: ...
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    ANY_FIELD_NUMBER: _ClassVar[int]
    NOT_FIELD_NUMBER: _ClassVar[int]
    condition: Condition
    all: Expression.Expressions
    any: Expression.Expressions
    def __init__(self, condition: _Optional[_Union[Condition, _Mapping]] = ..., all: _Optional[_Union[Expression.Expressions, _Mapping]] = ..., any: _Optional[_Union[Expression.Expressions, _Mapping]] = ..., **kwargs) -> None: ...

class Filter(_message.Message):
    __slots__ = ("conditions", "expression")
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    expression: Expression
    def __init__(self, conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., expression: _Optional[_Union[Expression, _Mapping]] = ...) -> None: ...

class Fields(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...
