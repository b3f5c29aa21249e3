"""RLJob and RLEnginePool v1alpha1: the objects that users write."""

from sluice.api.groups.algorithm import Algorithm
from sluice.api.groups.data import (
    Data,
    Evaluation,
    EvaluationDataset,
    EvaluationSampling,
    ModelSource,
    PromptSource,
    Reward,
)
from sluice.api.groups.rollout import Rollout, Sampling
from sluice.api.groups.storage import Checkpoint
from sluice.api.groups.trainer import Optimizer, Parallelism, Trainer
from sluice.api.groups.weight_sync import WeightSync
from sluice.api.job import KIND, MANAGER, PLURAL, SHORT_NAME, ObjectMeta, RLJob, RLJobSpec
from sluice.api.pool import RLEnginePool, RLEnginePoolSpec, RLEnginePoolStatus
from sluice.api.schema.base import API_VERSION, GROUP, VERSION, Model, manifest, quantity_value
from sluice.api.schema.load import (
    ManifestError,
    load_job,
    load_pool,
    parse_documents,
    parse_job,
    parse_pool,
    read_documents,
)
from sluice.api.status import (
    FINISHED,
    ROLES,
    Condition,
    ConditionType,
    GangStatus,
    GoodputStatus,
    LastFailure,
    PodGroupStatus,
    RLJobStatus,
    RoleName,
    RoleStatus,
)

__all__ = [
    "API_VERSION",
    "FINISHED",
    "GROUP",
    "KIND",
    "MANAGER",
    "PLURAL",
    "ROLES",
    "SHORT_NAME",
    "VERSION",
    "Algorithm",
    "Checkpoint",
    "Condition",
    "ConditionType",
    "Data",
    "Evaluation",
    "EvaluationDataset",
    "EvaluationSampling",
    "GangStatus",
    "GoodputStatus",
    "LastFailure",
    "ManifestError",
    "Model",
    "ModelSource",
    "ObjectMeta",
    "Optimizer",
    "Parallelism",
    "PodGroupStatus",
    "PromptSource",
    "RLEnginePool",
    "RLEnginePoolSpec",
    "RLEnginePoolStatus",
    "RLJob",
    "RLJobSpec",
    "RLJobStatus",
    "Reward",
    "RoleName",
    "RoleStatus",
    "Rollout",
    "Sampling",
    "Trainer",
    "WeightSync",
    "load_job",
    "load_pool",
    "manifest",
    "parse_documents",
    "parse_job",
    "parse_pool",
    "quantity_value",
    "read_documents",
]
