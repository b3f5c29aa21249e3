"""Objects that a job needs before its pods: manifest, token, certificates, Services and storage."""

from __future__ import annotations

import json
from typing import Any

from sluice.api import RLJob, manifest
from sluice.api.groups.storage import BufferStorage, CheckpointStorage
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults, with_job_defaults
from sluice_operator.plan.facts.model import KubeObject, Observed
from sluice_operator.plan.manifests import downloads, resource_claims
from sluice_operator.plan.manifests.volume_paths import mounted


def supporting_objects(job: RLJob, defaults: JobDefaults = NO_DEFAULTS) -> tuple[KubeObject, ...]:
    """Return these objects, in the order of creation."""
    full = with_job_defaults(job, defaults)
    objects = [
        config_map(job, defaults),
        token_secret(job),
        rendezvous_service(job),
        storage_claim(full),
    ]
    if (storage := full.spec.checkpoint.claim) is not None:
        objects.append(checkpoint_claim(job, storage))
    if job.spec.tls.enabled:
        objects.append(tls_secret(job))
    if job.spec.rollout.has_episode_pods:
        objects.append(_generated(job, names.episode_token_name(job), names.GENERATE_EPISODE_TOKEN))
    if job.spec.uses_pool:
        objects.append(
            _generated(job, names.pool_credential_name(job), names.GENERATE_POOL_CREDENTIAL)
        )
    if job.spec.rollout.nodes_per_replica > 1:
        objects.append(engines_service(job))
    return (*objects, *resource_claims.resource_claims(job))


def missing_objects(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """Return the objects that do not exist yet, and the config map if the spec has changed.

    Later attempts read the changed spec from it.
    """
    return tuple(
        manifest
        for manifest in supporting_objects(job, observed.defaults)
        if _is_missing(manifest, observed)
    )


def _is_missing(desired: KubeObject, observed: Observed) -> bool:
    stored = observed.objects.get((desired["kind"], desired["metadata"]["name"]))
    return stored is None or (
        desired["kind"] == "ConfigMap" and stored.get("data") != desired["data"]
    )


def rendezvous_address(job: RLJob, observed: Observed) -> str | None:
    """Return host:port of the rendezvous Service; None if it has no address yet.

    The host is an IP address, so pods do not depend on DNS.
    """
    service = observed.objects.get(("Service", names.rendezvous_name(job)))
    address = (service or {}).get("spec", {}).get("clusterIP")
    if service is None or not address:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{service['spec']['ports'][0]['port']}"


def config_map(job: RLJob, defaults: JobDefaults = NO_DEFAULTS) -> KubeObject:
    """Return the config map with the manifest for the job's pods.

    It also holds the URIs of the spec, which the manifest has links for, and if the cluster has
    defaults, those, for the user to read.
    """
    data = {names.JOB_FILE: json.dumps(resolved_manifest(job), indent=2, sort_keys=True) + "\n"}
    if uris := downloads.uris(job):
        data[names.URIS_FILE] = json.dumps(uris, indent=2, sort_keys=True) + "\n"
    if defaults != NO_DEFAULTS:
        data[names.DEFAULTS_FILE] = json.dumps(manifest(defaults), indent=2, sort_keys=True) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.config_name(job)),
        "data": data,
    }


def token_secret(job: RLJob) -> KubeObject:
    """Return the Secret of the job's token, which is filled on creation (names.GENERATE)."""
    return _generated(job, names.token_name(job), names.GENERATE_TOKEN)


def tls_secret(job: RLJob) -> KubeObject:
    """Return the Secret with the job's certificate authority and the certificate of its servers."""
    return _generated(job, names.tls_name(job), names.GENERATE_TLS)


def _generated(job: RLJob, name: str, what: str) -> KubeObject:
    # Immutable, because pods that were started with different contents could not connect to each
    # other.
    metadata = names.metadata(job, name) | {"annotations": {names.GENERATE: what}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
    }


def rendezvous_service(job: RLJob) -> KubeObject:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, names.rendezvous_name(job)),
        "spec": {
            "selector": names.selector(job, "rendezvous"),
            "ports": [{"name": "grpc", "port": names.PORTS["rendezvous"], "targetPort": "grpc"}],
        },
    }


def engines_service(job: RLJob) -> KubeObject:
    """Return the Service that gives the pods of a many-pod engine DNS names.

    SGLang needs the address of the engine's first pod.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, names.engines_name(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(job, "rollout"),
        },
    }


def storage_claim(job: RLJob) -> KubeObject:
    """Return the buffer's claim.

    It is deleted with the job, because its prompts and samples are of no use to another job.
    """
    return _claim(
        names.metadata(job, names.storage_name(job)), job.spec.buffer.storage, ["ReadWriteOnce"]
    )


def checkpoint_claim(job: RLJob, storage: CheckpointStorage) -> KubeObject:
    """Return the claim for checkpoints, final model, metrics and samples.

    It stays when the job is deleted, unless the spec says `whenDeleted: Delete`.
    """
    name = names.checkpoint_name(job)
    retained = storage.when_deleted == "Retain"
    metadata = names.retained_metadata(job, name) if retained else names.metadata(job, name)
    return _claim(metadata, storage, list(storage.access_modes or _access_modes(job)))


def _access_modes(job: RLJob) -> list[str]:
    # ReadWriteMany if pods that may be on different nodes use the claim.
    apart = job.spec.transport(one_machine=False) == "disk" and not resource_claims.shared(job)
    together = job.spec.trainer.nodes > 1 and not job.spec.separate_checkpoints
    return ["ReadWriteMany" if together or apart else "ReadWriteOnce"]


def _claim(
    metadata: dict[str, Any], storage: BufferStorage | CheckpointStorage, access_modes: list[str]
) -> KubeObject:
    spec: dict[str, Any] = {
        "accessModes": access_modes,
        "resources": {"requests": {"storage": str(storage.size)}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def resolved_manifest(job: RLJob) -> dict[str, Any]:
    """Return the manifest as pods see it, with paths inside the pod.

    It has no field that changes without a change of the spec.
    """
    document = manifest(job)
    document.pop("status", None)
    document["apiVersion"], document["kind"] = job.api_version, job.kind
    document["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    document["spec"] = mounted(job, document["spec"])
    return document
