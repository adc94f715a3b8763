import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from nobackfill.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UpgradeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPGRADE_STATE_UNSPECIFIED: _ClassVar[UpgradeState]
    UPGRADE_STATE_RUNNING: _ClassVar[UpgradeState]
    UPGRADE_STATE_PAUSED: _ClassVar[UpgradeState]
    UPGRADE_STATE_INDEXING: _ClassVar[UpgradeState]
    UPGRADE_STATE_DONE: _ClassVar[UpgradeState]
    UPGRADE_STATE_FAILED: _ClassVar[UpgradeState]
UPGRADE_STATE_UNSPECIFIED: UpgradeState
UPGRADE_STATE_RUNNING: UpgradeState
UPGRADE_STATE_PAUSED: UpgradeState
UPGRADE_STATE_INDEXING: UpgradeState
UPGRADE_STATE_DONE: UpgradeState
UPGRADE_STATE_FAILED: UpgradeState

class EstimateUpgradeRequest(_message.Message):
    __slots__ = ("gallery", "release", "spare_cores")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SPARE_CORES_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    release: int
    spare_cores: float
    def __init__(self, gallery: _Optional[str] = ..., release: _Optional[int] = ..., spare_cores: _Optional[float] = ...) -> None: ...

class EstimateUpgradeResponse(_message.Message):
    __slots__ = ("items", "duration", "bytes", "route", "expected_kept", "left_behind", "index_duration", "memory_bytes")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_KEPT_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_DURATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    items: int
    duration: _duration_pb2.Duration
    bytes: int
    route: _containers.RepeatedScalarFieldContainer[int]
    expected_kept: float
    left_behind: int
    index_duration: _duration_pb2.Duration
    memory_bytes: int
    def __init__(self, items: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., bytes: _Optional[int] = ..., route: _Optional[_Iterable[int]] = ..., expected_kept: _Optional[float] = ..., left_behind: _Optional[int] = ..., index_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class StartUpgradeRequest(_message.Message):
    __slots__ = ("gallery", "release", "spare_cores", "backfill", "backfill_budget")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SPARE_CORES_FIELD_NUMBER: _ClassVar[int]
    BACKFILL_FIELD_NUMBER: _ClassVar[int]
    BACKFILL_BUDGET_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    release: int
    spare_cores: float
    backfill: _containers.RepeatedCompositeFieldContainer[BackfillImage]
    backfill_budget: int
    def __init__(self, gallery: _Optional[str] = ..., release: _Optional[int] = ..., spare_cores: _Optional[float] = ..., backfill: _Optional[_Iterable[_Union[BackfillImage, _Mapping]]] = ..., backfill_budget: _Optional[int] = ...) -> None: ...

class BackfillImage(_message.Message):
    __slots__ = ("id", "image")
    ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    image: bytes
    def __init__(self, id: _Optional[str] = ..., image: _Optional[bytes] = ...) -> None: ...

class StartUpgradeResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: UpgradeProgress
    def __init__(self, progress: _Optional[_Union[UpgradeProgress, _Mapping]] = ...) -> None: ...

class WatchUpgradeRequest(_message.Message):
    __slots__ = ("gallery", "group_by")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    group_by: str
    def __init__(self, gallery: _Optional[str] = ..., group_by: _Optional[str] = ...) -> None: ...

class WatchUpgradeResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: UpgradeProgress
    def __init__(self, progress: _Optional[_Union[UpgradeProgress, _Mapping]] = ...) -> None: ...

class PauseUpgradeRequest(_message.Message):
    __slots__ = ("gallery",)
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    def __init__(self, gallery: _Optional[str] = ...) -> None: ...

class PauseUpgradeResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: UpgradeProgress
    def __init__(self, progress: _Optional[_Union[UpgradeProgress, _Mapping]] = ...) -> None: ...

class UpgradeProgress(_message.Message):
    __slots__ = ("gallery", "from_release", "to_release", "state", "done", "total", "items_per_second", "remaining", "re_embedded", "neighbours_kept", "message", "quality", "healing")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    FROM_RELEASE_FIELD_NUMBER: _ClassVar[int]
    TO_RELEASE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    RE_EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_KEPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    HEALING_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    from_release: int
    to_release: int
    state: UpgradeState
    done: int
    total: int
    items_per_second: float
    remaining: _duration_pb2.Duration
    re_embedded: int
    neighbours_kept: float
    message: str
    quality: SubgroupQuality
    healing: Healing
    def __init__(self, gallery: _Optional[str] = ..., from_release: _Optional[int] = ..., to_release: _Optional[int] = ..., state: _Optional[_Union[UpgradeState, str]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., items_per_second: _Optional[float] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., re_embedded: _Optional[int] = ..., neighbours_kept: _Optional[float] = ..., message: _Optional[str] = ..., quality: _Optional[_Union[SubgroupQuality, _Mapping]] = ..., healing: _Optional[_Union[Healing, _Mapping]] = ...) -> None: ...

class Healing(_message.Message):
    __slots__ = ("items", "carried", "today", "a_day", "embedded", "failed", "bytes_read", "seconds", "last_failure")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    TODAY_FIELD_NUMBER: _ClassVar[int]
    A_DAY_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    items: int
    carried: int
    today: int
    a_day: int
    embedded: int
    failed: int
    bytes_read: int
    seconds: _duration_pb2.Duration
    last_failure: str
    def __init__(self, items: _Optional[int] = ..., carried: _Optional[int] = ..., today: _Optional[int] = ..., a_day: _Optional[int] = ..., embedded: _Optional[int] = ..., failed: _Optional[int] = ..., bytes_read: _Optional[int] = ..., seconds: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_failure: _Optional[str] = ...) -> None: ...

class SubgroupQuality(_message.Message):
    __slots__ = ("re_embedded_share", "subgroups")
    RE_EMBEDDED_SHARE_FIELD_NUMBER: _ClassVar[int]
    SUBGROUPS_FIELD_NUMBER: _ClassVar[int]
    re_embedded_share: float
    subgroups: _containers.RepeatedCompositeFieldContainer[Subgroup]
    def __init__(self, re_embedded_share: _Optional[float] = ..., subgroups: _Optional[_Iterable[_Union[Subgroup, _Mapping]]] = ...) -> None: ...

class Subgroup(_message.Message):
    __slots__ = ("value", "items", "re_embedded", "probes", "cmc1", "cmc1_before")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RE_EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    CMC1_FIELD_NUMBER: _ClassVar[int]
    CMC1_BEFORE_FIELD_NUMBER: _ClassVar[int]
    value: _types_pb2.Value
    items: int
    re_embedded: int
    probes: int
    cmc1: float
    cmc1_before: float
    def __init__(self, value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ..., items: _Optional[int] = ..., re_embedded: _Optional[int] = ..., probes: _Optional[int] = ..., cmc1: _Optional[float] = ..., cmc1_before: _Optional[float] = ...) -> None: ...
