from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UpdatePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_PHASE_UNSPECIFIED: _ClassVar[UpdatePhase]
    UPDATE_PHASE_PREPARE: _ClassVar[UpdatePhase]
    UPDATE_PHASE_PAUSE: _ClassVar[UpdatePhase]
    UPDATE_PHASE_TRANSFER: _ClassVar[UpdatePhase]
    UPDATE_PHASE_VERIFY: _ClassVar[UpdatePhase]
    UPDATE_PHASE_RESUME: _ClassVar[UpdatePhase]
UPDATE_PHASE_UNSPECIFIED: UpdatePhase
UPDATE_PHASE_PREPARE: UpdatePhase
UPDATE_PHASE_PAUSE: UpdatePhase
UPDATE_PHASE_TRANSFER: UpdatePhase
UPDATE_PHASE_VERIFY: UpdatePhase
UPDATE_PHASE_RESUME: UpdatePhase

class Member(_message.Message):
    __slots__ = ("role", "name", "attempt", "index", "address", "world_size", "version", "info", "protocol", "devices", "starting_seconds")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    STARTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    attempt: int
    index: int
    address: str
    world_size: int
    version: int
    info: _containers.ScalarMap[str, str]
    protocol: int
    devices: int
    starting_seconds: float
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., address: _Optional[str] = ..., world_size: _Optional[int] = ..., version: _Optional[int] = ..., info: _Optional[_Mapping[str, str]] = ..., protocol: _Optional[int] = ..., devices: _Optional[int] = ..., starting_seconds: _Optional[float] = ...) -> None: ...

class MemberMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "sources")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    hello: Member
    heartbeat: Heartbeat
    sources: _containers.ScalarMap[str, int]
    def __init__(self, hello: _Optional[_Union[Member, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., sources: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "version", "gauges", "loaded", "episode_pods")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    EPISODE_PODS_FIELD_NUMBER: _ClassVar[int]
    state: str
    version: int
    gauges: _containers.ScalarMap[str, float]
    loaded: StoredWeights
    episode_pods: EpisodePodDemand
    def __init__(self, state: _Optional[str] = ..., version: _Optional[int] = ..., gauges: _Optional[_Mapping[str, float]] = ..., loaded: _Optional[_Union[StoredWeights, _Mapping]] = ..., episode_pods: _Optional[_Union[EpisodePodDemand, _Mapping]] = ...) -> None: ...

class EpisodePodDemand(_message.Message):
    __slots__ = ("waiting", "joined")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    waiting: _containers.RepeatedCompositeFieldContainer[ImageDemand]
    joined: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, waiting: _Optional[_Iterable[_Union[ImageDemand, _Mapping]]] = ..., joined: _Optional[_Iterable[str]] = ...) -> None: ...

class ImageDemand(_message.Message):
    __slots__ = ("role", "image", "pods")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    role: str
    image: str
    pods: int
    def __init__(self, role: _Optional[str] = ..., image: _Optional[str] = ..., pods: _Optional[int] = ...) -> None: ...

class EpisodePodState(_message.Message):
    __slots__ = ("pod", "image", "image_id", "error")
    POD_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    pod: str
    image: str
    image_id: str
    error: str
    def __init__(self, pod: _Optional[str] = ..., image: _Optional[str] = ..., image_id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class EpisodePodsRequest(_message.Message):
    __slots__ = ("states",)
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: EpisodePodStates
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[EpisodePodStates, _Mapping]] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.MessageMap[str, EpisodePodStates]
    def __init__(self, states: _Optional[_Mapping[str, EpisodePodStates]] = ...) -> None: ...

class EpisodePodStates(_message.Message):
    __slots__ = ("pods",)
    PODS_FIELD_NUMBER: _ClassVar[int]
    pods: _containers.RepeatedCompositeFieldContainer[EpisodePodState]
    def __init__(self, pods: _Optional[_Iterable[_Union[EpisodePodState, _Mapping]]] = ...) -> None: ...

class EpisodePodsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDemand]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDemand, _Mapping]]] = ...) -> None: ...

