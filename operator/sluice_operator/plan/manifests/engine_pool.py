"""Objects of an RLEnginePool: a StatefulSet of engines, and what they need.

An engine is one pod with one container. A StatefulSet gives the pods names that stay, so that
worker i of a job finds engine i by DNS, also after the pod was replaced.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sluice.api import RLEnginePool
from sluice.api.groups.resources import GPU
from sluice.api.schema.containers import NAMES
from sluice.engines import pool_launch
from sluice.engines.protocol import ServerPlacement
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import (
    JobDefaults,
    pod_defaults,
    with_default_amounts,
    with_pool_defaults,
)
from sluice_operator.plan.facts.merge import fitting, merge
from sluice_operator.plan.facts.model import Images, KubeObject
from sluice_operator.plan.manifests import downloads, placement, volumes
from sluice_operator.plan.manifests.containers import (
    EVERYWHERE,
    bare_container,
    engine_probes,
    restricted_pod,
    secret_variable,
    security_beside_engine,
    variables,
)
from sluice_operator.plan.manifests.resources import (
    Container,
    of_spec,
    with_pool_resources,
    with_shared_memory_limit,
)
from sluice_operator.plan.manifests.volume_paths import DIRECTORIES, model_path

# Seconds that an engine has for its open requests when it is told to end.
GRACE_SECONDS = 30
# Seconds without an answer after which an engine counts as hung.
SILENCE_SECONDS = 300
# Directory of the kernel cache that an engine shares with those of jobs.
_CACHE_ROLE = "rollout"


def pool_objects(
    pool: RLEnginePool, images: Images, defaults: JobDefaults
) -> tuple[KubeObject, ...]:
    """Return the objects that every pool has, in the order of creation."""
    return key_secret(pool), engines_service(pool), stateful_set(pool, images, defaults)


def key_secret(pool: RLEnginePool) -> KubeObject:
    """Return the Secret with the pool's key, which is filled on creation (names.GENERATE)."""
    metadata = names.metadata(pool, names.pool_key_name(pool))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"annotations": {names.GENERATE: names.GENERATE_POOL_KEY}},
        "type": "Opaque",
        "immutable": True,
    }


def engines_service(pool: RLEnginePool) -> KubeObject:
    """Return the Service that gives the engines DNS names, also while they are not ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(pool, names.engines_name(pool)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(pool, names.ENGINE),
            "ports": [{"name": "http", "port": names.PORTS["http"], "targetPort": "http"}],
        },
    }


def stateful_set(pool: RLEnginePool, images: Images, defaults: JobDefaults) -> KubeObject:
    """Return the engines. All of them start at the same time; a change replaces one by one."""
    pool = with_pool_defaults(pool, defaults)
    labels = names.selector(pool, names.ENGINE)
    metadata = names.metadata(pool, names.pool_engine_name(pool.metadata.name), labels)
    metadata["labels"] |= _kueue_labels(pool)
    spec = {
        "serviceName": names.engines_name(pool),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": _pod_template(pool, images, defaults),
    }
    # An API server writes quantities in its own way, so specs cannot be compared field by field.
    metadata["annotations"] = {names.SPEC_HASH: _hash(spec | {"labels": metadata["labels"]})}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {"replicas": pool.spec.replicas, **spec},
    }


def _kueue_labels(pool: RLEnginePool) -> dict[str, str]:
    """Return the labels by which Kueue queues a StatefulSet; its webhook adds those of the pods."""
    kueue = pool.spec.kueue
    if kueue is None:
        return {}
    priority = {names.LABEL_PRIORITY: kueue.priority_class} if kueue.priority_class else {}
    return {names.LABEL_QUEUE: kueue.queue_name} | priority


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _pod_template(pool: RLEnginePool, images: Images, defaults: JobDefaults) -> dict[str, Any]:
    """Return the template of an engine's pod: sluice's, with the cluster's defaults and the pool's.

    Later layers override earlier ones, but none overrides the labels by which pods are found.
    """
    labels = names.selector(pool, names.ENGINE)
    recommended = names.recommended_labels(pool, names.ENGINE)
    gpus = pool.spec.gpus_per_replica
    sources = _sources(pool, defaults)
    plugin = pool_launch(pool.spec).pool_plugin()
    merged: dict[str, Any] = {
        "metadata": {"labels": recommended, "annotations": dict(placement.STAY)},
        "spec": {
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": restricted_pod(root=gpus > 0),
            "topologySpreadConstraints": [placement.spread(labels)],
            "initContainers": [*_fetch(pool, sources, images), _plugin(pool, images)],
            "containers": [_engine(pool, sources, images, defaults)],
            "volumes": [*volumes.entries_of(sources), {"name": plugin.name, "emptyDir": {}}],
        },
    }
    own_names = {name for by_role in NAMES.values() for name in by_role[names.ENGINE]}
    for layer in (pod_defaults(defaults, defaults.rollout), pool.spec.template):
        merged = merge(merged, fitting(layer, merged, own_names))
    spec = merged["spec"]
    for kind in ("initContainers", "containers"):
        spec[kind] = [with_pool_resources(gpus, container) for container in spec[kind]]
    spec = with_shared_memory_limit(spec) | {"restartPolicy": "Always"}
    metadata = merged["metadata"] | {"labels": merged["metadata"]["labels"] | labels}
    return {"metadata": metadata, "spec": spec}


def _sources(pool: RLEnginePool, defaults: JobDefaults) -> dict[str, dict[str, Any]]:
    """Return the source of each volume but the plugin's, by name."""
    sources: dict[str, dict[str, Any]] = {}
    if pool.spec.model.volume is not None:
        sources["model"] = pool.spec.model.volume
    if downloads.pool_sources(pool):
        sources[downloads.VOLUME] = downloads.volume(pool)
    if _has_cache(pool, defaults):
        assert defaults.kernel_cache is not None
        sources["cache"] = defaults.kernel_cache.volume
    return sources | {"dshm": volumes.SHARED_MEMORY}


