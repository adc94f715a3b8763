import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReleaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_STATE_UNSPECIFIED: _ClassVar[ReleaseState]
    RELEASE_STATE_PUBLISHED: _ClassVar[ReleaseState]
    RELEASE_STATE_ACTIVATING: _ClassVar[ReleaseState]
    RELEASE_STATE_ACTIVE: _ClassVar[ReleaseState]
    RELEASE_STATE_PREVIOUS: _ClassVar[ReleaseState]
    RELEASE_STATE_RETIRED: _ClassVar[ReleaseState]
    RELEASE_STATE_FAILED: _ClassVar[ReleaseState]
    RELEASE_STATE_WITHDRAWN: _ClassVar[ReleaseState]

class Rollout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_UNSPECIFIED: _ClassVar[Rollout]
    ROLLOUT_DIRECT: _ClassVar[Rollout]
    ROLLOUT_DUAL: _ClassVar[Rollout]
    ROLLOUT_CUTOVER: _ClassVar[Rollout]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_VERIFYING: _ClassVar[Phase]
    PHASE_LOADING: _ClassVar[Phase]
    PHASE_PROBING: _ClassVar[Phase]
    PHASE_UPGRADING: _ClassVar[Phase]
    PHASE_SWITCHING: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
RELEASE_STATE_UNSPECIFIED: ReleaseState
RELEASE_STATE_PUBLISHED: ReleaseState
RELEASE_STATE_ACTIVATING: ReleaseState
RELEASE_STATE_ACTIVE: ReleaseState
RELEASE_STATE_PREVIOUS: ReleaseState
RELEASE_STATE_RETIRED: ReleaseState
RELEASE_STATE_FAILED: ReleaseState
RELEASE_STATE_WITHDRAWN: ReleaseState
ROLLOUT_UNSPECIFIED: Rollout
ROLLOUT_DIRECT: Rollout
ROLLOUT_DUAL: Rollout
ROLLOUT_CUTOVER: Rollout
PHASE_UNSPECIFIED: Phase
PHASE_VERIFYING: Phase
PHASE_LOADING: Phase
PHASE_PROBING: Phase
PHASE_UPGRADING: Phase
PHASE_SWITCHING: Phase
PHASE_DONE: Phase
PHASE_FAILED: Phase

class Release(_message.Message):
    __slots__ = ("number", "space", "side_space", "dim", "side_dim", "metric", "state", "reason", "searches_directly", "upgrades_from", "manifest", "ends_at")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    SIDE_SPACE_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SIDE_DIM_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_DIRECTLY_FIELD_NUMBER: _ClassVar[int]
    UPGRADES_FROM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    number: int
    space: str
    side_space: str
    dim: int
    side_dim: int
    metric: str
    state: ReleaseState
    reason: str
    searches_directly: _containers.RepeatedScalarFieldContainer[int]
    upgrades_from: _containers.RepeatedScalarFieldContainer[int]
    manifest: str
    ends_at: _timestamp_pb2.Timestamp
    def __init__(self, number: _Optional[int] = ..., space: _Optional[str] = ..., side_space: _Optional[str] = ..., dim: _Optional[int] = ..., side_dim: _Optional[int] = ..., metric: _Optional[str] = ..., state: _Optional[_Union[ReleaseState, str]] = ..., reason: _Optional[str] = ..., searches_directly: _Optional[_Iterable[int]] = ..., upgrades_from: _Optional[_Iterable[int]] = ..., manifest: _Optional[str] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListReleasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReleasesResponse(_message.Message):
    __slots__ = ("releases",)
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    def __init__(self, releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ...) -> None: ...

class GetReleaseRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class GetReleaseResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: Release
    def __init__(self, release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class WatchReleasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchReleasesResponse(_message.Message):
    __slots__ = ("releases",)
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    def __init__(self, releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ...) -> None: ...

class FetchFileRequest(_message.Message):
    __slots__ = ("path", "offset")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchFileResponse(_message.Message):
    __slots__ = ("chunk", "size")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    size: int
    def __init__(self, chunk: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class ActivateReleaseRequest(_message.Message):
    __slots__ = ("number", "rollout", "spare_cores", "old_space_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SPARE_CORES_FIELD_NUMBER: _ClassVar[int]
    OLD_SPACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    rollout: Rollout
    spare_cores: float
    old_space_seconds: int
    def __init__(self, number: _Optional[int] = ..., rollout: _Optional[_Union[Rollout, str]] = ..., spare_cores: _Optional[float] = ..., old_space_seconds: _Optional[int] = ...) -> None: ...

class ActivateReleaseResponse(_message.Message):
    __slots__ = ("phase", "done", "total", "message", "time")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    done: int
    total: int
    message: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., message: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RollbackReleaseRequest(_message.Message):
    __slots__ = ("confirm", "to_release")
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    TO_RELEASE_FIELD_NUMBER: _ClassVar[int]
    confirm: bool
    to_release: int
    def __init__(self, confirm: _Optional[bool] = ..., to_release: _Optional[int] = ...) -> None: ...

class RollbackReleaseResponse(_message.Message):
    __slots__ = ("number", "lost_items", "lost", "done")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOST_ITEMS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    number: int
    lost_items: int
    lost: _containers.RepeatedCompositeFieldContainer[LostItem]
    done: bool
    def __init__(self, number: _Optional[int] = ..., lost_items: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostItem, _Mapping]]] = ..., done: _Optional[bool] = ...) -> None: ...

class LostItem(_message.Message):
    __slots__ = ("gallery", "id")
    GALLERY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    gallery: str
    id: str
    def __init__(self, gallery: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class RetireReleaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetireReleaseResponse(_message.Message):
    __slots__ = ("retired",)
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    retired: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, retired: _Optional[_Iterable[int]] = ...) -> None: ...