class WorkerDemand(_message.Message):
    __slots__ = ("name", "attempt", "demand")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    name: str
    attempt: int
    demand: EpisodePodDemand
    def __init__(self, name: _Optional[str] = ..., attempt: _Optional[int] = ..., demand: _Optional[_Union[EpisodePodDemand, _Mapping]] = ...) -> None: ...

class StoredWeights(_message.Message):
    __slots__ = ("version", "attempt")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    version: int
    attempt: int
    def __init__(self, version: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("admitted", "version", "dropped", "heartbeat_seconds", "sources", "protocol", "published", "episode_pods")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    EPISODE_PODS_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    version: int
    dropped: str
    heartbeat_seconds: float
    sources: _containers.ScalarMap[str, int]
    protocol: int
    published: StoredWeights
    episode_pods: _containers.RepeatedCompositeFieldContainer[EpisodePodState]
    def __init__(self, admitted: _Optional[bool] = ..., version: _Optional[int] = ..., dropped: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., sources: _Optional[_Mapping[str, int]] = ..., protocol: _Optional[int] = ..., published: _Optional[_Union[StoredWeights, _Mapping]] = ..., episode_pods: _Optional[_Iterable[_Union[EpisodePodState, _Mapping]]] = ...) -> None: ...

class AddressBookRequest(_message.Message):
    __slots__ = ("role", "at_least", "attempt", "wait_seconds")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    at_least: int
    attempt: int
    wait_seconds: float
    def __init__(self, role: _Optional[str] = ..., at_least: _Optional[int] = ..., attempt: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class AddressBookResponse(_message.Message):
    __slots__ = ("epoch", "members")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("source", "attempt", "version", "joiners_only", "published")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOINERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    source: str
    attempt: int
    version: int
    joiners_only: bool
    published: bool
    def __init__(self, source: _Optional[str] = ..., attempt: _Optional[int] = ..., version: _Optional[int] = ..., joiners_only: _Optional[bool] = ..., published: _Optional[bool] = ...) -> None: ...

class EngineMember(_message.Message):
    __slots__ = ("member", "generation")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    member: Member
    generation: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class UpdatePlan(_message.Message):
    __slots__ = ("epoch", "version", "engines")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineMember]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineMember, _Mapping]]] = ...) -> None: ...

class PhaseReport(_message.Message):
    __slots__ = ("source", "attempt", "version", "phase", "engines")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    source: str
    attempt: int
    version: int
    phase: UpdatePhase
    engines: _containers.RepeatedCompositeFieldContainer[EngineReport]
    def __init__(self, source: _Optional[str] = ..., attempt: _Optional[int] = ..., version: _Optional[int] = ..., phase: _Optional[_Union[UpdatePhase, str]] = ..., engines: _Optional[_Iterable[_Union[EngineReport, _Mapping]]] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("engine", "attempt", "generation", "error")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    engine: str
    attempt: int
    generation: int
    error: str
    def __init__(self, engine: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class PhaseAck(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gone: _Optional[_Iterable[str]] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ("joiners_to",)
    JOINERS_TO_FIELD_NUMBER: _ClassVar[int]
    joiners_to: int
    def __init__(self, joiners_to: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("member", "state", "admitted", "generation", "seconds_since_heartbeat", "gauges", "last_error")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    admitted: bool
    generation: int
    seconds_since_heartbeat: float
    gauges: _containers.ScalarMap[str, float]
    last_error: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., state: _Optional[str] = ..., admitted: _Optional[bool] = ..., generation: _Optional[int] = ..., seconds_since_heartbeat: _Optional[float] = ..., gauges: _Optional[_Mapping[str, float]] = ..., last_error: _Optional[str] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("epoch", "version", "entries", "device_seconds")
    class DeviceSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    device_seconds: _containers.ScalarMap[str, float]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., device_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...
