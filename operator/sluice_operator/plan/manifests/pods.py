"""Pods of the four roles as Kubernetes objects. docs/contracts.md says what every container may
rely on.
"""

from __future__ import annotations

import math
from typing import Any

from sluice.api import RLJob
from sluice.engines import engine_of, kernels
from sluice.engines.base import Place, Plugin
from sluice_operator.plan import names
from sluice_operator.plan.constants import GRACE
from sluice_operator.plan.manifests import placement, queueing, resource_claims, volumes
from sluice_operator.plan.manifests.credentials import with_credentials
from sluice_operator.plan.manifests.mounted import model_path
from sluice_operator.plan.manifests.probes import probes
from sluice_operator.plan.manifests.resources import Container, of_spec, with_requests
from sluice_operator.plan.merge import merge
from sluice_operator.plan.model import Gang, Images, KubeObject, PodGroup

Env = list[dict[str, Any]]
ACCOUNT = 65532
"""User and group in our images (docker/Dockerfile)."""
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
NOT_ROOT = {"runAsNonRoot": True, "runAsUser": ACCOUNT, "runAsGroup": ACCOUNT}


def gang_pods(
    job: RLJob,
    gang: Gang,
    attempt: int,
    rendezvous: str,
    images: Images,
    group: PodGroup | None = None,
) -> list[KubeObject]:
    """The gang's pods. rendezvous: host:port. group: what a queue admits them with; None: they do
    not queue.
    """
    return [pod(job, gang, attempt, index, rendezvous, images, group) for index in range(gang.size)]


def pod(
    job: RLJob,
    gang: Gang,
    attempt: int,
    index: int,
    rendezvous: str,
    images: Images,
    group: PodGroup | None = None,
) -> KubeObject:
    """One pod: ours, the role's template over it, podTemplateOverrides over both.

    Identity is never overridden.
    """
    identity = _identity(job, gang, attempt, index)
    common = _common_env(gang, attempt, index, rendezvous)
    containers = _containers(job, gang, attempt, index, common, images)
    ours: dict[str, Any] = {
        "metadata": {"labels": {}, **placement.metadata(job, gang)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _grace(job, gang.role),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _pod_security(job, gang.role),
            **placement.placement(job, gang),
            **resource_claims.of_pod(job, gang, index),
            "containers": [
                with_credentials(job, each) | probes(job, each["name"]) for each in containers
            ],
            "volumes": volumes.volumes(job, gang.role),
        },
    }
    if gang.role == "buffer" and job.spec.row_sources:
        ours["spec"]["initContainers"] = [with_credentials(job, _rows(job, common, images))]
    ours["spec"]["containers"] += _openenv(job, gang, index)
    if gang.role == "rollout" and (plugin := engine_of(job.spec).launch.plugin(job.spec)):
        ours["spec"]["initContainers"] = [_plugin(job, plugin, images)]
    if gang.role == "rollout" and gang.size > 1:
        ours["spec"] |= {"hostname": identity["name"], "subdomain": names.engines_name(job)}
    for template in (queueing.marks(job, gang, index, group), *_templates(job, gang.role)):
        ours = merge(ours, template)
    for kind in ("initContainers", "containers"):
        if kind in ours["spec"]:
            ours["spec"][kind] = [with_requests(job, each) for each in ours["spec"][kind]]
    return identified(ours, identity)


