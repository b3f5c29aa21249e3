"""The pod of an episode, or of its verifier: the user's container, and our sidecar, which joins the
worker.

The user's container gets no account, no token of the job, no service's address and no network but
its own: its model is at the sidecar, on the pod's loopback. Both share the episode's directory. A
verifier has no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.environment import RolloutEnvironment, Verifier
from sluice.samples.episode_protocol import ARTIFACTS, SHELL
from sluice_operator.plan.decide.episodes import Turn
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.constants import GRACE
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
from sluice_operator.plan.merge import merge

_MOUNT = {"name": "episode", "mountPath": names.EPISODE_DIR}


def episode_pod(job: RLJob, turn: Turn, images: Images) -> KubeObject:
    """A pod for one episode: ours, and the user's template over it."""
    environment = job.spec.rollout.environment
    assert environment is not None
    identity = _identity(job, turn)
    if turn.place.role == names.EPISODE:
        program, template = _program(job, environment), environment.template
    else:
        assert environment.verifier is not None
        program, template = (
            _verifier(environment, environment.verifier),
            environment.verifier.template,
        )
    ours: dict[str, Any] = {
        "metadata": {"labels": {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE[turn.place.role],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                **NOT_ROOT,
                "fsGroup": ACCOUNT,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [program, _sidecar(job, turn, identity["name"], images)],
            "volumes": [{"name": "episode", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    merged = merge(ours, template)
    merged["spec"]["containers"] = [
        with_memory_limit(each, EPISODE_LIMITS[each["name"]])
        if each["name"] in EPISODE_LIMITS
        else each
        for each in merged["spec"]["containers"]
    ]
    return identified(merged, identity)


def _identity(job: RLJob, turn: Turn) -> dict[str, Any]:
    place = turn.place
    labels = {
        **names.selector(job, place.role),
        names.LABEL_REPLICA: str(place.replica),
        names.LABEL_ATTEMPT: str(place.attempt),
        names.LABEL_INDEX: str(place.index),
        names.LABEL_NUMBER: str(turn.number),
    }
    name = names.pod_name(job, place.role, place.replica, place.attempt, place.index)
    return names.metadata(job, f"{name}-{turn.number}", labels)


def _sidecar(job: RLJob, turn: Turn, pod: str, images: Images) -> dict[str, Any]:
    worker = f"[{turn.place.worker}]" if ":" in turn.place.worker else turn.place.worker
    settings = {
        "SLUICE_WORKER": f"http://{worker}:{names.PORTS['gateway']}",
        "SLUICE_POD": pod,
        "SLUICE_ROLE": turn.place.role,
        "SLUICE_EPISODE": names.EPISODE_DIR,
        "SLUICE_PORT_MODEL": str(names.PORTS["model"]),
    }
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


def _program(job: RLJob, environment: RolloutEnvironment) -> dict[str, Any]:
    model = f"http://127.0.0.1:{names.PORTS['model']}"
    settings = {
        "OPENAI_BASE_URL": f"{model}/v1",
        "OPENAI_API_BASE": f"{model}/v1",
        "OPENAI_API_KEY": names.EPISODE,
        "ANTHROPIC_BASE_URL": model,
        "ANTHROPIC_API_KEY": names.EPISODE,
        "SLUICE_MODEL": PurePosixPath(job.spec.model.path).name,
        **environment.env,
    }
    return _container(names.EPISODE, environment.image, environment.command or [], settings)


def _verifier(environment: RolloutEnvironment, verifier: Verifier) -> dict[str, Any]:
    image = verifier.image or environment.image
    return _container(names.VERIFIER, image, verifier.command, {})


def _container(
    name: str, image: str | None, command: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """The user's container: its image is there and a shell runs before there is an episode, and
    then nothing but the program itself has to start.
    """
    own = {
        "SLUICE_EPISODE": names.EPISODE_DIR,
        "SLUICE_ARTIFACTS": f"{names.EPISODE_DIR}/{ARTIFACTS}",
    }
    return {
        "name": name,
        "image": image,
        "command": ["/bin/sh", "-c", SHELL, "sh"],
        "args": list(command),
        "env": variables({**settings, **own}),
        "volumeMounts": [_MOUNT],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def episode_policies(job: RLJob) -> tuple[KubeObject, ...]:
    """Nobody connects to an episode's pod or its verifier's, and they connect to their worker's
    gateway alone; the program also to what the environment allows.
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
