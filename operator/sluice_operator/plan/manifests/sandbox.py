"""The Sandbox that makes an episode's pod, with kubernetes-sigs' agent-sandbox.

A job asks for it with rollout.environment.sandbox. The operator creates a Sandbox rather than a
SandboxClaim for a platform's SandboxTemplate. A claim takes a warm pod as it is: variables of the
claim make it start cold, they cannot come from a Secret, and a claim cannot add a container. So it
would have no sidecar, which joins the worker and holds the model's key; and the template's
NetworkPolicy would cut the pod off from its worker. The pod template of a Sandbox takes sluice's
whole pod, including the labels by which policies, people and the operator recognize it. sluice
keeps the warm pool itself.

A Sandbox keeps one pod of its name running. It leaves a pod whose containers have ended
(`restartPolicy: Never`, an episode is played once), but creates a deleted pod again. So a pod is
ended by deleting its Sandbox. `shutdownTime` is not used: pods may wait long for an episode, and an
episode that is played is bounded by the worker's limits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sluice.api import RLJob
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject, Observed

# Versions of the Sandbox API, the preferred one first. sluice's objects are the same in both.
VERSIONS = ("v1beta1", "v1alpha1")


def uses_sandboxes(job: RLJob) -> bool:
    """Return True if Sandboxes should make the job's episode pods."""
    environment = job.spec.rollout.environment
    return environment is not None and environment.sandbox is not None


def is_missing(job: RLJob, observed: Observed) -> bool:
    """Return True if the job asks for Sandboxes and its cluster does not serve them.

    A laptop runs episodes without Sandboxes.
    """
    in_cluster = observed.operator_namespace is not None
    return in_cluster and uses_sandboxes(job) and not observed.sandbox_version


def best_version(served: Collection[str]) -> str:
    """Return the version to use of those that an API server serves; empty if none is known."""
    return next((version for version in VERSIONS if version in served), "")


def sandbox(job: RLJob, pod: KubeObject, version: str) -> KubeObject:
    """Return the Sandbox that makes and owns this pod.

    The Sandbox owns the pod, so a label tells which job the pod belongs to.
    """
    metadata = pod["metadata"]
    labels = {**metadata["labels"], names.LABEL_UID: job.metadata.uid}
    shared = {"labels": labels}
    shared |= {"annotations": metadata["annotations"]} if metadata.get("annotations") else {}
    own_keys = ("name", "namespace", "ownerReferences")
    return {
        "apiVersion": f"{names.SANDBOX_GROUP}/{version}",
        "kind": names.SANDBOX,
        "metadata": {key: metadata[key] for key in own_keys if key in metadata} | shared,
        "spec": {"podTemplate": {"metadata": shared, "spec": pod["spec"]}},
    }


def without_pod(observed: Observed) -> tuple[KubeObject, ...]:
    """Return the Sandboxes that have no pod now. The planner treats them as pods that wait."""
    with_pod = {podstate.sandbox(pod) for pod in observed.pods}
    return tuple(stored for stored in observed.sandboxes if podstate.name(stored) not in with_pod)


def with_sandboxes(
    job: RLJob, pods: Sequence[KubeObject], observed: Observed
) -> tuple[KubeObject, ...]:
    """Return the objects to create for these pods: Sandboxes, or the pods themselves."""
    if not uses_sandboxes(job):
        return tuple(pods)
    return tuple(sandbox(job, pod, observed.sandbox_version) for pod in pods)
