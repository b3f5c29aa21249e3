"""Pods of the four roles as Kubernetes objects. docs/contracts.md says what every container may
rely on.
"""

from __future__ import annotations

import math
from typing import Any

from sluice.api import RLJob
from sluice.api.schema.containers import NAMES
from sluice.engines import engine_of
from sluice.runtime import kernel_cache
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.constants import GRACE
from sluice_operator.plan.facts.model import Gang, Images, KubeObject, PodGroup
from sluice_operator.plan.manifests import placement, queueing, resource_claims, volumes
from sluice_operator.plan.manifests.containers import (
    Env,
    common_env,
    container,
    pod_security,
    secret_variable,
    variables,
)
from sluice_operator.plan.manifests.credentials import with_credentials
from sluice_operator.plan.manifests.engines import (
    openenv,
    plugin_container,
    rollout_containers,
)
from sluice_operator.plan.manifests.probes import probes
from sluice_operator.plan.manifests.resources import (
    Container,
    of_spec,
    with_defaults,
    with_shared_memory_limit,
)
from sluice_operator.plan.merge import fitting, merge


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
    common = common_env(gang, attempt, index, rendezvous)
    containers = _containers(job, gang, attempt, index, common, images)
    ours: dict[str, Any] = {
        "metadata": {"labels": {}, **placement.metadata(job, gang)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _grace(job, gang.role),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(job, gang.role),
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
    ours["spec"]["containers"] += openenv(job, gang, index)
    if gang.role == "rollout" and (plugin := engine_of(job.spec).launch.plugin(job.spec)):
        ours["spec"]["initContainers"] = [plugin_container(job, plugin, images)]
    if gang.role == "rollout" and gang.size > 1:
        ours["spec"] |= {"hostname": identity["name"], "subdomain": names.engines_name(job)}
    metadata, scheduling = queueing.marks(job, gang, index, group)
    layers: list[dict[str, Any]] = [{"spec": scheduling}, *_templates(job, gang.role)]
    # No template moves a pod out of its group: a queue waits for ever for the group to be whole.
    for layer in [*layers, {"metadata": metadata}]:
        ours = merge(ours, fitting(layer, ours, _names(gang.role)))
    for kind in ("initContainers", "containers"):
        if kind in ours["spec"]:
            ours["spec"][kind] = [with_defaults(job, each) for each in ours["spec"][kind]]
    ours["spec"] = with_shared_memory_limit(ours["spec"])
    return identified(ours, identity)


def identified(merged: dict[str, Any], identity: dict[str, Any]) -> KubeObject:
    """The pod of a merged template, with the metadata by which we know it over the template's.

    Labels that are for people, `app.kubernetes.io/*`, go below those of the template.
    """
    metadata = merged["metadata"] | {key: identity[key] for key in identity if key != "labels"}
    ours = names.own_labels(identity["labels"])
    metadata["labels"] = identity["labels"] | merged["metadata"].get("labels", {}) | ours
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": merged["spec"] | {"restartPolicy": "Never"},
    }


def _names(role: str) -> set[str]:
    """Names of the containers that pods of this role may have."""
    return {name for by_role in NAMES.values() for name in by_role.get(role, ())}


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
        return rollout_containers(job, gang, attempt, index, common, token, images)
    mounts = volumes.mounts(job, gang.role) + volumes.tls_mount(job)
    if gang.role == "trainer":
        resources = merge(resource_claims.gpus(job, gang), of_spec(job.spec.trainer.resources))
        return [_trainer(job, common + token, mounts, images) | {"resources": resources}]
    if gang.role == "buffer":
        ports = {"grpc": names.PORTS["buffer"], "metrics": names.PORTS["metrics"]}
        env = common + token + variables({"SLUICE_STORAGE": names.STORAGE_DIR})
        buffer = container(
            job, "buffer", images.buffer, ["python", "-m", "sluice_buffer"], env, ports, mounts
        )
        memory = str(job.spec.buffer.memory)
        return [
            buffer | {"resources": {"requests": {"memory": memory}, "limits": {"memory": memory}}}
        ]
    ports = {"grpc": names.PORTS["rendezvous"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_rendezvous"]
    return [container(job, "rendezvous", images.rendezvous, command, common + token, ports, mounts)]


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
    return container(
        job,
        "rows",
        images.rollout,
        command,
        common + variables({"SLUICE_ROWS": names.ROWS_DIR}),
        {},
        mounts,
    )


def _trainer(job: RLJob, env: Env, mounts: list[dict[str, Any]], images: Images) -> Container:
    settings = {"SLUICE_CHECKPOINT_DIR": names.CHECKPOINT_DIR, "SLUICE_RUN_DIR": names.RUN_DIR}
    if not job.spec.on_gpu:
        settings["OMP_NUM_THREADS"] = "1"
    if job.spec.kernel_cache is not None:
        settings |= kernel_cache.caches(names.CACHE_DIR)
    ports = {"master": names.PORTS["master"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_trainer.launch"]
    return container(
        job, "trainer", images.trainer, command, env + variables(settings), ports, mounts
    )


def _tls_env(job: RLJob) -> Env:
    settings = {"SLUICE_TLS_DIR": names.TLS_DIR, "SLUICE_TLS_NAME": names.tls_server_name(job)}
    return variables(settings) if job.spec.tls.enabled else []
