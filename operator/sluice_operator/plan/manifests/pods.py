"""Pods of the four roles as Kubernetes objects.

docs/contracts.md says what every container may rely on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.api import RLJob
from sluice.api.schema.containers import NAMES
from sluice.runtime import kernel_cache
from sluice_operator.plan.decide.gangs import GangPlan
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.constants import GRACE
from sluice_operator.plan.facts.job_defaults import with_job_defaults
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.merge import fitting, merge
from sluice_operator.plan.facts.model import Gang, Images, KubeObject, PodGroup, PoolFacts
from sluice_operator.plan.manifests import downloads, placement, queueing, resource_claims, volumes
from sluice_operator.plan.manifests.containers import (
    Env,
    common_env,
    container,
    pod_security,
    probes,
    secret_variable,
    variables,
    with_credentials,
)
from sluice_operator.plan.manifests.engines import (
    openenv,
    plugin_container,
    plugin_of,
    pool_credential,
    rollout_containers,
)
from sluice_operator.plan.manifests.objects import rendezvous_address
from sluice_operator.plan.manifests.resources import (
    Container,
    of_spec,
    with_default_resources,
    with_shared_memory_limit,
)


def missing_pods(
    current: JobPass, plans: Sequence[GangPlan], groups: Mapping[Gang, PodGroup | None]
) -> tuple[KubeObject, ...]:
    """Return the pods that the gangs' plans create, with the objects of their groups.

    Pods name the rendezvous by its IP address, so they wait until it has one.
    """
    observed = current.observed
    address = rendezvous_address(current.job, observed)
    # Without the pool, the addresses of its engines are not known.
    if address is None or (observed.pool is not None and observed.pool.problem):
        return ()
    job = with_job_defaults(current.job, observed.defaults)
    # The object of a group sums up the requests of all its pods, including those that exist.
    joined = {groups[plan.gang] for plan in plans if plan.create and groups[plan.gang] is not None}
    pods = {
        plan.gang: gang_pods(
            job,
            plan.gang,
            plan.status.attempt,
            address,
            current.images,
            groups[plan.gang],
            observed.pool,
        )
        for plan in plans
        if plan.create or groups[plan.gang] in joined
    }
    group_objects = queueing.group_objects(job, {gang: groups[gang] for gang in pods}, pods)
    missing = [
        manifest
        for manifest in group_objects
        if (manifest["kind"], manifest["metadata"]["name"]) not in observed.objects
    ]
    return (*missing, *(pods[plan.gang][index] for plan in plans for index in plan.create))


def gang_pods(
    job: RLJob,
    gang: Gang,
    attempt: int,
    rendezvous: str,
    images: Images,
    group: PodGroup | None = None,
    pool: PoolFacts | None = None,
) -> list[KubeObject]:
    """Return all pods of a gang's attempt; parameters as in `pod`."""
    return [
        pod(job, gang, attempt, index, rendezvous, images, group, pool)
        for index in range(gang.size)
    ]


def pod(
    job: RLJob,
    gang: Gang,
    attempt: int,
    index: int,
    rendezvous: str,
    images: Images,
    group: PodGroup | None = None,
    pool: PoolFacts | None = None,
) -> KubeObject:
    """Return one pod: sluice's own template, with the role's template and podTemplateOverrides.

    Later layers override earlier ones, but no layer overrides the pod's identity.

    Parameters
    ----------
    job, gang, attempt, index
        Which pod to make.
    rendezvous
        Address of the rendezvous service, as host:port.
    images
        Container images of the roles.
    group
        The group with which a queue admits the pod; None if it does not queue.
    pool
        The pool of the job's engines; None if the job starts them itself.

    """
    identity = _identity(job, gang, attempt, index)
    common = common_env(gang, attempt, index, rendezvous)
    merged: dict[str, Any] = {
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
                with_credentials(job, manifest) | probes(job, manifest["name"])
                for manifest in _containers(job, gang, attempt, index, common, images, pool)
            ],
            "volumes": volumes.volumes(job, gang.role, index),
        },
    }
    spec = merged["spec"]
    spec["containers"] += openenv(job, gang, index)
    if inits := _init_containers(job, gang.role, common, images):
        spec["initContainers"] = inits
    if gang.role == "rollout" and gang.size > 1:
        spec |= {"hostname": identity["name"], "subdomain": names.engines_name(job)}

    metadata, scheduling = queueing.group_fields(job, gang, index, group)
    layers: list[dict[str, Any]] = [{"spec": scheduling}, *_templates(job, gang.role)]
    # The group comes last, so that no template moves a pod out of it: a queue would wait for ever
    # for the group to be whole.
    for layer in [*layers, {"metadata": metadata}]:
        merged = merge(merged, fitting(layer, merged, _own_containers(gang.role)))

    for kind in ("initContainers", "containers"):
        if kind in merged["spec"]:
            merged["spec"][kind] = [
                with_default_resources(job, manifest) for manifest in merged["spec"][kind]
            ]
    merged["spec"] = with_shared_memory_limit(merged["spec"])
    return identified(merged, identity)


def identified(merged: dict[str, Any], identity: dict[str, Any]) -> KubeObject:
    """Return the pod of a merged template, with sluice's own metadata over the template's.

    The labels `app.kubernetes.io/*` are for people, so those of the template override them.
    """
    metadata = merged["metadata"] | {key: identity[key] for key in identity if key != "labels"}
    own = names.own_labels(identity["labels"])
    metadata["labels"] = identity["labels"] | merged["metadata"].get("labels", {}) | own
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": merged["spec"] | {"restartPolicy": "Never"},
    }


