"""Containers of sluice's pods: variables, credentials, rights and probes."""

from __future__ import annotations

import math
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.lifecycle import SecretKey
from sluice.engines import engine_of
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import Gang
from sluice_operator.plan.manifests.resources import Container

Env = list[dict[str, Any]]
Probe = dict[str, Any]
ACCOUNT = 65532  # user and group of sluice's images (docker/Dockerfile)
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
NOT_ROOT = {"runAsNonRoot": True, "runAsUser": ACCOUNT, "runAsGroup": ACCOUNT}
START_SECONDS = 1800
ENGINE_START_SECONDS = 3600
ENGINE_PERIOD = 30
_OFFLINE = "HF_HUB_OFFLINE"
# Variables of all containers of sluice, those of pools included.
EVERYWHERE = {
    "SLUICE_BIND": "0.0.0.0",  # noqa: S104 - the pod's own network
    # Models are directories; a look-up over the network only delays and fails.
    _OFFLINE: "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ENGINE_POD = ("engine", "worker", "plugin", "openenv")
# Containers that may load models or data from the Hugging Face hub.
_HUB_CONTAINERS = ("trainer", "engine", "worker", "rows")


def container(
    job: RLJob,
    name: str,
    image: str,
    command: list[str],
    env: Env,
    ports: dict[str, int],
    mounts: list[dict[str, Any]],
) -> Container:
    """Return one of sluice's containers. Each port is also a variable, `SLUICE_PORT_NAME`."""
    return bare_container(name, image, command, env, ports, mounts) | {
        "securityContext": security(job, name)
    }


def bare_container(
    name: str,
    image: str,
    command: list[str],
    env: Env,
    ports: dict[str, int],
    mounts: list[dict[str, Any]],
) -> Container:
    """Return the container without its rights."""
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
    }


# -- variables


def common_env(gang: Gang, attempt: int, index: int, rendezvous: str) -> Env:
    """Return the variables that every container of sluice has in a pod."""
    settings = {
        "SLUICE_JOB_FILE": f"{names.CONFIG_DIR}/{names.JOB_FILE}",
        "SLUICE_RENDEZVOUS": rendezvous,
        "SLUICE_ROLE": gang.role,
        "SLUICE_NAME": gang.name,
        "SLUICE_ATTEMPT": str(attempt),
        "SLUICE_REPLICA": str(gang.replica),
        "SLUICE_INDEX": str(index),
        **EVERYWHERE,
    }
    address = {"name": "SLUICE_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [*variables(settings), address]


def variables(settings: dict[str, str]) -> Env:
    return [{"name": name, "value": value} for name, value in settings.items()]


def port_env(ports: dict[str, int]) -> Env:
    return variables({f"SLUICE_PORT_{name.upper()}": str(number) for name, number in ports.items()})


def secret_variable(secret: str, name: str = "SLUICE_TOKEN", key: str = names.TOKEN_KEY) -> Env:
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}]


def with_credentials(job: RLJob, manifest: Container) -> Container:
    """Return the container with the tokens of other services that it uses.

    These are HF_TOKEN, WANDB_API_KEY, the keys of other models, and the Secrets of trackers and
    object stores, as far as the job names Secrets for them. A container gets only the tokens that
    it uses.
    """
    secrets, name = job.spec.secrets, manifest["name"]
    env: list[dict[str, Any]] = manifest["env"]
    if secrets.hugging_face is not None and name in _HUB_CONTAINERS:
        # A job that has a token for the hub wants the hub to be used.
        env = [
            {"name": _OFFLINE, "value": "0"} if variable["name"] == _OFFLINE else variable
            for variable in env
        ]
        env = [*env, *hub_token(job)]
    if secrets.wandb is not None and name == "trainer":
        env = [*env, _from_secret(secrets.wandb, "WANDB_API_KEY")]
    references = [t.secret_ref for t in job.spec.telemetry.trackers]
    references.append(job.spec.checkpoint.secret_ref)
    of_trainer = [reference.name for reference in references if reference is not None]
    if of_trainer and name == "trainer":
        sources = [{"secretRef": {"name": secret}} for secret in dict.fromkeys(of_trainer)]
        manifest |= {"envFrom": [*manifest.get("envFrom", []), *sources]}
    store = job.spec.weight_sync.store
    if store is not None and store.secret_ref and name in ("trainer", "worker"):
        source = {"secretRef": {"name": store.secret_ref.name}}
        manifest |= {"envFrom": [*manifest.get("envFrom", []), source]}
    if name == "worker":
        models = job.spec.rollout.models
        env = [*env, *(_from_secret(m.key, m.key_variable) for m in models if m.key)]
    return manifest | {"env": env}


