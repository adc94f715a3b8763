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
    __slots__ = ("text", "number", "flag")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: float
    flag: bool
    def __init__(self, text: _Optional[str] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("key", "equals", "one_of", "range")
    class OneOf(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedCompositeFieldContainer[Value]
        def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    class Range(_message.Message):
        __slots__ = ("at_least", "less_than")
        AT_LEAST_FIELD_NUMBER: _ClassVar[int]
        LESS_THAN_FIELD_NUMBER: _ClassVar[int]
        at_least: float
        less_than: float
        def __init__(self, at_least: _Optional[float] = ..., less_than: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    EQUALS_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    key: str
    equals: Value
    one_of: Condition.OneOf
    range: Condition.Range
    def __init__(self, key: _Optional[str] = ..., equals: _Optional[_Union[Value, _Mapping]] = ..., one_of: _Optional[_Union[Condition.OneOf, _Mapping]] = ..., range: _Optional[_Union[Condition.Range, _Mapping]] = ...) -> None: ...

class Filter(_message.Message):
    __slots__ = ("conditions",)
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    def __init__(self, conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ...) -> None: ...