def _has_cache(pool: RLEnginePool, defaults: JobDefaults) -> bool:
    return pool.spec.gpus_per_replica > 0 and defaults.kernel_cache is not None


def _engine(
    pool: RLEnginePool,
    sources: dict[str, dict[str, Any]],
    images: Images,
    defaults: JobDefaults,
) -> Container:
    spec, launch = pool.spec, pool_launch(pool.spec)
    ports = {"http": names.PORTS["http"], "master": names.PORTS["master"]}
    settings = EVERYWHERE | launch.pool_env(spec)
    if _has_cache(pool, defaults):
        settings |= launch.caches(names.CACHE_DIR)
    env = variables(settings) + secret_variable(
        names.pool_key_name(pool), "SLUICE_POOL_KEY", names.POOL_KEY
    )
    mount_of: dict[str, dict[str, Any]] = {
        "model": {"mountPath": DIRECTORIES["model"], "readOnly": True},
        downloads.VOLUME: {"mountPath": names.DOWNLOADS_DIR, "readOnly": True},
        "cache": {"mountPath": names.CACHE_DIR, "subPath": _CACHE_ROLE},
        "dshm": {"mountPath": "/dev/shm"},  # noqa: S108
    }
    mounts = [{"name": volumes.holder(sources, name), **mount_of[name]} for name in sources]
    mounts.append(volumes.plugin_mount(launch.pool_plugin()) | {"readOnly": True})
    place = ServerPlacement(
        model=model_path(pool),
        bind="$(SLUICE_BIND)",
        port="$(SLUICE_PORT_HTTP)",
        index="0",
    )
    image = images.of_engine(spec.engine)
    amounts = with_default_amounts(defaults.rollout.resources, spec.resources)
    gpus = {"limits": {GPU: spec.gpus_per_replica}} if spec.gpus_per_replica else {}
    return {
        **bare_container("engine", image, launch.pool_command(), env, ports, mounts),
        "args": launch.pool_args(spec, place),
        "resources": merge(gpus, of_spec(amounts)),
        "securityContext": security_beside_engine("engine", root=spec.gpus_per_replica > 0),
        **engine_probes(launch.health, SILENCE_SECONDS),
    }


def _fetch(
    pool: RLEnginePool, sources: dict[str, dict[str, Any]], images: Images
) -> list[Container]:
    """Return the init container that fetches the pool's model, if a URI names it."""
    if downloads.VOLUME not in sources:
        return []
    holder = volumes.holder(sources, downloads.VOLUME)
    return [downloads.pool_fetch_container(pool, images.rollout, holder)]


def _plugin(pool: RLEnginePool, images: Images) -> Container:
    """Return the init container that brings sluice's plugin to the engine."""
    plugin = pool_launch(pool.spec).pool_plugin()
    mounts = [volumes.plugin_mount(plugin)]
    container = bare_container("plugin", images.rollout, list(plugin.command), [], {}, mounts)
    root = pool.spec.gpus_per_replica > 0
    return container | {"securityContext": security_beside_engine("plugin", root=root)}
