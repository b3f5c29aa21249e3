"""Parts of a pod of ours: a container, its variables, and the rights that it has."""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang
from sluice_operator.plan.manifests.resources import Container

Env = list[dict[str, Any]]
ACCOUNT = 65532
"""User and group in our images (docker/Dockerfile)."""
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
NOT_ROOT = {"runAsNonRoot": True, "runAsUser": ACCOUNT, "runAsGroup": ACCOUNT}


def container(
    job: RLJob,
    name: str,
    image: str,
    command: list[str],
    env: Env,
    ports: dict[str, int],
    mounts: list[dict[str, Any]],
) -> Container:
    """A container of ours. Each of its ports is also a variable, `SLUICE_PORT_NAME`."""
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "env": port_env(ports) + env,
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "volumeMounts": mounts,
        # The end of the log becomes the container's message, so that status.lastFailure can show
        # it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security(job, name),
    }


def common_env(gang: Gang, attempt: int, index: int, rendezvous: str) -> Env:
    """Variables of every container of ours in a pod."""
    settings = {
        "SLUICE_JOB_FILE": f"{names.CONFIG_DIR}/{names.JOB_FILE}",
        "SLUICE_RENDEZVOUS": rendezvous,
        "SLUICE_ROLE": gang.role,
        "SLUICE_NAME": gang.name,
        "SLUICE_ATTEMPT": str(attempt),
        "SLUICE_REPLICA": str(gang.replica),
        "SLUICE_INDEX": str(index),
        "SLUICE_BIND": "0.0.0.0",  # noqa: S104 - a pod's own network
        # Models are directories; a look-up over the network only delays and fails.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    address = {"name": "SLUICE_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [*variables(settings), address]


def variables(settings: dict[str, str]) -> Env:
    return [{"name": name, "value": value} for name, value in settings.items()]


def port_env(ports: dict[str, int]) -> Env:
    return variables({f"SLUICE_PORT_{name.upper()}": str(number) for name, number in ports.items()})


def secret_variable(secret: str, name: str = "SLUICE_TOKEN") -> Env:
    return [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secret, "key": names.TOKEN_KEY}},
        }
    ]


def security(job: RLJob, name: str) -> dict[str, Any]:
    """The restricted standard. SGLang's image keeps root, whose capabilities let it write to
    volumes of others.
    """
    if name == "engine" and has_root(job, "rollout"):
        return {"allowPrivilegeEscalation": False}
    beside_root = name in ("worker", "plugin", "openenv") and has_root(job, "rollout")
    return {
        **RESTRICTED,
        **(NOT_ROOT if beside_root else {}),
    }


def pod_security(job: RLJob, role: str) -> dict[str, Any]:
    """The restricted standard, but for the user of a pod whose engine is SGLang's own image.

    The group is that of our images' account,
    which so can write to volumes (checkpoints, the run's directory).
    """
    # Without OnRootMismatch every start would change the group of each file of the model's and the
    # data's volumes.
    profile: dict[str, Any] = {"fsGroup": ACCOUNT, "fsGroupChangePolicy": "OnRootMismatch"}
    profile["seccompProfile"] = {"type": "RuntimeDefault"}
    return profile if has_root(job, role) else profile | NOT_ROOT


def has_root(job: RLJob, role: str) -> bool:
    """An engine on GPUs is SGLang's image, which runs as root; without GPUs it is ours."""
    return role == "rollout" and job.spec.rollout.gpus_per_replica > 0
