"""Names, labels and paths that every room relies on (docs/contracts.md)."""

from __future__ import annotations

from typing import Any

from sluice import __version__
from sluice.api import API_VERSION, GROUP, KIND, RLJob
from sluice.samples import episode_protocol

LABEL_JOB = f"{GROUP}/job-name"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REPLICA = f"{GROUP}/replica"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_INDEX = f"{GROUP}/index"
LABEL_GROUP = f"{GROUP}/pod-group"
"""On a pod that queues: what is admitted as one with it."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""On a pod that Kueue queues: its LocalQueue."""
GATES_OF_KUEUE = ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
ENDS_GROUP = "kueue.x-k8s.io/retriable-in-group"
"""Annotation of a pod; `false`: its group has ended when none of its pods runs,
and gives its quota back."""
KEPT_BY_KUEUE = "kueue.x-k8s.io/managed"
"""Finalizer of the pods that Kueue queues."""
LABEL_UID = f"{GROUP}/job-uid"
"""On an object that its job does not own, since it outlives the job or a Sandbox owns it: whose it
is."""
POD_GROUP = "PodGroup"
WORKLOAD = "Workload"  # Kueue's object for a group of pods
SANDBOX, SANDBOX_GROUP = "Sandbox", "agents.x-k8s.io"
"""Kind and API group of kubernetes-sigs' agent-sandbox."""
GENERATE = f"{GROUP}/generate"
"""Annotation of a Secret: what it is filled with when it is created. The planner knows no key; the
cluster does."""
GENERATE_TOKEN, GENERATE_EPISODE_TOKEN, GENERATE_TLS = "token", "episode-token", "tls"

ROOT = "/sluice"
MODEL_DIR = f"{ROOT}/model"
DATA_DIR = f"{ROOT}/data"
CONFIG_DIR = f"{ROOT}/config"
CHECKPOINT_DIR = f"{ROOT}/checkpoint"
RUN_DIR = f"{ROOT}/run"
CACHE_DIR = f"{ROOT}/cache"
STORAGE_DIR = f"{ROOT}/storage"
ROWS_DIR = f"{ROOT}/rows"
TLS_DIR = f"{ROOT}/tls"
CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints in the run's own directory, on a claim as on a laptop."""
JOB_FILE = "rljob.json"
DEFAULTS_FILE = "defaults.json"
TOKEN_KEY = "token"  # noqa: S105 - the name of a key in a Secret
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
EPISODES = EPISODE, VERIFIER = episode_protocol.EPISODE, episode_protocol.VERIFIER
"""Roles of the pods that play episodes, and judge them."""
EPISODE_DIR = f"{ROOT}/episode"
LABEL_NUMBER = f"{GROUP}/number"
"""On an episode's pod: how many its place has had."""


def config_name(job: RLJob) -> str:
    return f"{job.metadata.name}-config"


def token_name(job: RLJob) -> str:
    return _own_name(job, "token")


def episode_token_name(job: RLJob) -> str:
    """The token with which episode pods join a worker; it opens nothing else."""
    return _own_name(job, "episode-token")


def tls_name(job: RLJob) -> str:
    return _own_name(job, "tls")


def _own_name(job: RLJob, what: str) -> str:
    """With the beginning of the job's uid: of what is never read (Secrets),
    or outlives its job (checkpoints).

    One that is there already is then this job's, and not that of a deleted job of the same name.
    """
    return "-".join(filter(None, (job.metadata.name, what, job.metadata.uid[:8])))


def tls_server_name(job: RLJob) -> str:
    return server_name(job.metadata.name, job.metadata.namespace)


def server_name(job: str, namespace: str) -> str:
    """The name in the certificate of a job's servers. It is no name in DNS: addresses in a cluster
    come and go.
    """
    return f"{job}.{namespace}.sluice"


def rendezvous_name(job: RLJob) -> str:
    return f"{job.metadata.name}-rendezvous"


def network_policy_name(job: RLJob) -> str:
    return f"{job.metadata.name}-ingress"


def episode_policy_name(job: RLJob, role: str = EPISODE) -> str:
    """Of the pods of one of EPISODES."""
    return f"{job.metadata.name}-{role}s"


def rollout_budget_name(job: RLJob) -> str:
    return f"{job.metadata.name}-rollout"


def storage_name(job: RLJob) -> str:
    return f"{job.metadata.name}-buffer"


def checkpoint_name(job: RLJob) -> str:
    """Claim for the checkpoints, which may outlive the job: a later job of its name gets a claim of
    its own.
    """
    return _own_name(job, "checkpoint")


def gpus_name(job: RLJob, node: int) -> str:
    """Claim of the GPUs that trainer pod `node` shares with engines."""
    return f"{job.metadata.name}-gpus-{node}"


def engines_name(job: RLJob) -> str:
    """Headless service that gives the pods of a many-pod engine a name in DNS."""
    return f"{job.metadata.name}-engines"


def group_name(job: RLJob, number: int) -> str:
    """The name of a group that queues and schedulers of gangs admit as one. Pods of a deleted job
    of the same name are in another.
    """
    return f"{_own_name(job, 'group')}-{number}"


def attempt_name(job: RLJob, role: str, replica: int, attempt: int) -> str:
    """One attempt of a gang."""
    return f"{job.metadata.name}-{role}-{replica}-{attempt}"


def pod_name(job: RLJob, role: str, replica: int, attempt: int, index: int) -> str:
    return f"{attempt_name(job, role, replica, attempt)}-{index}"


def selector(job: RLJob, role: str | None = None) -> dict[str, str]:
    labels = {LABEL_JOB: job.metadata.name}
    return labels | {LABEL_ROLE: role} if role else labels


def leaders(job: RLJob) -> dict[str, str]:
    """The first pod of each engine: what autoscalers count."""
    return selector(job, "rollout") | {LABEL_INDEX: "0"}


def selector_text(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def recommended_labels(job: RLJob, role: str | None = None) -> dict[str, str]:
    """Kubernetes' recommended labels, by which people and their tools group objects.

    The name is not `sluice`: by that the network policies of jobs know the operator.
    """
    labels = {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/instance": job.metadata.name,
        "app.kubernetes.io/version": __version__.replace("+", "_"),
        "app.kubernetes.io/part-of": "sluice",
        "app.kubernetes.io/managed-by": "sluice",
    }
    return labels | ({"app.kubernetes.io/component": role} if role else {})


def own_labels(labels: dict[str, str]) -> dict[str, str]:
    """Those by which the operator knows an object."""
    return {key: value for key, value in labels.items() if key.startswith(f"{GROUP}/")}


def retained_metadata(job: RLJob, name: str) -> dict[str, Any]:
    """Object metadata without an owner: the object stays when the job is deleted."""
    fields = metadata(job, name, selector(job) | {LABEL_UID: job.metadata.uid})
    fields.pop("ownerReferences", None)
    return fields


def metadata(job: RLJob, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Object metadata with the job's labels; owned by the job,
    so that the cluster cleans up after it.
    """
    labels = labels or selector(job)
    fields: dict[str, Any] = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": recommended_labels(job, labels.get(LABEL_ROLE)) | labels,
    }
    if job.metadata.uid:
        fields["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.metadata.name,
                "uid": job.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return fields
