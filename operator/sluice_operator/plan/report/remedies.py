"""Remedies for the complaints of a cluster, for people who do not run it.

A remedy is looked up by the text of the complaint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Patterns and remedies; the first pattern that matches counts. `{}` in a remedy is a group of the
# pattern.
Remedies = Sequence[tuple[str, str]]

# Messages of a scheduler about a pod.
PLACEMENT: Remedies = (
    (r'persistentvolumeclaim "?([^"\s]+)"? not found', "create the PersistentVolumeClaim {}"),
    (
        r"unbound immediate PersistentVolumeClaims",
        "a PersistentVolumeClaim has no volume: check its storage class",
    ),
    (r"volume node affinity conflict", "a volume is in another zone than the nodes that have room"),
    (
        r"Insufficient (\S+?\.\S+/\S+?|nvidia\.com/gpu)[,.]?(?:\s|$)",
        "no node has enough free {}: wait, add nodes, or request less",
    ),
    (
        r"Insufficient (cpu|memory|ephemeral-storage)",
        "no node has enough free {}: wait, add nodes, or request less",
    ),
    (r"untolerated taint", "add tolerations to the role's template"),
    (
        r"didn't match Pod's node affinity/selector",
        "no node has the labels of the template's nodeSelector or affinity",
    ),
    (
        r"didn't have free ports",
        "with hostNetwork only one pod of a node can use a port: add nodes",
    ),
)

# Warnings of a kubelet.
KUBELET_WARNINGS: Remedies = (
    (
        r"Multi-Attach error",
        "the volume is attached to another node: wait, or use a ReadWriteMany volume",
    ),
    (
        r'(secret|configmap|persistentvolumeclaim)s? "([^"]+)" not found',
        "create the {} {} in the job's namespace",
    ),
    (
        r"[Ff]ailed to create pod sandbox|FailedCreatePodSandBox",
        "the node's container runtime or network is failing",
    ),
)

# Answers of an API server that refuses an object.
REFUSALS: Remedies = (
    (
        r"exceeded quota: ([^,\s]+)",
        "wait for free quota, have ResourceQuota {} raised, or request less",
    ),
    (
        r"failed quota: ([^:\s]+): must specify ([^\n]+?)\.?$",
        "ResourceQuota {} requires {} of every container: set the role's resources, and those of "
        "containers in its template",
    ),
    (
        r'violates PodSecurity "([^":]+)',
        "the namespace only accepts pods of level {}: change these fields in the role's template, "
        "or have the namespace's label pod-security.kubernetes.io/enforce lowered",
    ),
    (
        r"(?:maximum|minimum) (\S+) usage per (?:Container|Pod)",
        "a LimitRange of the namespace bounds {}: set the role's resources within it",
    ),
    (
        r'admission webhook "([^"]+)" denied',
        "the cluster's policy {} forbids it: ask its administrator",
    ),
    (
        r'failed calling webhook "([^"]+)"',
        "the cluster's webhook {} does not answer: ask its administrator; the operator tries again "
        "within 30 s",
    ),
    (
        r"ValidatingAdmissionPolicy '([^']+)'",
        "the cluster's policy {} forbids it: ask its administrator",
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

# Messages of Kueue about a Workload.
QUEUEING: Remedies = (
    (
        r"maximum number of re-queuing retries",
        "Kueue's waitForPodsReady.timeout is shorter than this job takes to start: have it raised, "
        "then suspend and resume the job",
    ),
    (
        r"[Dd]eactivated",
        "a person or an admission check has set the Workload's spec.active to false: suspend and "
        "resume the job to queue again",
    ),
    (
        r"Exceeded the PodsReady timeout",
        "Kueue's waitForPodsReady.timeout is shorter than this job takes to start: have it raised",
    ),
)


def with_remedy(message: str, remedies: Remedies) -> str:
    """Return the message, with what to do about it if that is known."""
    for pattern, remedy in remedies:
        if match := re.search(pattern, message):
            return joined(message, remedy.format(*match.groups()))
    return joined(message, "")


def joined(message: str, remedy: str) -> str:
    return "; ".join(filter(None, (message.strip().rstrip("."), remedy)))
