"""The Sandbox that makes an episode's pod: kubernetes-sigs' agent-sandbox, where a job asks for it.

A Sandbox, and not a SandboxClaim of a platform's SandboxTemplate. A claim takes what is warm as it
is: its variables make it start cold, none of them can come from a Secret, and it can add no
container. So there is no way for the sidecar, which joins the worker and holds the key of the
model; and a template's own NetworkPolicy would shut the pod off from its worker. A Sandbox's pod
template takes the whole of our pod, its labels too, by which policies, people and the operator know
it; the warm pool is ours.

A Sandbox keeps one pod of its own name running. One whose containers have ended is left as it is
(`restartPolicy: Never` holds, an episode is played once), but one that is deleted is made anew. So
what ends a pod is the deletion of its Sandbox, which takes the pod along. No `shutdownTime`: pods
that wait for an episode may wait for long, and those that play one have the worker's own limits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sluice.api import RLJob
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject, Observed

VERSIONS = ("v1beta1", "v1alpha1")
"""Of its API, the best first: an object of ours is the same in both."""


def is_wanted(job: RLJob) -> bool:
    """The job's pods of episodes are to be made by Sandboxes."""
    environment = job.spec.rollout.environment
    return environment is not None and environment.sandbox is not None


def is_missing(job: RLJob, observed: Observed) -> bool:
    """The job asks for Sandboxes, and its cluster has none. On a laptop nobody asks."""
    in_cluster = observed.operator_namespace is not None
    return in_cluster and is_wanted(job) and not observed.sandbox_version


def best_version(served: Collection[str]) -> str:
    """The one of an API server's versions to speak; empty: it has none that we know."""
    return next((version for version in VERSIONS if version in served), "")


def sandbox(job: RLJob, pod: KubeObject, version: str) -> KubeObject:
    """The Sandbox that makes this pod, and owns it: whose pod it is, a label says."""
    ours = pod["metadata"]
    labels = {**ours["labels"], names.LABEL_UID: job.metadata.uid}
    shared = {"labels": labels}
    shared |= {"annotations": ours["annotations"]} if ours.get("annotations") else {}
    own = {key: ours[key] for key in ("name", "namespace", "ownerReferences") if key in ours}
    return {
        "apiVersion": f"{names.SANDBOX_GROUP}/{version}",
        "kind": names.SANDBOX,
        "metadata": own | shared,
        "spec": {"podTemplate": {"metadata": shared, "spec": pod["spec"]}},
    }


def without_pod(observed: Observed) -> tuple[KubeObject, ...]:
    """The Sandboxes that have no pod yet, or none any more: to a plan they are pods that wait."""
    with_pod = {podstate.sandbox(pod) for pod in observed.pods}
    return tuple(each for each in observed.sandboxes if podstate.name(each) not in with_pod)


def with_sandboxes(
    job: RLJob, pods: Sequence[KubeObject], observed: Observed
) -> tuple[KubeObject, ...]:
    """The objects to create for these pods: Sandboxes, or the pods themselves."""
    if not is_wanted(job):
        return tuple(pods)
    return tuple(sandbox(job, pod, observed.sandbox_version) for pod in pods)
