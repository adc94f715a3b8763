import datetime

from google.protobuf import duration_pb2 as _duration_pb2
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

class CanaryState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANARY_STATE_UNSPECIFIED: _ClassVar[CanaryState]
    CANARY_STATE_RUNNING: _ClassVar[CanaryState]
    CANARY_STATE_PROMOTED: _ClassVar[CanaryState]
    CANARY_STATE_STOPPED: _ClassVar[CanaryState]
    CANARY_STATE_ENDED: _ClassVar[CanaryState]

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
    PHASE_CANARY: _ClassVar[Phase]

class SyncFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYNC_FAILURE_UNSPECIFIED: _ClassVar[SyncFailure]
    SYNC_FAILURE_NO_ROUTE: _ClassVar[SyncFailure]
    SYNC_FAILURE_REFUSED: _ClassVar[SyncFailure]
    SYNC_FAILURE_LEFT_BEHIND: _ClassVar[SyncFailure]
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
CANARY_STATE_UNSPECIFIED: CanaryState
CANARY_STATE_RUNNING: CanaryState
CANARY_STATE_PROMOTED: CanaryState
CANARY_STATE_STOPPED: CanaryState
CANARY_STATE_ENDED: CanaryState
PHASE_UNSPECIFIED: Phase
PHASE_VERIFYING: Phase
PHASE_LOADING: Phase
PHASE_PROBING: Phase
PHASE_UPGRADING: Phase
PHASE_SWITCHING: Phase
PHASE_DONE: Phase
PHASE_FAILED: Phase
PHASE_CANARY: Phase
SYNC_FAILURE_UNSPECIFIED: SyncFailure
SYNC_FAILURE_NO_ROUTE: SyncFailure
SYNC_FAILURE_REFUSED: SyncFailure
SYNC_FAILURE_LEFT_BEHIND: SyncFailure

class Release(_message.Message):
    __slots__ = ("number", "space", "side_space", "dim", "side_dim", "metric", "state", "reason", "searches_directly", "upgrades_from", "manifest", "ends_at", "embeds_images", "embeds_texts")
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
    EMBEDS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_TEXTS_FIELD_NUMBER: _ClassVar[int]
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
    embeds_images: bool
    embeds_texts: bool
    def __init__(self, number: _Optional[int] = ..., space: _Optional[str] = ..., side_space: _Optional[str] = ..., dim: _Optional[int] = ..., side_dim: _Optional[int] = ..., metric: _Optional[str] = ..., state: _Optional[_Union[ReleaseState, str]] = ..., reason: _Optional[str] = ..., searches_directly: _Optional[_Iterable[int]] = ..., upgrades_from: _Optional[_Iterable[int]] = ..., manifest: _Optional[str] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., embeds_images: _Optional[bool] = ..., embeds_texts: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("number", "rollout", "spare_cores", "old_space_seconds", "canary", "promote")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SPARE_CORES_FIELD_NUMBER: _ClassVar[int]
    OLD_SPACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    number: int
    rollout: Rollout
    spare_cores: float
    old_space_seconds: int
    canary: Canary
    promote: bool
    def __init__(self, number: _Optional[int] = ..., rollout: _Optional[_Union[Rollout, str]] = ..., spare_cores: _Optional[float] = ..., old_space_seconds: _Optional[int] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., promote: _Optional[bool] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("share", "steps", "every", "shadow", "most_errors", "largest_p99_ratio")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    MOST_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_P99_RATIO_FIELD_NUMBER: _ClassVar[int]
    share: float
    steps: _containers.RepeatedScalarFieldContainer[float]
    every: _duration_pb2.Duration
    shadow: bool
    most_errors: float
    largest_p99_ratio: float
    def __init__(self, share: _Optional[float] = ..., steps: _Optional[_Iterable[float]] = ..., every: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shadow: _Optional[bool] = ..., most_errors: _Optional[float] = ..., largest_p99_ratio: _Optional[float] = ...) -> None: ...

class WatchCanaryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchCanaryResponse(_message.Message):
    __slots__ = ("release", "state", "canary", "message", "old_pair", "new_pair", "compared", "overlap", "rank_correlation", "skipped", "evidence", "stops_at")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OLD_PAIR_FIELD_NUMBER: _ClassVar[int]
    NEW_PAIR_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    RANK_CORRELATION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    STOPS_AT_FIELD_NUMBER: _ClassVar[int]
    release: int
    state: CanaryState
    canary: Canary
    message: str
    old_pair: CanaryPair
    new_pair: CanaryPair
    compared: int
    overlap: float
    rank_correlation: float
    skipped: int
    evidence: _containers.ScalarMap[str, float]
    stops_at: float
    def __init__(self, release: _Optional[int] = ..., state: _Optional[_Union[CanaryState, str]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., message: _Optional[str] = ..., old_pair: _Optional[_Union[CanaryPair, _Mapping]] = ..., new_pair: _Optional[_Union[CanaryPair, _Mapping]] = ..., compared: _Optional[int] = ..., overlap: _Optional[float] = ..., rank_correlation: _Optional[float] = ..., skipped: _Optional[int] = ..., evidence: _Optional[_Mapping[str, float]] = ..., stops_at: _Optional[float] = ...) -> None: ...

class CanaryPair(_message.Message):
    __slots__ = ("queries", "errors", "empty", "p50", "p99", "score", "sessions", "approved", "rejected")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    queries: int
    errors: int
    empty: int
    p50: float
    p99: float
    score: float
    sessions: int
    approved: int
    rejected: int
    def __init__(self, queries: _Optional[int] = ..., errors: _Optional[int] = ..., empty: _Optional[int] = ..., p50: _Optional[float] = ..., p99: _Optional[float] = ..., score: _Optional[float] = ..., sessions: _Optional[int] = ..., approved: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("confirm", "to_release", "canary")
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    TO_RELEASE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    confirm: bool
    to_release: int
    canary: int
    def __init__(self, confirm: _Optional[bool] = ..., to_release: _Optional[int] = ..., canary: _Optional[int] = ...) -> None: ...

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

class ReportSyncRequest(_message.Message):
    __slots__ = ("release", "probes_passed", "seconds", "neighbours_kept", "failure")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PROBES_PASSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_KEPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    release: int
    probes_passed: bool
    seconds: float
    neighbours_kept: float
    failure: SyncFailure
    def __init__(self, release: _Optional[int] = ..., probes_passed: _Optional[bool] = ..., seconds: _Optional[float] = ..., neighbours_kept: _Optional[float] = ..., failure: _Optional[_Union[SyncFailure, str]] = ...) -> None: ...

class ReportSyncResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
