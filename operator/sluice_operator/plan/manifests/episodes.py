"""The pod of an episode or of its verifier: the user's container, and a sidecar of sluice.

The sidecar joins the rollout worker. The user's container gets no service account, no token of the
job, no Service's address and no network except its own: it reaches its model through the sidecar,
on the pod's loopback interface. Both containers share the episode's directory. A verifier has no
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.environment import RolloutEnvironment
from sluice.samples.episode_protocol import ARTIFACTS, SHELL
from sluice_operator.plan.decide.episodes import EpisodePod
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.constants import GRACE
from sluice_operator.plan.facts.merge import merge
from sluice_operator.plan.facts.model import Images, KubeObject
from sluice_operator.plan.manifests.containers import (
    ACCOUNT,
    NOT_ROOT,
    RESTRICTED,
    secret_variable,
    variables,
)
from sluice_operator.plan.manifests.network import KIND as POLICY
from sluice_operator.plan.manifests.pods import identified
from sluice_operator.plan.manifests.resources import EPISODE_LIMITS, with_memory_limit
from sluice_operator.plan.manifests.volume_paths import model_path

_MOUNT = {"name": "episode", "mountPath": names.EPISODE_DIR}


def episode_pod(job: RLJob, pod: EpisodePod, images: Images) -> KubeObject:
    """Return the manifest of a pod for one episode, with the user's template over sluice's."""
    environment, role = job.spec.rollout.environment, pod.slot.role
    assert environment is not None
    identity = _identity(job, pod)
    if role == names.EPISODE:
        image = pod.image or environment.image
        program, template = _program(job, environment, image), environment.template
    else:
        verifier = environment.verifier
        assert verifier is not None
        image = pod.image or environment.verifier_image
        program = _container(names.VERIFIER, image, verifier.command, {})
        template = verifier.template
    base: dict[str, Any] = {
        "metadata": {"labels": {}, **_annotations(pod)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE[role],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                **NOT_ROOT,
                "fsGroup": ACCOUNT,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [program, _sidecar(job, pod, identity["name"], images)],
            "volumes": [{"name": "episode", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    merged = merge(base, template)
    merged["spec"]["containers"] = [
        with_memory_limit(container, EPISODE_LIMITS[container["name"]])
        if container["name"] in EPISODE_LIMITS
        else container
        for container in merged["spec"]["containers"]
    ]
    return identified(merged, identity)


def _identity(job: RLJob, pod: EpisodePod) -> dict[str, Any]:
    slot = pod.slot
    labels = {
        **names.selector(job, slot.role),
        names.LABEL_REPLICA: str(slot.replica),
        names.LABEL_ATTEMPT: str(slot.attempt),
        names.LABEL_INDEX: str(slot.index),
        names.LABEL_NUMBER: str(pod.number),
    }
    name = names.pod_name(job, slot.role, slot.replica, slot.attempt, slot.index)
    return names.metadata(job, f"{name}-{pod.number}", labels)


def _annotations(pod: EpisodePod) -> dict[str, Any]:
    return {"annotations": {names.ROW_IMAGE: pod.image}} if pod.image else {}


def _sidecar(job: RLJob, pod: EpisodePod, name: str, images: Images) -> dict[str, Any]:
    """Return the sidecar of the pod of this name."""
    worker = f"[{pod.slot.worker}]" if ":" in pod.slot.worker else pod.slot.worker
    settings = {
        "SLUICE_WORKER": f"http://{worker}:{names.PORTS['gateway']}",
        "SLUICE_POD": name,
        "SLUICE_ROLE": pod.slot.role,
        "SLUICE_EPISODE": names.EPISODE_DIR,
        "SLUICE_PORT_MODEL": str(names.PORTS["model"]),
    } | ({"SLUICE_IMAGE": pod.image} if pod.image else {})
    return {
        "name": "sidecar",
        "image": images.rollout,
        "command": ["python", "-m", "sluice_rollout.environments.sidecar"],
        "env": [
            *variables(settings),
            *secret_variable(names.episode_token_name(job), "SLUICE_EPISODE_TOKEN"),
        ],
        "volumeMounts": [_MOUNT],
        "resources": {"requests": {"cpu": "10m", "memory": "96Mi"}},
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _program(job: RLJob, environment: RolloutEnvironment, image: str | None) -> dict[str, Any]:
    model = f"http://127.0.0.1:{names.PORTS['model']}"
    settings = {
        "OPENAI_BASE_URL": f"{model}/v1",
        "OPENAI_API_BASE": f"{model}/v1",
        "OPENAI_API_KEY": names.EPISODE,
        "ANTHROPIC_BASE_URL": model,
        "ANTHROPIC_API_KEY": names.EPISODE,
        "SLUICE_MODEL": PurePosixPath(model_path(job)).name,
        **environment.env,
    }
    return _container(names.EPISODE, image, environment.command or [], settings)


def _container(
    name: str, image: str | None, command: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return the user's container."""
    paths = {
        "SLUICE_EPISODE": names.EPISODE_DIR,
        "SLUICE_ARTIFACTS": f"{names.EPISODE_DIR}/{ARTIFACTS}",
    }
    return {
        "name": name,
        "image": image,
        # The image is pulled and a shell runs before there is an episode, so that only the program
        # itself has to start then.
        "command": ["/bin/sh", "-c", SHELL, "sh"],
        "args": list(command),
        "env": variables({**settings, **paths}),
        "volumeMounts": [_MOUNT],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def episode_policies(job: RLJob) -> tuple[KubeObject, ...]:
    """Return the network policies of episode pods and verifiers.

    They accept no connections. They may connect to their worker's gateway, and the program also to
    what the environment's `egressTo` allows.
    """
    environment = job.spec.rollout.environment
    if not (job.spec.network_policy.enabled and job.spec.rollout.has_episode_pods and environment):
        return ()
    others = [{"to": list(environment.egress_to)}] if environment.egress_to else []
    verifier = (_policy(job, names.VERIFIER, []),) if environment.verifier else ()
    return (_policy(job, names.EPISODE, others), *verifier)


def _policy(job: RLJob, role: str, others: list[dict[str, Any]]) -> KubeObject:
    gateway = {
        "to": [{"podSelector": {"matchLabels": names.selector(job, "rollout")}}],
        "ports": [{"protocol": "TCP", "port": names.PORTS["gateway"]}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": POLICY,
        "metadata": names.metadata(job, names.episode_policy_name(job, role)),
        "spec": {
            "podSelector": {"matchLabels": names.selector(job, role)},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [gateway, *others],
        },
    }
