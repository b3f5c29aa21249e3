"""Names, labels and paths that all components rely on (docs/contracts.md)."""

from __future__ import annotations

from typing import Any

from sluice import __version__
from sluice.api import GROUP, RLEnginePool, RLJob
from sluice.samples import episode_protocol

LABEL_JOB = f"{GROUP}/job-name"
# On the objects of an RLEnginePool, and on the pods of jobs that use it.
LABEL_POOL = f"{GROUP}/pool"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REPLICA = f"{GROUP}/replica"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_INDEX = f"{GROUP}/index"
# The group with which a queue admits a pod.
LABEL_GROUP = f"{GROUP}/pod-group"
# The LocalQueue of a pod that Kueue queues.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_PRIORITY = "kueue.x-k8s.io/priority-class"
GATES_OF_KUEUE = ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
# Annotation of a pod; `false` means that its group ends, and returns its quota, once no pod of the
# group runs.
ENDS_GROUP = "kueue.x-k8s.io/retriable-in-group"
# Finalizer of the pods that Kueue queues.
KEPT_BY_KUEUE = "kueue.x-k8s.io/managed"
# The job of an object that is not owned by it, because it outlives the job or a Sandbox owns it.
LABEL_UID = f"{GROUP}/job-uid"
POD_GROUP = "PodGroup"
WORKLOAD = "Workload"  # Kueue's object for a group of pods
# Kind and API group of kubernetes-sigs' agent-sandbox.
SANDBOX, SANDBOX_GROUP = "Sandbox", "agents.x-k8s.io"
# Annotation of a Secret that says what to fill it with. The planner has no key, so the cluster
# fills the Secret when it creates it.
GENERATE = f"{GROUP}/generate"
GENERATE_TOKEN, GENERATE_EPISODE_TOKEN, GENERATE_TLS = "token", "episode-token", "tls"
GENERATE_POOL_KEY, GENERATE_POOL_CREDENTIAL = "pool-key", "pool-credential"

# Annotation of an object with a hash of what it was made from.
SPEC_HASH = f"{GROUP}/spec-hash"

ROOT = "/sluice"
MODEL_DIR = f"{ROOT}/model"
DATA_DIR = f"{ROOT}/data"
CONFIG_DIR = f"{ROOT}/config"
CHECKPOINT_DIR = f"{ROOT}/checkpoint"
RUN_DIR = f"{ROOT}/run"
CACHE_DIR = f"{ROOT}/cache"
WEIGHTS_DIR = f"{ROOT}/weights"
DOWNLOADS_DIR = f"{ROOT}/downloads"
FETCH = "fetch"  # init container that fetches the files of URIs
STORAGE_DIR = f"{ROOT}/storage"
ROWS_DIR = f"{ROOT}/rows"
TLS_DIR = f"{ROOT}/tls"
CHECKPOINTS = "checkpoints"  # directory in the run directory, on a claim as on a laptop
JOB_FILE = "rljob.json"
URIS_FILE = "uris.json"  # URIs of the links in the manifest
DEFAULTS_FILE = "defaults.json"
TOKEN_KEY = "token"  # noqa: S105 - the name of a key in a Secret
POOL_KEY = "key"  # the name of a key in a Secret
TLS_CA, TLS_CERTIFICATE, TLS_KEY = "ca.crt", "tls.crt", "tls.key"

PORTS = {
    "rendezvous": 7700,
    "buffer": 7701,
    "gateway": 7702,
    "model": 7703,
    "http": 30000,
    "master": 29500,
    "metrics": 9400,
}
# Role of the pods of an RLEnginePool.
ENGINE = "engine"
# Roles of the pods that play episodes, and of those that judge them.
EPISODES = EPISODE, VERIFIER = episode_protocol.EPISODE, episode_protocol.VERIFIER
EPISODE_DIR = f"{ROOT}/episode"
# On an episode's pod: how many pods its slot has had.
LABEL_NUMBER = f"{GROUP}/number"
# Annotation: the image of an episode's pod, if its row names it.
ROW_IMAGE = f"{GROUP}/row-image"
# The object that owns others. Functions that take one name objects of jobs and pools alike.
Owner = RLJob | RLEnginePool


def config_name(job: RLJob) -> str:
    return f"{job.metadata.name}-config"


def token_name(job: RLJob) -> str:
    return _unique_name(job, "token")


def episode_token_name(job: RLJob) -> str:
    """Return the name of the Secret with which episode pods join a worker, and only that."""
    return _unique_name(job, "episode-token")


def tls_name(job: RLJob) -> str:
    return _unique_name(job, "tls")


def pool_key_name(pool: RLEnginePool) -> str:
    """Return the name of the Secret with the key of a pool's engines."""
    return _unique_name(pool, GENERATE_POOL_KEY)


def pool_credential_name(job: RLJob) -> str:
    """Return the name of the Secret with which the job calls the engines of its pool."""
    return _unique_name(job, "pool")


def _unique_name(owner: Owner, what: str) -> str:
    """Return a name with the beginning of the owner's uid.

    It is for objects that are never read (Secrets) or outlive their job (checkpoints): if one
    exists already, it is this owner's and not that of a deleted one of the same name.
    """
    return "-".join(filter(None, (owner.metadata.name, what, owner.metadata.uid[:8])))