def hub_token(job: RLJob) -> Env:
    """Return the variable with the job's token for the hub, if it names one."""
    secret = job.spec.secrets.hugging_face
    return [] if secret is None else [_from_secret(secret, "HF_TOKEN")]


def _from_secret(secret: SecretKey, name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}


# -- rights


def security(job: RLJob, name: str) -> dict[str, Any]:
    """Return the security context of a container: the restricted standard, except for the engine.

    An engine in SGLang's image keeps root, whose capabilities let it write to volumes of other
    users.
    """
    if name in _ENGINE_POD:
        return security_beside_engine(name, root=has_root(job, "rollout"))
    return dict(RESTRICTED)


def security_beside_engine(name: str, *, root: bool) -> dict[str, Any]:
    """Return the security context of a container in an engine's pod.

    root: whether the engine runs as root. The pod's own context does not set a user then.
    """
    if name == "engine" and root:
        return {"allowPrivilegeEscalation": False}
    return {**RESTRICTED, **(NOT_ROOT if root else {})}


def pod_security(job: RLJob, role: str) -> dict[str, Any]:
    """Return the security context of a job's pod."""
    return restricted_pod(root=has_root(job, role))


def restricted_pod(*, root: bool) -> dict[str, Any]:
    """Return the security context of a pod: the restricted standard.

    It sets no user if the pod's engine is SGLang's own image. The group is that of sluice's
    images, so that they can write to volumes (checkpoints, the run directory).
    """
    # Without OnRootMismatch every start would change the group of each file of the model's and the
    # data's volumes.
    profile: dict[str, Any] = {"fsGroup": ACCOUNT, "fsGroupChangePolicy": "OnRootMismatch"}
    profile["seccompProfile"] = {"type": "RuntimeDefault"}
    return profile if root else profile | NOT_ROOT


def has_root(job: RLJob, role: str) -> bool:
    """Return True if the engine runs as root.

    It does on GPUs, in SGLang's image; without GPUs it runs in sluice's own.
    """
    has_engine = role == "rollout" and not job.spec.uses_pool
    return has_engine and job.spec.rollout.gpus_per_replica > 0


# -- probes
#
# Ready means at work, and status.roles[].ready counts it: a service serves, a trainer has joined
# the rendezvous, an engine holds weights that may be used. For an engine its worker answers, which
# hears about the weights from the rendezvous; it stays ready during an update. Probes use HTTP,
# which every Kubernetes version supports (gRPC probes: since 1.24).
#
# A pod whose container fails its liveness probe has failed, and its gang restarts. So a container
# that may be silent while it works is not killed: a trainer has no liveness probe, because its
# first step may compile for long, and spec.progressDeadlineSeconds detects hangs. An engine's probe
# tolerates more than any pause for an update.


def probes(job: RLJob, name: str) -> dict[str, Probe]:
    """Return the probes of one of sluice's containers, by field."""
    if name == "engine":
        return engine_probes(engine_of(job.spec).launch.health, job.spec.weight_sync.pause_seconds)
    ready = {"readinessProbe": _http("metrics", "/readyz", period=5, timeout=5, failures=3)}
    if name == "trainer":
        return ready
    return {
        "startupProbe": _http(
            "metrics", "/healthz", period=2, timeout=5, failures=START_SECONDS // 2
        ),
        **ready,
        "livenessProbe": _http("metrics", "/healthz", period=20, timeout=10, failures=6),
    }


def engine_probes(health: str, silence: float) -> dict[str, Probe]:
    """Return the probes of an engine.

    Parameters
    ----------
    health
        HTTP path that says at once whether the engine lives.
    silence
        Seconds for which an engine that works may not answer.

    """
    return {
        "startupProbe": _http(
            "http", health, period=5, timeout=5, failures=ENGINE_START_SECONDS // 5
        ),
        "readinessProbe": _http("http", health, period=10, timeout=10, failures=3),
        "livenessProbe": _http(
            "http",
            health,
            period=ENGINE_PERIOD,
            timeout=ENGINE_PERIOD,
            failures=math.ceil(silence / ENGINE_PERIOD),
        ),
    }


def _http(port: str, path: str, *, period: int, timeout: int, failures: int) -> Probe:
    return {
        "httpGet": {"port": port, "path": path},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
