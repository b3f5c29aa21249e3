"""Cures for what a cluster complains of, for those who did not build it. Looked up by the cluster's
own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Cures = Sequence[tuple[str, str]]
"""Patterns and cures, the first that fits. `{}` in a cure is a group of its pattern."""
OF_PLACEMENT: Cures = (
    (r'persistentvolumeclaim "?([^"\s]+)"? not found', "create the PersistentVolumeClaim {}"),
    (
        r"unbound immediate PersistentVolumeClaims",
        "a PersistentVolumeClaim has no volume: check its storage class",
    ),
    (r"volume node affinity conflict", "a volume is in another zone than the nodes that have room"),
    (
        r"Insufficient (\S+?\.\S+/\S+?|nvidia\.com/gpu)[,.]?(?:\s|$)",
        "no node has enough free {}: wait, add nodes, or ask for less",
    ),
    (
        r"Insufficient (cpu|memory|ephemeral-storage)",
        "no node has enough free {}: wait, add nodes, or ask for less",
    ),
    (r"untolerated taint", "add tolerations to the role's template"),
    (
        r"didn't match Pod's node affinity/selector",
        "no node has the labels of the template's nodeSelector or affinity",
    ),
    (r"didn't have free ports", "hostNetwork allows one pod of a port on a node: add nodes"),
)
"""Of what a scheduler says of a pod."""
OF_WARNINGS: Cures = (
    (
        r"Multi-Attach error",
        "another node holds the volume, which one node may have at a time: ReadWriteMany, or wait",
    ),
    (
        r'(secret|configmap|persistentvolumeclaim)s? "([^"]+)" not found',
        "create the {} {} in the job's namespace",
    ),
    (
        r"[Ff]ailed to create pod sandbox|FailedCreatePodSandBox",
        "the node's container runtime or network is at fault",
    ),
)
"""Of what a kubelet warns of."""
OF_REFUSALS: Cures = (
    (
        r"exceeded quota: ([^,\s]+)",
        "wait until others give some back, have ResourceQuota {} raised, or ask for less",
    ),
    (
        r"failed quota: ([^:\s]+): must specify ([^\n]+?)\.?$",
        "ResourceQuota {} wants {} of every container: set resources of the role, and of "
        "containers in its template",
    ),
    (
        r'violates PodSecurity "([^":]+)',
        "the namespace takes pods of level {} alone: change what is named in the role's template, "
        "or have the namespace's label pod-security.kubernetes.io/enforce lowered",
    ),
    (
        r"(?:maximum|minimum) (\S+) usage per (?:Container|Pod)",
        "a LimitRange of the namespace bounds {}: set resources of the role within it",
    ),
    (
        r'admission webhook "([^"]+)" denied',
        "a policy of the cluster, {}, does not allow it: ask who runs it",
    ),
    (
        r'failed calling webhook "([^"]+)"',
        "webhook {} of the cluster does not answer: ask who runs it; it is tried again within 30 s",
    ),
    (
        r"ValidatingAdmissionPolicy '([^']+)'",
        "a policy of the cluster, {}, does not allow it: ask who runs it",
    ),
    (
        r'User "system:serviceaccount:([^"]+)" cannot (\S+) resource "([^"]+)"',
        "the operator's service account {} may not {} {}: upgrade the chart with this namespace in "
        "watchNamespaces",
    ),
    (
        r"no PriorityClass with name (\S+) was found",
        "have PriorityClass {} created, or name another in the template",
    ),
    (r"because it is being terminated", "the namespace is being deleted"),
)
"""Of what an API server answers to an object that it does not take."""
OF_QUEUES: Cures = (
    (
        r"maximum number of re-queuing retries",
        "Kueue's waitForPodsReady.timeout is shorter than this job takes to start: have it raised, "
        "then suspend and resume the job",
    ),
    (
        r"[Dd]eactivated",
        "somebody, or an admission check, has set the Workload's spec.active to false: suspend and "
        "resume the job to queue again",
    ),
    (
        r"Exceeded the PodsReady timeout",
        "Kueue's waitForPodsReady.timeout is shorter than this job takes to start: have it raised",
    ),
)
"""Of what Kueue says of a Workload."""


def with_cure(message: str, cures: Cures) -> str:
    """The message, and what to do where that is known."""
    for pattern, cure in cures:
        if match := re.search(pattern, message):
            return joined(message, cure.format(*match.groups()))
    return joined(message, "")


def joined(message: str, cure: str) -> str:
    return "; ".join(filter(None, (message.strip().rstrip("."), cure)))