def _own_containers(role: str) -> set[str]:
    """Return the names of sluice's containers in pods of this role."""
    return {name for by_role in NAMES.values() for name in by_role.get(role, ())}


def _grace(job: RLJob, role: str) -> int:
    """Return the grace period in seconds."""
    # A trainer may first wait for a lost engine until the weight update times out. That must not
    # cost it the time for its checkpoint.
    update = math.ceil(job.spec.weight_sync.timeout_seconds) if role == "trainer" else 0
    return GRACE[role] + update


def _identity(job: RLJob, gang: Gang, attempt: int, index: int) -> dict[str, Any]:
    labels = {
        **names.selector(job, gang.role),
        **names.pool_labels(job),
        names.LABEL_REPLICA: str(gang.replica),
        names.LABEL_ATTEMPT: str(attempt),
        names.LABEL_INDEX: str(index),
    }
    return names.metadata(job, names.pod_name(job, gang.role, gang.replica, attempt, index), labels)


def _templates(job: RLJob, role: str) -> list[dict[str, Any]]:
    role_template = {
        "trainer": job.spec.trainer.template,
        "rollout": job.spec.rollout.template,
        "buffer": job.spec.buffer.template,
    }.get(role, {})
    overrides = [
        override.template for override in job.spec.pod_template_overrides if role in override.roles
    ]
    return [role_template, *overrides]


def _containers(
    job: RLJob,
    gang: Gang,
    attempt: int,
    index: int,
    common: Env,
    images: Images,
    pool: PoolFacts | None,
) -> list[Container]:
    token = secret_variable(names.token_name(job)) + _tls_env(job)
    if gang.role == "rollout":
        return rollout_containers(job, gang, attempt, index, common, token, images, pool)
    mounts = volumes.mounts(job, gang.role, index) + volumes.tls_mount(job)
    if gang.role == "trainer":
        resources = merge(resource_claims.gpus(job, gang), of_spec(job.spec.trainer.resources))
        env = common + token + pool_credential(job)
        return [_trainer(job, env, mounts, images) | {"resources": resources}]
    if gang.role == "buffer":
        ports = {"grpc": names.PORTS["buffer"], "metrics": names.PORTS["metrics"]}
        env = common + token + variables({"SLUICE_STORAGE": names.STORAGE_DIR})
        command = ["python", "-m", "sluice_buffer"]
        buffer = container(job, "buffer", images.buffer, command, env, ports, mounts)
        memory = str(job.spec.buffer.memory)
        return [
            buffer | {"resources": {"requests": {"memory": memory}, "limits": {"memory": memory}}}
        ]
    ports = {"grpc": names.PORTS["rendezvous"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_rendezvous"]
    return [container(job, "rendezvous", images.rendezvous, command, common + token, ports, mounts)]


def _init_containers(job: RLJob, role: str, common: Env, images: Images) -> list[Container]:
    containers = []
    if (holder := volumes.downloads_holder(job, role)) is not None:
        image = {"trainer": images.trainer, "rollout": images.rollout, "buffer": images.buffer}
        containers.append(downloads.fetch_container(job, role, image[role], common, holder))
    if role == "buffer" and job.spec.row_sources:
        containers.append(with_credentials(job, _rows(job, common, images)))
    if role == "rollout" and (plugin := plugin_of(job)):
        containers.append(plugin_container(job, plugin, images))
    return containers


def _rows(job: RLJob, common: Env, images: Images) -> Container:
    """Return the container that makes prompt files with the job's own code.

    It runs before the buffer starts, in the worker's image and without the job's token, and sees
    only its own directory of the storage.
    """
    mounts = [
        mount for mount in volumes.mounts(job, "buffer") if mount["mountPath"] != names.STORAGE_DIR
    ]
    mounts.append(volumes.rows_mount())
    command = ["python", "-m", "sluice.data.make"]
    env = common + variables({"SLUICE_ROWS": names.ROWS_DIR})
    return container(job, "rows", images.rollout, command, env, {}, mounts)


def _trainer(job: RLJob, env: Env, mounts: list[dict[str, Any]], images: Images) -> Container:
    settings = {"SLUICE_CHECKPOINT_DIR": names.CHECKPOINT_DIR, "SLUICE_RUN_DIR": names.RUN_DIR}
    if not job.spec.on_gpu:
        settings["OMP_NUM_THREADS"] = "1"
    if job.spec.kernel_cache is not None:
        settings |= kernel_cache.caches(names.CACHE_DIR)
    if job.spec.weight_sync.store is not None:
        settings["SLUICE_WEIGHTS_DIR"] = names.WEIGHTS_DIR
    ports = {"master": names.PORTS["master"], "metrics": names.PORTS["metrics"]}
    command = ["python", "-m", "sluice_trainer.launch"]
    return container(
        job, "trainer", images.trainer, command, env + variables(settings), ports, mounts
    )


def _tls_env(job: RLJob) -> Env:
    settings = {"SLUICE_TLS_DIR": names.TLS_DIR, "SLUICE_TLS_NAME": names.tls_server_name(job)}
    return variables(settings) if job.spec.tls.enabled else []