def tls_server_name(job: RLJob) -> str:
    return server_name(job.metadata.name, job.metadata.namespace)


def server_name(job: str, namespace: str) -> str:
    """Return the name in the certificate of a job's servers.

    It is not a DNS name, because addresses in a cluster come and go.
    """
    return f"{job}.{namespace}.sluice"


def rendezvous_name(job: RLJob) -> str:
    return f"{job.metadata.name}-rendezvous"


def network_policy_name(job: RLJob) -> str:
    return f"{job.metadata.name}-ingress"


def pool_policy_name(job: RLJob) -> str:
    """Return the name of the network policy that lets the engines of a pool reach the trainer."""
    return f"{job.metadata.name}-pool"


def episode_policy_name(job: RLJob, role: str = EPISODE) -> str:
    """Return the name of the network policy for pods of one of EPISODES."""
    return f"{job.metadata.name}-{role}s"


def rollout_budget_name(job: RLJob) -> str:
    return f"{job.metadata.name}-rollout"


def storage_name(job: RLJob) -> str:
    return f"{job.metadata.name}-buffer"


def checkpoint_name(job: RLJob) -> str:
    """Return the name of the claim for checkpoints.

    The claim may outlive the job, so a later job of the same name gets another claim.
    """
    return _unique_name(job, "checkpoint")


def gpus_name(job: RLJob, node: int) -> str:
    """Return the name of the claim for the GPUs that trainer pod `node` shares with engines."""
    return f"{job.metadata.name}-gpus-{node}"


def engines_name(owner: Owner) -> str:
    """Return the name of the headless Service that gives engines' pods DNS names.

    A job has it if an engine consists of several pods.
    """
    return f"{owner.metadata.name}-engines"


def pool_engine_name(pool: str) -> str:
    """Return the name of a pool's StatefulSet and, without a number, of its pods."""
    return f"{pool}-{ENGINE}"


def pool_engine_address(namespace: str, pool: str, number: int) -> str:
    """Return host:port of an engine of a pool."""
    return f"{pool_engine_name(pool)}-{number}.{pool}-engines.{namespace}.svc:{PORTS['http']}"


def group_name(job: RLJob, number: int) -> str:
    """Return the name of a job's group of pods, which differs from that of a deleted namesake."""
    return f"{_unique_name(job, 'group')}-{number}"


def attempt_name(job: RLJob, role: str, replica: int, attempt: int) -> str:
    """Return the name of one attempt of a gang."""
    return f"{job.metadata.name}-{role}-{replica}-{attempt}"


def pod_name(job: RLJob, role: str, replica: int, attempt: int, index: int) -> str:
    return f"{attempt_name(job, role, replica, attempt)}-{index}"


def selector(owner: Owner, role: str | None = None) -> dict[str, str]:
    label = LABEL_JOB if isinstance(owner, RLJob) else LABEL_POOL
    labels = {label: owner.metadata.name}
    return labels | {LABEL_ROLE: role} if role else labels


def pool_labels(job: RLJob) -> dict[str, str]:
    """Return the label of a job's pool, for pods that the pool's engines talk to."""
    pool = job.spec.rollout.pool
    return {LABEL_POOL: pool} if pool else {}


def leaders(job: RLJob) -> dict[str, str]:
    """Return the labels of the first pod of each engine, which autoscalers count."""
    return selector(job, "rollout") | {LABEL_INDEX: "0"}


def selector_text(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def recommended_labels(owner: Owner, role: str | None = None) -> dict[str, str]:
    """Return Kubernetes' recommended labels, by which people and tools group objects.

    The name is not `sluice`, because the jobs' network policies recognize the operator by it.
    """
    labels = {
        "app.kubernetes.io/name": owner.kind.lower(),
        "app.kubernetes.io/instance": owner.metadata.name,
        "app.kubernetes.io/version": __version__.replace("+", "_"),
        "app.kubernetes.io/part-of": "sluice",
        "app.kubernetes.io/managed-by": "sluice",
    }
    return labels | ({"app.kubernetes.io/component": role} if role else {})


def own_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return the labels by which the operator recognizes an object."""
    return {key: value for key, value in labels.items() if key.startswith(f"{GROUP}/")}


def retained_metadata(job: RLJob, name: str) -> dict[str, Any]:
    """Return metadata of an object without an owner, which stays when the job is deleted."""
    fields = metadata(job, name, selector(job) | {LABEL_UID: job.metadata.uid})
    fields.pop("ownerReferences", None)
    return fields


def metadata(owner: Owner, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return metadata of an object with an owner, so that the cluster deletes it with the owner.

    labels: instead of the owner's selector.
    """
    labels = labels or selector(owner)
    fields: dict[str, Any] = {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": recommended_labels(owner, labels.get(LABEL_ROLE)) | labels,
    }
    if owner.metadata.uid:
        fields["ownerReferences"] = [
            {
                "apiVersion": owner.api_version,
                "kind": owner.kind,
                "name": owner.metadata.name,
                "uid": owner.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return fields
