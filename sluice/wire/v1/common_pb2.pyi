from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SampleStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_STATUS_UNSPECIFIED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_PENDING: _ClassVar[SampleStatus]
    SAMPLE_STATUS_COMPLETED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_TRUNCATED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_ABORTED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_FAILED: _ClassVar[SampleStatus]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVALUATE: _ClassVar[Purpose]
SAMPLE_STATUS_UNSPECIFIED: SampleStatus
SAMPLE_STATUS_PENDING: SampleStatus
SAMPLE_STATUS_COMPLETED: SampleStatus
SAMPLE_STATUS_TRUNCATED: SampleStatus
SAMPLE_STATUS_ABORTED: SampleStatus
SAMPLE_STATUS_FAILED: SampleStatus
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVALUATE: Purpose

class WeightSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("ids", "rows", "bytes_per_id")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_ID_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    rows: int
    bytes_per_id: int
    def __init__(self, ids: _Optional[bytes] = ..., rows: _Optional[int] = ..., bytes_per_id: _Optional[int] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs", "seat", "images", "image_tokens", "routed_experts")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    response_length: int
    loss_mask: bytes
    rollout_log_probs: bytes
    weight_versions: _containers.RepeatedCompositeFieldContainer[WeightSpan]
    teacher_log_probs: bytes
    seat: str
    images: _containers.RepeatedScalarFieldContainer[str]
    image_tokens: int
    routed_experts: RoutedExperts
    def __init__(self, tokens: _Optional[bytes] = ..., response_length: _Optional[int] = ..., loss_mask: _Optional[bytes] = ..., rollout_log_probs: _Optional[bytes] = ..., weight_versions: _Optional[_Iterable[_Union[WeightSpan, _Mapping]]] = ..., teacher_log_probs: _Optional[bytes] = ..., seat: _Optional[str] = ..., images: _Optional[_Iterable[str]] = ..., image_tokens: _Optional[int] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("index", "tokens", "response_length", "response", "reward", "reward_parts", "loss_mask", "rollout_log_probs", "weight_versions", "status", "metadata_json", "error", "teacher_log_probs", "branches", "seat", "seat_rewards", "images", "image_tokens", "routed_experts")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SeatRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SEAT_REWARDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: bytes
    response_length: int
    response: str
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    loss_mask: bytes
    rollout_log_probs: bytes
    weight_versions: _containers.RepeatedCompositeFieldContainer[WeightSpan]
    status: SampleStatus
    metadata_json: str
    error: str
    teacher_log_probs: bytes
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    seat: str
    seat_rewards: _containers.ScalarMap[str, float]
    images: _containers.RepeatedScalarFieldContainer[str]
    image_tokens: int
    routed_experts: RoutedExperts
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[bytes] = ..., response_length: _Optional[int] = ..., response: _Optional[str] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., loss_mask: _Optional[bytes] = ..., rollout_log_probs: _Optional[bytes] = ..., weight_versions: _Optional[_Iterable[_Union[WeightSpan, _Mapping]]] = ..., status: _Optional[_Union[SampleStatus, str]] = ..., metadata_json: _Optional[str] = ..., error: _Optional[str] = ..., teacher_log_probs: _Optional[bytes] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., seat: _Optional[str] = ..., seat_rewards: _Optional[_Mapping[str, float]] = ..., images: _Optional[_Iterable[str]] = ..., image_tokens: _Optional[int] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("lease_id", "lease_attempt", "purpose", "group_id", "epoch", "dataset", "row", "prompt_json", "label_json", "metadata_json", "tools_json", "version", "images")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_JSON_FIELD_NUMBER: _ClassVar[int]
    LABEL_JSON_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_attempt: int
    purpose: Purpose
    group_id: int
    epoch: int
    dataset: str
    row: int
    prompt_json: str
    label_json: str
    metadata_json: str
    tools_json: str
    version: int
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_id: _Optional[str] = ..., lease_attempt: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., group_id: _Optional[int] = ..., epoch: _Optional[int] = ..., dataset: _Optional[str] = ..., row: _Optional[int] = ..., prompt_json: _Optional[str] = ..., label_json: _Optional[str] = ..., metadata_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., version: _Optional[int] = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "media_type", "width", "height", "data", "lease_id")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    digest: str
    media_type: str
    width: int
    height: int
    data: bytes
    lease_id: str
    def __init__(self, digest: _Optional[str] = ..., media_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., data: _Optional[bytes] = ..., lease_id: _Optional[str] = ...) -> None: ...

class SampleGroup(_message.Message):
    __slots__ = ("prompt", "samples", "failure")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    failure: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("key", "data", "last", "size")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    key: int
    data: bytes
    last: bool
    size: int
    def __init__(self, key: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., size: _Optional[int] = ...) -> None: ...
