"""The network policies of jobs and pools, which say who may connect to their pods.

NCCL and SGLang accept any connection without a token, so only the network can keep others away.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLEnginePool, RLJob
from sluice.api.groups.lifecycle import NetworkPolicy
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
    ingress += _from_operator(operator_namespace, "rendezvous", "buffer")
    ingress.append(_from_prometheus(job.spec.network_policy, "metrics"))
    return _policy(job, names.network_policy_name(job), names.selector(job), ingress)


def pool_network_policy(pool: RLEnginePool, operator_namespace: str | None) -> KubeObject | None:
    """Allow ingress only from the pool's own pods, its jobs, the operator and Prometheus.

    Workers send requests, and trainers send adapters on ports that collectives choose freely. Jobs
    are told apart by their credentials.
    """
    if not pool.spec.network_policy.enabled:
        return None
    ingress: list[dict[str, Any]] = [
        {"from": [{"podSelector": {"matchLabels": names.selector(pool)}}]}
    ]
    ingress += _from_operator(operator_namespace, "http")
    ingress.append(_from_prometheus(pool.spec.network_policy, "http"))
    return _policy(pool, names.engines_name(pool), names.selector(pool, names.ENGINE), ingress)


def pool_policy(job: RLJob) -> KubeObject | None:
    """Let the engines of the job's pool connect to its trainer, for weight updates.

    None if the job has no pool, or if the spec disables policies.
    """
    if not job.spec.uses_pool or not job.spec.network_policy.enabled:
        return None
    engines = {"matchLabels": names.pool_labels(job) | {names.LABEL_ROLE: names.ENGINE}}
    # On all ports, because collectives choose them freely.
    ingress = [{"from": [{"podSelector": engines}]}]
    return _policy(job, names.pool_policy_name(job), names.selector(job, "trainer"), ingress)


def _policy(
    owner: names.Owner, name: str, pods: dict[str, str], ingress: list[dict[str, Any]]
) -> KubeObject:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": KIND,
        "metadata": names.metadata(owner, name),
        "spec": {
            "podSelector": {"matchLabels": pods},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _from_operator(namespace: str | None, *ports: str) -> list[dict[str, Any]]:
    if namespace is None:
        return []
    peer = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: namespace}},
        "podSelector": {"matchLabels": dict(OPERATOR_LABELS)},
    }
    return [{"from": [peer], "ports": [_tcp(port) for port in ports]}]


def _from_prometheus(policy: NetworkPolicy, port: str) -> dict[str, Any]:
    peers = policy.metrics_from or [{"namespaceSelector": {}}]
    return {"from": list(peers), "ports": [_tcp(port)]}


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
