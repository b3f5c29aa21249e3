"""The network policy of a job, which says who may connect to its pods.

NCCL and SGLang accept any connection without a token, so only the network can keep others away.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject

KIND = "NetworkPolicy"
NAMESPACE_LABEL = "kubernetes.io/metadata.name"  # on every namespace since Kubernetes 1.21
OPERATOR_LABELS = {"app.kubernetes.io/name": "sluice"}


def network_policy(job: RLJob, operator_namespace: str | None) -> KubeObject | None:
    """Allow ingress only from the job's own pods, the operator and Prometheus.

    Its pods may connect on all ports, because NCCL chooses ports freely. Egress stays open: models,
    data sets and rewards are outside of the job. Kubelets may always probe the pods of their node.

    Parameters
    ----------
    job
        The job.
    operator_namespace
        The operator's namespace; None if the operator does not run in a cluster.

    Returns
    -------
    The policy, or None if the spec disables it.

    """
    if not job.spec.network_policy.enabled:
        return None
    ingress = _from_own_pods(job)
    if operator_namespace is not None:
        namespace = {"matchLabels": {NAMESPACE_LABEL: operator_namespace}}
        peer = {
            "namespaceSelector": namespace,
            "podSelector": {"matchLabels": dict(OPERATOR_LABELS)},
        }
        ingress.append({"from": [peer], "ports": [_tcp("rendezvous"), _tcp("buffer")]})
    metrics_from = job.spec.network_policy.metrics_from or [{"namespaceSelector": {}}]
    ingress.append({"from": list(metrics_from), "ports": [_tcp("metrics")]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": KIND,
        "metadata": names.metadata(job, names.network_policy_name(job)),
        "spec": {
            "podSelector": {"matchLabels": names.selector(job)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def pool_policy(job: RLJob) -> KubeObject | None:
    """Let the engines of the job's pool connect to its trainer, for weight updates.

    None if the job has no pool, or if the spec disables policies.
    """
    if not job.spec.uses_pool or not job.spec.network_policy.enabled:
        return None
    engines = {"matchLabels": names.pool_labels(job) | {names.LABEL_ROLE: names.ENGINE}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": KIND,
        "metadata": names.metadata(job, names.pool_policy_name(job)),
        "spec": {
            "podSelector": {"matchLabels": names.selector(job, "trainer")},
            "policyTypes": ["Ingress"],
            # On all ports, because collectives choose them freely.
            "ingress": [{"from": [{"podSelector": engines}]}],
        },
    }


def _from_own_pods(job: RLJob) -> list[dict[str, Any]]:
    """Let the job's pods connect to each other, but episode pods to the gateway only.

    Episode pods run code that is not trusted.
    """
    own: dict[str, Any] = {"matchLabels": names.selector(job)}
    if not job.spec.rollout.has_episode_pods:
        return [{"from": [{"podSelector": own}]}]
    others, episodes = (
        {"podSelector": own | {"matchExpressions": [_roles(operator)]}}
        for operator in ("NotIn", "In")
    )
    return [{"from": [others]}, {"from": [episodes], "ports": [_tcp("gateway")]}]


def _roles(operator: str) -> dict[str, Any]:
    return {"key": names.LABEL_ROLE, "operator": operator, "values": [*names.EPISODES]}


def _tcp(port: str) -> dict[str, Any]:
    return {"protocol": "TCP", "port": names.PORTS[port]}
