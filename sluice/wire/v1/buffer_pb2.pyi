from sluice.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Caller(_message.Message):
    __slots__ = ("name", "attempt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    attempt: int
    def __init__(self, name: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class LeasePromptsRequest(_message.Message):
    __slots__ = ("worker", "max_groups", "version", "wait_seconds", "request", "held", "session")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    worker: Caller
    max_groups: int
    version: int
    wait_seconds: float
    request: int
    held: _containers.RepeatedCompositeFieldContainer[Lease]
    session: int
    def __init__(self, worker: _Optional[_Union[Caller, _Mapping]] = ..., max_groups: _Optional[int] = ..., version: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., request: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., session: _Optional[int] = ...) -> None: ...

class LeasedGroup(_message.Message):
    __slots__ = ("prompt", "lease_seconds", "partial")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    prompt: _common_pb2.Prompt
    lease_seconds: float
    partial: _common_pb2.SampleGroup
    def __init__(self, prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., partial: _Optional[_Union[_common_pb2.SampleGroup, _Mapping]] = ...) -> None: ...

class LeasePromptsResponse(_message.Message):
    __slots__ = ("group", "exhausted")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    group: _common_pb2.Chunk
    exhausted: bool
    def __init__(self, group: _Optional[_Union[_common_pb2.Chunk, _Mapping]] = ..., exhausted: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "lease_attempt")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_attempt: int
    def __init__(self, lease_id: _Optional[str] = ..., lease_attempt: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "leases")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker: Caller
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, worker: _Optional[_Union[Caller, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("drop",)
    DROP_FIELD_NUMBER: _ClassVar[int]
    drop: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, drop: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("key", "outcome", "message")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[SubmitResponse.Outcome]
        OUTCOME_STORED: _ClassVar[SubmitResponse.Outcome]
        OUTCOME_DUPLICATE: _ClassVar[SubmitResponse.Outcome]
        OUTCOME_FILTERED: _ClassVar[SubmitResponse.Outcome]
        OUTCOME_STALE: _ClassVar[SubmitResponse.Outcome]
        OUTCOME_REFUSED: _ClassVar[SubmitResponse.Outcome]
    OUTCOME_UNSPECIFIED: SubmitResponse.Outcome
    OUTCOME_STORED: SubmitResponse.Outcome
    OUTCOME_DUPLICATE: SubmitResponse.Outcome
    OUTCOME_FILTERED: SubmitResponse.Outcome
    OUTCOME_STALE: SubmitResponse.Outcome
    OUTCOME_REFUSED: SubmitResponse.Outcome
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: int
    outcome: SubmitResponse.Outcome
    message: str
    def __init__(self, key: _Optional[int] = ..., outcome: _Optional[_Union[SubmitResponse.Outcome, str]] = ..., message: _Optional[str] = ...) -> None: ...

class ReturnResponse(_message.Message):
    __slots__ = ("key", "accepted", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: int
    accepted: bool
    message: str
    def __init__(self, key: _Optional[int] = ..., accepted: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class TakeBatchRequest(_message.Message):
    __slots__ = ("trainer", "step", "data_parallel_size", "wait_seconds", "balance_tokens", "image_cost")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BALANCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_COST_FIELD_NUMBER: _ClassVar[int]
    trainer: Caller
    step: int
    data_parallel_size: int
    wait_seconds: float
    balance_tokens: float
    image_cost: float
    def __init__(self, trainer: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., balance_tokens: _Optional[float] = ..., image_cost: _Optional[float] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("group_id", "index", "length", "response_length", "trainable_tokens", "reward", "rank", "optimizer_step", "min_version", "max_version", "status")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    index: int
    length: int
    response_length: int
    trainable_tokens: int
    reward: float
    rank: int
    optimizer_step: int
    min_version: int
    max_version: int
    status: _common_pb2.SampleStatus
    def __init__(self, group_id: _Optional[int] = ..., index: _Optional[int] = ..., length: _Optional[int] = ..., response_length: _Optional[int] = ..., trainable_tokens: _Optional[int] = ..., reward: _Optional[float] = ..., rank: _Optional[int] = ..., optimizer_step: _Optional[int] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.SampleStatus, str]] = ...) -> None: ...

class TakeBatchResponse(_message.Message):
    __slots__ = ("state", "step", "sequences", "waiting_for", "wait_time_seconds", "checkpoint_wanted", "late_seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[TakeBatchResponse.State]
        STATE_READY: _ClassVar[TakeBatchResponse.State]
        STATE_WAITING: _ClassVar[TakeBatchResponse.State]
        STATE_EXHAUSTED: _ClassVar[TakeBatchResponse.State]
        STATE_FAILED: _ClassVar[TakeBatchResponse.State]
    STATE_UNSPECIFIED: TakeBatchResponse.State
    STATE_READY: TakeBatchResponse.State
    STATE_WAITING: TakeBatchResponse.State
    STATE_EXHAUSTED: TakeBatchResponse.State
    STATE_FAILED: TakeBatchResponse.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_WANTED_FIELD_NUMBER: _ClassVar[int]
    LATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: TakeBatchResponse.State
    step: int
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    waiting_for: str
    wait_time_seconds: float
    checkpoint_wanted: bool
    late_seconds: float
    def __init__(self, state: _Optional[_Union[TakeBatchResponse.State, str]] = ..., step: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., wait_time_seconds: _Optional[float] = ..., checkpoint_wanted: _Optional[bool] = ..., late_seconds: _Optional[float] = ...) -> None: ...

class GetShardRequest(_message.Message):
    __slots__ = ("trainer", "step", "rank", "data_parallel_size", "balance_tokens", "image_cost")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    BALANCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_COST_FIELD_NUMBER: _ClassVar[int]
    trainer: Caller
    step: int
    rank: int
    data_parallel_size: int
    balance_tokens: float
    image_cost: float
    def __init__(self, trainer: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., balance_tokens: _Optional[float] = ..., image_cost: _Optional[float] = ...) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("trainer", "step", "version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    trainer: Caller
    step: int
    version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, trainer: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CommitStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitCheckpointRequest(_message.Message):
    __slots__ = ("trainer", "step")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    trainer: Caller
    step: int
    def __init__(self, trainer: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class CommitCheckpointResponse(_message.Message):
    __slots__ = ("forgotten_groups",)
    FORGOTTEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    forgotten_groups: int
    def __init__(self, forgotten_groups: _Optional[int] = ...) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("trainer", "step", "vocab_size")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    trainer: Caller
    step: int
    vocab_size: int
    def __init__(self, trainer: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class RewindResponse(_message.Message):
    __slots__ = ("replay_steps",)
    REPLAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    replay_steps: int
    def __init__(self, replay_steps: _Optional[int] = ...) -> None: ...

class GetEvaluationsRequest(_message.Message):
    __slots__ = ("after_version", "wait_seconds", "wait_for_version")
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    after_version: int
    wait_seconds: float
    wait_for_version: int
    def __init__(self, after_version: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., wait_for_version: _Optional[int] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "dataset", "metrics", "examples", "seconds")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    dataset: str
    metrics: _containers.ScalarMap[str, float]
    examples: int
    seconds: float
    def __init__(self, version: _Optional[int] = ..., dataset: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., examples: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetEvaluationsResponse(_message.Message):
    __slots__ = ("evaluations", "pending_versions")
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    PENDING_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    evaluations: _containers.RepeatedCompositeFieldContainer[Evaluation]
    pending_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, evaluations: _Optional[_Iterable[_Union[Evaluation, _Mapping]]] = ..., pending_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class GetExamplesRequest(_message.Message):
    __slots__ = ("version", "dataset")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    version: int
    dataset: str
    def __init__(self, version: _Optional[int] = ..., dataset: _Optional[str] = ...) -> None: ...

class GetHeldOutRequest(_message.Message):
    __slots__ = ("dataset", "first")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    dataset: int
    first: int
    def __init__(self, dataset: _Optional[int] = ..., first: _Optional[int] = ...) -> None: ...

class GetImagesRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class PutImagesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFailuresRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("serial", "group_id", "dataset", "row", "leases", "reason", "time", "version")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    serial: int
    group_id: int
    dataset: str
    row: int
    leases: int
    reason: str
    time: float
    version: int
    def __init__(self, serial: _Optional[int] = ..., group_id: _Optional[int] = ..., dataset: _Optional[str] = ..., row: _Optional[int] = ..., leases: _Optional[int] = ..., reason: _Optional[str] = ..., time: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class GetFailuresResponse(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BufferStats(_message.Message):
    __slots__ = ("step", "total_steps", "version", "checkpoint_step", "trainer_attempt", "depth", "leases", "returned", "started", "admitted", "counters", "metrics", "evaluation", "policy_lag", "stored_bytes", "capacity_bytes", "epoch", "waiting_for", "failed", "under_way_bytes", "under_way_peak_bytes", "under_way_limit_bytes", "image_bytes", "images")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_LAG_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    version: int
    checkpoint_step: int
    trainer_attempt: int
    depth: int
    leases: int
    returned: int
    started: int
    admitted: int
    counters: _containers.ScalarMap[str, int]
    metrics: _containers.ScalarMap[str, float]
    evaluation: _containers.ScalarMap[str, float]
    policy_lag: float
    stored_bytes: int
    capacity_bytes: int
    epoch: int
    waiting_for: str
    failed: _containers.ScalarMap[str, int]
    under_way_bytes: int
    under_way_peak_bytes: int
    under_way_limit_bytes: int
    image_bytes: int
    images: int
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., version: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., trainer_attempt: _Optional[int] = ..., depth: _Optional[int] = ..., leases: _Optional[int] = ..., returned: _Optional[int] = ..., started: _Optional[int] = ..., admitted: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., evaluation: _Optional[_Mapping[str, float]] = ..., policy_lag: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., waiting_for: _Optional[str] = ..., failed: _Optional[_Mapping[str, int]] = ..., under_way_bytes: _Optional[int] = ..., under_way_peak_bytes: _Optional[int] = ..., under_way_limit_bytes: _Optional[int] = ..., image_bytes: _Optional[int] = ..., images: _Optional[int] = ...) -> None: ...