def identified(merged: dict[str, Any], identity: dict[str, Any]) -> KubeObject:
    """The pod of a merged template, with the metadata by which we know it over the template's."""
    metadata = merged["metadata"] | {key: identity[key] for key in identity if key != "labels"}
    metadata["labels"] = {**merged["metadata"].get("labels", {}), **identity["labels"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": merged["spec"] | {"restartPolicy": "Never"},
    }


def _grace(job: RLJob, role: str) -> int:
    """Seconds to end in. An update that waits for a lost engine, up to its timeout, must not cost
    the checkpoint.
    """
    return GRACE[role] + (
        math.ceil(job.spec.weight_sync.timeout_seconds) if role == "trainer" else 0
    )


def _identity(job: RLJob, gang: Gang, attempt: int, index: int) -> dict[str, Any]:
    labels = {
        **names.selector(job, gang.role),
        names.LABEL_REPLICA: str(gang.replica),
        names.LABEL_ATTEMPT: str(attempt),
        names.LABEL_INDEX: str(index),
    }
    return names.metadata(job, names.pod_name(job, gang.role, gang.replica, attempt, index), labels)


def _templates(job: RLJob, role: str) -> list[dict[str, Any]]:
    of_role = {
        "trainer": job.spec.trainer.template,
        "rollout": job.spec.rollout.template,
        "buffer": job.spec.buffer.template,
    }.get(role, {})
    return [
        of_role,
        *(
            override.template
            for override in job.spec.pod_template_overrides
            if role in override.roles
        ),
    ]


def _containers(
    job: RLJob, gang: Gang, attempt: int, index: int, common: Env, images: Images
) -> list[Container]:
    token = secret_variable(names.token_name(job)) + _tls_env(job)
    if gang.role == "rollout":
        return _rollout(job, gang, attempt, index, common, token, images)
    mounts = volumes.mounts(job, gang.role) + volumes.tls_mount(job)
    if gang.role == "trainer":
        resources = merge(resource_claims.gpus(job, gang), of_spec(job.spec.trainer.resources))
        return [_trainer(job, common + token, mounts, images) | {"resources": resources}]
    if gang.role == "buffer":
        ports = {"grpc": names.PORTS["buffer"], "metrics": names.PORTS["metrics"]}
        env = common + token + variables({"SLUICE_STORAGE": names.STORAGE_DIR})
        container = _container(
            job, "buffer", images.buffer, ["python", "-m", "sluice_buffer"], env, ports, mounts
        )
        memory = str(job.spec.buffer.memory)
        return [
            container
            | {"resources": {"requests": {"memory": memory}, "limits": {"memory": memory}}}
        ]
    ports = {"grpc": names.PORTS["rendezvous"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_rendezvous"]
    return [
        _container(job, "rendezvous", images.rendezvous, command, common + token, ports, mounts)
    ]


def _rows(job: RLJob, common: Env, images: Images) -> Container:
    """Makes prompt files of the user's code, before the buffer starts: with the worker's image, and
    without the token.

    Of the storage it sees its own directory alone.
    """
    mounts = [
        each for each in volumes.mounts(job, "buffer") if each["mountPath"] != names.STORAGE_DIR
    ]
    mounts.append(volumes.rows_mount())
    command = ["python", "-m", "sluice.data.make"]
    return _container(
        job,
        "rows",
        images.rollout,
        command,
        common + variables({"SLUICE_ROWS": names.ROWS_DIR}),
        {},
        mounts,
    )


def _plugin(job: RLJob, plugin: Plugin, images: Images) -> Container:
    """Brings what the engine's image does not have: our plugin, out of the worker's image."""
    return _container(
        job, "plugin", images.rollout, list(plugin.command), [], {}, [volumes.plugin_mount(plugin)]
    )


def _trainer(job: RLJob, env: Env, mounts: list[dict[str, Any]], images: Images) -> Container:
    settings = {"SLUICE_CHECKPOINT_DIR": names.CHECKPOINT_DIR, "SLUICE_RUN_DIR": names.RUN_DIR}
    if not job.spec.on_gpu:
        settings["OMP_NUM_THREADS"] = "1"
    if job.spec.kernel_cache is not None:
        settings |= kernels.caches(names.CACHE_DIR)
    ports = {"master": names.PORTS["master"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_trainer.launch"]
    return _container(
        job, "trainer", images.trainer, command, env + variables(settings), ports, mounts
    )


def _rollout(
    job: RLJob, gang: Gang, attempt: int, index: int, common: Env, token: Env, images: Images
) -> list[Container]:
    """The engine, and on the engine's first pod our worker. The engine is not ours, so it does not
    get the token.
    """
    launch = engine_of(job.spec).launch
    ports = {"http": names.PORTS["http"], "master": names.PORTS["master"]}
    settings = launch.env(job.spec)
    if job.spec.kernel_cache is not None:
        settings = settings | launch.caches(names.CACHE_DIR)
    env = common + _port_env({"metrics": names.PORTS["metrics"]}) + variables(settings)
    mounts = volumes.mounts(job, "rollout")
    plugin = launch.plugin(job.spec)
    theirs = [*mounts, volumes.plugin_mount(plugin) | {"readOnly": True}] if plugin else mounts
    image = images.of_engine(job.spec.rollout.engine)
    engine = _container(job, "engine", image, launch.command(job.spec), env, ports, theirs)
    engine["args"] = launch.args(job.spec, _place(job, gang, attempt))
    engine["resources"] = merge(
        resource_claims.gpus(job, gang), of_spec(job.spec.rollout.resources)
    )
    if index > 0:
        return [engine]
    env = (
        common
        + token
        + _port_env(ports)
        + variables({"SLUICE_ENGINE_URL": "http://127.0.0.1:$(SLUICE_PORT_HTTP)"})
    )
    own = {"metrics": names.PORTS["metrics"]}
    if job.spec.rollout.has_episode_pods:
        own |= {"gateway": names.PORTS["gateway"]}
        env += variables({"SLUICE_EPISODES": "pods"})
        env += secret_variable(names.episode_token_name(job), "SLUICE_EPISODE_TOKEN")
    command = ["python", "-m", "sluice_rollout"]
    # The worker runs the user's code, which has no business with what the engine executes.
    mounts = [each for each in mounts if each["mountPath"] != names.CACHE_DIR]
    worker = _container(
        job, "worker", images.rollout, command, env, own, mounts + volumes.tls_mount(job)
    )
    return [engine, worker | {"resources": of_spec(job.spec.rollout.worker_resources)}]


def _openenv(job: RLJob, gang: Gang, index: int) -> list[Container]:
    """The user's server of OpenEnv, beside the worker. It has nothing of the job's, and its image's
    own command.
    """
    environment = job.spec.rollout.environment
    openenv = environment.openenv if environment else None
    if openenv is None or openenv.image is None or (gang.role, index) != ("rollout", 0):
        return []
    security = {**RESTRICTED, **(NOT_ROOT if _has_root(job, "rollout") else {})}
    return [
        {
            "name": "openenv",
            "image": openenv.image,
            "ports": [{"name": "openenv", "containerPort": openenv.port}],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": security,
        }
    ]


def _place(job: RLJob, gang: Gang, attempt: int) -> Place:
    head = f"{names.pod_name(job, 'rollout', gang.replica, attempt, 0)}.{names.engines_name(job)}"
    return Place(
        model=model_path(job),
        bind="$(SLUICE_BIND)",
        port="$(SLUICE_PORT_HTTP)",
        index="$(SLUICE_INDEX)",
        head=f"{head}:{names.PORTS['master']}" if gang.size > 1 else None,
    )


def _container(
    job: RLJob,
    name: str,
    image: str,
    command: list[str],
    env: Env,
    ports: dict[str, int],
    mounts: list[dict[str, Any]],
) -> Container:
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "env": _port_env(ports) + env,
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "volumeMounts": mounts,
        # The end of the log becomes the container's message, so that status.lastFailure can show
        # it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(job, name),
    }


def _common_env(gang: Gang, attempt: int, index: int, rendezvous: str) -> Env:
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


def _port_env(ports: dict[str, int]) -> Env:
    return variables({f"SLUICE_PORT_{name.upper()}": str(number) for name, number in ports.items()})


def secret_variable(secret: str, name: str = "SLUICE_TOKEN") -> Env:
    return [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secret, "key": names.TOKEN_KEY}},
        }
    ]


def _tls_env(job: RLJob) -> Env:
    settings = {"SLUICE_TLS_DIR": names.TLS_DIR, "SLUICE_TLS_NAME": names.tls_server_name(job)}
    return variables(settings) if job.spec.tls.enabled else []


def _container_security(job: RLJob, name: str) -> dict[str, Any]:
    """The restricted standard. SGLang's image keeps root, whose capabilities let it write to
    volumes of others.
    """
    if name == "engine" and _has_root(job, "rollout"):
        return {"allowPrivilegeEscalation": False}
    beside_root = name in ("worker", "plugin") and _has_root(job, "rollout")
    return {
        **RESTRICTED,
        **(NOT_ROOT if beside_root else {}),
    }


def _pod_security(job: RLJob, role: str) -> dict[str, Any]:
    """The restricted standard, but for the user of a pod whose engine is SGLang's own image.

    The group is that of our images' account,
    which so can write to volumes (checkpoints, the run's directory).
    """
    # Without OnRootMismatch every start would change the group of each file of the model's and the
    # data's volumes.
    profile: dict[str, Any] = {"fsGroup": ACCOUNT, "fsGroupChangePolicy": "OnRootMismatch"}
    profile["seccompProfile"] = {"type": "RuntimeDefault"}
    return profile if _has_root(job, role) else profile | NOT_ROOT


def _has_root(job: RLJob, role: str) -> bool:
    """An engine on GPUs is SGLang's image, which runs as root; without GPUs it is ours."""
    return role == "rollout" and job.spec.rollout.gpus_per_replica > 0
