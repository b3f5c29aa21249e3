"""The network policy of a job: who may connect to its pods. NCCL and SGLang ask nobody for a token:
only the network can keep others away.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject

KIND = "NetworkPolicy"
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Kubernetes puts it on every namespace (from 1.21)."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "sluice"}


def network_policy(job: RLJob, operator_namespace: str | None) -> KubeObject | None:
    """Ingress only from the job's own pods (on all ports: NCCL chooses its own),
    the operator, and Prometheus.

    operator_namespace: None where there is no operator in a cluster. Egress is left open: models,
    data sets and rewards are elsewhere. Kubelets may always probe the pods of their node.
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


def _from_own_pods(job: RLJob) -> list[dict[str, Any]]:
    """Pods of episodes run what nobody knows: they are let in to the gateway alone."""
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
